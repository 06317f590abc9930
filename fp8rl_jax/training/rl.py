"""The RL phase: GRPO and its relatives, with one forward function in rollout and learner.

One step, as `rl_step` runs it::

    questions --sample--> responses --reward--> rewards          with weights of the last refit
        |                     |                    |
        |             log-probabilities of the learner and       at zero drift the sampler's serve
        |             the reference policy                       as the learner's
        |                     |                    |
        +--------- batch: advantages and weights --+
                              |
                           update                                one or several optimiser updates
                              |
             compare: the first update's own log-probabilities with those recorded while decoding
                              |
                            refit                                the sampler's next weights

Each part waits for the one before it. With `rollout.ahead` the rollout of a later step runs beside
the update, and the step learns from an older one (ahead.py). With `rollout.most_versions` a rollout
draws for later steps too, and several versions draw one response (partial.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NoReturn, Protocol

import jax
import numpy as np

from fp8rl_jax.base import processes
from fp8rl_jax.base.compiling import compile_seconds
from fp8rl_jax.base.errors import DriftError, NonFiniteError, RewardError
from fp8rl_jax.base.jax_settings import hold_settings
from fp8rl_jax.batch import Batch, of_sequences
from fp8rl_jax.data import Stream
from fp8rl_jax.learner import TrainState, policy_of
from fp8rl_jax.models.lora import base_of, with_base
from fp8rl_jax.plan import gpus
from fp8rl_jax.plan.times import useful_flops
from fp8rl_jax.report import summarise, write_report
from fp8rl_jax.report.metrics import DRIFT_MAX, DRIFT_MEAN
from fp8rl_jax.rl import mismatch_metrics, prepare
from fp8rl_jax.rollout import changed_bytes, is_fresh
from fp8rl_jax.training.ahead import Drawn, Rollouts, Weights
from fp8rl_jax.training.checkpoint import Checkpoints
from fp8rl_jax.training.counters import age_metrics
from fp8rl_jax.training.engine import Served
from fp8rl_jax.training.optimizer import updates_made
from fp8rl_jax.training.run import Run, non_finite_message
from fp8rl_jax.training.runtime import Runtime
from fp8rl_jax.training.sample_step import Samples
from fp8rl_jax.training.step_record import StepRecord

# Metrics of a rollout and the policy that learns from it, where that is a later one.
_CHANGED = {DRIFT_MEAN: "learner_change_abs_diff", "mismatch_kl": "learner_change_kl"}
_STALE = {
    DRIFT_MEAN: "staleness_abs_diff",
    DRIFT_MAX: "staleness_abs_diff_max",
    "mismatch_kl": "staleness_kl",
    "ess_ratio": "staleness_ess",
}


class Monitor(Protocol):
    """Analyses steps with drift; see `drift.DriftMonitor`."""

    def keep(self, state: TrainState, drifted: bool) -> None:
        """Called before the update of each step; `drifted`: whether an earlier step had drift."""

    def seen(self, step: int, samples: Samples, logp: np.ndarray, seconds: float) -> None:
        """Called after a step with drift; `seconds`: its times of rollout and learner."""


@dataclasses.dataclass(frozen=True)
class StepResult:
    """The result of an RL step.

    Attributes:
      state, served: state after the step, and the weights that the next step samples with.
      samples: responses and rewards of the step.
      logp: (N, R) float32, log-probabilities that the first update's forward pass computed.
      record: metrics of the step.
    """

    state: TrainState
    served: Served
    samples: Samples
    logp: np.ndarray
    record: StepRecord


def rl_step(
    run: Run,
    state: TrainState,
    served: Served,
    reference: TrainState | None,
    rollouts: Rollouts,
    monitor: Monitor,
) -> StepResult:
    """Runs one step: sample, score, weigh, update, compare, refit.

    Args:
      run: the run, with its engine, text and algorithm.
      state: state after the previous step; donated.
      served: result of `refit` on `state`.
      reference: a state with the reference policy; None if the algorithm needs none.
      rollouts: rollouts that were begun; the oldest is this step's.
      monitor: monitor that may keep parts of the state before the update.

    Raises:
      RewardError: every call of a reward failed; `state` is unchanged.
      NonFiniteError: loss or gradients are not finite; the last good state is saved.
    """
    rt, engine, step = run.runtime, run.runtime.engine, int(state.step)
    record, compiled, ahead = StepRecord(step + 1), compile_seconds(), rt.config.rollout.ahead
    oldest = max(0, step - ahead - (rt.config.rollout.most_versions - 1))  # version
    with record.timed("step"):
        # 1. Sample a group of responses for each question, and reward them.
        hold_settings()  # before every part, because a user's code may have changed them
        assert is_fresh(state.kv_scales, step)
        record |= age_metrics(state.scaling_state, state.kv_scales, step)
        # Keys are on the host: the engine may sample on other devices.
        rollouts.begin(step, served, np.asarray(state.rng))
        if rt.rollout_mesh is not None:  # its devices have a copy
            served.release()
        with record.timed("wait") if ahead else contextlib.nullcontext():
            drawn = rollouts.oldest()
        samples = drawn.samples
        record |= drawn.record
        if ahead and step % rt.config.run.check_every == 0:
            state, drift = _drift_ahead(rt, state, rollouts.drawn_by(step))
            record |= drift

        # 2. Log-probabilities before the update, and under the reference policy.
        hold_settings()
        rollout = samples.rollout
        # Newer ones only behind a rollout that failed, or the end of a run that was extended.
        versions = samples.versions[rollout.mask]
        assert ((versions >= oldest) & (versions <= step)).all()
        batch = engine.batch(rollout, samples.prompts)
        with record.timed("old_logprobs"):
            batch = scored(rt, state, reference, batch, run.doubted or run.drifted)

        # 3. Advantages and weights.
        hold_settings()
        batch = weighed(rt, samples, batch, record)

        # 4. Update; the sampler's weights are freed before it.
        hold_settings()
        if not ahead:
            served.release()
        monitor.keep(state, run.drifted)
        state, logp, updates = _updates(run, state, batch, record, rollouts)
        _add_rates(rt, batch, updates, record)

        # 5. Compare log-probabilities on the first update's rows, and the weights that both read.
        first = slice(0, len(logp))
        if rt.stale:
            compared = mismatch_metrics(logp, rollout.logprobs[first], batch.mask[first])
            record |= {stale: compared[n] for n, stale in _STALE.items()}
            if not rt.same_forward and samples.learner_logprobs is not None:
                changed = mismatch_metrics(logp, samples.learner_logprobs[first], batch.mask[first])
                record |= {name: changed[n] for n, name in _CHANGED.items()}
        own = _comparable(batch, samples, step)[first]
        if own.any():
            compared = mismatch_metrics(logp, rollout.logprobs[first], own)
            of_later = record.get(DRIFT_MAX, 0.0)  # of a rollout ahead
            if not (np.isnan(of_later) or of_later > compared[DRIFT_MAX]):
                record |= compared
        if rt.same_forward:
            record["refit_checksum_ok"] = bool(
                updates[0]["checksum"] == np.asarray(served.checksum)
            )
        record.add_refit(served.health, rt.model, rt.rollout_recipe)

        # 6. Refit.
        hold_settings()
        state = engine.advance(state, step + 1, drawn.position)
        rollouts.learnt()
        before = served.sample
        state, served = _refit(rt, state, batch, record)
        if before:
            record["refit_changed_bytes"] = float(changed_bytes(before, served.sample))
        record["time_compile"] = compile_seconds() - compiled
        record.add_memory()
    return StepResult(state, served, samples, logp, record)


def _drift_ahead(
    rt: Runtime, state: TrainState, drawn: Drawn | None
) -> tuple[TrainState, dict[str, float]]:
    """Returns the drift of a rollout that `state` has drawn, and the state; {} without a rollout.
    `state` is donated. The step that learns from the rollout will have another policy.

    With one forward function the train step itself computes the log-probabilities, of one update's
    rows: no token counts, so the state stays as it is. Otherwise the learner scores all rows, and
    the scores are kept for the step that learns from them.
    """
    if drawn is None:
        return state, {}
    samples = drawn.samples
    batch = rt.engine.batch(samples.rollout, samples.prompts)
    own = _comparable(batch, samples, int(state.step))
    if not own.any():
        return state, {}
    rows = slice(None)
    if rt.same_forward:
        parts = np.split(own, rt.config.algo.num_minibatches)
        first = int(np.argmax([part.any() for part in parts]))
        rows = slice(first * len(parts[0]), (first + 1) * len(parts[0]))
        nothing = dataclasses.replace(batch, weights=np.zeros_like(batch.weights))
        state, logp, _ = rt.engine.update(state, jax.tree.map(lambda x: x[rows], nothing))
    else:
        logp = rt.engine.score(state, batch)
        if (own == samples.rollout.mask).all():
            samples.learner_logprobs = logp
    return state, mismatch_metrics(logp, samples.rollout.logprobs[rows], own[rows])


def _comparable(batch: Batch, samples: Samples, step: int) -> np.ndarray:
    """Returns (B, R) bool, the tokens that the loss takes without those that other versions than
    `step` drew. One that no version drew is left in: that the loss takes it shows as drift."""
    older = samples.rollout.mask & (samples.versions != step)
    return (batch.mask > 0) & ~older


def scored(
    rt: Runtime, state: TrainState, reference: TrainState | None, batch: Batch, drifted: bool
) -> Batch:
    """Returns the batch with log-probabilities before the update and under the reference policy.

    Args:
      rt: runtime whose engine scores.
      state: state before the update.
      reference: as for `rl_step`.
      batch: batch with the sampler's log-probabilities, kept if `takes_rollout_logprobs`.
      drifted: whether the self-check or an earlier update showed drift though there must be none.
    """
    if not rt.takes_rollout_logprobs(drifted):
        old = np.where(batch.mask > 0, rt.engine.score(state, batch), 0.0)
        batch = dataclasses.replace(batch, old_logprobs=old)
    if reference is not None:
        found = rt.engine.score_reference(reference, batch)
        batch = dataclasses.replace(batch, ref_logprobs=found)
    return batch


def weighed(rt: Runtime, samples: Samples, batch: Batch, record: StepRecord) -> Batch:
    """Returns the batch with advantages and weights of its tokens; adds metrics to the record."""
    rollout = samples.rollout
    prepared = prepare(
        rt.algorithm,
        samples.rewards,
        rollout.mask,
        rollout.finished,
        batch.old_logprobs,
        rollout.logprobs,
        batch.ref_logprobs,
        samples.counts,
        samples.turns,
        rollout.lengths,
    )
    record |= prepared.metrics
    parts = np.split(prepared.keep, rt.config.algo.num_minibatches)
    return dataclasses.replace(
        batch,
        advantages=prepared.advantages,
        rollout_weights=prepared.rollout_weights,
        weights=np.concatenate([rt.algorithm.token_weights(keep) for keep in parts]),
    )


def _updates(
    run: Run, state: TrainState, batch: Batch, record: StepRecord, rollouts: Rollouts
) -> tuple[TrainState, np.ndarray, list[dict]]:
    """Makes all optimiser updates of a step. Returns the state after them, the log-probabilities of
    the first update, and the metrics of all."""
    rt = run.runtime
    algo = rt.config.algo
    rows = len(batch.mask) // algo.num_minibatches
    updates, first = [], None
    _, schedule = rt.engine.rl_optimizer
    record["lr"] = float(schedule(updates_made(state.opt_state)))
    with record.timed("learner"):
        for index in range(algo.epochs * algo.num_minibatches):
            begin = index % algo.num_minibatches * rows
            part = jax.tree.map(lambda x, i=begin: x[i : i + rows], batch)
            state, logp, metrics = rt.engine.update(state, part)
            if not metrics["good"]:
                if index == 0:  # later the state already contains a part of this step
                    run.save(state, **rollouts.kept())
                raise NonFiniteError(non_finite_message("RL", record["step"], metrics, index == 0))
            updates.append(metrics | {"counts": part.weights != 0})
            first = logp if first is None else first
    record.add_updates(updates, float(batch.mask.sum()), rt.model, rt.learner_recipe)
    record.add_learner_tokens(updates)
    assert first is not None
    return state, first, updates


def _add_rates(rt: Runtime, batch: Batch, updates: list[dict], record: StepRecord) -> None:
    """Adds tokens per second of a device, and MFU on a known GPU, to the record of a step."""
    mesh = rt.layout.mesh
    gpu = gpus.of_kind(mesh.devices.flat[0].device_kind)
    algo = rt.config.algo
    shared = np.concatenate([metrics["shared"] for metrics in updates[: algo.num_minibatches]])
    tokens = batch.lengths, float(batch.mask.sum()), shared
    needed = algo.epochs * useful_flops(rt.model, *tokens)
    peak = None if gpu is None else gpu.bf16
    record.add_rates(needed, mesh.size, rt.sampling.mesh.size, peak)


def _refit(rt: Runtime, state: TrainState, batch: Batch, record: StepRecord):
    """Returns the state with calibrated KV scales, and the sampler's next weights."""
    if rt.layout.calibrated:
        with record.timed("calibrate"):
            state = rt.engine.calibrate(state, batch)
            state = jax.block_until_ready(state)
    with record.timed("refit"):
        served = jax.block_until_ready(rt.engine.refit(state))
    return state, served


