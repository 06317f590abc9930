"""Choice of the next token: temperature, top-k, top-p, greedy. Random bits follow the sample.

``key = fold_in(fold_in(fold_in(run_key, step), sample_id), position)``: which row, batch or device
a sample sits in changes nothing. Top-k and top-p mask tokens for the choice alone; the recorded
log-probability is over the full vocabulary (models/logprobs.py).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def sample_keys(key: jax.Array, sample_ids: jax.Array, positions: jax.Array) -> jax.Array:
    """One key per row from a step's key, sample ids (B,) and positions (B,)."""
    return jax.vmap(lambda i, p: jax.random.fold_in(jax.random.fold_in(key, i), p))(
        sample_ids, positions
    )


def mask_top_k(logits: jax.Array, top_k: int) -> jax.Array:
    """Keeps the k largest logits of each row (ties of the k-th stay); the others become -inf."""
    threshold = jax.lax.top_k(logits, top_k)[0][:, -1:]
    return jnp.where(logits >= threshold, logits, -jnp.inf)


def mask_top_p(logits: jax.Array, top_p: float) -> jax.Array:
    """Keeps the smallest set of most likely tokens whose probability reaches `top_p`.

    Nucleus sampling (Holtzman et al., arXiv:1904.09751). The most likely token always stays.
    """
    ordered = jnp.sort(logits, axis=-1, descending=True)
    probability = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    threshold = jnp.min(jnp.where(before < top_p, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= threshold, logits, -jnp.inf)


def _first_largest(x: jax.Array) -> jax.Array:
    """(B,) int32 argmax of x (B, W); 0 for a row with NaN.

    As a maximum and a search: XLA:CPU computes what an argmax reads number by number, logarithms of
    the noise included, which takes twice as long.
    """
    x = jax.lax.optimization_barrier(x)
    width = x.shape[1]
    place = jnp.where(x == x.max(axis=-1, keepdims=True), jnp.arange(width, dtype=jnp.int32), width)
    return place.min(axis=-1) % width


def choose(
    scaled: jax.Array, keys: jax.Array, temperature: jax.Array, top_k: int, top_p: float
) -> jax.Array:
    """Next token of each row.

    Args:
      scaled: (B, W) logits over temperature.
      keys: (B,) random keys.
      temperature: (B,); 0 takes the most likely token.
      top_k: keep this many tokens, 0 for all.
      top_p: keep this much probability, 1.0 for all.

    Returns:
      (B,) int32.
    """
    masked = mask_top_k(scaled, top_k) if top_k else scaled
    if top_p < 1.0:
        masked = mask_top_p(masked, top_p)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (scaled.shape[1],), jnp.float32))(keys)
    greedy = (temperature == 0)[:, None]
    return _first_largest(jnp.where(greedy, scaled, masked + noise))
