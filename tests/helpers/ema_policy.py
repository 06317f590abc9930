"""The user's own scaling policy of docs/recipes.md, as a module that a config can name."""

import jax.numpy as jnp

from fp8rl_jax.quant import ScalingPolicy


def ema():
    """Scales follow a moving average of the amax, with a factor two of headroom."""

    def scale(state, amax, fp8_max):
        return jnp.where(state > 0, fp8_max / (2 * state), 1.0)

    def update(state, amax):
        mean = jnp.where(state > 0, 0.9 * state + 0.1 * amax, amax)
        return jnp.where(jnp.isfinite(amax) & (amax > 0), mean, state)

    return ScalingPolicy(jnp.zeros, scale, update)
