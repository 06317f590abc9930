"""The named recipes, what each is for, and the table that shows what one of them does.

`fake_forward` and `fake` imitate FP8 by quantising and dequantising before bf16 products, as the
cases 2 and 3 of the article "Unified FP8: Moving Beyond Mixed Precision for Stable and Accelerated
MoE RL" (2025) do. `f32` is the canary of the drift tests: FP8 and bf16 rounding absorb most
last-bit differences and float32 none.
"""

from __future__ import annotations

import functools

from fp8rl_jax.base import user_code
from fp8rl_jax.base.errors import UserError, did_you_mean
from fp8rl_jax.quant import scaling
from fp8rl_jax.quant.recipe import DYNAMIC, E4M3, E5M2, FLOAT32, Operand, Recipe

_POW2 = scaling.power_of_two(DYNAMIC)
_TENSOR = (-1, -1)
_UNQUANTIZED = {"weight": None, "activation": None, "gradient": None, "kv": "none"}
_RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("fp8_blockwise"),
        Recipe(
            "fp8_blockwise_pow2",
            weight=Operand(block=(128, 128), policy=_POW2),
            activation=Operand(policy=_POW2),
            gradient=Operand(policy=_POW2),
            kv_policy=_POW2,
        ),
        Recipe(
            "fp8_tensorwise",
            weight=Operand(block=_TENSOR),
            activation=Operand(block=_TENSOR),
            gradient=Operand(block=_TENSOR),
        ),
        Recipe(
            "fp8_delayed",
            weight=Operand(block=_TENSOR, policy=scaling.delayed()),
            activation=Operand(block=_TENSOR, policy=scaling.delayed()),
            gradient=Operand(E5M2, _TENSOR, scaling.delayed()),
        ),
        Recipe(
            "mxfp8",
            weight=Operand(block=(32, 1), policy=_POW2),
            activation=Operand(block=(1, 32), policy=_POW2),
            gradient=Operand(block=(1, 32), policy=_POW2),
            kv_policy=_POW2,
        ),
        Recipe("fake_forward", gradient=None, fake=True),
        Recipe("fake", fake=True),
        Recipe("bf16", **_UNQUANTIZED),  # type: ignore[arg-type]
        Recipe("f32", compute_dtype=FLOAT32, **_UNQUANTIZED),  # type: ignore[arg-type]
    )
}
_ALIASES = {"fp8": "fp8_blockwise"}
# What each name is, in one line of at most 78 characters; an entry for every `recipe_names`.
DESCRIPTIONS = {
    "fp8_blockwise": "DeepSeek-V3: weights 128x128, activations and gradients 1x128, E4M3",
    "fp8_blockwise_pow2": "fp8_blockwise with scales that are powers of two",
    "fp8_tensorwise": "one dynamic scale per tensor, E4M3",
    "fp8_delayed": "one scale per tensor from earlier steps (TransformerEngine's HYBRID)",
    "mxfp8": "1x32 blocks with power-of-two (E8M0) scales, E4M3; emulated",
    "fake_forward": "quantise, dequantise, bf16 GEMM; bf16 backward (case 2 of the Miles study)",
    "fake": "quantise, dequantise, bf16 GEMM in both directions (case 3 of the Miles study)",
    "bf16": "no quantisation",
    "f32": "no quantisation, everything float32: the canary of the drift tests",
    "fp8": "another name of fp8_blockwise",
}
_BLOCK_NAMES = {(-1, -1): "tensor", (1, -1): "row", (-1, 1): "column"}


def recipe_names() -> list[str]:
    """Every name that `get_recipe` takes, aliases included."""
    return [*_RECIPES, *_ALIASES]


def get_recipe(recipe: Recipe | str) -> Recipe:
    """Returns the recipe of that name; a Recipe is returned unchanged.

    Args:
      recipe: a name of `recipe_names`, or ``package.module:function``, a function without
        arguments that returns a Recipe.

    Raises:
      UserError: no recipe has that name, or the function does not return one.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise UserError(
            f"a recipe is a Recipe or a name, not {recipe!r}: write one of "
            + ", ".join(recipe_names())
        )
    if ":" in recipe:
        return _load(recipe)
    name = _ALIASES.get(recipe, recipe)
    if name not in _RECIPES:
        known = "write one of " + ", ".join(recipe_names())
        hint = did_you_mean(recipe, recipe_names(), known, "{!r}")
        raise UserError(f"unknown recipe {recipe!r}; {hint}")
    return _RECIPES[name]


@functools.cache
def _load(text: str) -> Recipe:
    """Called once a name: policies are compared by identity, and both sides name one recipe."""
    return user_code.call(text, "recipe", Recipe)


def _cells(operand: Operand) -> tuple[str, str, str]:
    """Format, block and policy of an operand."""
    sizes = "x".join("all" if n == -1 else str(n) for n in operand.block)
    block = _BLOCK_NAMES.get(operand.block, sizes)
    return ("E4M3" if operand.dtype == E4M3 else "E5M2"), block, operand.policy.name


def gemm_table(recipe: Recipe | str) -> list[dict[str, str]]:
    """What every GEMM's operands are: rows with gemm, operand, format, block, policy, note.

    Blocks are rows x columns of the operand as it is stored: x (tokens, in), w (in, out), dy
    (tokens, out); 'tensor', 'row' and 'column' for those that span a whole axis.
    """
    recipe = get_recipe(recipe)
    x, w, dy = recipe.activation, recipe.weight, recipe.gradient
    plain = ("float32" if recipe.compute_dtype == FLOAT32 else "bf16", "", "")
    product = "dequantised, multiplied in bf16" if recipe.fake else ""
    rows: list[dict[str, str]] = []

    def add(gemm: str, name: str, operand: Operand | tuple | None, note: str = "") -> None:
        cells = _cells(operand) if isinstance(operand, Operand) else operand or plain
        keys = ("gemm", "operand", "format", "block", "policy", "note")
        rows.append(dict(zip(keys, (gemm, name, *cells, note), strict=True)))

    add("fprop", "x", x, product)
    add("fprop", "w", w, "once per update" if w else "")
    if x is None or w is None or dy is None:
        for gemm, name in (("dgrad", "dy"), ("dgrad", "w"), ("wgrad", "x"), ("wgrad", "dy")):
            add(gemm, name, None)
    else:
        add("dgrad", "dy", dy, product)
        if w.has_square_blocks:
            add("dgrad", "w", w, "the bytes of fprop, transposed")
        else:
            add("dgrad", "w", w.transposed, "requantised from the bf16 value")
        note = "; ".join(filter(None, ("along tokens, from the bf16 value", product)))
        for name, operand in (("x", x), ("dy", dy)):
            same = operand.transposed == operand
            add("wgrad", name, operand.transposed, "the same bytes" if same else note)
    kv = {
        "none": plain,
        "dynamic": ("E4M3", "token, kv head", recipe.kv_policy.name),
        "calibrated": ("E4M3", "layer", "calibrated each update"),
    }[recipe.kv]
    add("attention", "k, v", kv)
    q = tuple(cell.replace("kv head", "head") for cell in kv) if recipe.fp8_attention else plain
    add("attention", "q", q)
    add("head", "x, w", None, "embeddings, norms and head are never quantised")
    return rows
