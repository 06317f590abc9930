"""One RL step: sample, score, weigh, update, compare, refit; and its metrics.

::

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

`rl_step` computes; `metrics_of` turns its result into the step's line of metrics.jsonl.
"""

from __future__ import annotations

import contextlib
import dataclasses

import jax
import numpy as np

from fp8rl_jax.base.compiling import compile_seconds
from fp8rl_jax.base.jax_settings import hold_settings
from fp8rl_jax.batch import Batch
from fp8rl_jax.learner import TrainState
from fp8rl_jax.plan import gpus
from fp8rl_jax.plan.times import useful_flops
from fp8rl_jax.quant.kv import is_fresh
from fp8rl_jax.report.metrics import DRIFT_MAX, DRIFT_MEAN
from fp8rl_jax.rl import mismatch_metrics
from fp8rl_jax.rollout import changed_bytes
from fp8rl_jax.training.ahead import Rollouts
from fp8rl_jax.training.counters import age_metrics, first_layers, loss_metrics
from fp8rl_jax.training.engine import Served
from fp8rl_jax.training.learn import Update, learn, scored, weighed
from fp8rl_jax.training.runtime import Runtime
from fp8rl_jax.training.sample_step import Drawn, Samples
from fp8rl_jax.training.step_metrics import (
    Metrics,
    Times,
    learner_token_metrics,
    memory_metrics,
    rate_metrics,
    update_metrics,
)

# Metrics of a rollout and the policy that learns from it, where that is a later one.
_CHANGED = {DRIFT_MEAN: "learner_change_abs_diff", "mismatch_kl": "learner_change_kl"}
_STALE = {
    DRIFT_MEAN: "staleness_abs_diff",
    DRIFT_MAX: "staleness_abs_diff_max",
    "mismatch_kl": "staleness_kl",
    "ess_ratio": "staleness_ess",
}


@dataclasses.dataclass(frozen=True)
class StepResult:
    """The result of an RL step.

    Attributes:
      step: number of the step, from 1 on.
      state, served: state after the step, and the weights that the next step samples with.
      before: the weights that the step began with; given up, but for their checksum and sample.
      drawn: the rollout that the step learnt from.
      batch: what it learnt from.
      update: the updates.
      early: what was measured before the updates: ages of scales, advantages, and the drift of a
        rollout ahead.
      times: seconds of the parts.
    """

    step: int
    state: TrainState
    served: Served
    before: Served
    drawn: Drawn
    batch: Batch
    update: Update
    early: Metrics
    times: Times


def rl_step(
    runtime: Runtime,
    state: TrainState,
    served: Served,
    reference: TrainState | None,
    rollouts: Rollouts,
    doubted: bool = False,
) -> StepResult:
    """Runs one step.

    Args:
      runtime: result of `make_runtime`.
      state: state after the previous step; donated.
      served: result of `refit` on `state`.
      reference: a state with the reference policy; None if the algorithm needs none.
      rollouts: rollouts that were begun; the oldest is this step's.
      doubted: whether the self-check or an earlier update showed drift though there must be none.

    Raises:
      RewardError: every call of a reward failed; `state` is unchanged.
      NonFiniteUpdate: loss or gradients are not finite.
    """
    engine, algo, step = runtime.engine, runtime.config.algo, int(state.step)
    ahead, times, compiled = runtime.config.rollout.ahead, Times(), compile_seconds()
    with times.of("step"):
        # 1. Sample a group of responses for each question, and reward them.
        hold_settings()  # before every part, because a user's code may have changed them
        assert is_fresh(state.scaling_state, step)
        early: Metrics = age_metrics(state.scaling_state, step)
        # Keys are on the host: the engine may sample on other devices.
        rollouts.begin(step, served, np.asarray(state.rng))
        if runtime.rollout_mesh is not None:  # its devices have a copy
            served.release()
        with times.of("wait") if ahead else contextlib.nullcontext():
            drawn = rollouts.oldest()
        if ahead and step % runtime.config.run.check_every == 0:
            state, drift = _drift_ahead(runtime, state, rollouts.drawn_by(step))
            early |= drift

        # 2. Log-probabilities before the update, and under the reference policy.
        hold_settings()
        samples = drawn.samples
        _check_versions(runtime, samples, step)
        batch = engine.batch(samples.rollout, samples.prompts)
        with times.of("old_logprobs"):
            own = not runtime.resolved.takes_rollout_logprobs(doubted)
            batch = scored(engine, state, reference, batch, own)

        # 3. Advantages and weights.
        hold_settings()
        batch, weights = weighed(runtime.resolved.algorithm, samples, batch, algo.num_minibatches)

        # 4. Update; the sampler's weights are freed before it.
        hold_settings()
        if not ahead:
            served.release()
        schedule = engine.rl_optimizer.schedule
        with times.of("learner"):
            state, update = learn(
                engine.update, schedule, state, batch, algo.num_minibatches, algo.epochs
            )

        # 5. Refit.
        hold_settings()
        state = engine.advance(state, step + 1, drawn.position)
        rollouts.learnt()
        state = engine.calibrate(state, batch, times.of)
        with times.of("refit"):
            after = jax.block_until_ready(engine.refit(state))
    times["time_compile"] = compile_seconds() - compiled
    return StepResult(step + 1, state, after, served, drawn, batch, update, early | weights, times)


