"""`fp8rl replay`: runs an RL step of a run again, and says whether it is equal bit for bit."""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from fp8rl_jax.base.errors import UserError, refused_by_system
from fp8rl_jax.cli.arguments import (
    ALLOW_IMPORT,
    Command,
    a_path,
    argument,
    directory,
    keep_programs,
    note,
    whole,
    writable,
)

_CANNOT_BE_TRIED = 125  # `git bisect run` skips the commit


def _replay(values: argparse.Namespace) -> int:
    try:
        return _replayed(values)
    except UserError as error:
        if not values.git_bisect:
            raise
        print(f"cannot be tried: {' '.join(str(error).split())}", file=sys.stderr)
        return _CANNOT_BE_TRIED


def _replayed(values: argparse.Namespace) -> int:
    run, step = _run_and_step(values)
    from fp8rl_jax.config import override
    from fp8rl_jax.replay.again import recorded_steps, run_again
    from fp8rl_jax.replay.values import arrays_of, sample_table

    recorded = recorded_steps(run)
    if step is None:
        if not recorded:
            raise UserError(f"{run} has no RL step yet: name a step")
        step = max(recorded)
    config = _config_of(run, values.allow_import)
    override(config, values.overrides)
    with tempfile.TemporaryDirectory(prefix="fp8rl-replay-") as temporary:
        into = writable("fp8rl replay", values.out or temporary)
        if any(into.iterdir()):
            raise UserError(f"fp8rl replay: --out={into} is not empty; name a new directory")
        replayed = run_again(run, step, config, into, values.stop, note)
        status = 0
        if values.stop == "update":
            status = _compared(run, replayed, recorded, values.overrides)
        if values.sample is not None:
            print(*sample_table(replayed.values, values.sample), sep="\n")
        if values.save:
            _save(values.save, arrays_of(replayed.values))
        if values.shell:
            _shell(step, replayed.values | {"arrays": arrays_of(replayed.values)})
    return status


def _run_and_step(values: argparse.Namespace) -> tuple[pathlib.Path, int | None]:
    if values.config:
        raise UserError(
            "fp8rl replay: it takes the configuration of the run; write --config.SECTION.FIELD="
            "VALUE for what would have happened with another value"
        )
    step = values.run[1:]
    if len(values.run) not in (1, 2) or not all(word.isdecimal() and int(word) for word in step):
        raise UserError("fp8rl replay: write `fp8rl replay RUN_DIR STEP`, with an RL step from 1")
    if not os.path.isdir(values.run[0]):
        raise UserError(f"fp8rl replay: {values.run[0]} is no directory; name that of a run")
    return pathlib.Path(values.run[0]), int(step[0]) if step else None


def _compared(run: pathlib.Path, replayed, recorded, overrides: list[str]) -> int:
    """Prints whether the step is equal to the recorded one; returns the exit status."""
    from fp8rl_jax.replay.again import said, unlike
    from fp8rl_jax.replay.differences import line_of

    name = f"RL step {replayed.step} of {run}"
    if overrides:
        name += f" with {' '.join(overrides)}"
    if replayed.step not in recorded:
        print(f"{name}: the run has no record of it, so there is nothing to compare with")
        return 0
    for step, parts in unlike(run, replayed).items():
        first = f"; the first step that differs is {step}" * (step < replayed.step)
        print(f"{name}: not equal: {', '.join(parts)} differ{first}")
        print(*said(run, replayed, step, parts), sep="\n")
        return 0 if overrides else 1
    took, takes = (
        line.get("time_step", 0.0) - line.get("time_compile", 0.0)
        for line in (line_of(d, "metrics", replayed.step) for d in (run, replayed.directory))
    )
    print(
        f"{name}: equal bit for bit: prompts, tokens, rewards, record and state "
        f"(without compiling {takes:.2f} s, in the run {took:.2f} s)"
    )
    return 0


def _save(file: str, arrays: Mapping[str, Any]) -> None:
    import numpy as np

    with refused_by_system(f"fp8rl replay: {file} cannot be written", "name another file"):
        np.savez_compressed(file, allow_pickle=False, **arrays)
    print(file)


def _shell(step: int, names: dict[str, Any]) -> None:
    import code

    code.interact(banner=f"RL step {step}: {', '.join(names)}", local=names, exitmsg="")


def _config_of(run: pathlib.Path, permitted: list[str]):
    from fp8rl_jax.training.run_directory import training_config

    config = training_config(run, permitted, ("precision", "env", "algo"))
    keep_programs(config.run.compilation_cache)
    return config


REPLAY = Command(
    "replay",
    "runs an RL step of a run again, and says whether it is equal bit for bit",
    _replay,
    (
        argument(
            "run",
            "directory of a run, which is only read, and number of an RL step (default: its last)",
            "RUN_DIR STEP",
            nargs="*",
            type=a_path,
        ),
        argument(
            "--stop",
            "end behind this part of the step and compare nothing: its samples, their rewards with "
            "advantages and weights, or (default) its update",
            choices=("sample", "reward", "update"),
            default="update",
        ),
        argument("--sample", "show sample K, token by token", "K", type=whole(0)),
        argument("--save", "write the step's arrays to a file", "FILE.npz", type=a_path),
        argument(
            "--shell", "open a Python prompt with the step's values by name", action="store_true"
        ),
        argument(
            "--git-bisect",
            "exit with status 125, which `git bisect run` skips, where the step cannot be tried",
            action="store_true",
        ),
        argument("--out", "keep the replay's files in this new directory", "DIR", type=directory),
        ALLOW_IMPORT,
    ),
    config=True,
    processes=True,
    starts="restores the checkpoint before the step and compiles as the run did",
)
