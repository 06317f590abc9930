"""What `fp8rl recipe` prints: the named recipes, and what one of them does to every GEMM.

The text has a fixed width and no colours, so it reads the same in a terminal, a pipe and a file;
what does not fit a column goes on below, nothing is cut.
"""

from __future__ import annotations

import io

from rich import box
from rich.console import Console
from rich.table import Table

from fp8rl_jax.quant import Recipe, gemm_table, get_recipe, recipe_names
from fp8rl_jax.quant.recipe import FLOAT32
from fp8rl_jax.quant.recipes import DESCRIPTIONS

WIDTH = 110
_COLUMNS = ("gemm", "operand", "format", "block", "policy", "note")
_LEGEND = (
    "fprop: y = x w; dgrad: dx = dy w^T; wgrad: dw = x^T dy",
    "blocks: rows x columns of the operand: x (tokens, in), w (in, out), dy (tokens, out)",
)


def list_recipes() -> str:
    """Every name that a config may give as a recipe, one line each with what it is."""
    width = max(map(len, recipe_names()))
    return "\n".join(f"{name:<{width}}  {DESCRIPTIONS[name]}" for name in recipe_names())


def show_recipe(name: str) -> str:
    """What a recipe does: the table of its GEMMs, and its other properties in plain words.

    Args:
      name: a name of `recipe_names`, or ``package.module:function``.

    Returns:
      Lines of at most `WIDTH` columns, without control codes.

    Raises:
      UserError: there is no such recipe.
    """
    recipe = get_recipe(name)
    title = f"{recipe.name}: {name if ':' in name else DESCRIPTIONS[recipe.name]}"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in _COLUMNS:
        table.add_column(column, overflow="fold", max_width=25 if column == "policy" else None)
    for row in gemm_table(recipe):
        table.add_row(*(row[column] for column in _COLUMNS))
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    for fact in _facts(recipe).items():
        facts.add_row(*fact)
    written = io.StringIO()
    console = Console(
        file=written, width=WIDTH, color_system=None, markup=False, emoji=False, highlight=False
    )
    for part in (title, table, *_LEGEND, "", facts):
        console.print(part, overflow="fold")
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())


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