def begin_rl(run: Run, params, scaling_state: dict | None) -> TrainState:
    """Returns the state at the start of the phase; saves it, and the reference policy if needed."""
    rt = run.runtime
    run.phase = "rl"
    optimizer, _ = rt.engine.rl_optimizer
    state = rt.engine.new_state(params, optimizer, scaling_state)
    if rt.layout.calibrated:  # on the prompts of the first step
        rollout = rt.config.rollout
        prompts, lengths = rt.text.prompts(_stream(rt, state).next())
        # Padded to the shape of a rollout's sequences, so that one program calibrates on both.
        tokens = np.repeat(prompts, rollout.group_size, axis=0)
        tokens = np.pad(tokens, ((0, 0), (0, rollout.max_new_tokens)))
        lengths = np.repeat(lengths, rollout.group_size)
        seen = of_sequences(tokens, lengths, rollout.max_new_tokens)
        state = rt.engine.calibrate(state, seen)
    if rt.algorithm.needs_reference:
        reference = Checkpoints(run.directory / "reference", keep=1)
        reference.save(0, policy_of(state), {})
        reference.close()
    run.save(state)
    return state


def _stream(rt: Runtime, state: TrainState) -> Stream:
    """Returns the stream of the phase's questions, at the position of `state`."""
    config = rt.config
    stream = Stream(rt.questions["train"], config.rollout.prompts_per_step, config.run.seed)
    stream.position = int(state.data_state)
    return stream


