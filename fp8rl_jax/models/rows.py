"""Every device of a mesh computes its own rows of a batch, where XLA must not cut the work."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
from jax import lax
from jax.sharding import PartitionSpec

from fp8rl_jax.sharding import BATCH_AXES


def by_own_rows(run: Callable, by_row: tuple, whole: tuple, sums: int) -> tuple:
    """``run(*by_row, *whole)``, every device of a mesh with its own rows of the batch.

    A batch that the devices cannot share equally is computed by all of them.

    Args:
      run: returns a tuple of arrays (B, ...), the last `sums` of them sums over the rows instead.
      by_row: arrays (B, ...). whole: what every device holds.
      sums: see run.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or mesh.manual_axes:  # these rows are the device's own already
        return run(*by_row, *whole)
    axes = tuple(axis for axis in BATCH_AXES if axis in mesh.axis_names)
    if by_row[0].shape[0] % math.prod(mesh.shape[axis] for axis in axes):
        axes = ()

    def own_rows(*operands):
        results = run(*operands)
        rows, summed = results[: len(results) - sums], results[len(results) - sums :]
        return rows, lax.psum(summed, axes) if axes else summed

    rows, all_rows = PartitionSpec(axes), PartitionSpec()
    specs = (*(rows,) * len(by_row), *(all_rows,) * len(whole))
    mapped = jax.shard_map(own_rows, in_specs=specs, out_specs=(rows, all_rows))
    found, summed = mapped(*by_row, *whole)
    return (*found, *summed)
