"""The GRPO objective: advantages of grouped rewards, the clipped loss, the divergence from a
reference policy, and importance weights for a rollout whose policy is not the learner's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

MAX_LOG_RATIO = 20.0
_EPSILON = 1e-4  # added to a group's standard deviation


def group_advantages(rewards: np.ndarray, group_size: int, normalize_std: bool) -> np.ndarray:
    """GRPO's advantage: reward minus group mean, over group standard deviation + 1e-4.

    Args:
      rewards: (P * G,) float, prompt-major.
      group_size: G.
      normalize_std: divide by the group's standard deviation (GRPO, DeepSeekMath,
        arXiv:2402.03300, section 4.1.2); without it, Dr. GRPO (arXiv:2503.20783).

    Returns:
      (P * G,) float32.
    """
    groups = np.asarray(rewards, np.float64).reshape(-1, group_size)
    advantages = groups - groups.mean(axis=1, keepdims=True)
    equal = groups.max(axis=1) == groups.min(axis=1)
    advantages[equal] = 0.0  # the mean of equal numbers may differ from them in the last bit
    if normalize_std:
        advantages = advantages / (groups.std(axis=1, keepdims=True) + _EPSILON)
    return advantages.reshape(-1).astype(np.float32)


def zero_std_fraction(rewards: np.ndarray, group_size: int) -> float:
    """Share of groups whose rewards are all equal: they teach nothing."""
    groups = np.asarray(rewards).reshape(-1, group_size)
    return float(np.mean(groups.max(axis=1) == groups.min(axis=1)))


def tis_weights(learner_logp: np.ndarray, rollout_logp: np.ndarray, cap: float) -> np.ndarray:
    """Token-level truncated importance sampling: ``min(exp(D), cap)``.

    D = learner_logp - rollout_logp, clamped to +-20 first. FP8-RL, Miles and verl use
    cap = 2. The weights are constants for the gradient.

    Args:
      learner_logp, rollout_logp: (B, T) float32.
      cap: bound of the weight.

    Returns:
      (B, T) float32.
    """
    log_ratio = np.clip(
        learner_logp.astype(np.float64) - rollout_logp, -MAX_LOG_RATIO, MAX_LOG_RATIO
    )
    return np.minimum(np.exp(log_ratio), cap).astype(np.float32)


def k3(logp: jax.Array, ref_logp: jax.Array) -> jax.Array:
    """``exp(d) - d - 1`` with d = ref - logp: unbiased, never negative (Schulman, 2020).

    Args:
      logp, ref_logp: float32, of the same shape; ref_logp is constant.

    Returns:
      float32 of that shape, differentiable in logp.
    """
    d = jnp.clip(ref_logp - logp, -20.0, 20.0)
    series = d * d * (1 / 2 + d * (1 / 6 + d * (1 / 24 + d / 120)))
    # Near 0 the definition cancels in float32 and may fall below 0; the series does not.
    return jnp.where(jnp.abs(d) < 0.05, series, jnp.exp(d) - d - 1.0)


def clipped_policy_loss(
    logp: jax.Array,
    old_logp: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    clip_low: float,
    clip_high: float,
    weights: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Sum over tokens of ``-w * min(r A, clip(r, 1 - low, 1 + high) A)``, r = exp(logp - old).

    PPO's clipped objective (arXiv:1707.06347, equation 7) with GRPO's group advantage; `clip_high`
    above `clip_low` is DAPO's clip-higher (arXiv:2503.14476). The caller divides by its token
    count (token-level mean). logp - old is clamped to +-20 first, beyond which no gradient flows.

    Args:
      logp, old_logp: (B, T) float32; old_logp is constant.
      advantages: (B,) float32.
      mask: (B, T) float32, 1 for response tokens.
      clip_low, clip_high: distances of the bounds from 1.
      weights: (B, T) importance weights of a rollout correction, constant; None for 1.

    Returns:
      The sum, and sums over tokens: clipped_low, clipped_high, ratio, as float32 scalars.
    """
    log_ratio = jnp.clip((logp - old_logp) * mask, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = jnp.exp(log_ratio)  # clamped first: 0 * inf would be NaN
    advantage = advantages[:, None]
    clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    loss = -jnp.minimum(ratio * advantage, clipped * advantage) * mask
    if weights is not None:
        loss = loss * weights
    sums = {
        "clipped_low": ((ratio < 1.0 - clip_low) & (advantage < 0)) * mask,
        "clipped_high": ((ratio > 1.0 + clip_high) & (advantage > 0)) * mask,
        "ratio": ratio * mask,
    }
    return loss.sum(), {name: jax.lax.stop_gradient(x.sum()) for name, x in sums.items()}
