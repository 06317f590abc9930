"""Random operands for the kernels' bench, cut out of one pool of normal numbers; caches in pages.

Operands of every shape are slices at random places of a pool that is made once: drawing gigabytes
anew for each shape would take longer than what is measured. Never zeros: they hide what was not
written, and they run faster.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8rl_jax.kernels import KV_CHUNK

_MARGIN = 1 << 20  # places to start from, whatever the size of an operand
_FLOAT32 = 1 << 26  # float32 operands and scales are small


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, size: int, dtype) -> jax.Array:
    return jax.random.normal(key, (size,)).astype(dtype)


@functools.partial(jax.jit, static_argnums=2)
def _cut(pool: jax.Array, start: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.dynamic_slice(pool, (start,), (math.prod(shape),)).reshape(shape)


@jax.jit
def _positive(x: jax.Array) -> jax.Array:
    return 0.5 + jnp.minimum(jnp.abs(x), 1.0)


class Source:
    """Operands from a seed.

    Args:
      largest: elements of the largest operand that will be asked for.
      seed: equal seeds and equal calls give equal operands.
    """

    def __init__(self, largest: int, seed: int = 0):
        self._size = largest + _MARGIN
        self._key = jax.random.key(seed)
        self._places = np.random.default_rng(seed)
        self._pools: dict[str, jax.Array] = {}

    def take(self, dtype, *shape: int) -> jax.Array:
        """Normal numbers, rounded to `dtype`."""
        name, size = jnp.dtype(dtype).name, self._size
        if name == "float32":
            size = min(size, max(_FLOAT32, math.prod(shape) + _MARGIN))
        if name not in self._pools or self._pools[name].size < math.prod(shape):
            self._pools[name] = _normal(self._key, size, jnp.dtype(dtype))
        pool = self._pools[name]
        start = self._places.integers(pool.size - math.prod(shape) + 1)
        return _cut(pool, jnp.int32(start), shape)

    def scales(self, *shape: int) -> jax.Array:
        """Float32 between 0.5 and 1.5, no two neighbours alike."""
        return _positive(self.take(jnp.float32, *shape))


class Pages(NamedTuple):
    """Where the caches of some sequences lie in a pool of pages.

    Attributes:
      table: (B, N) int32, the pages of each sequence; behind its last, no page's number.
      used: (P, 64) bool, slots of the pool that a sequence has filled. Some pages have none.
    """

    table: np.ndarray
    used: np.ndarray

    def fill(self, pool: jax.Array) -> jax.Array:
        """A pool (P, 64, ...) with NaN in what nobody may read."""
        used = self.used.reshape(self.used.shape + (1,) * (pool.ndim - 2))
        return jnp.where(used, pool, jnp.asarray(jnp.nan, pool.dtype))


def pages(lengths: Sequence[int], seed: int = 0) -> Pages:
    """Pages in random order for sequences of these lengths."""
    counts = [-(-length // KV_CHUNK) for length in lengths]
    free = iter(np.random.default_rng(seed).permutation(sum(counts) + 3))
    table = np.full((len(lengths), max(counts)), 10**9, np.int32)
    used = np.zeros((sum(counts) + 3, KV_CHUNK), bool)
    for row, length in zip(table, lengths, strict=True):
        for place, start in enumerate(range(0, length, KV_CHUNK)):
            row[place] = next(free)
            used[row[place], : length - start] = True
    return Pages(table, used)


def in_one_piece(pool: jax.Array, table: jax.Array) -> jax.Array:
    """(B, N * 64, ...), the caches of sequences, of a pool of pages (P, 64, ...)."""
    cache = jnp.take(pool, table, axis=0, mode="clip")
    return cache.reshape(table.shape[0], -1, *pool.shape[2:])
