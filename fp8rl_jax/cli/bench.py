"""`fp8rl bench` and its subcommands: drift-cost, gemm-error, kernels, rollout."""

from __future__ import annotations

from collections.abc import Sequence

from fp8rl_jax.cli.arguments import (
    CONFIG,
    no_positional,
    note,
    parse,
    read_config,
    writable,
    writing,
)
from fp8rl_jax.errors import UserError

_MOST_ROWS = 1 << 17  # of a product that `fp8rl bench kernels` times: a batch of 128k tokens
_MOST_SLOTS = 1 << 15  # sequences, and tokens of one, that `fp8rl bench rollout` takes


def bench(arguments: Sequence[str]) -> int:
    """`fp8rl bench`, or the subcommand that the first argument names."""
    if arguments and arguments[0] in _COMMANDS:
        return _COMMANDS[arguments[0]](arguments[1:])
    options = {
        **CONFIG,
        "recipes": ("string", "fp8,bf16,f32", "recipes to time"),
        "repeats": ("int", 5, "timed repetitions, after one that compiles"),
    }
    values, overrides, positional = parse("bench", arguments, options)
    if positional:
        names = ", ".join(f"`fp8rl bench {name}`" for name in _COMMANDS)
        raise UserError(
            f"fp8rl bench: {positional[0]!r} is not understood here; write `fp8rl bench --config "
            f"FILE`, or one of {names} and options after that"
        )
    config = read_config("bench", values, overrides)
    from fp8rl_jax.bench import step_time

    result = step_time.bench(config, values.recipes.split(","), values.repeats)
    print(step_time.format_table(result))
    return 0


def _drift_cost(arguments: Sequence[str]) -> int:
    command = "bench drift-cost"
    options = {
        **CONFIG,
        "recipes": ("string", "fp8,bf16", "recipes to time"),
        "repeats": ("int", 5, "timed repetitions, after one that compiles"),
    }
    values, overrides, positional = parse(command, arguments, options)
    no_positional(command, positional)
    config = read_config(command, values, overrides)
    from fp8rl_jax.bench.drift_cost import drift_cost, format_cost_table

    print(format_cost_table(drift_cost(config, values.recipes.split(","), values.repeats)))
    return 0


def _gemm_error(arguments: Sequence[str]) -> int:
    options = {
        "recipes": ("string", None, "recipes to measure; all that have a name if left out"),
        "out": ("string", "runs/gemm_error", "directory of gemm_error.json and gemm_error.png"),
    }
    command = "bench gemm-error"
    values, overrides, positional = parse(command, arguments, options)
    if overrides or positional:
        raise UserError(
            f"fp8rl {command}: {[*overrides, *positional][0]!r} is not understood; it takes "
            "--recipes=NAME,NAME and --out=DIR, and no config"
        )
    if not values.out:
        raise UserError(f"fp8rl {command}: --out is empty; name a directory, or leave it out")
    from fp8rl_jax.quant import get_recipe

    recipes = None if values.recipes is None else values.recipes.split(",")
    for name in recipes or ():
        get_recipe(name)
    directory = writable(command, values.out)
    from fp8rl_jax.bench.gemm_error import format_table, gemm_errors, write_gemm_errors

    result = gemm_errors(recipes, note=note)
    print(format_table(result))
    with writing(command, values.out):
        paths = write_gemm_errors(result, directory)
    print(*paths, sep="\n")
    return 0


