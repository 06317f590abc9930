"""The command line: `fp8rl train | eval | sample | drift | bench | recipe | convert | report`.

Exit status: 0 done; 2 the user's to mend, one sentence on standard error; 1 ours, a traceback,
a bound that `fp8rl drift --fail-above` was given and found exceeded, or a check of `fp8rl bench
kernels` that failed.
"""

from __future__ import annotations

import errno
import os
import pathlib
import sys
from collections.abc import Sequence

from fp8rl_jax.arguments import CONFIG, no_positional, note, parse, read_config
from fp8rl_jax.errors import NonFiniteError, UserError
from fp8rl_jax.policy_commands import evaluate, sample

_USAGE = """\
fp8rl: reinforcement learning of language models in FP8, rollout and learner through one forward

usage: fp8rl COMMAND --config FILE [--config.SECTION.FIELD=VALUE ...] [options]

commands:
  train    warm-up, then GRPO; writes metrics, checkpoints and report.html to run.dir
           [--resume]  continue the run in run.dir, bit for bit
  eval     held-out accuracy of the newest checkpoint in run.dir, or of a directory by its name:
           fp8rl eval --checkpoint DIR [--task=TASK] [--task-options=NAME=VALUE,...]
           [--questions=N] [--reward=R] [--batch-size=N] and the options of sample after --prompt
  sample   answers of the newest checkpoint to questions given as arguments, or text of a
           directory by its name, shown while it is made:
           fp8rl sample --checkpoint DIR --prompt TEXT [--prompt TEXT ...]
           [--chat] [--system=TEXT] [--chat-options=NAME=VALUE,...] [--max-new-tokens=N]
           [--temperature=T] [--top-k=K] [--top-p=P] [--seed=S] [--precision=fp8|bf16|f32]
           DIR is that of a run, or of a Hugging Face model; neither needs --config
  drift    where rollout and learner differ, if they do: compares the two programs bit by bit
           [--checkpoint=RUN_DIR]  with its newest weights instead of random ones
           [--prompts=N] [--out=DIR] [--fail-above=X]  status 1 if a |dlogp| is above X
  bench    time of rollout and train step under several recipes, in one process
           [--recipes=fp8,bf16,f32] [--repeats=5]
           fp8rl bench drift-cost --config FILE: what zero drift costs, exact programs against
           naive ones  [--recipes=fp8,bf16] [--repeats=5]
           fp8rl bench gemm-error: error of every recipe's matrix products, beside a published
           table; no config  [--recipes=fp8,mxfp8,...] [--out=runs/gemm_error]
           fp8rl bench kernels: the GPU kernels, their correctness and then their speed beside
           XLA's; status 1 if a check fails; no config  [--models=qwen3_8b,...] [--rows=1,64,...]
           [--quick] [--out=runs/bench_kernels]
  recipe   fp8rl recipe list: the names of all recipes
           fp8rl recipe show NAME: formats, blocks and scaling policies of every GEMM
  convert  fp8rl convert SRC DST --dtype bf16|fp8: a checkpoint in Hugging Face's format in another
           number format; SRC is its directory, a run whose newest weights to export, or a GGUF
           file of the llama architecture
           [--max-shard-gb=5]  size of a file above which there are several
  report   fp8rl report RUN_DIR [OTHER_RUN ...]: writes RUN_DIR/report.html again, with a
           comparison if other runs are named

`fp8rl COMMAND --help` lists every config field.
"""


_MOST_ROWS = 1 << 17  # of a product that `fp8rl bench kernels` times: a batch of 128k tokens


def _train(arguments: Sequence[str]) -> int:
    options = {**CONFIG, "resume": ("bool", False, "continue the run in run.dir")}
    values, overrides, positional = parse("train", arguments, options)
    no_positional("train", positional)
    config = read_config("train", values, overrides)
    from fp8rl_jax.summary import summarise
    from fp8rl_jax.train import train

    outcome = train(config, values.resume)
    if outcome.report is not None:
        summary = summarise(config.run.dir)
        for line in (summary["sentence"], *summary["notes"], f"report: {outcome.report}"):
            print(line)
    return 0


