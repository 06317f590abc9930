"""`python -m benchmarks NAME`, from the root of a checkout."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from fp8rl_jax import cli
from fp8rl_jax.cli.arguments import Command, argument, note, read_config, writable, writing
from fp8rl_jax.cli.bench import STARTS, out_option, repeats, write_json

_PROGRAM = "python -m benchmarks"


def _step(values: argparse.Namespace) -> int:
    config = read_config(f"{_PROGRAM} step", values)
    from benchmarks import step_time

    rows = step_time.bench(config, values.recipes.split(","), values.repeats)
    print(step_time.format_table(rows))
    return 0


def _drift_cost(values: argparse.Namespace) -> int:
    config = read_config(f"{_PROGRAM} drift-cost", values)
    from benchmarks.drift_cost import drift_cost, format_cost_table

    print(format_cost_table(drift_cost(config, values.recipes.split(","), values.repeats)))
    return 0


def _gemm_error(values: argparse.Namespace) -> int:
    from fp8rl_jax.quant import get_recipe

    recipes = None if values.recipes is None else values.recipes.split(",")
    for name in recipes or ():
        get_recipe(name)
    out = writable(f"{_PROGRAM} gemm-error", values.out)
    from benchmarks import gemm_error

    result = gemm_error.gemm_errors(recipes, note=note)
    print(gemm_error.format_table(result))
    write_json(f"{_PROGRAM} gemm-error", out / "gemm_error.json", result)
    with writing(f"{_PROGRAM} gemm-error", out):
        gemm_error.draw(result).savefig(out / "gemm_error.png")
    print(out / "gemm_error.png")
    return 0


_COMMANDS = (
    Command(
        "step",
        "times rollout and train step under several recipes, in one process",
        _step,
        (argument("--recipes", "recipes to time", default="fp8,bf16,f32"), repeats(5)),
        config=True,
    ),
    Command(
        "drift-cost",
        "what zero drift costs: exact programs against naive ones",
        _drift_cost,
        (argument("--recipes", "recipes to time", default="fp8,bf16"), repeats(5)),
        config=True,
    ),
    Command(
        "gemm-error",
        "error of every recipe's matrix products, next to a published table",
        _gemm_error,
        (
            argument("--recipes", "recipes to measure (default: all named recipes)"),
            out_option("runs/gemm_error", "gemm_error.json and gemm_error.png"),
        ),
    ),
)
COMMANDS = {
    command.name: dataclasses.replace(command, starts=STARTS, program=_PROGRAM)
    for command in _COMMANDS
}


def run(arguments: Sequence[str]) -> int:
    """Runs one benchmark's command and returns the exit status."""
    return cli.run(arguments, commands=COMMANDS)


if __name__ == "__main__":
    cli.entry(commands=COMMANDS)
