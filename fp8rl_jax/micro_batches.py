"""Micro-batches: splits a batch, runs a program on each part, and joins the results.

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


def over_parts(
    run: Callable, add: Callable, batch: Batch, parallel: Parallel, micro_batches: int = 1
):
    """Runs ``run(part) -> (result, rest)`` on the micro-batches of a batch.

    Row r goes to micro-batch r % count, so that each device keeps its rows. Those of a packed batch
    have one row for each device, whatever `micro_batches` says; only the first ones hold anything.

    Returns (the sum of the results by `add`, the rests (count, ...)). Micro-batches that hold
    nothing are not run; their rests are 0.
    """
    filled = None
    if batch.packing is not None:
        micro_batches = len(batch.tokens) // parallel.row_devices
        holds = batch.valid.any(1).reshape(-1, micro_batches).any(0)
        filled = holds.sum(dtype=jnp.int32)
    parts = jax.tree.map(lambda x: x.reshape(-1, micro_batches, *x.shape[1:]).swapaxes(0, 1), batch)

    def part_at(index: int | jax.Array) -> Batch:
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), parts)

    total, rests = jax.eval_shape(run, part_at(0))
    total = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), total)
    if filled is None:

        def accumulate(total, part):
            result, rest = run(part)
            return add(total, result), rest

        return lax.scan(accumulate, total, parts)

    def step(index, carried):
        result, rest = run(part_at(index))
        put = functools.partial(lax.dynamic_update_index_in_dim, index=index, axis=0)
        return add(carried[0], result), jax.tree.map(put, carried[1], rest)

    rests = jax.tree.map(lambda x: jnp.zeros((micro_batches, *x.shape), x.dtype), rests)
    return lax.fori_loop(0, filled, step, (total, rests))


def join_parts(x: jax.Array, axis: int) -> jax.Array:
    """Joins micro-batches' results (parts, ...), row r in part r % parts, with rows in order."""
    x = jnp.moveaxis(x, 0, axis + 1)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
