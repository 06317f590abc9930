"""`fp8rl study` and its subcommands: layers, cases, kv, scale, training, accuracy, all."""

from __future__ import annotations

import argparse
import functools
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from fp8rl_jax.cli.arguments import (
    ALLOW_IMPORT,
    Command,
    argument,
    counts,
    directory,
    keep_programs,
    note,
    read_config,
    words,
    writable,
    writing,
)
from fp8rl_jax.errors import UserError

if TYPE_CHECKING:
    from fp8rl_jax.study.cells import Cells
    from fp8rl_jax.study.subjects import Subject

_NAMES = "layers, cases, kv, scale, training, accuracy or all"


def _study(values: argparse.Namespace) -> int:
    raise UserError(f"fp8rl study: write `fp8rl study {_NAMES}` and options after that")


def _check(command: str, values: argparse.Namespace) -> None:
    """Raises UserError unless the options name one model, or none with --quick."""
    named = [bool(values.config), values.checkpoint is not None]
    if all(named) or (not any(named) and not values.quick):
        raise UserError(
            f"fp8rl {command}: name one model, by --config FILE or by --checkpoint DIR, or write "
            "--quick for a small one"
        )
    if values.overrides and not values.config:
        raise UserError(
            f"fp8rl {command}: {values.overrides[0]!r} changes a config: name one with --config, "
            "or leave it out"
        )
    seeds = values.seeds
    if len(set(seeds)) < len(seeds):
        raise UserError(
            f"fp8rl {command}: --seeds names {max(seeds, key=seeds.count)} more than once: write "
            "each seed once"
        )
    if values.checkpoint is not None:
        _check_checkpoint(command, values)
    if command == "study layers" and len(seeds) > 1:
        raise UserError(
            "fp8rl study layers: it looks at one model: name one seed, and for the next one run it "
            "again with another --out"
        )


def _check_checkpoint(command: str, values: argparse.Namespace) -> None:
    """Raises UserError unless --checkpoint is a directory, and of one seed."""
    if not pathlib.Path(values.checkpoint).is_dir():
        raise UserError(
            f"fp8rl {command}: --checkpoint={values.checkpoint} is no directory; name that of a "
            "run, or of a Hugging Face model"
        )
    if len(values.seeds) > 1:
        raise UserError(
            f"fp8rl {command}: a checkpoint is the result of one seed: leave out --seeds, or name "
            "a config with --config"
        )


def _subjects(
    command: str, values: argparse.Namespace, out: pathlib.Path, questions: bool
) -> list[Subject]:
    """The model that the options name, once for each seed."""
    from fp8rl_jax.study import subjects

    if values.checkpoint is not None:
        from fp8rl_jax.policy.source import directory_config

        keep_programs()
        config = directory_config(values.checkpoint, words(values.allow_import))
        return [subjects.of_directory(config, note, questions)]
    if values.config:
        config = read_config(command, values)
    else:
        config = subjects.quick_config()
        keep_programs()
    found = []
    for seed in values.seeds:
        config.run.seed = seed
        found.append(subjects.of_config(config, out, note, questions))
    return found


def _run(
    name: str,
    questions: bool,
    work: Callable[[argparse.Namespace, list[Subject], pathlib.Path, Cells], list[str]],
    values: argparse.Namespace,
) -> int:
    """A study by its name: `work` makes its files, of which it returns the paths, and prints its
    sentences."""
    command = f"study {name}"
    _check(command, values)
    out = writable(command, values.out or f"runs/study_{name}")
    from fp8rl_jax.study.cells import Cells

    cells = Cells(pathlib.Path(values.cells or out / "cells"), values.resume)
    with writing(command, out):
        subjects = _subjects(command, values, out, questions)
        paths = work(values, subjects, out, cells)
    print(*paths, sep="\n")
    return 0


def _print_verdicts(result: dict) -> None:
    for verdict in result["hypotheses"]:
        print(verdict["sentence"])


