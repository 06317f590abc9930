"""The command line: `fp8rl train | eval | sample | drift | bench | plan | recipe | convert |
report`.

Exit status: 0 done; 2 the user's to mend, one sentence on standard error; 1 ours, a traceback,
a bound that `fp8rl drift --fail-above` was given and found exceeded, or a check of `fp8rl bench
kernels` that failed.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence

from fp8rl_jax.cli.arguments import (
    CONFIG,
    found_programs,
    keep_programs,
    no_positional,
    note,
    parse,
    read_config,
    writable,
    writing,
)
from fp8rl_jax.cli.bench import bench
from fp8rl_jax.cli.sample_eval import evaluate, sample
from fp8rl_jax.errors import NonFiniteError, UserError

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
           fp8rl bench rollout --config FILE, or --models=qwen3_4p5m,qwen3_29m: tokens per second
           of the sampler on random weights, beside transformers  [--cases=bf16,fp8_linears,
           fp8_kv,fp8] [--batch=8,32] [--prompt=64] [--new=128] [--group=1,8]
           [--lengths=full,long_tail] [--peers=transformers] [--repeats=3]
           [--out=runs/bench_rollout]
  plan     fp8rl plan --rollout --config FILE: what a rollout needs of a GPU, in FP8 and BF16, and
           how many slots and pages fit; needs no GPU and no weights
           [--memory-gb=141] [--devices=N]
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


def _train(arguments: Sequence[str]) -> int:
    options = {**CONFIG, "resume": ("bool", False, "continue the run in run.dir")}
    values, overrides, positional = parse("train", arguments, options)
    no_positional("train", positional)
    config = read_config("train", values, overrides)
    from fp8rl_jax.report.summary import summarise
    from fp8rl_jax.train import train

    outcome = train(config, values.resume)
    if outcome.report is not None:
        summary = summarise(config.run.dir)
        for line in (summary["sentence"], *summary["notes"], f"report: {outcome.report}"):
            print(line)
    return 0


def _plan(arguments: Sequence[str]) -> int:
    from fp8rl_jax.cli.plan import plan

    return plan(arguments)


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
    from fp8rl_jax.cli.recipe import list_recipes, show_recipe

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
    directory = writable("drift", values.out or values.checkpoint or config.run.dir)
    from fp8rl_jax.drift.render import print_analysis, write_analysis
    from fp8rl_jax.policy.inference import analyse_drift

    result = analyse_drift(config, values.checkpoint, values.prompts, note)
    print_analysis(result)
    with writing("drift", directory):
        paths = write_analysis(result, directory)
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
    keep_programs()
    from fp8rl_jax.models import hf
    from fp8rl_jax.policy.export import export_run, is_run

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
    "bench": bench,
    "plan": _plan,
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
        status = _COMMANDS[command](rest)
        if found := found_programs():
            note(found)
        return status
    except UserError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except NonFiniteError as error:
        print("stopped:", error, file=sys.stderr)
        return 1


def main() -> None:
    """Entry point of the console script `fp8rl`."""
    sys.exit(run(sys.argv[1:]))
