"""`fp8rl bench kernels` and `fp8rl bench rollout`, which users run on their machines."""

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


DEFAULT = "(default: %(default)s)"
STARTS = "compiles, then measures; minutes"


def repeats(default: int):
    """Returns the argument --repeats."""
    return argument(
        "--repeats",
        f"timed repetitions, after one that compiles {DEFAULT}",
        "N",
        type=int,
        default=default,
    )


def out_option(default: str, files: str):
    """Returns the argument --out, the directory of `files`."""
    return argument(
        "--out", f"directory of {files} {DEFAULT}", "DIR", type=directory, default=default
    )


def _slots(name: str, default: str, help: str):
    return argument(name, f"{help} {DEFAULT}", "N,N", type=counts(_MOST_SLOTS), default=default)


def write_json(command: str, path: pathlib.Path, result: dict) -> None:
    """Writes a result to a JSON file and prints its path."""
    with writing(command, path.parent):
        write_whole(path, json.dumps(result, indent=1) + "\n")
    print(path)


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
    write_json("fp8rl bench kernels", out / "kernels.json", result)
    return 0 if result["ok"] else 1


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
        repeats=values.repeats,
    )
    if values.models:
        models = {name: rollout.model_of(name) for name in words(values.models)}
    else:
        from fp8rl_jax.training.runtime import make_runtime

        runtime = make_runtime(read_config(command, values), with_questions=False)
        models = {values.config: runtime.resolved.model}
    out = writable(command, values.out)
    result = rollout.bench(models, plan, note)
    print(rollout.format_table(result))
    write_json(command, out / "rollout.json", result)
    return 0


_COMMANDS = (
    Command("bench", "measures speed: kernels, rollout"),
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
            out_option("runs/bench_kernels", "kernels.json"),
        ),
    ),
    Command(
        "bench rollout",
        "tokens per second of the sampler on random weights",
        _rollout,
        (
            argument("--models", "names of models to run, instead of a config's model"),
            argument(
                "--cases",
                f"what is in FP8: nothing, linear layers, the KV cache, both {DEFAULT}",
                default="bf16,fp8_linear,fp8_kv,fp8",
            ),
            _slots("--batch", "8,32", "sequences decoded at once"),
            _slots("--prompt", "64", "tokens of a prompt"),
            _slots("--new", "128", "most tokens of a response"),
            _slots("--group", "1,8", "samples per prompt"),
            argument(
                "--lengths",
                f"lengths of responses: full, long_tail, or full,long_tail {DEFAULT}",
                default="full",
            ),
            repeats(3),
            out_option("runs/bench_rollout", "rollout.json"),
        ),
        config=True,
    ),
)
COMMANDS = tuple(dataclasses.replace(command, starts=STARTS) for command in _COMMANDS)
