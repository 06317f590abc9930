"""Arrays on devices, in any sharding, that are filled piece by piece.

Each device's shard is allocated once, on that device. A piece is written by a program that takes
the shard as a donated argument and returns it, so only the piece is copied: besides the result the
host holds the piece that it has just read. A device gets only the part of a piece that overlaps its
shard.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Sharding, SingleDeviceSharding

from fp8rl_jax.base.exact_jit import exact_jit

_SMALL = 2**20  # bytes


class Filling:
    """An array on devices that is filled piece by piece.

    Args:
      shape, dtype: shape and dtype of the array.
      sharding: its sharding; None: the default device.
    """

    def __init__(self, shape: tuple[int, ...], dtype, sharding: Sharding | None):
        self.shape = shape
        self.dtype = jnp.dtype(dtype)
        if sharding is None:
            sharding = SingleDeviceSharding(next(iter(jnp.zeros(()).devices())))
        self.sharding = sharding
        self._spans: dict[jax.Device, tuple[tuple[int, int], ...]] = {}
        self._shards: dict[jax.Device, jax.Array] = {}
        for device, slices in sharding.addressable_devices_indices_map(shape).items():
            assert slices is not None
            spans = tuple(s.indices(n)[:2] for s, n in zip(slices, shape, strict=True))
            self._spans[device] = spans
            self._shards[device] = _zeros(
                tuple(stop - start for start, stop in spans), self.dtype, device
            )

    def held(
        self, index: tuple[int, ...], shape: tuple[int, ...], transposed: bool
    ) -> list[tuple[int, int]] | None:
        """Returns the bounding box of the parts of a matrix in the shards of this process.

        Args:
          index: position of the matrix in the leading axes.
          shape: (rows, columns) of the matrix, or (elements,) of a vector.
          transposed: as for `write`.

        Returns:
          (first, last + 1) along each axis of `shape`; None if no shard overlaps the matrix.
        """
        extents = [(0, n) for n in shape]
        overlaps = (_overlap(spans, index, extents, transposed) for spans in self._spans.values())
        boxes = [overlap for overlap in overlaps if overlap]
        if not boxes:
            return None
        axes = zip(*boxes, strict=True)
        return [(min(a for a, _ in axis), max(b for _, b in axis)) for axis in axes]

    def write(
        self,
        index: tuple[int, ...],
        start: tuple[int, ...],
        values: np.ndarray,
        transposed: bool,
        scales: np.ndarray | None = None,
    ) -> None:
        """Writes a part of the matrix (or vector) at `index` of the leading axes.

        Args:
          index: position of the matrix in the leading axes.
          start: where the part begins: (row, column), or (element,).
          values: (n, m), or (n,) for a vector; any type.
          transposed: the array holds rows as columns: values[i, j] goes to
            [..., start[1] + j, start[0] + i].
          scales: (n, blocks) float32, a factor for each block of 128 of the full rows; None: 1.
        """
        extents = [(a, a + n) for a, n in zip(start, values.shape, strict=True)]
        for device, spans in self._spans.items():
            overlap = _overlap(spans, index, extents, transposed)
            if overlap is None:
                continue
            cut = tuple(slice(a - i, b - i) for (a, b), i in zip(overlap, start, strict=True))
            corner = [a for a, _ in (overlap[::-1] if transposed else overlap)]
            place = np.array([*index, *corner], np.int32)
            place -= np.array([low for low, _ in spans], np.int32)
            first, last = overlap[-1]
            of_blocks = None if scales is None else scales[cut[0], first // 128 : -(-last // 128)]
            piece, of_blocks, place = jax.device_put(
                (np.ascontiguousarray(values[cut]), of_blocks, place), device
            )
            write = _writer(transposed, 0 if scales is None else first % 128)
            shard = write(self._shards.pop(device), piece, of_blocks, place)
            # Dispatched work holds its arguments: without waiting, pieces would pile up.
            self._shards[device] = shard.block_until_ready()

    def finish(self) -> jax.Array:
        """Returns the filled array."""
        return jax.make_array_from_single_device_arrays(
            self.shape, self.sharding, list(self._shards.values())
        )


def _overlap(
    spans: tuple[tuple[int, int], ...],
    index: tuple[int, ...],
    extents: list[tuple[int, int]],
    transposed: bool,
) -> list[tuple[int, int]] | None:
    """Intersects a matrix's `extents` with a shard over `spans`, along the matrix's axes; None if
    they do not overlap."""
    placed = extents[::-1] if transposed else extents
    wanted = [*((i, i + 1) for i in index), *placed]
    common = [
        (max(a, low), min(b, high)) for (a, b), (low, high) in zip(wanted, spans, strict=True)
    ]
    if any(a >= b for a, b in common):
        return None
    inner = common[len(index) :]
    return inner[::-1] if transposed else inner


def _zeros(shape: tuple[int, ...], dtype: np.dtype, device: jax.Device) -> jax.Array:
    """Makes zeros on a device; a small array is made on the host and needs no compiled program."""
    if math.prod(shape) * dtype.itemsize > _SMALL:
        return jnp.zeros(shape, dtype, device=SingleDeviceSharding(device))
    return jax.device_put(np.zeros(shape, dtype), device)


@functools.cache
def _writer(transposed: bool, skipped: int):
    """Returns the program that writes a piece into a shard.

    Args:
      transposed: as for `Filling.write`.
      skipped: number of elements of a row's first block that precede the piece.
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