def _steps(study, values: argparse.Namespace) -> int:
    """RL steps of each run of a study's module."""
    if values.steps is not None:
        return values.steps
    return study.QUICK_STEPS if values.quick else study.STEPS


def _layers(values, subjects, out, cells) -> list[str]:
    from fp8rl_jax.study import layers

    sequences = layers.QUICK_SEQUENCES if values.quick else layers.SEQUENCES
    result = layers.study(subjects[0], sequences, cells, note)
    _print_verdicts(result)
    return layers.write(result, out)


def _cases(values, subjects, out, cells) -> list[str]:
    from fp8rl_jax.study import cases

    questions = cases.QUICK_QUESTIONS if values.quick else cases.QUESTIONS
    result = cases.study(subjects, out, cells, note, questions, _steps(cases, values))
    _print_verdicts(result)
    return cases.write(result, out)


def _kv(values, subjects, out, cells) -> list[str]:
    from fp8rl_jax.study import kv

    questions = kv.QUICK_QUESTIONS if values.quick else kv.QUESTIONS
    result = kv.study(subjects, out, cells, note, questions, _steps(kv, values))
    _print_verdicts(result)
    return kv.write(result, out)


def _scale(values: argparse.Namespace) -> int:
    command = "study scale"
    if values.checkpoint is not None:
        raise UserError(
            f"fp8rl {command}: a ladder is several models, and --checkpoint names one: name their "
            "file, such as --config configs/study_scale.py"
        )
    _check(command, values)
    out = writable(command, values.out or "runs/study_scale")
    from fp8rl_jax.study import scale, subjects
    from fp8rl_jax.study.cells import Cells

    cells = Cells(pathlib.Path(values.cells or out / "cells"), values.resume)
    with writing(command, out):
        ladder: dict[str, list[Subject]] = {}
        if not values.config:
            keep_programs()
            ladder = subjects.quick_ladder(values.seeds, out, note)
        for rung in values.rungs.split(",") if values.config else ():
            named = argparse.Namespace(**{**vars(values), "config": f"{values.config}:{rung}"})
            ladder[rung] = _subjects(command, named, out, True)
        questions = scale.QUICK_QUESTIONS if values.quick else scale.QUESTIONS
        result = scale.study(ladder, cells, note, questions)
        _print_verdicts(result)
        paths = scale.write(result, out)
    print(*paths, sep="\n")
    return 0


def _training(values, subjects, out, cells) -> list[str]:
    from fp8rl_jax.study import training

    questions = training.QUICK_QUESTIONS if values.quick else training.QUESTIONS
    result = training.study(subjects, out, cells, note, questions, _steps(training, values))
    _print_verdicts(result)
    return training.write(result, out)


def _accuracy(values, subjects, out, cells) -> list[str]:
    from fp8rl_jax.study import accuracy

    result = accuracy.study(subjects, out, cells, note, _steps(accuracy, values))
    _print_verdicts(result)
    print(accuracy.format_power(result))
    return accuracy.write(result, out)


_OF_A_MODEL = {
    "layers": functools.partial(_run, "layers", False, _layers),
    "cases": functools.partial(_run, "cases", True, _cases),
    "kv": functools.partial(_run, "kv", True, _kv),
    "training": functools.partial(_run, "training", True, _training),
    "accuracy": functools.partial(_run, "accuracy", True, _accuracy),
}


def _all(values: argparse.Namespace) -> int:
    """Each study in a directory of its own, with cells in one."""
    command = "study all"
    _check(command, values)
    if values.checkpoint is not None:
        from fp8rl_jax.policy.source import directory_config
        from fp8rl_jax.study.subjects import check_task

        check_task(directory_config(values.checkpoint, words(values.allow_import)))
    out = writable(command, values.out or "runs/study_all")
    from fp8rl_jax.study.cells import Cells

    cells = Cells(pathlib.Path(values.cells or out / "cells"), values.resume)
    studies = dict(_OF_A_MODEL)
    if values.config or values.checkpoint is not None:
        note("study scale has models of its own: run it with --config configs/study_scale.py")
    else:
        studies["scale"] = _scale
    shared = {"cells": str(cells.directory), "resume": True, "steps": None}
    for name, run in studies.items():
        note(f"study {name}")
        seeds = values.seeds[:1] if name == "layers" else values.seeds
        own = {**shared, "out": str(out / name), "seeds": seeds}
        run(argparse.Namespace(**{**vars(values), **own}))
    return 0


