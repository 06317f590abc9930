"""The RL phase: GRPO and its relatives, with one forward function in rollout and learner.

`run_rl` runs the steps of step.py, whose docstring draws one, and does what they do not: logs,
evaluations, checkpoints, and what ends a run.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np

from fp8rl_jax.base import processes
from fp8rl_jax.base.compiling import compile_seconds
from fp8rl_jax.base.errors import DriftError, NonFiniteError, RewardError
from fp8rl_jax.batch import Batch, of_sequences
from fp8rl_jax.data import Stream
from fp8rl_jax.learner import TrainState, policy_of
from fp8rl_jax.report import summarise, write_report
from fp8rl_jax.report.metrics import DRIFT_MAX
from fp8rl_jax.training.ahead import Rollouts, Weights
from fp8rl_jax.training.checkpoint import Checkpoints
from fp8rl_jax.training.digests import record_digest, rewards_digest, rewards_line, samples_digests
from fp8rl_jax.training.engine import Served
from fp8rl_jax.training.learn import NonFiniteUpdate
from fp8rl_jax.training.run import Run, non_finite_message
from fp8rl_jax.training.runtime import Runtime
from fp8rl_jax.training.step import metrics_of, rl_step
from fp8rl_jax.training.step_metrics import Metrics


def begin_rl(run: Run, params, scaling_state: dict | None) -> TrainState:
    """Returns the state at the start of the phase; saves it, and the reference policy if needed."""
    rt = run.runtime
    run.phase = "rl"
    state = rt.engine.new_state(params, rt.engine.rl_optimizer, scaling_state)
    if rt.layout.calibrates:
        state = rt.engine.calibrate(state, _first_prompts(rt, state))
    if rt.resolved.algorithm.needs_reference:
        reference = Checkpoints(run.directory / "reference", keep=1)
        reference.save(0, policy_of(state), {})
        reference.close()
    run.link(state)
    run.save(state)
    return state


def _first_prompts(rt: Runtime, state: TrainState) -> Batch:
    """Returns the prompts of the step after `state`, padded to the shape of a rollout's sequences,
    so that one program calibrates on both."""
    rollout = rt.config.rollout
    prompts, lengths = rt.prompts(_stream(rt, state).next())
    tokens = np.repeat(prompts, rollout.group_size, axis=0)
    tokens = np.pad(tokens, ((0, 0), (0, rollout.max_new_tokens)))
    lengths = np.repeat(lengths, rollout.group_size)
    return of_sequences(tokens, lengths, rollout.max_new_tokens)


def _stream(rt: Runtime, state: TrainState) -> Stream:
    """Returns the stream of the phase's questions, at the position of `state`."""
    stream = Stream(rt.questions["train"], rt.config.rollout.prompts_per_step, rt.config.run.seed)
    stream.position = int(state.data_state)
    return stream


def _reference(run: Run, state: TrainState) -> TrainState:
    """Returns `state` with the policy replaced by the saved reference policy."""
    checkpoints = Checkpoints(run.directory / "reference", keep=1)
    policy = checkpoints.restore(0, policy_of(state))
    checkpoints.close()
    return dataclasses.replace(state, **policy)


def run_rl(
    run: Run, state: TrainState, meta: Mapping[str, Any] = MappingProxyType({})
) -> TrainState:
    """Runs RL steps from `state.step` to the end, or until the run must stop.

    Args:
      run: the run.
      state: state of `begin_rl`, or of a checkpoint.
      meta: the checkpoint's metadata.

    Raises:
      RewardError, NonFiniteError: as `rl_step`.
      DriftError: drift appeared and zero drift is required; the state after that step is saved.
    """
    rt = run.runtime
    reference = _reference(run, state) if rt.resolved.algorithm.needs_reference else None
    run.display.phase("RL", run.runtime.config.run.steps, int(state.step), run.compile_times)
    rollouts = Rollouts(rt, _stream(rt, state), run.display.rollout, run.watch)
    served = rt.engine.refit(state)

    def weights_of(name: str) -> Weights:
        like = served.weights  # held by `served` alone, which gives it up before an update
        return rt.for_sampling(run.checkpoints.read_other(run.number(state), name, like))

    if "rollouts" in meta:
        arrays = run.checkpoints.read_arrays(run.number(state))
        rollouts.restore(int(state.step), meta, arrays, weights_of)
    with contextlib.closing(rollouts):
        return _steps(run, state, served, reference, rollouts)


