"""Random operands for the kernels' bench, cut out of one pool of normal numbers.

Operands of every shape are slices at random places of a pool that is made once: drawing gigabytes
anew for each shape would take longer than what is measured. Never zeros: they hide what was not
written, and they run faster.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

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
