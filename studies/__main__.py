"""`python -m studies NAME`, from the root of a checkout: cases, kv, scale, training,
accuracy, recipes, gradients, staleness, all."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fp8rl_jax import cli
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
    writable,
    writing,
)

if TYPE_CHECKING:
    from studies.cells import Cells
    from studies.subjects import Subject


def _check(command: str, values: argparse.Namespace) -> None:
    """Raises UserError unless the options name one model, or none with --quick, and its seeds."""
    named = [bool(values.config), values.checkpoint is not None]
    if all(named) or (not any(named) and not values.quick):
        raise UserError(
            f"{command}: name one model, by --config FILE or by --checkpoint DIR, or write "
            "--quick for a small one"
        )
    if values.overrides and not values.config:
        raise UserError(
            f"{command}: {values.overrides[0]!r} changes a config: name one with --config, "
            "or leave it out"
        )
    seeds = values.seeds
    if len(set(seeds)) < len(seeds):
        raise UserError(
            f"{command}: --seeds names {max(seeds, key=seeds.count)} more than once: write "
            "each seed once"
        )
    if values.checkpoint is not None and not os.path.isdir(values.checkpoint):
        raise UserError(
            f"{command}: --checkpoint={values.checkpoint} is no directory; name that of a "
            "run, or of a Hugging Face model"
        )
    if values.checkpoint is not None and len(seeds) > 1:
        raise UserError(
            f"{command}: a checkpoint is the result of one seed: leave out --seeds, or name "
            "a config with --config"
        )


def _subjects(
    command: str, values: argparse.Namespace, out: pathlib.Path, questions: bool
) -> list[Subject]:
    """Returns the model that the options name, once for each seed."""
    from studies import subjects

    if values.checkpoint is not None:
        from fp8rl_jax.policy.source import directory_config

        keep_programs()
        config = directory_config(values.checkpoint, values.allow_import)
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


def _ladder(values: argparse.Namespace, out: pathlib.Path) -> list[Subject]:
    """Returns the models of `scale`, for each seed: those of --rungs in the config file, else
    the one that the options name, else two small ones."""
    from studies import subjects

    rungs = vars(values).get("rungs")  # no option of `all`
    if values.config and rungs:
        found = []
        for rung in dict.fromkeys(rungs.split(",")):
            named = argparse.Namespace(**{**vars(values), "config": f"{values.config}:{rung}"})
            models = _subjects(f"{_PROGRAM} scale", named, out, True)
            found += [dataclasses.replace(subject, name=rung) for subject in models]
        return found
    if values.config or values.checkpoint is not None:
        return _subjects(f"{_PROGRAM} scale", values, out, True)
    keep_programs()
    return subjects.quick_ladder(values.seeds, out, note)


def _open(name: str, values: argparse.Namespace) -> tuple[pathlib.Path, Cells]:
    """Opens the directory of the results; returns it with the finished cells."""
    from studies.cells import Cells

    out = writable(f"{_PROGRAM} {name}", values.out or f"runs/study_{name}")
    return out, Cells(pathlib.Path(values.cells or out / "cells"), values.resume)


def _run(name: str, values: argparse.Namespace) -> int:
    """Runs the command of one study."""
    _check(f"{_PROGRAM} {name}", values)
    _study(name, values, *_open(name, values))
    return 0


def _study(name: str, values: argparse.Namespace, out: pathlib.Path, cells: Cells) -> None:
    """Runs a study, prints its verdicts and writes its files."""
    from studies import frame

    command, study = f"{_PROGRAM} {name}", frame.load(name)
    size = study.quick if values.quick else study.full
    if (steps := vars(values).get("steps")) is not None:  # not an option of every study
        size = dataclasses.replace(size, steps=steps)
    if (batches := vars(values).get("batches")) is not None:
        size = dataclasses.replace(size, sequences=batches)
    with writing(command, out):
        if name == "scale":
            subjects = _ladder(values, out)
        else:
            subjects = _subjects(command, values, out, study.questions)
        result = frame.run(study, frame.Plan(subjects, size, out, note), cells)
        for verdict in result["hypotheses"]:
            print(verdict["sentence"])
        if study.remark:
            print(study.remark(result))
        paths = frame.write(study, result, out)
    print(*paths, sep="\n")


def _all(values: argparse.Namespace) -> int:
    """Runs every study, each in its own directory, with one directory of cells for all."""
    _check(f"{_PROGRAM} all", values)
    if values.checkpoint is not None:
        from fp8rl_jax.policy.source import directory_config
        from studies.subjects import check_task

        check_task(directory_config(values.checkpoint, values.allow_import))
    out, cells = _open("all", values)
    for name in (name for name in COMMANDS if name != "all"):
        note(f"study {name}")
        _study(name, values, writable(f"{_PROGRAM} all", str(out / name)), cells)
    return 0


def _command(name: str, summary: str, quick: str, *arguments) -> Command:
    """Returns a study's command; `quick` is the help of --quick, `arguments` are its own."""
    options = (
        argument(
            "--checkpoint",
            "directory of a run, or of a Hugging Face model, instead of --config",
            "DIR",
            type=a_path,
        ),
        argument(
            "--seeds",
            "seeds, for each of which a model is trained (default: 0)",
            "N,...",
            type=counts((1 << 31) - 1, 0),
            default=[0],
        ),
        argument("--quick", quick, action="store_true"),
        argument(
            "--out",
            "directory of study.json, study.md, study.png and of runs (default: runs/study_NAME)",
            "DIR",
            type=directory,
        ),
        argument(
            "--cells",
            "directory of cells, the study's finished measurements (default: OUT/cells)",
            "DIR",
            type=directory,
        ),
        argument("--resume", "use the finished cells of that directory", action="store_true"),
        ALLOW_IMPORT,
    )
    return Command(
        name,
        summary,
        _all if name == "all" else functools.partial(_run, name),
        (*options, *arguments),
        config=True,
        starts=_STARTS,
        program=_PROGRAM,
    )