def _steps(
    run: Run, state: TrainState, served: Served, reference: TrainState | None, rollouts: Rollouts
) -> TrainState:
    config = run.runtime.config
    if not config.sft.steps and int(state.step) == 0:
        run.evaluate(state, served.weights)
    for step in range(int(state.step) + 1, config.run.steps + 1):
        rescore = not run.runtime.resolved.takes_rollout_logprobs(run.doubted or run.drifted)
        compiled = compile_seconds()
        try:
            result = rl_step(run.runtime, state, served, reference, rollouts, rescore)
        except RewardError:
            run.save_for_reward(state, rollouts.beside())
            raise
        except NonFiniteUpdate as error:
            saved = error.unchanged is not None  # later the state has a part of this step
            if error.unchanged is not None:
                run.save(error.unchanged, rollouts.beside())
            raise NonFiniteError(non_finite_message("RL", step, error.metrics, saved)) from None
        result.times["time_compile"] = compile_seconds() - compiled
        state = result.state
        served = result.served
        record = metrics_of(run.runtime, result)
        drift = _forbidden_drift(run, record)
        rewards = rewards_line(step, result.drawn.samples)
        digests = samples_digests(result.drawn.samples) | {"rewards": rewards_digest(rewards)}
        run.logs.write("metrics", record)
        run.logs.write("rewards", rewards)
        run.link(state, digests | {"record": record_digest(record)})
        run.watch("update", step, result=result)
        del result  # frees device memory: its routing is on the devices
        run.display.step("metrics", record)
        last = step == config.run.steps
        if last or step % config.eval.every == 0:
            rollouts.wait()
            run.evaluate(state, served.weights, rollouts.beside)
        stopping = run.stop() is not None
        if stopping:
            rollouts.stop()
            if count := rollouts.running():
                run.display.note(f"{run.stopped_by}: waits for {count} rollouts ahead, then saves")
        broken = drift and config.precision.zero_drift == "required"
        due = step % config.run.checkpoint_every == 0 or run.number(state) in run.kept
        if last or stopping or broken or due:
            run.save(state, rollouts.beside())
        if broken:
            _end_for_drift(run, step, drift)
        if stopping:
            break
    return state


def _forbidden_drift(run: Run, record: Metrics) -> float:
    """Returns a step's largest |dlogp| if the run must have none, else 0, the same in all
    processes. Shows a warning the first time."""
    rt = run.runtime
    drift = record.get(DRIFT_MAX, 0.0)
    drift = next(filter(None, processes.exchange(drift)), 0.0) if rt.resolved.zero_drift else 0.0
    if drift and not run.drifted:
        recompute = ""
        taken = rt.resolved.takes_rollout_logprobs
        if taken(drifted=False) and not taken(drifted=True):
            recompute = "; from the next step on log-probabilities are recomputed"
        run.drifted = True
        run.display.note(
            f"warning: drift {drift:.1e} at RL step {record['step']}, though the recipes are "
            f"equal{recompute}; `fp8rl drift --checkpoint {run.directory}` runs it again and names "
            "the operation"
        )
    return drift


def _end_for_drift(run: Run, step: int, drift: float) -> NoReturn:
    """Raises DriftError in a run that requires zero drift, after a saved step that had drift."""
    processes.decided(lambda: write_report(run.directory))
    advice = processes.decided(lambda: summarise(run.directory)["advice"])
    raise DriftError(
        f"precision.zero_drift is 'required', and drift of {drift:.1e} appeared at RL step "
        f"{step}; the state after it is saved, and --resume goes on from there. "
        f"{advice or ''}".rstrip()
    )
