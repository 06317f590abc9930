"""`fp8rl bench` and its subcommands: drift-cost, gemm-error, kernels, processes, rollout."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.whole_file import write_whole
from fp8rl_jax.cli.arguments import (
    Command,
    argument,
    counts,
    directory,
    note,
    read_config,
    words,
    writable,
    writing,
)

_MOST_ROWS = 1 << 17  # most rows of a product in `fp8rl bench kernels`: a batch of 128k tokens
_MOST_SLOTS = 1 << 15  # most sequences, and most tokens of one, in `fp8rl bench rollout`


_DEFAULT = "(default: %(default)s)"


def _repeats(default: int):
    help = f"timed repetitions, after one that compiles {_DEFAULT}"
    return argument("--repeats", help, "N", type=int, default=default)


def _out(default: str, files: str):
    help = f"directory of {files} {_DEFAULT}"
    return argument("--out", help, "DIR", type=directory, default=default)


def _slots(name: str, default: str, help: str):
    help = f"{help} {_DEFAULT}"
    return argument(name, help, "N,N", type=counts(_MOST_SLOTS), default=default)


def _write_json(command: str, path: pathlib.Path, result: dict) -> None:
    """Writes a result to a JSON file and prints its path."""
    with writing(command, path.parent):
        write_whole(path, json.dumps(result, indent=1) + "\n")
    print(path)


def _step(values: argparse.Namespace) -> int:
    config = read_config("fp8rl bench", values)
    from fp8rl_jax.bench import step_time

    rows = step_time.bench(config, values.recipes.split(","), values.repeats)
    print(step_time.format_table(rows))
    return 0


def _drift_cost(values: argparse.Namespace) -> int:
    config = read_config("fp8rl bench drift-cost", values)
    from fp8rl_jax.bench.drift_cost import drift_cost, format_cost_table

    print(format_cost_table(drift_cost(config, values.recipes.split(","), values.repeats)))
    return 0


def _gemm_error(values: argparse.Namespace) -> int:
    from fp8rl_jax.quant import get_recipe

    recipes = None if values.recipes is None else values.recipes.split(",")
    for name in recipes or ():
        get_recipe(name)
    out = writable("fp8rl bench gemm-error", values.out)
    from fp8rl_jax.bench import gemm_error

    result = gemm_error.gemm_errors(recipes, note=note)
    print(gemm_error.format_table(result))
    _write_json("fp8rl bench gemm-error", out / "gemm_error.json", result)
    with writing("fp8rl bench gemm-error", out):
        gemm_error.draw(result).savefig(out / "gemm_error.png")
    print(out / "gemm_error.png")
    return 0


def _kernels(values: argparse.Namespace) -> int:
    from fp8rl_jax.bench import kernel_shapes, kernels
    from fp8rl_jax.models.presets import preset

    models = kernel_shapes.MODELS if values.models is None else values.models.split(",")
    for name in models:
        preset(name)
    kernels.require_gpu("fp8rl bench kernels")
    out = writable("fp8rl bench kernels", values.out)
    result = kernels.bench(models, values.rows, values.quick, note)
    print(kernels.format_table(result))
    _write_json("fp8rl bench kernels", out / "kernels.json", result)
    return 0 if result["ok"] else 1


def _processes(values: argparse.Namespace) -> int:
    if values.processes < 2 or values.pairs < 1:
        raise UserError(
            f"fp8rl bench processes: --processes is {values.processes} and --pairs "
            f"{values.pairs}; write at least 2 and 1"
        )
    config = read_config("fp8rl bench processes", values)
    if config.rollout.slots:
        raise UserError(
            "fp8rl bench processes: rollout.slots is "
            f"{config.rollout.slots}, whose programs are not timed: write --config.rollout.slots=0"
        )
    if config.mesh.rollout:
        raise UserError(
            f"fp8rl bench processes: mesh.rollout is {config.mesh.rollout}, and rollouts are timed "
            "on the learner's devices: write --config.mesh.rollout=0"
        )
    from fp8rl_jax.bench import processes
    from fp8rl_jax.sharding import abstract_mesh

    abstract_mesh(config.mesh.to_dict(), values.processes)  # UserError if it has others
    arguments = [values.config, *values.overrides]
    print(processes.format_table(processes.bench(arguments, values.processes, values.pairs, note)))
    return 0


def _rollout(values: argparse.Namespace) -> int:
    command = "fp8rl bench rollout"
    if bool(values.models) == bool(values.config):
        raise UserError(
            f"{command}: name the shapes to run, either by --config FILE or by --models, "
            "for example --models=qwen3_4p5m,qwen3_29m"
        )
    if values.overrides and values.models:
        raise UserError(
            f"{command}: {values.overrides[0]!r} changes a config, and --models takes none: "
            "leave one of them out"
        )
    from fp8rl_jax.bench import rollout

    plan = rollout.Plan(
        values.batch,
        values.prompt,
        values.new,
        values.group,
        cases=words(values.cases),
        lengths=words(values.lengths),
        peers=words(values.peers),
        repeats=values.repeats,
    )
    if values.models:
        models = {name: rollout.model_of(name) for name in words(values.models)}
    else:
        from fp8rl_jax.training.runtime import make_runtime

        config = read_config(command, values)
        models = {values.config: make_runtime(config, with_questions=False).model}
    out = writable(command, values.out)
    result = rollout.bench(models, plan, note)
    print(rollout.format_table(result))
    _write_json(command, out / "rollout.json", result)
    return 0


_COMMANDS = (
    Command(
        "bench",
        "times rollout and train step under several recipes, in one process; or drift-cost,\n"
        "gemm-error, kernels, processes, rollout",
        _step,
        (argument("--recipes", "recipes to time", default="fp8,bf16,f32"), _repeats(5)),
        config=True,
    ),
    Command(
        "bench drift-cost",
        "what zero drift costs: exact programs against naive ones",
        _drift_cost,
        (argument("--recipes", "recipes to time", default="fp8,bf16"), _repeats(5)),
        config=True,
    ),
    Command(
        "bench gemm-error",
        "error of every recipe's matrix products, next to a published table",
        _gemm_error,
        (
            argument("--recipes", "recipes to measure (default: all named recipes)"),
            _out("runs/gemm_error", "gemm_error.json and gemm_error.png"),
        ),
    ),
    Command(
        "bench kernels",
        "speed of the GPU kernels compared with XLA's; status 1 if one of ours fails",
        _kernels,
        (
            argument("--models", "published models whose matrices to run (default: three)"),
            argument("--rows", "numbers of rows of the products", "N,N", type=counts(_MOST_ROWS)),
            argument(
                "--quick",
                "run only the largest matrix of each model, and attention at the targets' shapes",
                action="store_true",
            ),
            _out("runs/bench_kernels", "kernels.json"),
        ),
    ),
    Command(
        "bench processes",
        "cost of several processes: one training run with one process and with several, in turns",
        _processes,
        (
            argument(
                "--processes", f"processes, and devices in all {_DEFAULT}", "N", type=int, default=2
            ),
            argument("--pairs", f"timed steps of each run {_DEFAULT}", "N", type=int, default=10),
        ),
        config=True,
    ),
    Command(
        "bench rollout",
        "tokens per second of the sampler on random weights, compared with other libraries",
        _rollout,
        (
            argument("--models", "names of models to run, instead of a config's model"),
            argument(
                "--cases",
                f"what is in FP8: nothing, linear layers, the KV cache, both {_DEFAULT}",
                default="bf16,fp8_linear,fp8_kv,fp8",
            ),
            _slots("--batch", "8,32", "sequences decoded at once"),
            _slots("--prompt", "64", "tokens of a prompt"),
            _slots("--new", "128", "most tokens of a response"),
            _slots("--group", "1,8", "samples per prompt"),
            argument(
                "--lengths",
                f"lengths of responses: full, long_tail, or full,long_tail {_DEFAULT}",
                default="full",
            ),
            argument("--peers", "other libraries to time; empty for none", default="transformers"),
            _repeats(3),
            _out("runs/bench_rollout", "rollout.json"),
        ),
        config=True,
    ),
)
COMMANDS = tuple(
    dataclasses.replace(command, starts="compiles, then measures; minutes") for command in _COMMANDS
)
