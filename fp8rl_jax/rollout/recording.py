"""Intermediate values of a rollout, kept as the KV cache keeps its keys: slot == position.

Prefill and every decode step tap the same names (models/taps.py); here they are laid into buffers
that line up with the learner's sequences.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fp8rl_jax.models.taps import batch_axis


def begin(prefill: dict[str, jax.Array], group_size: int, slots: int) -> dict[str, jax.Array]:
    """Buffers that hold the prompts' values.

    Args:
      prefill: {name: (L, P, Tp, ...), or (P, Tp, ...) for MODEL_TAPS}.
      group_size: G, samples per prompt.
      slots: S, positions of a whole sequence, at least Tp.

    Returns:
      {name: (L, P * G, S, ...) or (P * G, S, ...)}, zeros from Tp on.
    """

    def buffer(name: str, x: jax.Array) -> jax.Array:
        batch = batch_axis(name)
        x = jnp.repeat(x, group_size, axis=batch)
        widths = [(0, 0)] * x.ndim
        widths[batch + 1] = (0, slots - x.shape[batch + 1])
        return jnp.pad(x, widths)

    return {name: buffer(name, x) for name, x in prefill.items()}


def write(
    buffers: dict[str, jax.Array], new: dict[str, jax.Array], positions: jax.Array
) -> dict[str, jax.Array]:
    """`buffers` with one decode step's values (T = 1) at `positions` (B,)."""
    rows = jnp.arange(positions.shape[0])

    def put(name: str, old: jax.Array, x: jax.Array) -> jax.Array:
        if batch_axis(name) == 0:
            return old.at[rows, positions].set(x[:, 0])
        return old.at[:, rows, positions].set(x[:, :, 0])

    return {name: put(name, buffers[name], x) for name, x in new.items()}
