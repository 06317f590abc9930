"""Arrays that are filled piece by piece where they are stored: on devices, in any sharding.

The whole array is allocated once, each device's shard on that device. A piece is written by a
program that takes the shard as a donated argument and returns it, so nothing is copied but the
piece: what the host holds beyond the result is the piece it has just read. A piece goes only to the
devices whose shard it touches, and only as much of it as they hold.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Sharding, SingleDeviceSharding

from fp8rl_jax.exact_jit import exact_jit

_SMALL = 2**20  # bytes


class Filling:
    """An array on devices, to be filled.

    Args:
      shape, dtype: of the array.
      sharding: of the array; None: on the default device.
    """

    def __init__(self, shape: tuple[int, ...], dtype, sharding: Sharding | None):
        self.shape, self.dtype = shape, jnp.dtype(dtype)
        if sharding is None:
            sharding = SingleDeviceSharding(next(iter(jnp.zeros(()).devices())))
        self.sharding = sharding
        self._spans: dict[jax.Device, tuple[tuple[int, int], ...]] = {}
        self._shards: dict[jax.Device, jax.Array] = {}
        for device, slices in sharding.addressable_devices_indices_map(shape).items():
            assert slices is not None
            spans = tuple(s.indices(n)[:2] for s, n in zip(slices, shape, strict=True))
            self._spans[device] = spans
            own = tuple(stop - start for start, stop in spans)
            self._shards[device] = _zeros(own, self.dtype, device)

    def write(
        self,
        index: tuple[int, ...],
        start: int,
        rows: np.ndarray,
        transposed: bool,
        scales: np.ndarray | None = None,
    ) -> None:
        """Writes rows of the matrix (or vector) at `index` of the axes in front.

        Args:
          index: into the stacks.
          start: the first row's place.
          rows: (n, m), or (n,) of a vector; any type.
          transposed: the array holds rows as columns: rows[i, j] goes to [..., j, start + i].
          scales: (n, ceil(m / 128)) float32, to multiply a row's blocks of 128 by; None: 1.
        """
        extents = [(start, start + rows.shape[0]), *((0, n) for n in rows.shape[1:])]
        placed = extents[::-1] if transposed else extents
        wanted = [*((i, i + 1) for i in index), *placed]
        for device, spans in self._spans.items():
            common = [
                (max(a, low), min(b, high))
                for (a, b), (low, high) in zip(wanted, spans, strict=True)
            ]
            if any(a >= b for a, b in common):
                continue
            inner = common[len(index) :]
            inner = inner[::-1] if transposed else inner
            cut = tuple(
                slice(a - low, b - low) for (a, b), (low, _) in zip(inner, extents, strict=True)
            )
            place = np.array(
                [a - low for (a, _), (low, _) in zip(common, spans, strict=True)], np.int32
            )
            spread, skipped = None, 0
            if scales is not None:
                first, last = cut[1].start // 128, -(-cut[1].stop // 128)
                spread, skipped = scales[cut[0], first:last], cut[1].start - first * 128
            piece = jax.device_put((np.ascontiguousarray(rows[cut]), spread, place), device)
            shard = _writer(transposed, skipped)(self._shards.pop(device), *piece)
            # Dispatched work holds its arguments: without waiting, pieces would pile up.
            self._shards[device] = shard.block_until_ready()

    def finish(self) -> jax.Array:
        """The array."""
        shards = list(self._shards.values())
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, shards)


def _zeros(shape: tuple[int, ...], dtype: np.dtype, device: jax.Device) -> jax.Array:
    """An array to be written; a small one comes from the host, which needs no compiling."""
    if math.prod(shape) * dtype.itemsize > _SMALL:
        return jnp.zeros(shape, dtype, device=SingleDeviceSharding(device))
    return jax.device_put(np.zeros(shape, dtype), device)


@functools.cache
def _writer(transposed: bool, skipped: int):
    """The program that writes a piece into a shard.

    Args:
      transposed: as for `Filling.write`.
      skipped: elements of a row's first block before the piece.
    """

    def write(shard, piece, scales, place):
        if scales is not None:
            spread = jnp.repeat(scales, 128, axis=1)
            spread = lax.slice_in_dim(spread, skipped, skipped + piece.shape[1], axis=1)
            piece = piece.astype(jnp.float32) * spread
        piece = piece.astype(shard.dtype)
        piece = piece.T if transposed else piece
        piece = piece.reshape((1,) * (shard.ndim - piece.ndim) + piece.shape)
        return lax.dynamic_update_slice(shard, piece, list(place))

    return exact_jit(write, donate_argnums=0)
