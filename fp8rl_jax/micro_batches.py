"""Micro-batches: runs a program on each part of a batch, and joins the results.

A dynamic number of parts runs in one compiled program: a packed batch has room for the most that it
may need, and those that hold nothing are left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from fp8rl_jax.batch import Batch
from fp8rl_jax.models import Parallel


def join_parts(x: jax.Array, axis: int) -> jax.Array:
    """Joins micro-batches' results (parts, ...), row r in part r % parts, with rows in order."""
    x = jnp.moveaxis(x, 0, axis + 1)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _joined(rows):
    return jax.tree.map(lambda x: join_parts(x, 0), rows)


def over_parts(
    run: Callable,
    batch: Batch,
    parallel: Parallel,
    micro_batches: int = 1,
    add: Callable = lambda one, other: (),
    join: Callable = _joined,
):
    """Runs ``run(part) -> (sums, rows)`` on the micro-batches of a batch.

    Row r goes to micro-batch r % count, so that each device keeps its rows. Micro-batches that hold
    nothing are not run; their rows' results are 0.

    Args:
      run: function of a batch, that of a micro-batch.
      batch: the batch, packed or one sequence a row.
      parallel: the devices that share the rows.
      micro_batches: how many; those of a packed batch have one row for each device, whatever this
        says.
      add: adds the sums of two micro-batches; by default there are none.
      join: makes results by row, stacked (count, ...), those of the batch; by default arrays
        (B, ...).

    Returns:
      ``run(batch)``, but that its sums are of the micro-batches.
    """
    filled = None
    if batch.packing is not None:
        micro_batches = len(batch.tokens) // parallel.row_devices
        holds = batch.valid.any(1).reshape(-1, micro_batches).any(0)
        filled = holds.sum(dtype=jnp.int32)
    elif micro_batches == 1:
        return run(batch)
    parts = jax.tree.map(lambda x: x.reshape(-1, micro_batches, *x.shape[1:]).swapaxes(0, 1), batch)

    def part_at(index: int | jax.Array) -> Batch:
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), parts)

    sums, rows = jax.eval_shape(run, part_at(0))
    sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums)
    if filled is None:

        def accumulate(sums, part):
            of_part, rows = run(part)
            return add(sums, of_part), rows

        sums, rows = lax.scan(accumulate, sums, parts)
        return sums, join(rows)

    def step(index, carried):
        of_part, rows = run(part_at(index))
        put = functools.partial(lax.dynamic_update_index_in_dim, index=index, axis=0)
        return add(carried[0], of_part), jax.tree.map(put, carried[1], rows)

    rows = jax.tree.map(lambda x: jnp.zeros((micro_batches, *x.shape), x.dtype), rows)
    sums, rows = lax.fori_loop(0, filled, step, (sums, rows))
    return sums, join(rows)
