"""The learner's half of an RL step: score, weigh, update.

The RL step (step.py) and the Python API's `train_step` both call it. Nothing here knows of a run,
its files or its clock.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from fp8rl_jax.batch import Batch
from fp8rl_jax.learner import TrainState
from fp8rl_jax.rl import Algorithm, Outcomes, prepare
from fp8rl_jax.training.engine import JaxEngine
from fp8rl_jax.training.optimizer import updates_made
from fp8rl_jax.training.sample_step import Samples


class NonFiniteUpdate(Exception):
    """Loss or gradients of an update are not finite, so it was not made.

    Attributes:
      metrics: metrics of the update.
      unchanged: the state before it if no update of the step was made; else None.
    """

    def __init__(self, metrics: dict[str, Any], unchanged: TrainState | None):
        super().__init__(f"loss {float(metrics['loss'])}")
        self.metrics = metrics
        self.unchanged = unchanged


@dataclasses.dataclass(frozen=True)
class Update:
    """The optimiser updates of a step.

    Attributes:
      logp: (N, R) float32, log-probabilities that the first update's forward pass computed.
      updates: metrics of each update on the host (`JaxEngine.update`), and its `counts` (N, R)
        bool, which tokens its loss takes.
      learning_rate: that of the first update.
    """

    logp: np.ndarray
    updates: list[dict[str, Any]]
    learning_rate: float


def scored(
    engine: JaxEngine, state: TrainState, reference: TrainState | None, batch: Batch, own: bool
) -> Batch:
    """Returns the batch with log-probabilities before the update and under the reference policy.

    Args:
      engine: engine that scores.
      state: state before the update.
      reference: a state with the reference policy; None without one.
      batch: batch with the sampler's log-probabilities.
      own: whether the learner's log-probabilities replace the sampler's.
    """
    if own:
        old = np.where(batch.mask > 0, engine.score(state, batch), 0.0)
        batch = dataclasses.replace(batch, old_logprobs=old)
    if reference is not None:
        batch = dataclasses.replace(batch, ref_logprobs=engine.score_reference(reference, batch))
    return batch


def weighed(algorithm: Algorithm, samples: Samples, batch: Batch) -> tuple[Batch, dict[str, float]]:
    """Returns the batch with advantages and weights of its tokens, and their metrics.

    Args:
      algorithm: gives them.
      samples: the samples of the batch, with their rewards.
      batch: result of `scored`.
    """
    rollout = samples.rollout
    outcomes = Outcomes(
        rewards=samples.rewards,
        mask=rollout.mask,
        finished=rollout.finished,
        old_logprobs=batch.old_logprobs,
        rollout_logprobs=rollout.logprobs,
        ref_logprobs=batch.ref_logprobs,
        keep_groups=samples.counts,
        turns=samples.turns,
        lengths=rollout.lengths,
    )
    prepared = prepare(algorithm, outcomes)
    token_weights = [
        algorithm.aggregation(keep) for keep in np.split(prepared.keep, algorithm.minibatches)
    ]
    batch = dataclasses.replace(
        batch,
        advantages=prepared.advantages,
        rollout_weights=prepared.rollout_weights,
        weights=np.concatenate(token_weights).astype(np.float32),
    )
    return batch, prepared.metrics


def learn(
    engine: JaxEngine, algorithm: Algorithm, state: TrainState, batch: Batch, train_step: Any = None
) -> tuple[TrainState, Update]:
    """Makes all optimiser updates of a step, and returns the state after them.

    Args:
      engine: engine that updates.
      algorithm: numbers of mini-batches and epochs.
      state: state before the updates, which the train step may donate.
      batch: result of `weighed`.
      train_step: result of `JaxEngine.train_step`, by default that of RL.

    Raises:
      NonFiniteUpdate: loss or gradients are not finite.
    """
    learning_rate = float(engine.rl_optimizer.schedule(updates_made(state.opt_state)))
    rows = len(batch.mask) // algorithm.minibatches
    logps: list[np.ndarray] = []
    updates: list[dict] = []
    for index in range(algorithm.epochs * algorithm.minibatches):
        begin = index % algorithm.minibatches * rows
        part = jax.tree.map(lambda x, begin=begin: x[begin : begin + rows], batch)
        state, logp, metrics = engine.update(state, part, train_step)
        if not metrics["good"]:
            raise NonFiniteUpdate(metrics, None if updates else state)
        logps.append(logp)
        updates.append(metrics | {"counts": part.weights != 0})
    return state, Update(logps[0], updates, learning_rate)
