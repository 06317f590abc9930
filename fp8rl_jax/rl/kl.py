"""Estimators of the divergence from a reference policy, per token."""

from __future__ import annotations

import jax
import jax.numpy as jnp


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
