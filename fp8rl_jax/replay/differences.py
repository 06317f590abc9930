"""Compares what two run directories have recorded of an RL step."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Mapping
from typing import Any

from fp8rl_jax.report.metrics import reproducible
from fp8rl_jax.training.digests import PARTS, Line
from fp8rl_jax.training.logs import read_jsonl

_MOST = 5  # values that a sentence names


def differing(recorded: Line, found: Line) -> list[str]:
    """Returns the parts of a step whose digests differ, in the order in which they arise."""
    return [part for part in PARTS if recorded.get(part) != found.get(part)]


def sentences(
    recorded: pathlib.Path, found: pathlib.Path, step: int, parts: list[str]
) -> list[str]:
    """Returns a sentence for each part of a step that can be looked into without its arrays: the
    rewards and metrics of two directories."""
    said = []
    if "rewards" in parts:
        said += _rewards(*(line_of(d, "rewards", step) for d in (recorded, found)))
    if "record" in parts:
        said += _record(*(reproducible(line_of(d, "metrics", step)) for d in (recorded, found)))
    return said


def line_of(directory: pathlib.Path, name: str, step: int) -> Line:
    """Returns a step's line of a log; {} if it has none."""
    rows = [row for row in read_jsonl(directory / f"{name}.jsonl") if row.get("step") == step]
    return rows[-1] if rows else {}


def _rewards(recorded: Line, found: Line) -> list[str]:
    before = [*itertools.chain.from_iterable(recorded.get("rewards", []))]
    now = [*itertools.chain.from_iterable(found.get("rewards", []))]
    named = [
        f"sample {number} was {before[number]}, is {now[number]}"
        for number in range(min(len(before), len(now)))
        if before[number] != now[number]
    ]
    return [f"rewards: {_listed(named)}"] if named else []


def _record(recorded: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    names = [name for name in {**recorded, **found} if recorded.get(name) != found.get(name)]
    named = [f"{name} was {recorded.get(name)}, is {found.get(name)}" for name in names]
    return [f"metrics: {_listed(named)}"] if named else []


def arrays(recorded: Mapping[str, int], found: Mapping[str, int]) -> str:
    """Returns a sentence that names the arrays of a state whose checksums differ."""
    names = [name for name in recorded if recorded[name] != found.get(name)]
    return f"state: {len(names)} of {len(recorded)} arrays differ: {_listed(names)}"


def _listed(named: list[str]) -> str:
    more = f", and {len(named) - _MOST} more" if len(named) > _MOST else ""
    return ", ".join(named[:_MOST]) + more
