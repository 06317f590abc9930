"""Checks what a run has recorded, and runs some of its steps again: `fp8rl verify`."""

from __future__ import annotations

import contextlib
import pathlib
import random
import tempfile
from collections.abc import Callable, Collection

import ml_collections

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.policy.export import export_run
from fp8rl_jax.policy.provenance import chain_at, file_digests, read_provenance
from fp8rl_jax.replay.again import recorded_steps, run_again
from fp8rl_jax.replay.differences import differing
from fp8rl_jax.training.checkpoint import Checkpoints, named_checksums
from fp8rl_jax.training.digests import (
    Chain,
    Line,
    link,
    made_with,
    record_digest,
    rewards_digest,
    state_digest,
)
from fp8rl_jax.training.logs import read_log
from fp8rl_jax.training.optimizer import optimizer_of_phase
from fp8rl_jax.training.runtime import make_runtime

# What changes bits without a fault of the run.
_OF_MACHINE = ("machine.", "versions.")


def check_records(directory: pathlib.Path) -> list[str]:
    """Recomputes the chain of a run and the digests of its records, without its checkpoints.

    Returns:
      Sentences on what is not as it should be.

    Raises:
      UserError: the directory holds no run, or one without digests.
    """
    recorded = recorded_steps(directory)
    wrong = []
    previous = ""
    for line in read_log(directory / "digests.jsonl"):
        if line.get("chain") != link(previous, line):
            wrong.append(
                f"digests.jsonl: the line of {line.get('phase')} step {line['step']} is not the "
                "one that its chain was made from"
            )
        previous = line.get("chain", "")
    if [*recorded] != [*range(1, len(recorded) + 1)]:
        wrong.append("digests.jsonl: there is not one line for each RL step, in order")
    for name, part, digest in (
        ("metrics", "record", record_digest),
        ("rewards", "rewards", rewards_digest),
    ):
        lines = {line["step"]: line for line in read_log(directory / f"{name}.jsonl")}
        for step in sorted({*recorded, *lines}):
            if digest(lines.get(step, {})) != recorded.get(step, {}).get(part):
                wrong.append(f"{name}.jsonl: RL step {step} is not as it was recorded")
    return wrong


def check_start(
    directory: pathlib.Path, config: ml_collections.ConfigDict
) -> tuple[list[str], list[str]]:
    """Compares what a run was made with, and the states in its checkpoints, with its digests.

    Returns:
      Sentences on what is not as it should be; and on what is another machine's or version's.
    """
    runtime = make_runtime(config)
    lines = read_log(directory / "digests.jsonl")
    changed = Chain(lines).changed(made_with(runtime))
    said = [f"{name} is {value!r} here" for name, value in changed.items()]
    other = [text for text in said if text.startswith(_OF_MACHINE)]
    wrong = [f"{text}, and the run was made with another" for text in said if text not in other]
    states = {(line.get("phase"), line["step"]): line.get("state") for line in lines}
    with contextlib.closing(Checkpoints(directory / "checkpoints", keep=10**9)) as checkpoints:
        for number in checkpoints.newest(10**9):
            try:
                meta = checkpoints.read_meta(number)
                like = runtime.engine.like(optimizer_of_phase(runtime.config, meta["phase"]))
                digest = state_digest(named_checksums(checkpoints.restore(number, like)))
            except UserError as error:
                wrong.append(str(error))
                continue
            at = f"{meta['phase']} step {meta['step']}"
            if number != meta["step"] + (config.sft.steps if meta["phase"] == "rl" else 0):
                wrong.append(f"checkpoint {number}: it holds the state after {at}")
            if digest != states.get((meta["phase"], meta["step"]), digest):
                wrong.append(f"checkpoint {number}: its state is not the one recorded after {at}")
    return wrong, other


def check_exported(
    directory: pathlib.Path, exported: pathlib.Path, permitted: Collection[str]
) -> tuple[list[str], str]:
    """Compares what `fp8rl convert` has written of a run with the run: its chain, and each file
    with what the checkpoint gives here or, if that is not kept, its digest in provenance.json.

    Returns:
      Sentences on what is not as it should be; and one on what was compared.

    Raises:
      UserError: the directory holds no provenance.json, or a damaged one.
    """
    named = read_provenance(exported)
    expected = named.files
    at = f"{named.phase} step {named.step}"
    compared = f"{exported}, of {at}: its chain, and its files with "
    wrong = []
    if named.chain != chain_at(directory, named.phase, named.step):
        wrong.append(f"{exported}: its chain is not that of this run after {at}")
    if (directory / "checkpoints" / str(named.form.checkpoint)).exists():
        with tempfile.TemporaryDirectory(prefix="fp8rl-verify-") as temporary:
            again = pathlib.Path(temporary) / "exported"
            try:
                export_run(directory, again, named.form, permitted, lambda text: None)
            except UserError as error:
                return [*wrong, f"{exported}: not exported again: {error}"], ""
            expected = file_digests(again)
        compared += f"checkpoint {named.form.checkpoint}, exported again"
    else:
        compared += f"their digests only, for checkpoint {named.form.checkpoint} is not kept"
    found = file_digests(exported)
    changed = [name for name, digest in expected.items() if found.get(name) != digest]
    wrong += [f"{exported / name} is not what the run's checkpoint gives" for name in changed]
    if more := [name for name in found if name not in expected]:
        compared += f"; not of the run: {', '.join(more)}"
    return wrong, compared


def check_steps(
    directory: pathlib.Path,
    config: ml_collections.ConfigDict,
    count: int,
    seed: int,
    note: Callable[[str], None],
) -> dict[int, list[str]]:
    """Runs `count` steps again, drawn with `seed`; returns {step: parts that differ}."""
    recorded = recorded_steps(directory)
    chosen = sorted(random.Random(seed).sample(sorted(recorded), min(count, len(recorded))))
    found: dict[int, list[str]] = {}
    for step in chosen:
        with tempfile.TemporaryDirectory(prefix="fp8rl-verify-") as temporary:
            into = pathlib.Path(temporary)
            run_again(directory, step, config, into, note=note)
            again: dict[int, Line] = recorded_steps(into)
        found[step] = differing(recorded[step], again[step])
    return found
