"""Finds where two runs part, and why: `fp8rl bisect`.

The digests alone say at which step and in which part of it. Then both steps are run again here, to
name the sample, token or array, and each is compared with what its run has recorded::

    both as recorded    what they were made with differs, or a reward is no function
    one or none         the other was computed by another machine or version, or otherwise than its
                        state says
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.drift.compare import bits_differ
from fp8rl_jax.replay.again import Replayed, recorded_steps
from fp8rl_jax.replay.differences import arrays, differing, sentences
from fp8rl_jax.replay.values import arrays_of
from fp8rl_jax.training.digests import Line
from fp8rl_jax.training.logs import read_log

_PARTS = {
    "prompts": "its questions",
    "tokens": "its rollout",
    "rewards": "its rewards",
    "record": "its metrics",
    "state": "its update",
}
_WHICH = ("first", "second")


@dataclasses.dataclass(frozen=True)
class Parting:
    """Where two runs part.

    Attributes:
      phase, step: of the first lines that differ; a step of 0 is the start of the phase.
      parts: what of them differs, in the order in which it arises.
      made_with: {name: (value in the first run, in the second)} of what they were made with; empty
        if one does not say it.
    """

    phase: str
    step: int
    parts: list[str]
    made_with: dict[str, tuple[Any, Any]]

    def __str__(self) -> str:
        if not self.step:
            phase = {"sft": "fine-tuning", "rl": "RL"}[self.phase]
            return f"the runs part before the first step of {phase}: their states differ"
        first = _PARTS[self.parts[0]]
        return f"the runs part at RL step {self.step}: {first} ({', '.join(self.parts)} differ)"


def parting(first: pathlib.Path, second: pathlib.Path) -> tuple[Parting | None, int]:
    """Compares the digests of two runs.

    Args:
      first, second: directories of runs, or files with lines of their digests.jsonl.

    Returns:
      Where they part, None if nowhere; and the last RL step that was compared.

    Raises:
      UserError: a directory holds no run, or one without digests; or the two have no step in
        common.
    """
    ours = _lines(first)
    theirs = _lines(second)
    common = [place for place in ours if place in theirs]
    if not common:
        raise UserError(f"{first} and {second} have no step in common: compare other runs")
    compared = 0
    for place in common:
        parts = differing(ours[place], theirs[place])
        if parts:
            return Parting(*place, parts, _changed(ours[place], theirs[place])), compared
        compared = place[1]
    return None, compared


def _lines(run: pathlib.Path) -> dict[tuple[str, int], Line]:
    """Returns {(phase, step): line} of a run, each with all of `made_with` so far."""
    if run.is_dir():
        recorded_steps(run)  # refuses what is no run
    known: dict[str, Any] = {}
    found = {}
    for line in read_log(run / "digests.jsonl" if run.is_dir() else run):
        known = known | line.get("made_with", {})
        found[line.get("phase", ""), line["step"]] = line | {"made_with": known}
    return found


def _changed(ours: Line, theirs: Line) -> dict[str, tuple[Any, Any]]:
    before = ours["made_with"]
    now = theirs["made_with"]
    names = sorted({*before, *now}) if before and now else []
    return {n: (before.get(n), now.get(n)) for n in names if before.get(n) != now.get(n)}


def cause(found: Parting, again: tuple[bool, bool] | None) -> str:
    """Returns a sentence on why two runs part.

    Args:
      found: result of `parting`.
      again: for each run whether its step, run again, is as it recorded; None if that was not
        tried.
    """
    changed = [f"{name} ({was!r}, {now!r})" for name, (was, now) in found.made_with.items()]
    odd = [] if again is None else [w for w, same in zip(_WHICH, again, strict=True) if not same]
    run_again = f"run again here, RL step {found.step} of the {' and the '.join(odd)} run"
    if changed:
        but = f"; {run_again} is not as recorded" if odd else ""
        return f"cause: they were made with different {', '.join(changed)}{but}"
    if odd:
        return (
            f"cause: {run_again} is not as recorded: it was computed otherwise, or its record or "
            "its state was changed"
        )
    if again is None:
        return "cause: not in what they were made with, which is the same"
    return (
        "cause: both are as recorded when they are run again, and what they were made with is the "
        "same: a reward, an environment or a tool gives other values for equal input"
    )


def details(found: Parting, ours: Replayed, theirs: Replayed) -> list[str]:
    """Returns sentences that name the first sample, token, metric or array of a step that differs
    between two replays."""
    said = sentences(ours.directory, theirs.directory, found.step, found.parts)
    a = arrays_of(ours.values)
    b = arrays_of(theirs.values)
    if a["prompts"].shape == b["prompts"].shape and (a["prompts"] != b["prompts"]).any():
        question = int(np.argmax((a["prompts"] != b["prompts"]).any(1)))
        said.append(f"prompts: question {question} is the first that differs")
    if a["tokens"].shape == b["tokens"].shape:
        other = (a["tokens"] != b["tokens"]) | bits_differ(a["logprobs"], b["logprobs"])
        other = np.where(a["mask"] | b["mask"], other, False)
        if other.any():
            sample, token = (int(i) for i in np.argwhere(other)[0])
            said.append(f"tokens: the first that differs is token {token} of sample {sample}")
    return said + _arrays(ours, theirs)


def _arrays(ours: Replayed, theirs: Replayed) -> list[str]:
    """Returns a sentence on the arrays of the states that differ, and the first one's layer."""
    before = ours.checksums()
    now = theirs.checksums()
    names = [name for name in before if before[name] != now.get(name)]
    if not names:
        return []
    pair = [_named(replayed, names[0]) for replayed in (ours, theirs)]
    said = arrays(before, now)
    if pair[0].ndim > 2 and pair[0].shape == pair[1].shape:
        layers = bits_differ(*pair).reshape(len(pair[0]), -1).any(1)
        said += f"; the first in layer {int(np.argmax(layers))}"
    return [said]


def _named(replayed: Replayed, name: str) -> np.ndarray:
    leaves = jax.tree_util.tree_leaves_with_path(replayed.values["result"].state)
    return next(np.asarray(x) for path, x in leaves if jax.tree_util.keystr(path) == name)
