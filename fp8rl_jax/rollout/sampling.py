"""Draws the next token, or takes the most likely one. Random bits depend on the sample alone.

``key = fold_in(fold_in(fold_in(run_key, step), sample_id), position)``: the row, batch or device of
a sample changes nothing. Logits come divided by the temperature, those of tokens that top-k and
top-p leave out as -inf (models/truncation.py).

Tokens are drawn by inverting the cumulative distribution, with two uniform numbers a row: one
chooses a block of tokens, the other a token of the block. Noise for every token of the vocabulary
(the Gumbel-max trick) would take more time on a CPU than a small model's layers. All sums are
additions of slices in an order fixed here, so that a row's token does not depend on the number of
rows; XLA's own reductions and cumulative sums promise no order.

Resolution: a uniform number is a multiple of 2^-24, and sums are float32. A block of probability q
is therefore chosen with probability q + e, |e| about 2^-24 (6e-8), and so is a token within its
block: the relative error of a token's probability is about 2^-24 over that of its block. A block of
a probability far below 2^-24 may never be chosen.
"""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8rl_jax.kernels import EXP_LANES, folded, max_last

_BLOCK = 64  # largest number of tokens in a block
_STRIDE = 8  # terms added at a time in cumulative sums


def sample_keys(key: jax.Array, sample_ids: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns one key per row.

    Args:
      key: key of the step, or (B,) the key of each row's step.
      sample_ids, positions: (B,).
    """

    def of_row(key, sample_id, position):
        return jax.random.fold_in(jax.random.fold_in(key, sample_id), position)

    return jax.vmap(of_row, in_axes=(0 if key.ndim else None, 0, 0))(key, sample_ids, positions)


def _first(found: jax.Array) -> jax.Array:
    """Returns the (B,) int32 index of the first True of found (B, N); 0 in a row without True."""
    width = found.shape[1]
    place = jnp.where(found, jnp.arange(width, dtype=jnp.int32), width)
    return folded(place, jnp.minimum).min(axis=1) % width


def _cumulative(x: jax.Array) -> jax.Array:
    """Returns cumulative sums of x (B, N) float32 along a row, in steps that widen by `_STRIDE`."""
    width = x.shape[1]
    span = 1
    while span < width:
        reach = (_STRIDE - 1) * span
        behind = jnp.pad(x, ((0, 0), (reach, 0)))
        x = functools.reduce(
            operator.add, [behind[:, n : n + width] for n in range(reach, -1, -span)]
        )
        x = lax.optimization_barrier(x)  # else the next step recomputes this one for every term
        span *= _STRIDE
    return x


def invert(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Returns each row's first entry whose cumulative sum exceeds a share of the row's total.

    An entry of weight 0 is never taken, though its cumulative sum may be larger than the one before
    it: entries' sums are rounded differently. The entry with the largest cumulative sum counts as
    exceeding any share.

    Args:
      weights: (B, N) float32, at least 0.
      uniform: (B,) float32, the share, in [0, 1).

    Returns:
      (B,) int32; 0 for rows without a weight above 0, and for rows with NaN.
    """
    there = weights > 0
    sums = jnp.where(there, _cumulative(weights), 0.0)
    total = max_last(sums)[:, None]
    exceeds = (sums > uniform[:, None] * total) | (sums == total)
    return _first(there & exceeds)


def draw(weights: jax.Array, uniforms: jax.Array) -> jax.Array:
    """Draws a token of each row by unnormalised probabilities.

    Token t is in block ``t % blocks``, so that the sums of all blocks are additions of slices.

    Args:
      weights: (B, W) float32, at least 0.
      uniforms: (B, 2) float32 in [0, 1), for the block and for the token within it.

    Returns:
      (B,) int32; a token whose weight is above 0; 0 if a row has no such weight, or NaN.
    """
    rows, width = weights.shape
    blocks = -(-width // _BLOCK)
    blocks += -blocks % EXP_LANES
    each = -(-width // blocks)
    weights = jnp.pad(weights, ((0, 0), (0, each * blocks - width))).reshape(rows, each, blocks)
    sums = functools.reduce(operator.add, [weights[:, i] for i in range(each)])
    block = invert(sums, uniforms[:, 0])
    inside = jnp.take_along_axis(weights, block[:, None, None], axis=2)[..., 0]
    return invert(inside, uniforms[:, 1]) * blocks + block


def sample_token(scaled: jax.Array, keys: jax.Array, temperature: jax.Array) -> jax.Array:
    """Draws the next token of each row.

    Args:
      scaled: (B, W) logits divided by the temperature; -inf for tokens that may not be drawn.
      keys: (B,) random keys.
      temperature: (B,); 0 takes the most likely token, the first one of equals.

    Returns:
      (B,) int32; 0 for a row with NaN.
    """
    top = max_last(scaled)[:, None]  # the log-probability takes the same maximum: computed once
    missing = -scaled.shape[1] % EXP_LANES
    padded = jnp.pad(scaled, ((0, 0), (0, missing)), constant_values=-jnp.inf)
    weights = lax.optimization_barrier(jnp.exp(padded - top))
    bits = jax.vmap(lambda key: jax.random.bits(key, (2,), jnp.uint32))(keys)
    # Multiples of 2^-24 below 1; `jax.random.uniform` gives multiples of 2^-23.
    uniforms = (bits >> 8).astype(jnp.float32) * np.float32(2.0**-24)
    drawn = draw(weights, uniforms)
    return jnp.where(temperature == 0, _first(scaled == top), drawn)