def _bench(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["gemm-error"]:
        return _gemm_error(arguments[1:])
    if arguments[:1] == ["drift-cost"]:
        return _drift_cost(arguments[1:])
    if arguments[:1] == ["kernels"]:
        return _kernels(arguments[1:])
    options = {
        **CONFIG,
        "recipes": ("string", "fp8,bf16,f32", "recipes to time"),
        "repeats": ("int", 5, "timed repetitions, after one that compiles"),
    }
    values, overrides, positional = parse("bench", arguments, options)
    if positional:
        raise UserError(
            f"fp8rl bench: {positional[0]!r} is not understood here; write `fp8rl bench --config "
            "FILE`, or `fp8rl bench gemm-error`, `fp8rl bench drift-cost` or `fp8rl bench kernels` "
            "and options after that"
        )
    config = read_config("bench", values, overrides)
    from fp8rl_jax.bench.step_time import bench, format_table

    print(format_table(bench(config, values.recipes.split(","), values.repeats)))
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
    directory = _writable(command, values.out)
    from fp8rl_jax.bench.gemm_error import format_table, gemm_errors, write_gemm_errors

    result = gemm_errors(recipes, note=lambda text: print(text, file=sys.stderr, flush=True))
    print(format_table(result))
    try:
        paths = write_gemm_errors(result, directory)
    except OSError as error:
        raise _unwritable(command, values.out, error) from None
    print(*paths, sep="\n")
    return 0


def _kernels(arguments: Sequence[str]) -> int:
    command = "bench kernels"
    options = {
        "models": ("string", None, "names of presets whose matrices to run; three if left out"),
        "rows": ("string", None, "rows of the products, separated by commas"),
        "quick": ("bool", False, "the largest matrix of each model alone"),
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
    rows = kernel_shapes.ROWS if values.rows is None else _row_counts(command, values.rows)
    directory = _writable(command, values.out)
    from fp8rl_jax.bench.kernels import bench, format_table, write

    result = bench(models, rows, values.quick, note)
    print(format_table(result))
    try:
        print(write(result, directory))
    except OSError as error:
        raise _unwritable(command, values.out, error) from None
    return 0 if result["ok"] else 1


def _row_counts(command: str, text: str) -> list[int]:
    """The numbers of '1,64,4096'.

    Raises:
      UserError: one of them is none, is below 1, or is more than a kernel counts.
    """
    counts = []
    for word in text.split(","):
        if not word.strip().isdecimal() or not 1 <= int(word) <= _MOST_ROWS:
            raise UserError(
                f"fp8rl {command}: --rows holds {word!r}; write whole numbers from 1 to "
                f"{_MOST_ROWS}, such as --rows=1,64,4096"
            )
        counts.append(int(word))
    return counts


def _recipe(arguments: Sequence[str]) -> int:
    _, overrides, words = parse("recipe", arguments, {})
    words += overrides
    if not words:
        raise UserError("fp8rl recipe: write `fp8rl recipe list` or `fp8rl recipe show NAME`")
    from fp8rl_jax.quant import recipe_names

    action, *names = words
    if action not in ("list", "show"):
        raise UserError(
            f"fp8rl recipe: {action!r} is not understood; write list, or show and a name"
        )
    if action == "show" and not names:
        raise UserError(
            "fp8rl recipe show: name a recipe, one of " + ", ".join(recipe_names()) + ", or "
            "package.module:function"
        )
    if junk := names[action == "show" :]:
        raise UserError(
            f"fp8rl recipe {action}: {junk[0]!r} is not understood; write "
            f"`fp8rl recipe {action}{' NAME' if action == 'show' else ''}`"
        )
    from fp8rl_jax.recipe_show import list_recipes, show_recipe

    print(show_recipe(*names) if names else list_recipes())
    return 0


def _drift(arguments: Sequence[str]) -> int:
    options = {
        **CONFIG,
        "checkpoint": ("string", None, "a run directory, whose newest weights to take"),
        "prompts": ("int", None, "questions to sample; those of an RL step if left out"),
        "out": ("string", None, "directory of drift.json and drift.html; run.dir if left out"),
        "fail_above": ("float", None, "exit with status 1 if a |dlogp| is above this"),
    }
    values, overrides, positional = parse("drift", arguments, options)
    no_positional("drift", positional)
    if values.prompts is not None and values.prompts < 1:
        raise UserError(f"fp8rl drift: --prompts is {values.prompts}; write at least 1")
    if values.fail_above is not None and not values.fail_above >= 0:
        raise UserError(
            f"fp8rl drift: --fail-above is {values.fail_above}; write a number of at least 0"
        )
    config = read_config("drift", values, overrides)
    if values.checkpoint is not None and not pathlib.Path(values.checkpoint).is_dir():
        raise UserError(
            f"fp8rl drift: --checkpoint={values.checkpoint} is no directory; name that of a run"
        )
    directory = _writable("drift", values.out or values.checkpoint or config.run.dir)
    from fp8rl_jax.drift.render import print_analysis, write_analysis
    from fp8rl_jax.inference import analyse_drift

    result = analyse_drift(config, values.checkpoint, values.prompts, note)
    print_analysis(result)
    try:
        paths = write_analysis(result, directory)
    except OSError as error:
        raise _unwritable("drift", directory, error) from None
    print(*paths, sep="\n")
    largest = result["headline"]["train_rollout_logprob_abs_diff_max"]
    if values.fail_above is not None and not largest <= values.fail_above:
        print(
            f"failed: the largest |dlogp| is {largest:.3g}, above --fail-above="
            f"{values.fail_above:g}",
            file=sys.stderr,
        )
        return 1
    return 0


def _unwritable(command: str, directory: str | pathlib.Path, error: OSError) -> UserError:
    return UserError(
        f"fp8rl {command}: nothing can be written to --out={directory} ({error.strerror}): "
        "name another directory"
    )


def _writable(command: str, directory: str) -> pathlib.Path:
    """The directory, made if need be.

    Raises:
      UserError: nothing can be written to it.
    """
    path = pathlib.Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _unwritable(command, directory, error) from None
    return path


def _report(arguments: Sequence[str]) -> int:
    _, overrides, directories = parse("report", arguments, {})
    no_positional("report", overrides)
    if not directories:
        raise UserError("fp8rl report: name a run directory, for example runs/tiny_arithmetic")
    from fp8rl_jax.report import write_report

    try:
        print(write_report(directories[0], directories[1:]))
    except OSError as error:
        raise UserError(
            f"fp8rl report: {directories[0]}/report.html cannot be written ({error.strerror}): "
            "make room for it, or mend its permissions"
        ) from None
    return 0


def _convert(arguments: Sequence[str]) -> int:
    options = {
        "dtype": ("string", None, "bf16 or fp8"),
        "max_shard_gb": ("float", 5.0, "size of a file above which there are several"),
    }
    values, overrides, paths = parse("convert", arguments, options)
    no_positional("convert", overrides)
    if len(paths) != 2 or values.dtype not in ("bf16", "fp8"):
        raise UserError(
            "fp8rl convert: write `fp8rl convert SRC DST --dtype bf16` or `--dtype fp8`"
        )
    from fp8rl_jax.export import export_run, is_run
    from fp8rl_jax.models import hf

    if is_run(paths[0]):
        print(export_run(*paths, values.dtype, values.max_shard_gb, note))
    else:
        print(hf.convert(*paths, values.dtype, values.max_shard_gb))
    return 0


_COMMANDS = {
    "train": _train,
    "eval": evaluate,
    "sample": sample,
    "drift": _drift,
    "bench": _bench,
    "recipe": _recipe,
    "convert": _convert,
    "report": _report,
}


def run(arguments: Sequence[str]) -> int:
    """Runs one command; returns the exit status. Errors of ours propagate as exceptions."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_USAGE)
        return 0
    command, *rest = arguments
    try:
        if command not in _COMMANDS:
            raise UserError(f"fp8rl: no command {command!r}; write one of {', '.join(_COMMANDS)}")
        if any(a in ("-h", "--help") for a in rest):
            from fp8rl_jax.config import describe_fields

            print(_USAGE + "\nconfig fields and their defaults:\n" + describe_fields())
            return 0
        return _COMMANDS[command](rest)
    except UserError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except NonFiniteError as error:
        print("stopped:", error, file=sys.stderr)
        return 1


def main() -> None:
    """Entry point of the console script `fp8rl`."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
