"""Runs a step of a run again, alone, from the newest checkpoint before it.

The directory of the run is only read. What the run's files say is copied to a directory of its own,
where the run goes on as `fp8rl train --resume` would, without evaluations, up to that step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import ml_collections
from rich.console import Console

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.whole_file import write_whole
from fp8rl_jax.replay.differences import arrays, differing, sentences
from fp8rl_jax.train import train
from fp8rl_jax.training.checkpoint import Checkpoints, named_checksums
from fp8rl_jax.training.digests import Line
from fp8rl_jax.training.logs import RunLogs, read_log
from fp8rl_jax.training.progress import Display
from fp8rl_jax.training.run_directory import FILES_OF_START, as_saved

_NEVER = 10**9  # steps


class _Enough(Exception):
    """The part behind which a replay ends is done."""


@dataclasses.dataclass(frozen=True)
class Replayed:
    """A step that was run again.

    Attributes:
      step: number of the RL step.
      directory: directory with the records of the replay.
      values: values of the step's parts, as `training.watch.Watch` gets them.
    """

    step: int
    directory: pathlib.Path
    values: dict[str, Any]

    def checksums(self) -> dict[str, int]:
        """Returns {path: checksum} of the arrays of the state after the step."""
        return named_checksums(self.values["result"].state)


def recorded_steps(directory: pathlib.Path) -> dict[int, Line]:
    """Returns {RL step: its line in digests.jsonl} of a run.

    Raises:
      UserError: the directory holds no run, or one without digests.
    """
    path = directory / "digests.jsonl"
    if not os.path.lexists(directory / "config.json"):
        raise UserError(f"{directory} holds no config.json: name the directory of a run")
    if not os.path.lexists(path):
        raise UserError(
            f"{directory} holds no digests.jsonl, which runs of older versions did not write: "
            "nothing can be compared with it"
        )
    lines = read_log(path)
    return {line["step"]: line for line in lines if line.get("phase") == "rl" and "tokens" in line}


def checkpoint_checksums(directory: pathlib.Path, step: int) -> dict[str, int]:
    """Returns {path: checksum} of the arrays in a run's checkpoint after an RL step; {} if it has
    none."""
    with contextlib.closing(Checkpoints(directory / "checkpoints", keep=_NEVER)) as checkpoints:
        for number in checkpoints.newest(_NEVER):
            meta = checkpoints.read_meta(number)
            if (meta["phase"], meta["step"]) == ("rl", step):
                return meta["arrays"]
    return {}


def unlike(directory: pathlib.Path, replayed: Replayed) -> dict[int, list[str]]:
    """Returns {step: parts that differ from what the run has recorded} of the steps of a replay."""
    recorded = recorded_steps(directory)
    found = recorded_steps(replayed.directory)
    parts = {n: differing(recorded[n], found[n]) for n in sorted({*recorded} & {*found})}
    return {step: names for step, names in parts.items() if names}


def said(directory: pathlib.Path, replayed: Replayed, step: int, parts: list[str]) -> list[str]:
    """Returns sentences on what differs at a step: rewards, metrics and, of the replayed step,
    arrays, if the run has kept the state after it."""
    lines = sentences(directory, replayed.directory, step, parts)
    kept = checkpoint_checksums(directory, step) if step == replayed.step else {}
    return [*lines, arrays(kept, replayed.checksums())] if kept and "state" in parts else lines


def run_again(
    directory: pathlib.Path,
    step: int,
    config: ml_collections.ConfigDict,
    into: pathlib.Path,
    until: str = "update",
    note: Callable[[str], None] = lambda text: None,
) -> Replayed:
    """Runs an RL step of a run again.

    Args:
      directory: directory of the run.
      step: number of the step, from 1 on.
      config: the run's configuration, or one with other values; `run.dir` and what says how often
        a run saves are set here.
      into: directory for the replay's files, empty.
      until: part of the step behind which the replay ends: 'sample', 'reward' or 'update'.
      note: called with a line that says where the replay begins.

    Raises:
      UserError: there is no such step; the checkpoint cannot be read, or suits another
        configuration.
      NonFiniteError, RewardError, DriftError: the run ended so.
    """
    if not 1 <= step <= config.run.steps:
        raise UserError(f"there is no RL step {step}: run.steps is {config.run.steps}")
    began = _nearest(directory, config, step)
    _copy_start(directory, into, began)
    config = _for_replay(config, into)
    if began is not None:
        write_whole(into / "config.json", json.dumps(as_saved(config), indent=2) + "\n")
    note(_said(step, began, config.sft.steps))
    values: dict[str, Any] = {}
    wanted = step

    def watch(part: str, step: int, **found: Any) -> None:
        if step != wanted:
            return
        values.update(found)
        if part == until:
            raise _Enough()

    try:
        train(config, began is not None, watch=watch, display=Display(Console(stderr=True)))
    except _Enough:
        return Replayed(step, into, values)
    raise AssertionError(f"RL step {step} was not reached")


def _nearest(directory: pathlib.Path, config: ml_collections.ConfigDict, step: int) -> int | None:
    """Returns the number of the newest checkpoint before a step; None without one."""
    names = [path.name for path in (directory / "checkpoints").glob("*")]
    numbers = [int(name) for name in names if name.isdecimal()]
    return max((n for n in numbers if n < config.sft.steps + step), default=None)


def _copy_start(directory: pathlib.Path, into: pathlib.Path, number: int | None) -> None:
    """Gives a directory what a run reads that begins, or goes on at checkpoint `number`."""
    shutil.copyfile(directory / "environment.json", into / "environment.json")
    if number is None:
        return
    logs = (f"{name}.jsonl" for name in RunLogs.NAMES)
    for name in (*FILES_OF_START, *logs):
        if (directory / name).exists():
            shutil.copyfile(directory / name, into / name)
    (into / "checkpoints").mkdir()
    (into / "checkpoints" / str(number)).symlink_to(
        (directory / "checkpoints" / str(number)).resolve()
    )
    if (directory / "reference").exists():
        (into / "reference").symlink_to((directory / "reference").resolve())


def _for_replay(config: ml_collections.ConfigDict, into: pathlib.Path) -> ml_collections.ConfigDict:
    """Returns the configuration of a replay in `into`, which saves nothing and deletes nothing."""
    config = config.copy_and_resolve_references()
    config.run.dir = str(into)
    config.run.checkpoint_every = _NEVER
    config.run.keep_checkpoints = _NEVER
    config.run.keep_every = 0
    config.run.loggers = ""
    return config


def _said(step: int, began: int | None, sft_steps: int) -> str:
    if began is None:
        fine_tuning = f"{sft_steps} steps of fine-tuning, if they are not cached, and " * bool(
            sft_steps
        )
        return (
            f"RL step {step}: no checkpoint before it is kept, so the run begins anew: "
            f"{fine_tuning}{step} RL steps (run.keep_every keeps checkpoints for good)"
        )
    if began < sft_steps:
        return f"RL step {step}: from fine-tuning step {began} on, then {step} RL steps"
    count = step - (began - sft_steps)
    return f"RL step {step}: {count} step{'s' * (count > 1)} from the checkpoint before it"
