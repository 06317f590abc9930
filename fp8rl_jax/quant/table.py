"""Formats a recipe as text of fixed width: a table, its legend, and facts in two columns.

The text has no colours, so it reads the same in a terminal, a pipe, a notebook and a file. Text too
long for its column continues on the next line; nothing is cut.
"""

from __future__ import annotations

import textwrap

import jax.numpy as jnp

from fp8rl_jax.quant.qarray import E4M3, E5M2, INT8
from fp8rl_jax.quant.recipe import Operand, Recipe, get_recipe

WIDTH = 110
_POLICY, _GAP = 25, 3  # characters: the widest policy cell, and the gap between two cells
_FORMATS = {E4M3: "E4M3", E5M2: "E5M2", INT8: "INT8"}
_BLOCK_NAMES = {(-1, -1): "tensor", (1, -1): "row", (-1, 1): "column"}
_LEGEND = (
    "fprop: y = x w; dgrad: dx = dy w^T; wgrad: dw = x^T dy",
    "blocks: rows x columns of the operand: x (tokens, in), w (in, out), dy (tokens, out)",
)


def text_of(title: str, recipe: Recipe) -> str:
    """Returns lines of at most `WIDTH` characters: the rows of `gemm_table` below their column
    names, then what else is true of the recipe."""
    rows = gemm_table(recipe)
    facts = _facts(recipe)
    cells = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    widths[-2] = min(widths[-2], _POLICY)
    widths[-1] = WIDTH - sum(widths[:-1]) - _GAP * len(widths)
    lines = [line for row in cells for line in _wrapped(row, widths, _GAP)]
    label = max(map(len, facts))
    below = [
        line for fact in facts.items() for line in _wrapped(fact, (label, WIDTH - label - 2), 2)
    ]
    parts = [title, "", lines[0], "-" * WIDTH, *lines[1:], "", *_LEGEND, "", *below]
    return "\n".join(line.rstrip() for line in parts)


def _wrapped(cells, widths, gap: int) -> list[str]:
    """Returns the lines of a row of cells, each wrapped in its column."""
    wrapped = [textwrap.wrap(cell, width) for cell, width in zip(cells, widths, strict=True)]
    height = max(map(len, wrapped))
    columns = [[*lines, *[""] * (height - len(lines))] for lines in wrapped]
    return [
        (" " * gap).join(f"{line:<{width}}" for line, width in zip(row, widths, strict=True))
        for row in zip(*columns, strict=True)
    ]


def _cells(operand: Operand) -> tuple[str, str, str]:
    """Returns format, block and policy of an operand as text."""
    sizes = "x".join("all" if n == -1 else str(n) for n in operand.block)
    block = _BLOCK_NAMES.get(operand.block, sizes)
    return _FORMATS[operand.dtype], block, operand.policy.name


def gemm_table(recipe: Recipe | str) -> list[dict[str, str]]:
    """Returns a row for every operand of every GEMM: gemm, operand, format, block, policy, note.

    Blocks are rows x columns of the stored operand: x (tokens, in), w (in, out), dy (tokens, out);
    'tensor', 'row' and 'column' name blocks that span an axis.
    """
    recipe = get_recipe(recipe)
    w = recipe.weight
    plain = ("float32" if recipe.compute_dtype == jnp.float32 else "bf16", "", "")
    product = "dequantised, multiplied in bf16" if recipe.fake else ""
    rows: list[dict[str, str]] = []

    def add(gemm: str, name: str, operand: Operand | tuple | None, note: str = "") -> None:
        cells = _cells(operand) if isinstance(operand, Operand) else operand or plain
        keys = ("gemm", "operand", "format", "block", "policy", "note")
        rows.append(dict(zip(keys, (gemm, name, *cells, note), strict=True)))

    add("fprop", "x", recipe.activation, product)
    add("fprop", "w", w, "once per update" if w else "")
    if recipe.activation is None or w is None or recipe.gradient is None:
        again = recipe.backward == "dequantized"
        for gemm, name, operand in (
            ("dgrad", "dy", None),
            ("dgrad", "w", w),
            ("wgrad", "x", recipe.activation),
            ("wgrad", "dy", None),
        ):
            bytes_of_fprop = operand if again else None
            add(gemm, name, bytes_of_fprop, "the bytes of fprop, in bf16" if bytes_of_fprop else "")
    else:
        add("dgrad", "dy", recipe.gradient, product)
        if w.has_square_blocks:
            add("dgrad", "w", w, "the bytes of fprop, transposed")
        else:
            add("dgrad", "w", w.transposed, "requantised from the bf16 value")
        note = "; ".join(filter(None, ("along tokens, from the bf16 value", product)))
        for name, operand in (("x", recipe.activation), ("dy", recipe.gradient)):
            same = operand.transposed == operand
            add("wgrad", name, operand.transposed, "the same bytes" if same else note)
    scales = {
        "dynamic": ("token, kv head", recipe.kv_policy.name),
        "calibrated": ("layer", "calibrated each update"),
    }

    def stored(name: str) -> tuple:
        dtype = recipe.stored_dtype(name)
        return plain if dtype is None else (_FORMATS[dtype], *scales[recipe.kv])

    if recipe.stored_dtype("k") == recipe.stored_dtype("v"):
        add("attention", "k, v", stored("k"))
    else:
        for name in "kv":
            add("attention", name, stored(name))
    add("attention", "q", tuple(cell.replace("kv head", "head") for cell in stored("q")))
    head = ("float32" if recipe.for_head().compute_dtype == jnp.float32 else "bf16", "", "")
    add("head", "x, w", head, "embeddings, norms and head are never quantised")
    return rows


