"""`Run`: the host's state that a run's phases share: logs, checkpoints, evaluation, stopping."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from fp8rl_jax.base import processes
from fp8rl_jax.base.errors import RewardError
from fp8rl_jax.base.jax_settings import hold_settings
from fp8rl_jax.learner import TrainState
from fp8rl_jax.training.checkpoint import NOTHING, Beside, Checkpoints, named_checksums
from fp8rl_jax.training.compile_times import CompileTimes
from fp8rl_jax.training.digests import Chain, made_with, state_digest
from fp8rl_jax.training.evaluate import evaluate
from fp8rl_jax.training.lock import RunLock
from fp8rl_jax.training.logs import RunLogs
from fp8rl_jax.training.progress import Display
from fp8rl_jax.training.runtime import Runtime
from fp8rl_jax.training.watch import Watch, unwatched


class Run:
    """One execution of the job.

    Attributes:
      runtime: result of `make_runtime`.
      directory: `run.dir`.
      display: display of the progress.
      compile_times: estimates of what the first steps compile.
      checkpoints: checkpoints of the run.
      kept: numbers of those that are kept for good.
      logs: logs, which `open_logs` opens at the run's start or its resumption.
      phase: 'sft' or 'rl'.
      doubted: whether the self-check, or an earlier run of this configuration, has shown drift
        though there must be none.
      drifted: whether a first update has.
      evaluation_failed: whether the restored state was saved because its evaluation failed.
      interrupted: function that returns the name of the signal that stops this process, or None.
      stopped_by: result of `stop`.
      watch: looks at the parts of RL steps; with one, nothing is evaluated.
    """

    logs: RunLogs

    def __init__(
        self,
        runtime: Runtime,
        lock: RunLock,
        display: Display,
        stop: Callable[[], str | None],
        watch: Watch = unwatched,
    ):
        config = runtime.config
        self.runtime = runtime
        self.display = display
        self.directory = pathlib.Path(config.run.dir)
        self.compile_times = CompileTimes(runtime)
        self._lock = lock
        self.interrupted = stop
        keep = config.run.keep_checkpoints
        self._opened = contextlib.ExitStack()
        self.kept = kept_for_good(config)
        self.checkpoints = Checkpoints(
            self.directory / "checkpoints", keep, own=True, kept=self.kept
        )
        self._opened.callback(self.checkpoints.close)
        self.phase = "sft"
        self.evaluation_failed = False
        self.doubted = self.drifted = False
        self.stopped_by: str | None = None
        self.watch = watch

    def open_logs(self, offsets: dict[str, int] | None) -> None:
        """Opens the logs at a checkpoint's `offsets`; None starts new logs."""
        self.logs = RunLogs(self.directory, offsets, self.runtime.config, self.display.note)
        self._opened.callback(self.logs.close)
        self._chain = Chain(self.logs.digests)
        self._changed = self._chain.changed(made_with(self.runtime))

    def close(self) -> None:
        """Closes logs and checkpoints."""
        self._opened.close()

    def stop(self) -> str | None:
        """Returns the name of what stops the run in any process, or None, the same in all
        processes. The caller saves the state."""
        if self.stopped_by is None:
            self.stopped_by = next(filter(None, processes.exchange(self.interrupted())), None)
        return self.stopped_by

    def number(self, state: TrainState) -> int:
        """Returns the number of the checkpoint of a state."""
        return int(state.step) + (self.runtime.config.sft.steps if self.phase == "rl" else 0)

    def save(self, state: TrainState, beside: Beside = NOTHING, **more: Any) -> None:
        """Writes a checkpoint while the run goes on, with what goes beside the state, and `more` in
        its metadata."""
        meta = {
            "phase": self.phase,
            "step": int(state.step),
            "offsets": self.logs.offsets(),
            "drifted": self.drifted,
            **more,
        }
        self._lock.check()
        self.checkpoints.save(self.number(state), state, meta, beside)

    def link(self, state: TrainState, digests: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Writes the line of digests.jsonl of a state, with digests of the step behind which it
        is."""
        line: dict[str, Any] = {"phase": self.phase, "step": int(state.step)}
        if self._changed:
            line["made_with"] = self._changed
            self._changed = {}
        line |= {**digests, "state": state_digest(named_checksums(state))}
        self.logs.write("digests", self._chain.linked(line))

    def save_for_reward(self, state: TrainState, beside: Beside, **more: Any) -> None:
        """Writes a checkpoint before a run stops because of its reward, and shows a note."""
        self.save(state, beside, **more)
        self.checkpoints.finish()
        at = f"{self.phase} step {int(state.step)}"
        self.display.note(f"the state after {at} is saved; --resume goes on from there")

    def evaluate(self, state: TrainState, weights, beside: Callable[[], Beside] = Beside) -> None:
        """Evaluates the weights of a state, and logs the results. `beside`: returns what goes
        beside the state in a checkpoint, if one is saved.

        Raises:
          RewardError: every call of the reward failed; the resumed run evaluates again.
        """
        if self.watch is not unwatched:
            return
        hold_settings()
        try:
            evaluations = evaluate(self.runtime, weights, self.phase, int(state.step))
        except RewardError:
            self.save_for_reward(state, beside(), evaluation_failed=True)
            raise
        self.logs.write_evaluations(evaluations)
        self.display.evaluations([evaluation.record for evaluation in evaluations])


def kept_for_good(config) -> range:
    """Returns the numbers of the checkpoints that `run.keep_every` keeps."""
    first = config.sft.steps
    every = config.run.keep_every
    return range(first, first + config.run.steps + 1, every) if every else range(0)


def non_finite_message(phase: str, step: int, metrics, saved: bool = True) -> str:
    """Returns the message for a run that met NaN: step, layer if known, and the saved state."""
    layer, loss, norm = (metrics[name].item() for name in ("bad_layer", "loss", "grad_norm"))
    where = f"layer {layer} is the first with a non-finite output"
    if layer < 0:
        where = "every layer's output is finite, so it arose in the loss or in a gradient"
    kept = "last good state is saved" if saved else "newest checkpoint is the last good state"
    return f"{phase} step {step}: loss {loss}, gradient norm {norm}; {where}; the {kept}"
