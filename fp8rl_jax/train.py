"""The main job: supervised fine-tuning, then RL with one forward function in rollout and learner.

preflight        checks, most of them before anything compiles
restore          the newest checkpoint, or the initial parameters
sft              training/sft.py
rl               training/rl.py, whose docstring draws a step
report           report.html in the run directory
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any, Literal

import jax
import ml_collections

from fp8rl_jax import sharding
from fp8rl_jax.base import processes
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.config.adapters import adapted_shapes
from fp8rl_jax.drift import SelfCheck, kept_self_check, note_drift
from fp8rl_jax.learner import TrainState
from fp8rl_jax.models.masters import is_adapted, trained
from fp8rl_jax.models.params import parameter_counts
from fp8rl_jax.report import write_report
from fp8rl_jax.training.environment import layout
from fp8rl_jax.training.optimizer import optimizer_of_phase
from fp8rl_jax.training.preflight import preflight
from fp8rl_jax.training.progress import Display
from fp8rl_jax.training.rl import begin_rl, run_rl
from fp8rl_jax.training.run import Run
from fp8rl_jax.training.run_directory import WRITE_ERRORS, continues, no_room
from fp8rl_jax.training.runtime import Runtime, make_runtime
from fp8rl_jax.training.sft import load_cached, run_sft, save_cached
from fp8rl_jax.training.watch import Watch, unwatched


@dataclasses.dataclass
class Outcome:
    """The end of a run: `finished`, or the signal that stopped it; and its report, if written."""

    finished: bool
    stopped_by: str | None
    report: pathlib.Path | None


def train(
    config: ml_collections.ConfigDict,
    resume: bool | Literal["auto"] = False,
    stop: Callable[[], str | None] = lambda: None,
    watch: Watch = unwatched,
    display: Display | None = None,
) -> Outcome:
    """Runs fine-tuning and RL in `config.run.dir`, and writes the report.

    Args:
      config: result of `load_config`.
      resume: continue from the newest checkpoint, bit for bit; 'auto': if there is a run.
      stop: function called after each step; if it returns a name, that of what stops the run, the
        run saves its state and ends.
      watch: looks at the parts of RL steps; with one, nothing is evaluated.
      display: display of the progress; by default on standard output.

    Raises:
      UserError: an error that the user can fix.
      RewardError: every call of a reward failed; the state after the last finished step is saved.
      NonFiniteError: loss or gradient became NaN; the last good state is saved.
      DriftError: drift appeared and zero drift is required; the state after that step is saved.
    """
    processes.check_joined()
    continued: bool = processes.decided(lambda: continues(config.run.dir, resume))
    runtime = make_runtime(config)
    display = display or Display()
    check = functools.partial(_self_check, runtime, display.note)
    with display, preflight(runtime, continued, check) as (lock, lines, checked):
        try:
            for line in lines:
                display.note(line)
            run = Run(runtime, lock, display, stop, watch)
            run.doubted = checked is not None and (not checked.holds or bool(checked.drifted))
            return _execute(run, continued)
        except OSError as error:
            if error.errno not in WRITE_ERRORS:
                raise
            raise no_room(pathlib.Path(runtime.config.run.dir), error) from error


def _self_check(runtime: Runtime, note: Callable[[str], None]) -> SelfCheck | None:
    """Checks zero drift if the run relies on it; `note` is called before anything compiles.

    Raises:
      UserError: there is drift here, and the configuration requires zero drift.
    """
    config = runtime.config
    if not (config.precision.self_check and runtime.resolved.zero_drift):
        return None
    checked = kept_self_check(runtime, note)
    if config.precision.zero_drift == "required" and not checked.holds:
        raise UserError(
            f"precision.zero_drift is 'required', and {checked}: `fp8rl drift` names the "
            "operation; set precision.zero_drift='report' to go on"
        )
    return checked


def _execute(run: Run, resume: bool) -> Outcome:
    """Runs the phases of a run from its newest checkpoint on."""
    config = run.runtime.config
    with contextlib.closing(run), contextlib.ExitStack() as at_end:
        run.interrupted()  # from here on a signal waits for the end of a step
        if (frozen := run.runtime.engine.frozen_model) is not None:  # loaded now: it may be damaged
            run.display.note(frozen.note)
        state, meta = _restore(run, resume)
        at_end.callback(_note_drift, run, run.drifted)
        _describe(run)
        if run.evaluation_failed:
            run.evaluate(state, run.runtime.engine.refit(state).weights)
        if run.phase == "sft":
            state = _sft(run, state)
        if run.phase == "rl" and not run.stop():
            state = run_rl(run, state, meta)
    if run.phase == "rl" and int(state.step) >= config.run.steps:
        return Outcome(True, None, processes.decided(lambda: write_report(run.directory)))
    at = f"{run.phase} step {int(state.step)}"
    run.display.note(f"stopped by {run.stopped_by} after {at}, saved; --resume goes on")
    return Outcome(False, run.stopped_by, None)


def _note_drift(run: Run, before: bool) -> None:
    """Records that a run has drifted, which had done so `before` it was resumed or not."""
    if run.drifted and not before:
        note_drift(run.runtime, f"a step of {run.directory}")


def _restore(run: Run, resume: bool) -> tuple[TrainState, dict[str, Any]]:
    """Returns the newest checkpoint's state and metadata, or the initial state; opens the logs."""
    engine = run.runtime.engine
    number = run.checkpoints.latest()
    if number is None:
        run.open_logs(None)
        params = engine.initial_params()
        if resume:
            run.display.note("there is no checkpoint to resume from: starting anew")
        if run.logs.moved_to:
            run.display.note(f"what was logged before is in {run.logs.moved_to}")
        if not run.runtime.config.sft.steps:
            return begin_rl(run, params, None), {}
        state = engine.new_state(params, optimizer_of_phase(run.runtime.config, "sft"))
        run.link(state)
        return state, {}
    meta = run.checkpoints.read_meta(number)
    run.phase = meta["phase"]
    run.drifted = meta.get("drifted", False)
    run.evaluation_failed = meta.get("evaluation_failed", False)
    state = run.checkpoints.restore(
        number, engine.like(optimizer_of_phase(run.runtime.config, run.phase))
    )
    run.open_logs(meta["offsets"])
    run.display.note(f"resuming after {run.phase} step {meta['step']}")
    return state, meta