_PROGRAM = "python -m studies"
_STARTS = "trains and scores models; minutes with --quick, hours without"
_STEPS = argument("--steps", "RL steps of each run; 0 leaves them out", "N", type=whole(0))
_RL_STEPS = argument("--steps", "RL steps of each run (default: 160)", "N", type=whole(1))
_FEW_STEPS = "few steps; without a model, two layers trained for a minute"

_COMMANDS = (
    _command(
        "cases",
        "an FP8 rollout with learners in bf16, imitated FP8 and FP8: mismatch, KL, RL curves",
        "few questions and steps; without a model, two layers trained for a minute",
        _STEPS,
    ),
    _command(
        "kv",
        "an FP8 KV cache, FP8 linear layers and both against a bf16 learner; calibrated scales",
        "few questions; without a model, two layers trained for a minute",
        _STEPS,
    ),
    _command(
        "scale",
        "mismatch by experts, depth and router; routing replay; planted outliers",
        "few questions; without --config, a dense model and one with experts",
        argument(
            "--rungs",
            "models of the ladder, each an argument of the config file (FILE:NAME; default: "
            "%(default)s); empty for a config file of one model",
            "NAME,...",
            default="d4,d8,d16,m8,m16,m32,s16",
        ),
    ),
    _command(
        "training",
        "mismatch of an FP8 rollout and a bf16 learner over RL, with TIS and without",
        _FEW_STEPS,
        _RL_STEPS,
    ),
    _command(
        "accuracy",
        "accuracy after RL in bf16, with an FP8 rollout, with TIS, in FP8; and under stress",
        _FEW_STEPS,
        _RL_STEPS,
    ),
    _command(
        "recipes",
        "which FP8 recipe learns as much as bf16: with an FP8 KV cache, without, exact gradients",
        _FEW_STEPS,
        _RL_STEPS,
    ),
    _command(
        "gradients",
        "how near backward passes come to the gradient; which part of the forward pass errs",
        "two batches; without a model, two layers trained for a minute",
        argument("--batches", "batches of RL whose gradients are compared", "N", type=whole(1)),
    ),
    _command(
        "staleness",
        "rollouts ahead of the learner: what is staleness and what is mismatch; FP8, bf16 learners",
        _FEW_STEPS,
        _RL_STEPS,
    ),
    _command(
        "all",
        "all studies of one model, each in a directory of its own; with --quick the ladder too",
        "small sizes for every study; without a model, each study's small one",
    ),
)
COMMANDS = {command.name: command for command in _COMMANDS}


def run(arguments: Sequence[str]) -> int:
    """Runs one study's command and returns the exit status."""
    return cli.run(arguments, commands=COMMANDS)


if __name__ == "__main__":
    cli.entry(commands=COMMANDS)