def _kernels(arguments: Sequence[str]) -> int:
    command = "bench kernels"
    options = {
        "models": ("string", None, "names of presets whose matrices to run; three if left out"),
        "rows": ("string", None, "rows of the products, separated by commas"),
        "quick": ("bool", False, "the largest matrix of each model and the targets' attention"),
        "out": ("string", "runs/bench_kernels", "directory of kernels.json"),
    }
    values, overrides, positional = parse(command, arguments, options)
    if overrides or positional:
        raise UserError(
            f"fp8rl {command}: {[*overrides, *positional][0]!r} is not understood; it takes "
            "--models=NAME,NAME, --rows=N,N, --quick and --out=DIR, and no config"
        )
    if not values.out:
        raise UserError(f"fp8rl {command}: --out is empty; name a directory, or leave it out")
    from fp8rl_jax.bench import kernel_shapes
    from fp8rl_jax.models.presets import preset

    models = kernel_shapes.MODELS if values.models is None else values.models.split(",")
    for name in models:
        preset(name)
    rows = (
        kernel_shapes.ROWS
        if values.rows is None
        else _counts(command, "rows", values.rows, _MOST_ROWS)
    )
    directory = writable(command, values.out)
    from fp8rl_jax.bench.kernels import bench, format_table, write

    result = bench(models, rows, values.quick, note)
    print(format_table(result))
    with writing(command, values.out):
        path = write(result, directory)
    print(path)
    return 0 if result["ok"] else 1


def _rollout(arguments: Sequence[str]) -> int:
    command = "bench rollout"
    options = {
        **CONFIG,
        "models": ("string", None, "names of shapes to run, in the place of a config's"),
        "cases": ("string", "bf16,fp8_linears,fp8_kv,fp8", "what is in FP8"),
        "batch": ("string", "8,32", "sequences decoded at once"),
        "prompt": ("string", "64", "tokens of a prompt"),
        "new": ("string", "128", "most tokens of a response"),
        "group": ("string", "1,8", "samples per prompt"),
        "lengths": ("string", "full", "of responses: full, long_tail or both"),
        "peers": ("string", "transformers", "other libraries to time; empty for none"),
        "repeats": ("int", 3, "timed repetitions, after one that compiles"),
        "out": ("string", "runs/bench_rollout", "directory of rollout.json"),
    }
    values, overrides, positional = parse(command, arguments, options)
    no_positional(command, positional)
    if bool(values.models) == bool(values.config):
        raise UserError(
            f"fp8rl {command}: name the shapes to run, either by --config FILE or by --models, "
            "for example --models=qwen3_4p5m,qwen3_29m"
        )
    if overrides and values.models:
        raise UserError(
            f"fp8rl {command}: {overrides[0]!r} changes a config, and --models takes none: leave "
            "one of them out"
        )
    if not values.out:
        raise UserError(f"fp8rl {command}: --out is empty; name a directory, or leave it out")
    sizes = [
        _counts(command, name, getattr(values, name), _MOST_SLOTS)
        for name in ("batch", "prompt", "new", "group")
    ]
    from fp8rl_jax.bench import rollout

    plan = rollout.Plan(
        *sizes, cases=_words(values.cases), lengths=_words(values.lengths),
        peers=_words(values.peers), repeats=values.repeats,
    )  # fmt: skip
    if values.models:
        models = {name: rollout.model_of(name) for name in _words(values.models)}
    else:
        from fp8rl_jax.training.runtime import make_runtime

        config = read_config(command, values, overrides)
        models = {values.config: make_runtime(config, with_questions=False).model}
    directory = writable(command, values.out)
    result = rollout.bench(models, plan, note)
    print(rollout.format_table(result))
    with writing(command, values.out):
        path = rollout.write(result, directory)
    print(path)
    return 0


def _words(text: str) -> list[str]:
    """The words of 'one,two'; none of ''."""
    return [word.strip() for word in text.split(",")] if text else []


def _counts(command: str, option: str, text: str, most: int) -> list[int]:
    """The numbers of '1,64,4096'.

    Raises:
      UserError: one of them is none, is below 1, or is above `most`.
    """
    counts = []
    for word in text.split(","):
        if not word.strip().isdecimal() or not 1 <= int(word) <= most:
            raise UserError(
                f"fp8rl {command}: --{option} holds {word!r}; write whole numbers from 1 to "
                f"{most}, such as --{option}=1,64"
            )
        counts.append(int(word))
    return counts


_COMMANDS = {
    "drift-cost": _drift_cost,
    "gemm-error": _gemm_error,
    "kernels": _kernels,
    "rollout": _rollout,
}
