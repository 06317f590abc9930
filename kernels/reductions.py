"""Sums and maxima over a last axis, in an order that its length alone decides.

XLA:CPU reduces a last axis number by number. Here equal slices of it are combined first, lane by
lane, in ascending order, until 16 numbers (or an odd rest) are left for a reduction. That is
several times faster, and the order is written down instead of left to a compiler.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

_LANES = 16  # numbers that one instruction combines
_MOST_SLICES = 16  # combined in one step, in registers


def folded(x: jax.Array, combine: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """(..., W) -> (..., w): slices of the last axis combined; w is at most 16, or an odd multiple
    of 16, or W where that is no multiple of 32."""
    width = x.shape[-1]
    while width % (2 * _LANES) == 0:
        slices = max(n for n in range(2, _MOST_SLICES + 1) if width % (_LANES * n) == 0)
        width //= slices
        parts = [x[..., i * width : (i + 1) * width] for i in range(slices)]
        x = functools.reduce(combine, parts)
    return x


def sum_last(x: jax.Array) -> jax.Array:
    """Sum of float32 over the last axis."""
    return folded(x, jnp.add).sum(-1)


def sum_rows(x: jax.Array) -> jax.Array:
    """Sum of float32 (M, N) over its rows, (N,); parts of the rows are added to each other."""
    while x.shape[0] > 1 and any(x.shape[0] % n == 0 for n in range(2, _MOST_SLICES + 1)):
        parts = max(n for n in range(2, _MOST_SLICES + 1) if x.shape[0] % n == 0)
        x = functools.reduce(jnp.add, jnp.split(x, parts))
    return x.sum(0)


def max_last(x: jax.Array) -> jax.Array:
    """Maximum over the last axis."""
    return folded(x, jnp.maximum).max(-1)


def stored(x: jax.Array) -> jax.Array:
    """`x` of float32, computed at this place once: on a CPU, as a sum with zeros.

    XLA:CPU fuses a few numbers into the loops that read them for many others, where they are
    computed, or looked up in a stack, again for each. It does not fuse reductions.
    """
    if jax.default_backend() != "cpu":
        return x
    first = jnp.arange(2).reshape(2, *(1,) * x.ndim) == 0
    return jnp.where(first, x, 0).sum(0)