def _reference(run: Run, state: TrainState) -> TrainState:
    """Returns `state` with the policy replaced by the saved reference policy."""
    checkpoints = Checkpoints(run.directory / "reference", keep=1)
    policy = checkpoints.restore(0, policy_of(state))
    checkpoints.close()
    return dataclasses.replace(state, **with_base(policy, base_of(state.params)))


def run_rl(
    run: Run, state: TrainState, monitor: Monitor, meta: Mapping[str, Any] = MappingProxyType({})
) -> TrainState:
    """Runs RL steps from `state.step` to the end, or until the run must stop.

    Args:
      run: the run.
      state: state of `begin_rl`, or of a checkpoint.
      meta: the checkpoint's metadata.
      monitor: monitor of steps that drift though they must not.

    Raises:
      RewardError, NonFiniteError: as `rl_step`.
      DriftError: drift appeared and zero drift is required; the state after that step is saved.
    """
    rt, config = run.runtime, run.runtime.config
    reference = _reference(run, state) if rt.algorithm.needs_reference else None
    run.display.phase("RL", config.run.steps, int(state.step), run.compile_times)
    rollouts, served = Rollouts(rt, _stream(rt, state), run.display.rollout), rt.engine.refit(state)

    def weights_of(name: str) -> Weights:
        like = served.weights  # held by `served` alone, which gives it up before an update
        return rt.for_sampling(run.checkpoints.read_other(run.number(state), name, like))

    rollouts.restore(int(state.step), meta, weights_of)
    with contextlib.closing(rollouts):
        return _steps(run, state, served, reference, rollouts, monitor)


