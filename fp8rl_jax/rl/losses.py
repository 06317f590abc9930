"""The clipped policy loss over response tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fp8rl_jax.rl.corrections import MAX_LOG_RATIO


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