def _options(quick: str) -> tuple:
    """Options that every study has; `quick` is the help of --quick."""
    return (
        argument("--checkpoint", metavar="DIR",
                 help="a run, or a Hugging Face model, in the place of a config's"),
        argument("--seeds", type=counts((1 << 31) - 1, 0), default=[0], metavar="N,...",
                 help="a model is trained for each of them (default: 0)"),
        argument("--quick", action="store_true", help=quick),
        argument("--out", type=directory, metavar="DIR",
                 help="directory of study.json, study.md, study.png and of runs (default: "
                 "runs/study_NAME)"),
        argument("--cells", type=directory, metavar="DIR",
                 help="directory of the finished cells; OUT/cells if left out"),
        argument("--resume", action="store_true", help="use the cells that are there"),
        ALLOW_IMPORT,
    )  # fmt: skip


def _from(least: int) -> Callable[[str], int]:
    """A type of an argument: a whole number, at least `least`."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"it is {text!r}; write a whole number of at least {least}"
            )
        return int(text)

    return read


_STEPS = argument("--steps", type=_from(0), metavar="N",
                  help="RL steps of each run; 0 leaves them out")  # fmt: skip
_RL_STEPS = argument("--steps", type=_from(1), metavar="N",
                     help="RL steps of each run (default: 160)")  # fmt: skip
_FEW_STEPS = "few steps; without a model, two layers trained for a minute"


COMMANDS = (
    Command(
        "study",
        "hypotheses written beforehand: layers, cases, kv, scale, training, accuracy, all",
        _study,
        others=f"write `fp8rl study {_NAMES}` and options after that; ",
    ),
    Command(
        "study layers",
        "error of every GEMM of a forward and backward pass: FP8, fake FP8 and bf16",
        _OF_A_MODEL["layers"],
        _options("three sequences; without a model, two layers of random weights"),
        config=True,
    ),
    Command(
        "study cases",
        "an FP8 rollout with learners in bf16, imitated FP8 and FP8: mismatch, KL, RL curves",
        _OF_A_MODEL["cases"],
        (*_options("few questions and steps; without a model, two layers trained for a minute"),
         _STEPS),
        config=True,
    ),
    Command(
        "study kv",
        "an FP8 KV cache, FP8 linear layers and both against a bf16 learner; calibrated scales",
        _OF_A_MODEL["kv"],
        (*_options("few questions; without a model, two layers trained for a minute"), _STEPS),
        config=True,
    ),
    Command(
        "study scale",
        "mismatch by experts, depth and router; routing replay; planted outliers",
        _scale,
        (
            *_options("few questions; without --config, a dense model and one with experts"),
            argument("--rungs", default="d4,d8,d16,m8,m16,m32,s16", metavar="NAME,...",
                     help="arguments of the config file, one for each model (default: "
                     "%(default)s)"),
        ),
        config=True,
    ),
    Command(
        "study training",
        "mismatch of an FP8 rollout and a bf16 learner over RL, with TIS and without",
        _OF_A_MODEL["training"],
        (*_options(_FEW_STEPS), _RL_STEPS),
        config=True,
    ),
    Command(
        "study accuracy",
        "accuracy after RL in bf16, with an FP8 rollout, with TIS, in FP8; and under stress",
        _OF_A_MODEL["accuracy"],
        (*_options(_FEW_STEPS), _RL_STEPS),
        config=True,
    ),
    Command(
        "study all",
        "all studies of one model, each in a directory of its own; with --quick the ladder too",
        _all,
        _options("as for each study; without a model, their own small ones"),
        config=True,
    ),
)  # fmt: skip
