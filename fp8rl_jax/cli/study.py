"""`fp8rl study` and its subcommands: layers, cases, kv, scale, training, accuracy, all."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.cli.arguments import (
    ALLOW_IMPORT,
    Command,
    a_path,
    argument,
    counts,
    directory,
    keep_programs,
    note,
    read_config,
    whole,
    words,
    writable,
    writing,
)

if TYPE_CHECKING:
    from fp8rl_jax.study.cells import Cells
    from fp8rl_jax.study.subjects import Subject


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
    if not os.path.isdir(values.checkpoint):
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
    study: Callable[[argparse.Namespace, pathlib.Path, Cells], tuple[Any, dict]],
    values: argparse.Namespace,
) -> int:
    """A study by its name: `study` measures, and returns its module and the result; prints the
    sentences and writes the files."""
    command = f"study {name}"
    _check(command, values)
    out = writable(command, values.out or f"runs/study_{name}")
    from fp8rl_jax.study import writing as files
    from fp8rl_jax.study.cells import Cells

    cells = Cells(pathlib.Path(values.cells or out / "cells"), values.resume)
    with writing(command, out):
        module, result = study(values, out, cells)
        for verdict in result["hypotheses"]:
            print(verdict["sentence"])
        if name == "accuracy":
            print(module.format_power(result))
        paths = files.write(out, result, module.draw(result), module.format_table(result))
    print(*paths, sep="\n")
    return 0


def _steps(study, values: argparse.Namespace) -> int:
    """RL steps of each run of a study's module."""
    if values.steps is not None:
        return values.steps
    return study.QUICK_STEPS if values.quick else study.STEPS


def _questions(study, values: argparse.Namespace) -> int:
    """Questions of a study's module."""
    return study.QUICK_QUESTIONS if values.quick else study.QUESTIONS


def _layers(values, out, cells):
    from fp8rl_jax.study import layers

    (subject,) = _subjects("study layers", values, out, False)
    sequences = layers.QUICK_SEQUENCES if values.quick else layers.SEQUENCES
    return layers, layers.study(subject, sequences, cells, note)


def _cases(values, out, cells):
    from fp8rl_jax.study import cases

    return cases, _of_questions("study cases", cases, values, out, cells)


def _kv(values, out, cells):
    from fp8rl_jax.study import kv

    return kv, _of_questions("study kv", kv, values, out, cells)


def _training(values, out, cells):
    from fp8rl_jax.study import training

    return training, _of_questions("study training", training, values, out, cells)


def _of_questions(command: str, study, values, out, cells) -> dict:
    """The result of a study that scores questions and trains runs."""
    subjects = _subjects(command, values, out, True)
    return study.study(subjects, out, cells, note, _questions(study, values), _steps(study, values))


def _accuracy(values, out, cells):
    from fp8rl_jax.study import accuracy

    subjects = _subjects("study accuracy", values, out, True)
    return accuracy, accuracy.study(subjects, out, cells, note, _steps(accuracy, values))


def _scale(values, out, cells):
    from fp8rl_jax.study import scale, subjects

    ladder: dict[str, list[Subject]] = {}
    if values.config and values.rungs:
        for rung in values.rungs.split(","):
            named = argparse.Namespace(**{**vars(values), "config": f"{values.config}:{rung}"})
            ladder[rung] = _subjects("study scale", named, out, True)
    elif values.config or values.checkpoint is not None:
        found = _subjects("study scale", values, out, True)
        ladder = {found[0].name: found}
    else:
        keep_programs()
        ladder = subjects.quick_ladder(values.seeds, out, note)
    return scale, scale.study(ladder, cells, note, _questions(scale, values))


_RUNS = {
    name: functools.partial(_run, name, study)
    for name, study in (
        ("layers", _layers),
        ("cases", _cases),
        ("kv", _kv),
        ("training", _training),
        ("accuracy", _accuracy),
        ("scale", _scale),
    )
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
    shared = {"cells": str(cells.directory), "resume": True, "steps": None, "rungs": ""}
    for name, run in _RUNS.items():
        note(f"study {name}")
        seeds = values.seeds[:1] if name == "layers" else values.seeds
        own = {**shared, "out": str(out / name), "seeds": seeds}
        run(argparse.Namespace(**{**vars(values), **own}))
    return 0


def _options(quick: str) -> tuple:
    """Options that every study has; `quick` is the help of --quick."""
    return (
        argument(
            "--checkpoint",
            type=a_path,
            metavar="DIR",
            help="a run, or a Hugging Face model, in the place of a config's",
        ),
        argument(
            "--seeds",
            type=counts((1 << 31) - 1, 0),
            default=[0],
            metavar="N,...",
            help="a model is trained for each of them (default: 0)",
        ),
        argument("--quick", action="store_true", help=quick),
        argument(
            "--out",
            type=directory,
            metavar="DIR",
            help="directory of study.json, study.md, study.png and of runs (default: "
            "runs/study_NAME)",
        ),
        argument(
            "--cells",
            type=directory,
            metavar="DIR",
            help="directory of the finished cells; OUT/cells if left out",
        ),
        argument("--resume", action="store_true", help="use the cells that are there"),
        ALLOW_IMPORT,
    )


_STEPS = argument(
    "--steps", type=whole(0), metavar="N", help="RL steps of each run; 0 leaves them out"
)
_RL_STEPS = argument(
    "--steps", type=whole(1), metavar="N", help="RL steps of each run (default: 160)"
)
_FEW_STEPS = "few steps; without a model, two layers trained for a minute"


_COMMANDS = (
    Command(
        "study", "hypotheses written beforehand: layers, cases, kv, scale, training, accuracy, all"
    ),
    Command(
        "study layers",
        "error of every GEMM of a forward and backward pass: FP8, fake FP8 and bf16",
        _RUNS["layers"],
        _options("three sequences; without a model, two layers of random weights"),
        config=True,
    ),
    Command(
        "study cases",
        "an FP8 rollout with learners in bf16, imitated FP8 and FP8: mismatch, KL, RL curves",
        _RUNS["cases"],
        (
            *_options("few questions and steps; without a model, two layers trained for a minute"),
            _STEPS,
        ),
        config=True,
    ),
    Command(
        "study kv",
        "an FP8 KV cache, FP8 linear layers and both against a bf16 learner; calibrated scales",
        _RUNS["kv"],
        (*_options("few questions; without a model, two layers trained for a minute"), _STEPS),
        config=True,
    ),
    Command(
        "study scale",
        "mismatch by experts, depth and router; routing replay; planted outliers",
        _RUNS["scale"],
        (
            *_options("few questions; without --config, a dense model and one with experts"),
            argument(
                "--rungs",
                default="d4,d8,d16,m8,m16,m32,s16",
                metavar="NAME,...",
                help="arguments of the config file, one for each model (default: "
                "%(default)s); empty: the config is of one model, as --checkpoint's is",
            ),
        ),
        config=True,
    ),
    Command(
        "study training",
        "mismatch of an FP8 rollout and a bf16 learner over RL, with TIS and without",
        _RUNS["training"],
        (*_options(_FEW_STEPS), _RL_STEPS),
        config=True,
    ),
    Command(
        "study accuracy",
        "accuracy after RL in bf16, with an FP8 rollout, with TIS, in FP8; and under stress",
        _RUNS["accuracy"],
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
)
_STARTS = "trains and scores models; minutes with --quick, hours without"
COMMANDS = tuple(dataclasses.replace(command, starts=_STARTS) for command in _COMMANDS)
