"""Benchmark `gemm-error`: how far quantised matrix products are from the exact ones.

Prints two tables. The first compares our figures with those of the article "Unified FP8: Moving
Beyond Mixed Precision for Stable and Accelerated MoE RL" (InfiXAI, Ant, SGLang and Miles teams, 25
November 2025), which compared two FP8 kernels at eight shapes (M, K, N) on normal numbers. The
second has every recipe of ours at the same shapes: a linear layer with M tokens, K inputs and N
outputs, so that fprop contracts over K, dgrad over N and wgrad over M.

The metric is DeepGEMM's ``calc_diff = 1 - 2 <x, y> / (<x, x> + <y, y>)`` in float64, x being the
product under the recipe and y the float64 product of the same bf16 operands.

The article's DeepGEMM column is reproduced by two changes, both of which DeepGEMM's test of its
weight-gradient kernel makes: both operands have 1x128 blocks along the contraction, and a residual
of ten times normal numbers is added to both sides (docs/gemm_error.md).

What is not measured: anything but normal numbers. Outliers, which decide between block sizes, are
absent, so per-tensor scales look as good here as finer ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.bench.table import text_table
from fp8rl_jax.quant import (
    Recipe,
    get_recipe,
    init_probe,
    init_site,
    make_dot_general,
    quantize,
    recipe_names,
    scaled_matmul,
    update_site,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Shape = tuple[int, int, int]

# The article's figures, as printed there: (M, K, N) -> (cuBLAS through TransformerEngine,
# DeepGEMM). The only numbers here that are not computed.
ARTICLE: dict[Shape, tuple[float, float]] = {
    (128, 128, 128): (0.00068, 0.00036),
    (256, 128, 256): (0.00068, 0.00037),
    (320, 128, 336): (0.000684, 0.00037),
    (320, 64, 336): (0.00067, 0.00024),
    (320, 256, 336): (0.00068, 0.00048),
    (1024, 4096, 1024): (0.000681, 0.00065),
    (2048, 2048, 512): (0.00068, 0.00063),
    (1024, 1024, 1024): (0.000683, 0.0006),
}
GEMMS = ("fprop", "dgrad", "wgrad")
_SEED = 0
_RESIDUAL = 10.0  # standard deviation of the numbers added to both products
_BLOCKS = {"cublas": (128, 128), "deepgemm": (128, 1)}  # blocks of the right operand, (K, N)
_LAYER = (((1,), (0,)), ((), ()))  # y = x w
_COLOURS = {"fprop": "#0072b2", "dgrad": "#d55e00", "wgrad": "#009e73"}


def calc_diff(x: np.ndarray, y: np.ndarray) -> float:
    """Returns ``1 - 2 <x, y> / (<x, x> + <y, y>)`` in float64: 0 for equal arrays, also of zeros.

    Computed as ``<x - y, x - y> / (<x, x> + <y, y>)``, which is the same number without the
    cancellation: differences far below 1e-16 keep their digits.
    """
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    total = np.vdot(x, x) + np.vdot(y, y)
    return float(np.vdot(x - y, x - y) / total) if total else 0.0


class _Operands(NamedTuple):
    """Operands of one layer, and the exact products.

    Attributes:
      x, w, dy: (M, K), (K, N), (M, N) float32 arrays of normal numbers, rounded to bf16.
      residual: (M, N) float64, standard deviation 10.
      exact: {GEMM: float64 product}.
    """

    x: np.ndarray
    w: np.ndarray
    dy: np.ndarray
    residual: np.ndarray
    exact: dict[str, np.ndarray]


def _operands(shape: Shape) -> _Operands:
    """Draws the operands of a shape, which do not depend on the other shapes that are measured."""
    m, k, n = shape
    rng = np.random.default_rng((_SEED, *shape))
    shapes = ((m, k), (k, n), (m, n))
    x, w, dy = (rng.standard_normal(s).astype(jnp.bfloat16).astype(np.float32) for s in shapes)
    x64, w64, dy64 = (a.astype(np.float64) for a in (x, w, dy))
    exact = dict(zip(GEMMS, (x64 @ w64, dy64 @ w64.T, x64.T @ dy64), strict=True))
    return _Operands(x, w, dy, _RESIDUAL * rng.standard_normal((m, n)), exact)


class _Layer:
    """One recipe's linear layer, forward and backward, as a model would run it.

    Activations and their gradients have the recipe's compute dtype; weights and their gradients are
    float32. The state of a stateful recipe comes from one earlier step with the same operands.
    """

    def __init__(self, recipe: Recipe):
        self.recipe = recipe

        def layer(x, w, dy, site, probe):
            def forward(x, w, probe):
                return make_dot_general(recipe, site, probe)(x, w, _LAYER)

            y, backward = jax.vjp(forward, x, w, probe)
            return y, *backward(dy)

        self._layer = exact_jit(layer)

    def products(self, operands: _Operands) -> dict[str, np.ndarray]:
        """Returns {GEMM: its product under the recipe, as float64}."""
        recipe = self.recipe
        x, dy = (jnp.asarray(a, recipe.compute_dtype) for a in (operands.x, operands.dy))
        w = jnp.asarray(operands.w)
        site, probe = init_site(recipe, w.shape), None
        if site is not None:
            probe = init_probe(recipe, w.shape, health=False, weight=True)
            *_, seen = self._layer(x, w, dy, site, probe)
            stateful = [name for name, o in recipe.operands.items() if o.policy.stateful]
            site = update_site(recipe, site, {n: getattr(seen, n).amax for n in stateful})
        *results, _ = self._layer(x, w, dy, site, probe)
        return {g: np.asarray(r, np.float64) for g, r in zip(GEMMS, results, strict=True)}


def gemm_errors(
    recipes: Sequence[str] | None = None,
    shapes: Sequence[Shape] | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> dict:
    """Measures every recipe at every shape.

    Args:
      recipes: names, or ``package.module:function``; None: all named recipes without aliases.
      shapes: (M, K, N) of the layers; None: the article's eight.
      note: called with a line after each shape.

    Returns:
      The content of `gemm_error.json`. All errors are calc_diff, without unit.
      ``seed`` of the operands, and JAX's ``platform``.
      ``article``: one entry per shape: ``shape``; ``article_cublas`` and ``article_deepgemm``, as
      printed in the article (None at other shapes); ``cublas`` (1x128 by 128x128),
      ``cublas_diluted`` (the same with the residual), ``deepgemm_undiluted`` (1x128 by 1x128) and
      ``deepgemm`` (the same with the residual).
      ``recipes``: one entry per recipe: ``recipe``; ``stateful``: whether an earlier step gave its
      scales; ``errors``: {GEMM: [error per shape]}.

    Raises:
      UserError: no recipe is named, or an unknown one.
    """
    if recipes is None:
        recipes = [name for name in recipe_names() if get_recipe(name).name == name]
    layers = {name: _Layer(get_recipe(name)) for name in recipes}
    if not layers:
        raise UserError("no recipe to measure: write one of " + ", ".join(recipe_names()))
    article: list[dict] = []
    errors: dict[str, dict[str, list[float]]] = {n: {g: [] for g in GEMMS} for n in layers}
    for shape in ARTICLE if shapes is None else shapes:
        operands = _operands(shape)
        article.append(_article_row(shape, operands))
        for name, layer in layers.items():
            for gemm, product in layer.products(operands).items():
                errors[name][gemm].append(calc_diff(product, operands.exact[gemm]))
        note(f"{_shape_text(shape)}: measured")
    measured = [
        {"recipe": name, "stateful": layer.recipe.stateful, "errors": errors[name]}
        for name, layer in layers.items()
    ]
    platform = jax.devices()[0].platform
    return {"seed": _SEED, "platform": platform, "article": article, "recipes": measured}


@functools.cache
def _block_product(w_block: tuple[int, int]) -> Callable[..., jax.Array]:
    """Returns (x, w) -> their FP8 product, x in 1x128 blocks, w in `w_block`, float32 scales."""
    return exact_jit(lambda x, w: scaled_matmul(quantize(x, (1, 128)), quantize(w, w_block)))


def _article_row(shape: Shape, operands: _Operands) -> dict:
    exact, residual = operands.exact["fprop"], operands.residual
    plain, diluted = {}, {}
    for name, block in _BLOCKS.items():
        y = np.asarray(_block_product(block)(operands.x, operands.w), np.float64)
        plain[name] = calc_diff(y, exact)
        diluted[name] = calc_diff(y + residual, exact + residual)
    cublas, deepgemm = ARTICLE.get(shape, (None, None))
    return {
        "shape": list(shape),
        "article_cublas": cublas,
        "article_deepgemm": deepgemm,
        "cublas": plain["cublas"],
        "cublas_diluted": diluted["cublas"],
        "deepgemm": diluted["deepgemm"],
        "deepgemm_undiluted": plain["deepgemm"],
    }


def _shape_text(shape: Sequence[int]) -> str:
    return ",".join(map(str, shape))


_COLUMNS = {  # columns of the first table: key -> three lines of heading
    "article_cublas": ("article", "cuBLAS(TE)", ""),
    "cublas": ("ours", "1x128 by", "128x128"),
    "article_deepgemm": ("article", "DeepGEMM", ""),
    "deepgemm": ("ours", "1x128 by", "1x128 + r"),
    "cublas_diluted": ("ours", "1x128 by", "128x128 + r"),
    "deepgemm_undiluted": ("ours", "1x128 by", "1x128"),
}
_EXPLANATION = """\
Figures are calc_diff = 1 - 2<x,y> / (<x,x> + <y,y>), x the FP8 product and y the exact product of
the same bf16 operands; blocks of left by right operand, float32 scales. The article's cuBLAS
column is the error of the product itself. Its DeepGEMM column is not a better kernel but a smaller
ratio: both operands have 1x128 blocks, and r, a residual of 10 * randn, is added to x and y, which
multiplies the error by about K / (K + 100). DeepGEMM's test of its weight-gradient kernel does
both; that the article ran it is inferred. The last two columns show either change alone."""


def format_table(result: dict) -> str:
    """Returns the result of `gemm_errors` as text: the article's table and ours, then recipes."""
    article = [("M,K,N", *row) for row in zip(*_COLUMNS.values(), strict=True)]
    article[1:] = [("", *row[1:]) for row in article[1:]]
    for row in result["article"]:
        # The article's figures with the digits that it prints.
        forms = {key: "g" if key.startswith("article") else ".6f" for key in _COLUMNS}
        cells = ["-" if row[key] is None else format(row[key], forms[key]) for key in _COLUMNS]
        article.append((_shape_text(row["shape"]), *cells))
    recipes = [("recipe", *GEMMS)]
    recipes += [(r["recipe"], *(_span(r["errors"][g]) for g in GEMMS)) for r in result["recipes"]]
    shapes = len(result["article"])
    lines = [
        *text_table(article),
        _EXPLANATION,
        "",
        f"Every recipe: median over {shapes} shapes, smallest..largest",
        *text_table(recipes),
        "A layer of M tokens, K inputs and N outputs: fprop contracts over K, dgrad over N, wgrad",
        "over M. y and dx are rounded to the compute dtype: that is all that bf16 shows here, its",
        "operands being bf16 numbers already.",
    ]
    if stateful := ", ".join(row["recipe"] for row in result["recipes"] if row["stateful"]):
        lines.append(f"{stateful}: the scales come from one earlier step with the same operands.")
    return "\n".join(lines)