def _steps(
    run: Run,
    state: TrainState,
    served: Served,
    reference: TrainState | None,
    rollouts: Rollouts,
    monitor: Monitor,
) -> TrainState:
    rt, config = run.runtime, run.runtime.config
    if not config.sft.steps and int(state.step) == 0:
        run.evaluate(state, served.weights)
    for step in range(int(state.step) + 1, config.run.steps + 1):
        try:
            result = rl_step(run, state, served, reference, rollouts, monitor)
        except RewardError:
            run.save_for_reward(state, **rollouts.kept())
            raise
        state, served, record = result.state, result.served, result.record
        drift = _forbidden_drift(run, record)
        if drift:
            seconds = record["time_rollout"] + record["time_learner"]
            monitor.seen(step, result.samples, result.logp, seconds)
        del result  # frees device memory: its routing is on the devices
        if rt.layout.calibrated:
            record["calibrate_frac"] = record["time_calibrate"] / record["time_step"]
        run.logs.write("metrics", record)
        run.display.step("metrics", record)
        last = step == config.run.steps
        if last or step % config.eval.every == 0:
            rollouts.wait()
            run.evaluate(state, served.weights, rollouts.kept)
        stopping = run.stop() is not None
        if stopping:
            rollouts.stop()
            if count := rollouts.running():
                run.display.note(f"{run.stopped_by}: waits for {count} rollouts ahead, then saves")
        broken = drift and config.precision.zero_drift == "required"
        if last or stopping or broken or step % config.run.checkpoint_every == 0:
            run.save(state, rollouts.unfinished() if stopping else {}, **rollouts.kept())
        if broken:
            _end_for_drift(run, step, drift)
        if stopping:
            break
    return state


def _forbidden_drift(run: Run, record: StepRecord) -> float:
    """Returns a step's largest |dlogp| if the run must have none, else 0, the same in all
    processes. Shows a warning the first time."""
    rt = run.runtime
    drift = record.get(DRIFT_MAX, 0.0)
    drift = next(filter(None, processes.exchange(drift)), 0.0) if rt.zero_drift else 0.0
    if drift and not run.drifted:
        recompute = ""
        if rt.takes_rollout_logprobs(False) and not rt.takes_rollout_logprobs(True):
            recompute = "; from the next step on log-probabilities are recomputed"
        run.drifted = True
        run.display.note(
            f"warning: drift {drift:.1e} at RL step {record['step']}, though the recipes are "
            f"equal{recompute}"
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
