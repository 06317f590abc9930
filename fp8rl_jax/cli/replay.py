"""`fp8rl replay`, `bisect` and `verify`: a step of a run again, where two runs part, what a run has
recorded."""

from __future__ import annotations

import argparse
import contextlib
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
    note,
    recorded_config,
    whole,
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
    from fp8rl_jax.replay.again import recorded_steps, run_again
    from fp8rl_jax.replay.values import arrays_of, sample_table

    recorded = recorded_steps(run)
    if step is None:
        if not recorded:
            raise UserError(f"{run} has no RL step yet: name a step")
        step = max(recorded)
    config = recorded_config(run, values)
    with tempfile.TemporaryDirectory(prefix="fp8rl-replay-") as temporary:
        replayed = run_again(run, step, config, pathlib.Path(temporary), values.stop, note)
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
    (run,) = _runs("fp8rl replay", values.run[:1], "RUN_DIR STEP", 1)
    return run, int(step[0]) if step else None


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


def _bisect(values: argparse.Namespace) -> int:
    runs = [pathlib.Path(word) for word in values.runs]
    directories = [str(run) for run in runs if not run.is_file()]
    files = len(runs) - len(directories)
    _runs("fp8rl bisect", directories, "RUN_DIR OTHER_RUN_DIR", 2 - files)
    from fp8rl_jax.replay.bisect import cause, parting

    found, compared = parting(*runs)
    if found is None:
        print(f"equal bit for bit up to RL step {compared}, the last that both runs have")
        return 0
    print(found)
    again = None
    if files and not found.made_with:
        return 1
    if found.step and not values.digests_only and not files:
        again, lines = _both_again(runs, found, values)
        for line in lines:
            print(line)
    print(cause(found, again))
    return 1


def _both_again(runs: list[pathlib.Path], found, values: argparse.Namespace):
    """Runs the step at which two runs part again in both; returns whether each is as recorded, and
    sentences on what differs."""
    from fp8rl_jax.replay.again import run_again, said, unlike
    from fp8rl_jax.replay.bisect import details

    with contextlib.ExitStack() as stack:
        replays = []
        for run in runs:
            temporary = tempfile.TemporaryDirectory(prefix="fp8rl-replay-")
            into = pathlib.Path(stack.enter_context(temporary))
            config = recorded_config(run, values)
            replays.append(run_again(run, found.step, config, into, note=note))
        odd = [unlike(run, one) for run, one in zip(runs, replays, strict=True)]
        lines = details(found, *replays)
        for run, one, steps in zip(runs, replays, odd, strict=True):
            for step, parts in steps.items():
                lines += [f"{run}, {text}" for text in said(run, one, step, parts)]
    return tuple(not steps for steps in odd), lines


def _verify(values: argparse.Namespace) -> int:
    (run,) = _runs("fp8rl verify", values.runs, "RUN_DIR", 1)
    published = [values.exported] if values.exported else []
    published = _runs("fp8rl verify", published, "RUN_DIR --exported=DIR", len(published))
    from fp8rl_jax.replay.again import recorded_steps
    from fp8rl_jax.replay.verify import check_exported, check_records, check_start, check_steps

    wrong = check_records(run)
    config = recorded_config(run, values)
    changed, other = check_start(run, config)
    wrong += changed
    compared = ""
    for exported in published:
        changed, compared = check_exported(run, exported, values.allow_import)
        wrong += changed
    steps = {} if wrong else check_steps(run, config, values.steps, values.seed, note)
    unequal = [
        f"RL step {step}, run again, is not equal: {', '.join(parts)} differ"
        for step, parts in steps.items()
        if parts
    ]
    count = len(recorded_steps(run))
    if not wrong:
        print(f"intact: the chain, the records of {count} RL steps and the states of checkpoints")
        if compared:
            print(compared)
    if equal := [str(step) for step, parts in steps.items() if not parts]:
        print(f"equal, run again here: RL step{'s' * (len(equal) > 1)} {', '.join(equal)}")
    if other and unequal:
        print(*unequal, sep="\n")
        print(f"not decided, for the run was made with others: {'; '.join(other)}")
        return 0
    print(*wrong, *unequal, sep="\n", end="\n" if wrong or unequal else "")
    return 1 if wrong or unequal else 0


def _runs(command: str, words: list[str], form: str, count: int) -> list[pathlib.Path]:
    if len(words) != count:
        raise UserError(f"{command}: write `{command} {form}`")
    for word in words:
        if not os.path.isdir(word):
            raise UserError(f"{command}: {word} is no directory; name that of a run")
    return [pathlib.Path(word) for word in words]


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
        ALLOW_IMPORT,
    ),
    config=True,
    starts="restores the checkpoint before the step and compiles as the run did",
)

BISECT = Command(
    "bisect",
    "finds the first step, sample, token or array in which two runs differ, and why",
    _bisect,
    (
        argument(
            "runs",
            "directories of two runs, which are only read; or a file with lines of a run's "
            "digests.jsonl in the place of one",
            "RUN_DIR OTHER_RUN_DIR",
            nargs="*",
            type=a_path,
        ),
        argument(
            "--digests-only",
            "compare what the runs have recorded, and run no step again",
            action="store_true",
        ),
        ALLOW_IMPORT,
    ),
    starts="reads the digests of both runs; then runs a step of each again",
)

VERIFY = Command(
    "verify",
    "checks what a run has recorded, and runs some of its steps again",
    _verify,
    (
        argument(
            "runs", "directory of a run, which is only read", "RUN_DIR", nargs="*", type=a_path
        ),
        argument(
            "--steps", "number of steps to run again (default: 3)", "K", type=whole(0), default=3
        ),
        argument("--seed", "which steps (default: 0)", "S", type=whole(0), default=0),
        argument(
            "--exported",
            "compare what `fp8rl convert` has written of the run with it, too",
            "DIR",
            type=a_path,
        ),
        ALLOW_IMPORT,
    ),
    starts="reads the records and checkpoints of the run; then runs steps again",
)