def _describe(run: Run) -> None:
    rt = run.runtime
    model = rt.resolved.model
    counts = parameter_counts(model)
    active = f" ({counts.active / 1e6:.2f}M a token)" if model.num_experts else ""
    shapes = adapted_shapes(rt.config, model)
    if is_adapted(shapes):
        count = sum(x.size for x in jax.tree.leaves(trained(shapes)))
        active += f" and {count / 1e6:.2f}M of adapters, which are trained"
    run.display.note(
        f"{rt.config.env.task}: {counts.total / 1e6:.2f}M parameters{active}, "
        f"{model.num_hidden_layers} layers; rollout {rt.resolved.rollout_recipe.name}, "
        f"learner {rt.resolved.learner_recipe.name}; "
        f"{layout()}; seed {rt.config.run.seed}"
    )
    run.display.note(_exact(rt))
    for axis in ("tensor", "expert"):
        if sharding.between_hosts(rt.mesh, axis, processes.hosts()):
            run.display.note(
                f"mesh.{axis}={rt.mesh.shape[axis]} goes over several hosts: in every layer "
                "activations travel between them; a number that divides a host's devices is "
                "faster"
            )
    if rt.config.model.checkpoint:
        run.display.note(f"initial parameters: {rt.config.model.checkpoint}")


def _exact(rt: Runtime) -> str:
    """Returns a line that says what is exact in a run."""
    config = rt.config
    every = f"every {config.run.check_every} steps" if config.rollout.ahead else "every step"
    if (most := config.rollout.most_versions) > 1 and not config.rollout.ahead:
        every += " that draws some of its tokens"
    whose = " of the same version" if rt.resolved.stale else ""
    parts = [
        f"the learner{whose} computes the log-probabilities that the rollout records, compared in "
        f"{every}"
        if rt.resolved.zero_drift
        else "nothing between rollout and learner, whose recipes differ or which only report drift"
    ]
    if rt.resolved.step is not None:
        parts.append("tokens are kept as drawn through a conversation, whatever its steps take")
    if most > 1:
        oldest = config.rollout.ahead + most - 1
        parts.append(f"which policy, at most {oldest} steps older, drew a token that a step learns")
    elif ahead := config.rollout.ahead:
        parts.append(
            f"which policy, {ahead} step{'s' * (ahead > 1)} older, drew what a step learns"
        )
    return f"exact here: {'; '.join(parts)}; a resumed run is the run in one piece"


def _sft(run: Run, state: TrainState) -> TrainState:
    """Fine-tunes, or loads the cached result; returns the state at the start of RL, or that at
    which the run must stop."""
    cached = load_cached(run, state) if int(state.step) == 0 else None
    if cached is not None:
        run.display.note("supervised fine-tuning found in the cache")
        params, scaling_state = cached
        return begin_rl(run, params, scaling_state)
    state = run_sft(run, state)
    if int(state.step) < run.runtime.config.sft.steps:
        return state
    run.logs.offsets()
    save_cached(run.runtime, state, run.directory)
    return begin_rl(run, state.params, state.scaling_state)
