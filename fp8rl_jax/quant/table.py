"""A recipe as text: `print(recipe)`, which `fp8rl recipe show` prints too.

The text has a fixed width and no colours, so it reads the same in a terminal, a pipe, a notebook
and a file; what does not fit a column goes on below, nothing is cut.
"""

from __future__ import annotations

import textwrap

from fp8rl_jax.quant.recipe import FLOAT32, Recipe
from fp8rl_jax.quant.recipes import DESCRIPTIONS, gemm_table, get_recipe

WIDTH = 110
_POLICY, _GAP = 25, 3  # columns of text: a policy at most, between two cells
_LEGEND = (
    "fprop: y = x w; dgrad: dx = dy w^T; wgrad: dw = x^T dy",
    "blocks: rows x columns of the operand: x (tokens, in), w (in, out), dy (tokens, out)",
)


def text_of(recipe: Recipe) -> str:
    """The table of a recipe's GEMMs, and its other properties in plain words: lines of at most
    `WIDTH` columns."""
    title = recipe.name
    if recipe.name in DESCRIPTIONS and get_recipe(recipe.name) == recipe:
        title = f"{title}: {DESCRIPTIONS[title]}"
    rows = gemm_table(recipe)
    cells = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    widths[-2] = min(widths[-2], _POLICY)
    widths[-1] = WIDTH - sum(widths[:-1]) - _GAP * len(widths)
    lines = [line for row in cells for line in _wrapped(row, widths, _GAP)]
    facts = _facts(recipe)
    label = max(map(len, facts))
    below = [
        line for fact in facts.items() for line in _wrapped(fact, (label, WIDTH - label - 2), 2)
    ]
    parts = [title, "", lines[0], "-" * WIDTH, *lines[1:], "", *_LEGEND, "", *below]
    return "\n".join(line.rstrip() for line in parts)


def _wrapped(cells, widths, gap: int) -> list[str]:
    """The lines of a row of cells."""
    wrapped = [textwrap.wrap(cell, width) for cell, width in zip(cells, widths, strict=True)]
    height = max(map(len, wrapped))
    columns = [[*lines, *[""] * (height - len(lines))] for lines in wrapped]
    return [
        (" " * gap).join(f"{line:<{width}}" for line, width in zip(row, widths, strict=True))
        for row in zip(*columns, strict=True)
    ]


def _facts(recipe: Recipe) -> dict[str, str]:
    """{property: what holds}, in the order of printing."""
    compute = "float32" if recipe.compute_dtype == FLOAT32 else "bf16"
    product = "real: FP8 operands, a float32 partial sum per 128 of the contraction"
    if recipe.fake:
        product = "fake: operands are quantised, dequantised to bf16 and multiplied in bf16"
    if recipe.gradient is None:
        product += f"; forward only, the backward GEMMs run in {compute}"
    ends = {"first": recipe.first_layers, "last": recipe.last_layers}
    layers = " and ".join(f"the {end} {count}" for end, count in ends.items() if count)
    modules = ("embeddings, norms, output head, routers (float32)", *recipe.bf16_modules)
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
    kv = {
        "none": f"{compute}, not quantised",
        "dynamic": f"E4M3, one scale per (token, kv head), {recipe.kv_policy.name}",
        "calibrated": "E4M3, one scale per layer for K and one for V, measured at every update",
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