def _span(errors: list[float]) -> str:
    return f"{np.median(errors):.2e}  {min(errors):.2e}..{max(errors):.2e}"


def draw(result: dict) -> Figure:
    """Draws the article's columns and ours over the shapes (left) and every recipe (right)."""
    from matplotlib.figure import Figure  # not at the top: other commands start without it

    size = (13, max(4.2, 1.6 + 0.42 * len(result["recipes"])))
    figure = Figure(figsize=size, layout="constrained", dpi=110)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    _draw_article(left, result["article"])
    _draw_recipes(right, result["recipes"])
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e6e6e6", lw=0.7)
        axes.set_axisbelow(True)
        axes.legend(frameon=False, fontsize=9)
    return figure


def _draw_article(axes, rows: list[dict]) -> None:
    for key, colour, ours, theirs in (
        ("cublas", "#0072b2", "ours: 1x128 by 128x128", "article: cuBLAS(TE)"),
        ("deepgemm", "#d55e00", "ours: 1x128 by 1x128, + residual", "article: DeepGEMM"),
    ):
        printed = [np.nan if r[f"article_{key}"] is None else r[f"article_{key}"] for r in rows]
        axes.plot([1e4 * r[key] for r in rows], color=colour, lw=1, marker=".", label=ours)
        axes.plot(1e4 * np.array(printed), "o", ms=10, mfc="none", mec=colour, label=theirs)
    places = [_shape_text(r["shape"]) for r in rows]
    axes.set_xticks(range(len(rows)), places, rotation=35, ha="right")
    axes.set_ylim(0, 8)
    axes.set_xlabel("M,K,N")
    axes.set_ylabel("error (calc_diff), 1e-4")
    axes.set_title("The article's table and ours", fontsize=11)


def _draw_recipes(axes, rows: list[dict]) -> None:
    for i, (gemm, colour) in enumerate(_COLOURS.items()):
        errors = 1e4 * np.array([row["errors"][gemm] for row in rows])  # (recipes, shapes)
        middle, heights = np.median(errors, axis=1), np.arange(len(rows)) + 0.22 * (i - 1)
        axes.hlines(heights, errors.min(axis=1), errors.max(axis=1), color=colour, lw=2)
        axes.plot(middle, heights, "o", color=colour, ms=5, label=gemm)
        for x, height in zip(middle, heights, strict=True):
            if x < 0.1:
                axes.text(x + 0.2, height, f"{x * 1e-4:.0e}", va="center", fontsize=7, color=colour)
    axes.set_yticks(range(len(rows)), [row["recipe"] for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(left=-0.3)
    axes.set_xlabel("error (calc_diff), 1e-4; dot: median over the shapes, bar: their range")
    axes.set_title("Every recipe, normal operands", fontsize=11)