def _formats(recipe: Recipe) -> str:
    """Returns the formats of stored K and V, such as 'E4M3' or 'K INT8, V bf16'."""
    compute = "float32" if recipe.compute_dtype == jnp.float32 else "bf16"
    k, v = (_FORMATS.get(recipe.stored_dtype(name), compute) for name in "kv")  # type: ignore[arg-type]
    return k if k == v else f"K {k}, V {v}"


def kv_cache_text(recipe: Recipe) -> str:
    """Returns how K and V are stored, and q if it is quantised too, as part of a sentence."""
    if not recipe.kv_quantized:
        return "not quantised"
    scales = " with calibrated scales" if recipe.calibrates else ""
    return _formats(recipe) + scales + (", with q in FP8" if recipe.fp8_attention else "")


def _facts(recipe: Recipe) -> dict[str, str]:
    """Returns {property: its value as text}, in the order of printing."""
    compute = "float32" if recipe.compute_dtype == jnp.float32 else "bf16"
    product = "real: FP8 operands, a float32 partial sum per 128 of the contraction"
    if recipe.fake:
        product = "fake: operands are quantised, dequantised to bf16 and multiplied in bf16"
    if recipe.backward == "dequantized":
        product += f"; backward in {compute} on the bytes of the forward pass"
    elif recipe.backward == "bf16":
        product += f"; forward only, the backward GEMMs run in {compute}"
    ends = {"first": recipe.first_layers, "last": recipe.last_layers}
    layers = " and ".join(f"the {end} {count}" for end, count in ends.items() if count)
    wide = " (float32)" if recipe.head == jnp.float32 else ""
    modules = (f"embeddings, norms, output head{wide}, routers (float32)", *recipe.bf16_modules)
    why = "no activation's scale depends on another row of the batch"
    if not recipe.quantized:
        product = f"not FP8: {compute} operands, float32 sums"
        layers, modules, why = "all", ("all",), "nothing is scaled"
    local = f"yes: {why}, so the drift between rollout and learner can be exactly zero"
    if not recipe.row_local:
        local = (
            "no: an activation's scale depends on which other tokens share the batch, so rollout "
            "and learner differ and zero drift is refused"
        )
    stateful = [name for name, operand in recipe.operands.items() if operand.policy.stateful]
    state = (
        f"amaxes of {', '.join(stateful)}: frozen within an optimiser step, updated after it, kept "
        "in checkpoints"
    )
    formats = _formats(recipe)
    kv = {
        "none": f"{compute}, not quantised",
        "dynamic": f"{formats}, one scale per (token, kv head), {recipe.kv_policy.name}",
        "calibrated": f"{formats}, one scale per layer for K and one for V, measured at every "
        "update",
    }
    return {
        "between operations": compute,
        "product": product,
        "KV cache": kv[recipe.kv],
        "FP8 attention": "yes: q is E4M3, too"
        if recipe.fp8_attention
        else f"no: q stays {compute}",
        f"layers in {compute}": layers or "none",
        f"modules in {compute}": ", ".join(modules),
        "row-local": local,
        "state": state if stateful else "none",
    }
