"""Composes an algorithm from small pure functions, and computes its part before an update.

Everything without a gradient is computed here, on the host, once per step and in this order:
penalty for length, baseline, scale, divergence in the reward, tokens to keep, weights of
corrections. Advantages are computed before tokens are dropped, denominators after.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from fp8rl_jax.base.by_name import choose
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.rl.advantages import BASELINES, SCALES, Baseline, Scale, no_scale, token_std
from fp8rl_jax.rl.aggregation import AGGREGATIONS, Aggregation
from fp8rl_jax.rl.corrections import CORRECTIONS, Correction, effective_sample_size
from fp8rl_jax.rl.kl import ESTIMATORS, Estimator
from fp8rl_jax.rl.losses import LOSSES, TokenLoss
from fp8rl_jax.rl.shaping import overlong_penalty


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """The functions and settings that section `algo` chooses; see its fields.

    Attributes:
      baseline, scale, aggregation, loss: functions of advantages.py, aggregation.py, losses.py.
      corrections: {name: correction}, applied together.
      kl: estimator of the divergence in the loss; None without one.
      kl_coef, kl_in_reward: weight of the divergence, and whether it is part of the reward.
      length: number of tokens that a response may have.
      overlong_buffer, overlong_factor: arguments of `overlong_penalty`.
      mask_truncated: leave out responses whose end was cut at a length limit.
      dynamic_sampling: sample more questions instead of groups with equal rewards.
      credit_by_turn: count for a token the rewards from its reply on, not those of the response.
      minibatches: number of equal parts of a step's batch that get an update each.
      epochs: passes over the batch.
    """

    baseline: Baseline
    scale: Scale
    aggregation: Aggregation
    loss: TokenLoss
    corrections: dict[str, Correction]
    kl: Estimator | None
    kl_coef: float
    kl_in_reward: bool
    length: int
    overlong_buffer: int
    overlong_factor: float
    mask_truncated: bool
    dynamic_sampling: bool
    credit_by_turn: bool = False
    minibatches: int = 1
    epochs: int = 1

    @property
    def needs_reference(self) -> bool:
        """Whether a reference policy scores the responses."""
        return self.kl_coef > 0


def algorithm_of(algo, max_new_tokens: int, correction: str) -> Algorithm:
    """Returns the algorithm that the section `algo` of a configuration describes.

    Args:
      algo: the section.
      max_new_tokens: number of tokens that a response may have.
      correction: `algo.correction`, with 'auto' resolved.

    Raises:
      UserError: a name is unknown or its arguments do not fit.
    """
    ((_, loss),) = choose(
        algo.loss, LOSSES, "algo.loss", most=1, clip_low=algo.clip_low, clip_high=algo.clip_high
    )
    ((_, aggregation),) = choose(
        algo.loss_aggregation, AGGREGATIONS, "algo.loss_aggregation", most=1, length=max_new_tokens
    )
    corrections = choose(correction, CORRECTIONS, "algo.correction") if correction != "none" else []
    if len({name for name, _ in corrections}) < len(corrections):
        raise UserError(f"algo.correction is {correction!r}: write each correction once")
    buffer = algo.overlong_buffer
    return Algorithm(
        baseline=BASELINES[algo.baseline],
        scale=SCALES[algo.scale],
        aggregation=aggregation,
        loss=loss,
        corrections=dict(corrections),
        kl=ESTIMATORS[algo.kl_estimator] if algo.kl_coef and algo.kl_in == "loss" else None,
        kl_coef=algo.kl_coef,
        kl_in_reward=algo.kl_in == "reward",
        length=max_new_tokens,
        overlong_buffer=max_new_tokens // 5 if buffer < 0 else buffer,
        overlong_factor=algo.overlong_penalty,
        mask_truncated=algo.mask_truncated,
        dynamic_sampling=algo.dynamic_sampling,
        credit_by_turn=algo.credit == "turn",
        minibatches=algo.num_minibatches,
        epochs=algo.epochs,
    )


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Advantages and weights of a step's tokens, (B, R) each.

    Attributes:
      advantages, rollout_weights: float32; rollout_weights come from the corrections.
      keep: bool, the tokens that count.
      metrics: {name: number}.
    """

    advantages: np.ndarray
    rollout_weights: np.ndarray
    keep: np.ndarray
    metrics: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Outcomes:
    """Rewards and log-probabilities of a step's responses: P questions with G each, B = P * G.

    Attributes:
      rewards: (P, G) float. Responses with nan were not scored: their advantage is 0, and their
        tokens do not count.
      mask: (B, R) bool, response tokens that were drawn.
      finished: (B,) bool, False for responses whose last reply was cut at a length limit.
      old_logprobs, rollout_logprobs, ref_logprobs: (B, R) float32 log-probabilities of the learner
        before the update, the sampler, and the reference policy (read if the algorithm needs it).
      keep_groups: (P,) bool, groups that count; None for all.
      turns: (B, K) float, what the environment gave for each reply, which is part of the rewards;
        None for responses of one reply.
      lengths: (B,) tokens of the responses, with those of the environment; None if all were drawn.
    """

    rewards: np.ndarray
    mask: np.ndarray
    finished: np.ndarray
    old_logprobs: np.ndarray
    rollout_logprobs: np.ndarray
    ref_logprobs: np.ndarray
    keep_groups: np.ndarray | None = None
    turns: np.ndarray | None = None
    lengths: np.ndarray | None = None


