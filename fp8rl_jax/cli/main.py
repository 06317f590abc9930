"""The command line: `fp8rl COMMAND ...`.

Exit status: 0 done; 2 the user's to fix, one sentence on standard error; 75 a run that a signal
stopped, with a checkpoint; 3 a run that drift ended, with a checkpoint, as precision.zero_drift is
'required'; 1 anything else: an error of ours, a run that met NaN, a bound of `fp8rl drift
--fail-above` that was exceeded, a kernel that failed in `fp8rl bench kernels`. docs/usage.md has
the table.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import traceback
from collections.abc import Sequence

from fp8rl_jax.base import processes
from fp8rl_jax.base.errors import (
    DriftError,
    NonFiniteError,
    RewardError,
    UserError,
    limit_reached,
    raised,
)
from fp8rl_jax.base.jax_settings import hold_settings
from fp8rl_jax.cli import algo, bench, data, sample_eval, study
from fp8rl_jax.cli.arguments import (
    ALLOW_IMPORT,
    Command,
    a_path,
    argument,
    found_programs,
    keep_programs,
    note,
    read_config,
    words,
    writable,
    writing,
)
from fp8rl_jax.cli.interrupt import Interrupt
from fp8rl_jax.cli.output import keep_talking

_OPEN_FILES = 64  # that a checkpoint, its arrays and the workers of a reward need at a time
_STOPPED = os.EX_TEMPFAIL  # 75: try again, here with --resume
_DRIFTED = 3


def _train(values: argparse.Namespace) -> int:
    with keep_talking():
        with Interrupt() as interrupt:  # imports too, which may lose a KeyboardInterrupt
            config = read_config("train", values)
            directory = os.path.abspath(config.run.dir)
            from fp8rl_jax.report.summary import summarise
            from fp8rl_jax.train import train

            outcome = train(config, values.resume, interrupt)
        if not outcome.finished:
            return _STOPPED
        if not processes.first():
            return 0
        summary = summarise(directory)
        lines = (summary["sentence"], *summary["notes"], f"report: {outcome.report}")
        for line in filter(None, (*lines, summary["advice"])):
            print(line)
    return 0


def _plan(values: argparse.Namespace) -> int:
    from fp8rl_jax.cli.plan import plan

    return plan(values)


def _list_recipes(values: argparse.Namespace) -> int:
    from fp8rl_jax.cli.recipe import list_recipes

    print(list_recipes())
    return 0


def _show_recipe(values: argparse.Namespace) -> int:
    from fp8rl_jax.cli.recipe import show_recipe
    from fp8rl_jax.quant import recipe_names

    if values.name is None:
        raise UserError(
            "fp8rl recipe show: name a recipe, one of " + ", ".join(recipe_names()) + ", or "
            "package.module:function"
        )
    print(show_recipe(values.name))
    return 0


def _recipe(values: argparse.Namespace) -> int:
    raise UserError("fp8rl recipe: write `fp8rl recipe list` or `fp8rl recipe show NAME`")


def _drift_config(values: argparse.Namespace):
    """The configuration of --config, or of the run that --checkpoint names."""
    if values.config or values.checkpoint is None:
        return read_config("drift", values)
    from fp8rl_jax.config import override
    from fp8rl_jax.policy.source import directory_config

    permitted = words(values.allow_import)
    config = directory_config(values.checkpoint, permitted, ("precision", "env", "algo"))
    override(config, values.overrides)
    keep_programs(config.run.compilation_cache)
    return config


def _drift(values: argparse.Namespace) -> int:
    if values.prompts is not None and values.prompts < 1:
        raise UserError(f"fp8rl drift: --prompts is {values.prompts}; write at least 1")
    if values.fail_above is not None and not values.fail_above >= 0:
        raise UserError(
            f"fp8rl drift: --fail-above is {values.fail_above}; write a number of at least 0"
        )
    if values.checkpoint is not None and not os.path.isdir(values.checkpoint):
        raise UserError(
            f"fp8rl drift: --checkpoint={values.checkpoint} is no directory; name that of a run"
        )
    config = _drift_config(values)
    directory = writable("drift", values.out or values.checkpoint or config.run.dir)
    from fp8rl_jax.drift.command import analyse_drift
    from fp8rl_jax.drift.render import print_analysis, write_analysis

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


def _report(values: argparse.Namespace) -> int:
    if not values.directories:
        raise UserError("fp8rl report: name a run directory, for example runs/tiny_arithmetic")
    from fp8rl_jax.report import write_report

    own, *others = values.directories
    try:
        print(write_report(own, others))
    except OSError as error:
        raise UserError(
            f"fp8rl report: {own}/report.html cannot be written ({error.strerror}): make room for "
            "it, or fix its permissions"
        ) from None
    return 0


def _convert(values: argparse.Namespace) -> int:
    if len(values.paths) != 2 or values.dtype is None:
        raise UserError(
            "fp8rl convert: write `fp8rl convert SRC DST --dtype bf16` or `--dtype fp8`"
        )
    keep_programs()
    from fp8rl_jax.models import hf
    from fp8rl_jax.policy.export import export_run, is_run

    if is_run(values.paths[0]):
        permitted = words(values.allow_import)
        print(export_run(*values.paths, values.dtype, values.max_shard_gb, permitted, note))
    else:
        print(hf.convert(*values.paths, values.dtype, values.max_shard_gb))
    return 0


_COMMANDS = (
    Command(
        "train",
        "supervised fine-tuning, then GRPO; writes metrics, checkpoints and report.html to\n"
        "run.dir",
        _train,
        (argument("--resume", action="store_true",
                  help="continue the run in run.dir, bit for bit"),),
        config=True,
        processes=True,
    ),
    *sample_eval.COMMANDS,
    *data.COMMANDS,
    Command(
        "drift",
        "where rollout and learner differ, if they do: compares the two programs bit by bit",
        _drift,
        (
            argument("--checkpoint", type=a_path, metavar="RUN_DIR",
                     help="a run whose kept step, or else newest weights, to take instead of "
                     "random weights; without --config its own configuration"),
            argument("--prompts", type=int, metavar="N",
                     help="questions to sample with the newest weights; those of an RL step if "
                     "left out"),
            ALLOW_IMPORT,
            argument("--out", type=a_path, metavar="DIR",
                     help="directory of drift.json and drift.html; run.dir if left out"),
            argument("--fail-above", type=float, metavar="X",
                     help="exit with status 1 if a |dlogp| is above this"),
        ),
        config=True,
    ),
    *bench.COMMANDS,
    *study.COMMANDS,
    Command(
        "plan",
        "what a rollout and a train step need of GPUs, whether they fit, and what the step costs;\n"
        "needs no GPU and no weights",
        _plan,
        (
            argument("--rollout", action="store_true",
                     help="plan the rollout alone: weights, slots and pages in FP8 and BF16, and "
                     "predicted decode times of BF16, FP8 linear layers, FP8 KV cache, and both"),
            argument("--learner", action="store_true",
                     help="plan the train step alone: memory, FLOPs, bytes over the mesh, times"),
            argument("--devices", type=int, metavar="N",
                     help="of the mesh; as many as its axes ask for if left out"),
            argument("--hosts", type=int, metavar="H",
                     help="that the devices are on; one for eight of them if left out"),
            argument("--gpu", choices=("h100", "h200"), default="h200",
                     help="whose memory and speed to take (default: h200)"),
            argument("--memory-gb", type=float, metavar="X",
                     help="memory of a GPU, in GiB; 141 of an H200 and 80 of an H100 if left out"),
            argument("--compile", action="store_true",
                     help="also compile train step and decode step for H200s that are not there, "
                     "and print the compiler's figures (extra gpu_proofs; minutes)"),
        ),
        config=True,
    ),
    Command(
        "recipe",
        "what a precision recipe does: recipe list, recipe show NAME",
        _recipe,
        others="write `fp8rl recipe list` or `fp8rl recipe show NAME`; ",
    ),
    Command("recipe list", "the names of all recipes", _list_recipes),
    Command(
        "recipe show",
        "formats, blocks and scaling policies of every GEMM",
        _show_recipe,
        (argument("name", nargs="?", metavar="NAME", help="a recipe, or package.module:function"),),
    ),
    *algo.COMMANDS,
    Command(
        "convert",
        "a checkpoint in Hugging Face's format in another number format",
        _convert,
        (
            argument("paths", nargs="*", type=a_path, metavar="SRC DST",
                     help="SRC: a checkpoint's directory, a run whose newest weights to export, or "
                     "a GGUF file of the llama architecture; DST: a new directory"),
            argument("--dtype", choices=("bf16", "fp8"), help="of the numbers written"),
            argument("--max-shard-gb", type=float, default=5.0, metavar="X",
                     help="size of a file above which there are several (default: 5)"),
            ALLOW_IMPORT,
        ),
    ),
    Command(
        "report",
        "writes RUN_DIR/report.html again, with a comparison if other runs are named",
        _report,
        (argument("directories", nargs="*", type=a_path, metavar="RUN_DIR", help="of runs"),),
    ),
)  # fmt: skip
COMMANDS = {command.name: command for command in _COMMANDS}
_FIRST_WORDS = list(dict.fromkeys(name.split()[0] for name in COMMANDS))


def _overview() -> str:
    """The text of `fp8rl --help`."""
    parser = argparse.ArgumentParser(
        "fp8rl",
        usage="fp8rl COMMAND [--config FILE] [--config.SECTION.FIELD=VALUE ...] [options]",
        description="reinforcement learning of language models in FP8, rollout and learner "
        "through one forward",
        epilog="`fp8rl COMMAND --help` lists a command's options, and the config's fields. Exit "
        "status: 0 done; 2 something to fix; 75 a run stopped by a signal, saved; 3 a run ended by "
        "drift, saved (precision.zero_drift=required); 1 anything else.",
        add_help=False,
    )
    commands = parser.add_subparsers(title="commands", metavar="")
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.summary)
    return parser.format_help()


def _find(words: Sequence[str]) -> tuple[Command, Sequence[str]]:
    """The command that the first words name, and the others."""
    for count in (2, 1):
        if command := COMMANDS.get(" ".join(words[:count])):
            return command, words[count:]
    raise UserError(f"fp8rl: no command {words[0]!r}; write one of {', '.join(_FIRST_WORDS)}")


def run(arguments: Sequence[str]) -> int:
    """Runs one command; returns the exit status. Errors of ours propagate as exceptions."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    try:
        command, words = _find(arguments)
        if any(word in ("-h", "--help") for word in words):
            print(command.help())
            return 0
        values = command.parse(words)
        hold_settings()
        _check_limits(command)
        _join(command)
        status = command.run(values)
        if found := found_programs():
            note(found)
        return status
    except RewardError as error:  # ends with a traceback, in several lines
        return processes.end(2, f"error: {error}")
    except UserError as error:
        return processes.end(2, f"error: {' '.join(str(error).split())}")
    except DriftError as error:
        return processes.end(_DRIFTED, f"stopped: {' '.join(str(error).split())}")
    except NonFiniteError as error:
        return processes.end(1, f"stopped: {error}")
    except SystemExit as error:  # none of ours ends so
        return processes.end(
            2,
            f"error: a function that the configuration names has ended the command with "
            f"{raised(error)}: raise another error there, or return",
        )
    except BaseException as error:
        if limit := limit_reached(error):
            return processes.end(2, f"error: {limit}: raise that limit")
        if processes.count() == 1:
            raise
        return processes.end(1, traceback.format_exc().rstrip())


def _check_limits(command: Command) -> None:
    """Raises UserError if this process may open too few files: then checkpoints fail half-way."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if command.config and most < _OPEN_FILES:
        raise UserError(
            f"fp8rl {command.name} may open {most} files at a time (`ulimit -n`): allow "
            f"{_OPEN_FILES} or more"
        )


def _join(command: Command) -> None:
    """Joins the processes that the environment speaks of.

    Raises:
      UserError: the command runs in one, or of `processes.join`.
    """
    others = processes.asked() - 1
    if others and not command.processes:
        raise UserError(
            f"fp8rl {command.name} runs in one process, and this is one of {others + 1}: start it "
            "once, without FP8RL_PROCESSES and outside srun"
        )
    processes.join()
