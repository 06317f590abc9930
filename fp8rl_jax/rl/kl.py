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
    difference = jnp.clip(ref_logp - logp, -20.0, 20.0)
    return jnp.exp(difference) - difference - 1.0