def prepare(algorithm: Algorithm, outcomes: Outcomes) -> Prepared:
    """Computes advantages and weights of a step's responses."""
    shaped = np.asarray(outcomes.rewards, np.float64)
    scored = ~np.isnan(shaped).reshape(-1, 1)
    mask = outcomes.mask & scored
    penalty: np.ndarray | float = 0.0
    if algorithm.overlong_buffer:
        penalty = overlong_penalty(
            outcomes.mask.sum(1) if outcomes.lengths is None else outcomes.lengths,
            algorithm.length,
            algorithm.overlong_buffer,
            algorithm.overlong_factor,
        ).reshape(shaped.shape)
    shaped = shaped + penalty
    advantages = _advantages(algorithm, outcomes, shaped, scored)

    keep = mask.copy()
    if algorithm.mask_truncated:
        keep &= outcomes.finished[:, None]
    if outcomes.keep_groups is not None:
        keep &= np.repeat(outcomes.keep_groups, shaped.shape[1])[:, None]
    metrics: dict[str, float] = {}
    log_ratio = np.where(
        mask, outcomes.old_logprobs.astype(np.float64) - outcomes.rollout_logprobs, 0.0
    )
    weights = np.ones(mask.shape)
    candidates = keep
    for name, correction in algorithm.corrections.items():
        factors, kept = correction(log_ratio, candidates, advantages)
        weights = weights * factors
        keep = keep & kept
        metrics |= _weight_metrics(name, factors, candidates, kept)
    metrics |= {
        "advantage_mean": _mean(advantages, mask),
        "advantage_std": float(advantages[mask].std()) if mask.any() else 0.0,
        "advantage_abs_max": float(np.abs(advantages).max()),
        "advantage_nonzero_frac": _mean(advantages != 0, mask),
        "kept_tokens_frac": _mean(keep, mask),
        "kept_sequences_frac": float(keep.any(axis=1).sum() / max(mask.any(axis=1).sum(), 1)),
    }
    if algorithm.overlong_buffer:
        metrics["overlong_penalty_mean"] = float(np.mean(penalty))
    return Prepared(advantages.astype(np.float32), weights.astype(np.float32), keep, metrics)


def _advantages(
    algorithm: Algorithm, outcomes: Outcomes, rewards: np.ndarray, scored: np.ndarray
) -> np.ndarray:
    """Returns advantages (B, R) of tokens; `rewards` (P, G) are those with the penalty, `scored`
    (B, 1) bool marks the responses that have one."""
    mask = outcomes.mask & scored
    scale = algorithm.scale
    if algorithm.credit_by_turn and outcomes.turns is not None:
        of_turn, scale = (no_scale, scale) if scale is token_std else (scale, no_scale)
        advantages = _from_turn_on(algorithm.baseline, of_turn, rewards, mask, outcomes.turns)
    else:
        advantages = algorithm.baseline(rewards).reshape(-1, 1) * np.ones(mask.shape)
    advantages = np.where(scored, advantages, 0.0)
    divergence = np.zeros(mask.shape)
    if algorithm.kl_in_reward and algorithm.kl_coef:
        each = np.where(mask, outcomes.old_logprobs.astype(np.float64) - outcomes.ref_logprobs, 0.0)
        divergence = algorithm.kl_coef * np.cumsum(each[:, ::-1], axis=1)[:, ::-1]  # from t on
    if scale is token_std:  # REINFORCE++ subtracts the divergence, then normalises
        return scale(advantages - divergence, rewards, mask)
    return scale(advantages, rewards, mask) - np.where(mask, divergence, 0.0)


def reply_numbers(mask: np.ndarray) -> np.ndarray:
    """Returns (B, R) int, the number from 0 on of each drawn token's reply; `mask` (B, R) bool
    marks the drawn tokens. -1 before a response's first."""
    begins = mask & ~np.pad(mask, ((0, 0), (1, 0)))[:, :-1]
    return np.cumsum(begins, axis=1) - 1


def _from_turn_on(
    baseline: Baseline, scale: Scale, rewards: np.ndarray, mask: np.ndarray, turns: np.ndarray
) -> np.ndarray:
    """Returns advantages (B, R) of tokens by the rewards from their reply on: a reply is compared
    with the group's replies of the same number, in baseline and scale. Arguments are those of
    `prepare`."""
    number = reply_numbers(mask)
    before = np.cumsum(turns, axis=1) - turns  # what was given before each reply
    advantages = np.zeros(mask.shape)
    for turn in range(turns.shape[1]):
        here = mask & (number == turn)
        left = np.where(here.any(1), rewards.reshape(-1) - before[:, turn], np.nan)
        left = left.reshape(rewards.shape)
        of_rows = np.where(here, baseline(left).reshape(-1, 1), 0.0)
        advantages = np.where(here, scale(of_rows, left, here), advantages)
    return advantages


def _mean(x: np.ndarray, mask: np.ndarray) -> float:
    return float(x[mask].mean()) if mask.any() else 0.0


def _weight_metrics(name: str, weights, mask, kept) -> dict[str, float]:
    """Returns statistics of one correction's weights over the tokens of the mask."""
    if not mask.any():
        return {}
    w = weights[mask]
    return {
        f"correction/{name}_mean": float(w.mean()),
        f"correction/{name}_min": float(w.min()),
        f"correction/{name}_max": float(w.max()),
        f"correction/{name}_ess": effective_sample_size(w),
        f"correction/{name}_dropped": 1.0 - _mean(kept, mask),
    }
