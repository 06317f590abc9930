"""Estimators of the divergence from a reference policy, per token.

With d = ref - logp (Schulman, "Approximating KL divergence", 2020). As a loss, k3 has a biased
gradient, k1 one of expectation 0, and k2 the divergence's own gradient if the responses are the
policy's; ``k3+`` has k3's value and k2's gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fp8rl_jax.rl.corrections import MAX_LOG_RATIO

Estimator = Callable[[jax.Array, jax.Array], jax.Array]


def _difference(logp: jax.Array, ref_logp: jax.Array) -> jax.Array:
    return jnp.clip(ref_logp - logp, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def k1(logp: jax.Array, ref_logp: jax.Array) -> jax.Array:
    """Returns ``-d``: unbiased, of either sign.

    Args:
      logp, ref_logp: float32 log-probabilities of the same shape; ref_logp is constant.

    Returns:
      float32 of that shape, differentiable in logp.
    """
    return jnp.clip(logp - ref_logp, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def k2(logp: jax.Array, ref_logp: jax.Array) -> jax.Array:
    """Returns ``d^2 / 2``."""
    return 0.5 * _difference(logp, ref_logp) ** 2


def k3(logp: jax.Array, ref_logp: jax.Array) -> jax.Array:
    """Returns ``exp(d) - d - 1``: unbiased, never negative."""
    d = _difference(logp, ref_logp)
    series = d * d * (1 / 2 + d * (1 / 6 + d * (1 / 24 + d / 120)))
    # Near 0 the definition cancels in float32 and may fall below 0; the series does not.
    return jnp.where(jnp.abs(d) < 0.05, series, jnp.exp(d) - d - 1.0)


def absolute(logp: jax.Array, ref_logp: jax.Array) -> jax.Array:
    """Returns ``|d|``, with gradient 0 at 0."""
    d = _difference(logp, ref_logp)
    return jax.lax.stop_gradient(jnp.sign(d)) * d


def straight_through(estimator: Estimator) -> Estimator:
    """Returns an estimator with the given one's value and k2's gradient (see the module)."""

    def estimate(logp, ref_logp):
        slope = k2(logp, ref_logp)
        slope = slope - jax.lax.stop_gradient(slope)  # 0, with k2's gradient
        return jax.lax.stop_gradient(estimator(logp, ref_logp)) + slope

    return estimate


_PLAIN = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute}
ESTIMATORS: dict[str, Estimator] = {
    **_PLAIN,
    **{f"{name}+": straight_through(function) for name, function in _PLAIN.items()},
}