def _check_versions(runtime: Runtime, samples: Samples, step: int) -> None:
    """Asserts that no version older than the configuration allows drew a token. Newer ones draw
    behind a rollout that failed, or the end of a run that was extended."""
    rollout = runtime.config.rollout
    oldest = max(0, step - rollout.ahead - (rollout.most_versions - 1))
    versions = samples.versions[samples.rollout.mask]
    assert ((versions >= oldest) & (versions <= step)).all()


def _drift_ahead(
    runtime: Runtime, state: TrainState, drawn: Drawn | None
) -> tuple[TrainState, Metrics]:
    """Returns the drift of a rollout that `state` has drawn, and the state; {} without a rollout.
    `state` is donated. The step that learns from the rollout will have another policy.

    With one forward function the train step itself computes the log-probabilities, of one update's
    rows: no token counts, so the state stays as it is. Otherwise the learner scores all rows, and
    the scores are kept for the step that learns from them.
    """
    if drawn is None:
        return state, {}
    engine, samples = runtime.engine, drawn.samples
    batch = engine.batch(samples.rollout, samples.prompts)
    own = _comparable(batch, samples, int(state.step))
    if not own.any():
        return state, {}
    rows = slice(None)
    if runtime.resolved.same_forward:
        parts = np.split(own, runtime.config.algo.num_minibatches)
        first = int(np.argmax([part.any() for part in parts]))
        rows = slice(first * len(parts[0]), (first + 1) * len(parts[0]))
        nothing = dataclasses.replace(batch, weights=np.zeros_like(batch.weights))
        state, logp, _ = engine.update(state, jax.tree.map(lambda x: x[rows], nothing))
    else:
        logp = engine.score(state, batch)
        if (own == samples.rollout.mask).all():
            samples.learner_logprobs = logp
    return state, mismatch_metrics(logp, samples.rollout.logprobs[rows], own[rows])


def _comparable(batch: Batch, samples: Samples, step: int) -> np.ndarray:
    """Returns (B, R) bool, the tokens that the loss takes without those that other versions than
    `step` drew. One that no version drew is left in: that the loss takes it shows as drift."""
    older = samples.rollout.mask & (samples.versions != step)
    return (batch.mask > 0) & ~older


def metrics_of(runtime: Runtime, result: StepResult) -> Metrics:
    """Returns the metrics of a step, a line of metrics.jsonl."""
    updates, algo = result.update.updates, runtime.config.algo
    tokens = float(result.batch.mask.sum())
    record: Metrics = {"step": result.step} | result.drawn.metrics | result.times | result.early
    record["lr"] = result.update.learning_rate
    record |= update_metrics(updates, runtime.resolved.model, runtime.resolved.learner_recipe)
    record["tokens_per_s_learner"] = tokens / record["time_learner"]
    record |= learner_token_metrics(updates)
    shared = np.concatenate([update["shared"] for update in updates[: algo.num_minibatches]])
    flops = algo.epochs * useful_flops(runtime.resolved.model, result.batch.lengths, tokens, shared)
    mesh = runtime.layout.mesh
    gpu = gpus.of_kind(mesh.devices.flat[0].device_kind)
    peak = None if gpu is None else gpu.bf16
    record |= rate_metrics(record, flops, mesh.size, runtime.sampling.mesh.size, peak)
    record |= _compared(runtime, result, record.get(DRIFT_MAX, 0.0))
    if lost := result.before.health:
        first = first_layers(runtime.resolved.model, runtime.resolved.rollout_recipe)
        record |= loss_metrics({"weights": jax.device_get(lost)}, first)
    if result.before.sample:
        changed = changed_bytes(result.before.sample, result.served.sample)
        record["refit_changed_bytes"] = float(changed)
    if "time_calibrate" in record:
        record["calibrate_frac"] = record["time_calibrate"] / record["time_step"]
    return record | memory_metrics()


def _compared(runtime: Runtime, result: StepResult, of_later: float) -> Metrics:
    """Compares log-probabilities on the first update's rows, and the weights that both sides read.
    `of_later`: drift of a rollout ahead, which stands unless the step's own is larger."""
    logp, samples = result.update.logp, result.drawn.samples
    first = slice(0, len(logp))
    mask = result.batch.mask[first]
    recorded = samples.rollout.logprobs[first]
    metrics: Metrics = {}
    if runtime.resolved.stale:
        compared = mismatch_metrics(logp, recorded, mask)
        metrics |= {stale: compared[name] for name, stale in _STALE.items()}
        if not runtime.resolved.same_forward and samples.learner_logprobs is not None:
            changed = mismatch_metrics(logp, samples.learner_logprobs[first], mask)
            metrics |= {changed_name: changed[name] for name, changed_name in _CHANGED.items()}
    own = _comparable(result.batch, samples, result.step - 1)[first]
    if own.any():
        compared = mismatch_metrics(logp, recorded, own)
        if not (np.isnan(of_later) or of_later > compared[DRIFT_MAX]):
            metrics |= compared
    if runtime.resolved.same_forward:
        checksum = np.asarray(result.before.checksum)
        metrics["refit_checksum_ok"] = bool(result.update.updates[0]["checksum"] == checksum)
    return metrics
