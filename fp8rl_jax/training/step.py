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

import dataclasses

import jax
import numpy as np

from fp8rl_jax.batch import Batch
from fp8rl_jax.learner import TrainState
from fp8rl_jax.plan import gpus
from fp8rl_jax.plan.times import useful_flops
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
      state, served: state after the step, and the weights that the next step samples with.
      before: the weights that the step began with; given up, but for their checksum and sample.
      drawn: the rollout that the step learnt from.
      batch: what it learnt from.
      update: the updates.
      early: what was measured before the updates: ages of scales, advantages, and the drift of a
        rollout ahead.
      times: seconds of the parts.
    """

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
    rescore: bool = False,
) -> StepResult:
    """Runs one step.

    Args:
      runtime: result of `make_runtime`.
      state, served: those of the previous step's result; `state` is donated.
      reference: a state with the reference policy; None if the algorithm needs none.
      rollouts: rollouts that were begun; the oldest is this step's.
      rescore: whether the learner's log-probabilities before the update replace the recorded ones.

    Raises:
      RewardError: every call of a reward failed; `state` is unchanged.
      NonFiniteUpdate: loss or gradients are not finite.
    """
    engine = runtime.engine
    with Times().of("step") as times:
        # 1. Sample a group of responses for each question, and reward them.
        drawn = rollouts.next(state, served, times)
        state, early = _measured(runtime, state, rollouts)

        # 2. Log-probabilities before the update, and under the reference policy.
        with times.of("old_logprobs"):
            batch = engine.batch(drawn.samples.rollout, drawn.samples.prompts)
            batch = scored(engine, state, reference, batch, rescore)

        # 3. Advantages and weights.
        batch, weights = weighed(runtime.resolved.algorithm, drawn.samples, batch)
        rollouts.watch("reward", int(state.step) + 1, batch=batch)

        # 4. Update; the sampler's weights are freed before it.
        if not rollouts.share_weights:
            served.release()
        with times.of("learner"):
            state, update = learn(engine, runtime.resolved.algorithm, state, batch)

        # 5. Refit.
        state = engine.advance(state, drawn.position)
        state = engine.calibrate(state, batch, times.of)
        with times.of("refit"):
            after = jax.block_until_ready(engine.refit(state))
        rollouts.learnt()
    return StepResult(state, after, served, drawn, batch, update, early | weights, times)


def _measured(
    runtime: Runtime, state: TrainState, rollouts: Rollouts
) -> tuple[TrainState, Metrics]:
    """Returns what is measured between rollout and update, the ages of scales and the drift of a
    rollout ahead, and the state, which is donated."""
    step = int(state.step)
    ages: Metrics = age_metrics(state.scaling_state, step) if state.scaling_state else {}
    assert not ages.get("scale_age/kv"), "scales of keys and values are of other weights"
    if not runtime.config.rollout.ahead or step % runtime.config.run.check_every:
        return state, ages
    state, drift = _drift_ahead(runtime, state, rollouts.drawn_by(step))
    return state, ages | drift


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
    samples = drawn.samples
    batch = runtime.engine.batch(samples.rollout, samples.prompts)
    own = _comparable(batch, samples, int(state.step))
    if not own.any():
        return state, {}
    rows = slice(None)
    if runtime.resolved.same_forward:
        parts = np.split(own, runtime.resolved.algorithm.minibatches)
        first = int(np.argmax([part.any() for part in parts]))
        rows = slice(first * len(parts[0]), (first + 1) * len(parts[0]))
        nothing = dataclasses.replace(batch, weights=np.zeros_like(batch.weights))
        state, logp, _ = runtime.engine.update(state, jax.tree.map(lambda x: x[rows], nothing))
    else:
        logp = runtime.engine.score(state, batch)
        if (own == samples.rollout.mask).all():
            samples.learner_logprobs = logp
    return state, mismatch_metrics(logp, samples.rollout.logprobs[rows], own[rows])


def _comparable(batch: Batch, samples: Samples, step: int) -> np.ndarray:
    """Returns (B, R) bool, the tokens that the loss takes without those that other versions than
    `step` drew. One that no version drew is left in: that the loss takes it shows as drift."""
    return (batch.mask > 0) & ~(samples.rollout.mask & (samples.versions != step))


def metrics_of(runtime: Runtime, result: StepResult) -> Metrics:
    """Returns the metrics of a step, a line of metrics.jsonl."""
    resolved = runtime.resolved
    updates = result.update.updates
    tokens = float(result.batch.mask.sum())
    record: Metrics = {"step": int(result.state.step)}
    record |= result.drawn.metrics | result.times | result.early
    record["lr"] = result.update.learning_rate
    record |= update_metrics(updates, resolved.model, resolved.learner_recipe)
    record["tokens_per_s_learner"] = tokens / record["time_learner"]
    record |= learner_token_metrics(updates)
    first_epoch = updates[: resolved.algorithm.minibatches]
    shared = np.concatenate([update["shared"] for update in first_epoch])
    flops = useful_flops(resolved.model, result.batch.lengths, tokens, shared)
    flops *= resolved.algorithm.epochs
    mesh = runtime.layout.mesh
    gpu = gpus.of_kind(mesh.devices.flat[0].device_kind)
    peak = None if gpu is None else gpu.bf16
    record |= rate_metrics(record, flops, mesh.size, runtime.sampling.mesh.size, peak)
    record |= _compared(runtime, result, record.get(DRIFT_MAX, 0.0))
    if lost := result.before.health:
        first = first_layers(resolved.model, resolved.rollout_recipe)
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
    logp = result.update.logp
    samples = result.drawn.samples
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
    own = _comparable(result.batch, samples, int(result.state.step) - 1)[first]
    if own.any():
        compared = mismatch_metrics(logp, recorded, own)
        if not (np.isnan(of_later) or of_later > compared[DRIFT_MAX]):
            metrics |= compared
    if runtime.resolved.same_forward:
        checksum = np.asarray(result.before.checksum)
        metrics["refit_checksum_ok"] = bool(result.update.updates[0]["checksum"] == checksum)
    return metrics
