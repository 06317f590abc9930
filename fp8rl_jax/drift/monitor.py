"""Watches a run that requires zero drift: keeps a step that drifts, and analyses it.

A train step donates its state, so the policy before the update would be lost before both sides are
compared. It is therefore copied to the host before the update: a policy of up to 1 GiB (0.2 s) in
every step, up to 8 GiB after a step of the run has drifted. The optimiser's moments are not copied,
as no log-probability depends on them.

The first drifting step whose policy was kept is analysed at once and the one with the largest drift
at the end, each within a budget of time. The largest is also written to RUN_DIR/drift_step (a third
of a checkpoint), from which `fp8rl drift` analyses it without a budget.

Not done: with several processes nothing is kept, since no process has all arrays.
"""

from __future__ import annotations

import math
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fp8rl_jax.base import processes
from fp8rl_jax.drift.budget import Budget
from fp8rl_jax.drift.kept_step import RECORDED, KeptStep, analyse_step
from fp8rl_jax.drift.render import write_json
from fp8rl_jax.drift.self_check import note_drift
from fp8rl_jax.learner import TrainState, policy_of
from fp8rl_jax.report.verdicts import step_verdicts
from fp8rl_jax.training.runtime import Runtime
from fp8rl_jax.training.sample_step import Samples

BUDGET_SECONDS = 180.0  # an analysis of a model of 1M parameters takes 30 to 60 on two cores
_COPIED = 1 << 30  # bytes of a policy
_COPIED_ONCE_DRIFTED = 8 << 30


class DriftMonitor:
    """Drift monitor of one execution of a run."""

    def __init__(
        self,
        runtime: Runtime,
        directory: pathlib.Path,
        note: Callable[[str], None],
        stopping: Callable[[], Any] = lambda: None,
        budget: float = BUDGET_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ):
        """
        Args:
          runtime: the run's Runtime.
          directory: the run's directory.
          note: called with a line to show.
          stopping: returns whether the run was asked to stop; then no part of an analysis begins.
          budget: seconds that one analysis may take.
          clock: function that returns the time in seconds.
        """
        self._runtime, self._directory, self._note = runtime, directory, note
        self._budget, self._clock, self._stopping = budget, clock, stopping
        self._policy: dict[str, Any] | None = None
        self._said: set[str] = set()
        self._largest = 0.0
        self._bytes = 0
        self._command = f"`fp8rl drift --checkpoint {directory}`"

    @property
    def _not_analysed(self) -> bool:
        """Whether steps hold conversations, or learn what older policies drew."""
        return self._runtime.resolved.step is not None or self._runtime.resolved.stale

    def keep(self, state: TrainState, drifted: bool) -> None:
        """Copies the policy before a step's update; `drifted`: whether an earlier step drifted."""
        self._policy = None
        if not self._runtime.resolved.zero_drift or processes.count() > 1 or self._not_analysed:
            return
        policy = policy_of(state)
        self._bytes = sum(x.nbytes for x in jax.tree.leaves(policy))
        if self._bytes <= (_COPIED_ONCE_DRIFTED if drifted else _COPIED):
            self._policy = jax.tree.map(np.array, policy)

    def seen(self, step: int, samples: Samples, logp: np.ndarray, seconds: float) -> None:
        """Writes a drifting step whose policy was kept if its drift is the largest so far; analyses
        it if no step of the run has been analysed.

        Args:
          step: number of the RL step, from 1 on.
          samples: the step's samples.
          logp: (N, R), the learner's log-probabilities in the step's first update.
          seconds: duration of the step's rollout and update.
        """
        note_drift(self._runtime, f"RL step {step} of {self._directory}")
        if self._policy is None:
            if (reason := self._why_not(step)) not in self._said:
                self._said.add(reason)
                self._note(reason)
            return
        kept = KeptStep(
            step,
            self._policy,
            samples.questions,
            samples.prompts.first_ids,
            samples.prompts.key,
            {name: np.asarray(getattr(samples.rollout, name)) for name in RECORDED},
            logp,
        )
        self._policy = None
        if not kept.drift <= self._largest_kept():
            self._largest = kept.drift
            self._save(kept)
        if not step_verdicts(self._directory):
            self._analyse(kept, seconds)

    def forget_after(self, step: int) -> None:
        """Removes the records of later steps from the directory: a resumed run repeats them, and
        they may not drift again."""
        if not processes.first():
            return
        if any(verdict["step"] > step for verdict in step_verdicts(self._directory)):
            for name in ("drift.json", "drift.html"):
                (self._directory / name).unlink(missing_ok=True)
        KeptStep.remove_after(step, self._directory)

    def finish(self) -> None:
        """Analyses the step with the run's largest drift, unless it has been analysed."""
        if processes.count() > 1 or not self._runtime.resolved.zero_drift:
            return
        try:
            kept = KeptStep.load(self._runtime, self._directory)
        except Exception as error:  # a run must not die of its monitor
            return self._note(f"{self._directory} holds a step that cannot be analysed: {error}")
        analysed = [verdict["step"] for verdict in step_verdicts(self._directory)]
        if kept is not None and kept.step not in analysed:
            self._analyse(kept, 0.0)

    def _largest_kept(self) -> float:
        """Returns the drift of the kept step, which this execution or an earlier one wrote."""
        if not self._largest:
            self._largest = KeptStep.drift_of(self._directory)
        return self._largest

    def _why_not(self, step: int) -> str:
        if processes.count() > 1:
            return f"{self._command}, in one process, names the operation"
        if self._not_analysed:
            return (
                "steps of conversations, and those that learn what older policies drew, are not "
                f"analysed; {self._command} samples one reply"
            )
        if self._bytes <= _COPIED_ONCE_DRIFTED:
            return (
                f"the weights before RL step {step} were not kept, as they are above "
                f"{_COPIED >> 30} GiB: from now on they are, up to {_COPIED_ONCE_DRIFTED >> 30} "
                "GiB, and the next step that drifts is analysed"
            )
        return (
            f"the weights of a step are above {_COPIED_ONCE_DRIFTED >> 30} GiB and are not kept: "
            f"{self._command} looks for the operation at the newest checkpoint"
        )

    def _save(self, kept: KeptStep) -> None:
        try:
            kept.save(self._runtime, self._directory)
        except Exception as error:  # a run must not die of its monitor
            self._note(f"RL step {kept.step} could not be kept for `fp8rl drift`: {error!r}")

    def _analyse(self, kept: KeptStep, seconds: float) -> None:
        """Analyses a step, writes drift.json, and notes the verdict."""
        step = f"RL step {kept.step}"
        now = lambda: math.inf if self._stopping() else self._clock()
        budget = Budget(self._clock() + self._budget, now)
        if not budget.allows(seconds):
            self._note(f"{step} is kept, and not analysed in the run: {self._command} does that")
            return
        self._note(
            f"drift: looking for the operation in {step} itself (drift {kept.drift:.1e}), for "
            f"about {self._budget / 60:g} minutes at most; the run waits"
        )
        try:
            result = analyse_step(self._runtime, kept, lambda t: self._note(f"  {t}"), budget)
            write_json(result, self._directory)
        except Exception as error:  # a run must not die of its monitor
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            self._note(f"{step} could not be analysed ({reason}): {self._command} tries again")
            return
        verdict = result["verdict"]
        self._note(f"drift: {verdict['sentence']} What to do: {verdict['advice']}.")
        if left_out := ", ".join(result["left_out"]):
            self._note(f"time was up before {left_out}: {self._command} does the rest")
