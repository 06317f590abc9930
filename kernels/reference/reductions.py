"""Sums and maxima in a fixed order, which is the same for every row.

A reduction of XLA:CPU has no fixed order: it adds number by number, or, in a fusion, as LLVM
reassociates it (`fadd reassoc`), depending on the shape of the array. A decode step and a train
step would add the same numbers in different orders. Here slices of the last axis are added lane by
lane, in ascending order, until 16 numbers are left, which are added by halves. This is also several
times faster. Maxima are the same in any order. `sum_rows` sums over rows, `sum_all` over all
numbers, and `broadcast_last` has a derivative that sums in this order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from fp8rl_jax.kernels.arrays import prevent_fma
from fp8rl_jax.kernels.machine import backend

_LANES = 16  # numbers that one instruction combines
_MOST_SLICES = 16  # slices combined in one step, in registers


def _slices(x: jax.Array, width: int, count: int) -> list[jax.Array]:
    return [x[..., i * width : (i + 1) * width] for i in range(count)]


def folded(x: jax.Array, combine: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """Combines slices of the last axis in ascending order: (..., 16 n) -> (..., 16).

    Slices left over from a division into up to 16 parts are combined last. An array whose width is
    not a multiple of 16 is returned unchanged.
    """
    if x.shape[-1] % _LANES:
        return x
    rests: list[jax.Array] = []
    while x.shape[-1] > _LANES:
        groups = x.shape[-1] // _LANES
        count = min(groups, _MOST_SLICES)
        width = groups // count * _LANES
        rest = x[..., count * width :]
        rests += _slices(rest, _LANES, rest.shape[-1] // _LANES)
        x = functools.reduce(combine, _slices(x, width, count))
    return functools.reduce(combine, rests, x)


def sum_last(x: jax.Array) -> jax.Array:
    """Sums float32 over the last axis: by `folded`, then the 16 numbers by halves."""
    missing = -x.shape[-1] % _LANES
    if missing:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    x = folded(x, jnp.add)
    while (width := x.shape[-1] // 2) > 0:
        x = x[..., :width] + x[..., width:]
    return x[..., 0]


def sum_rows(x: jax.Array) -> jax.Array:
    """Sums float32 (M, N) over its rows, (N,), adding 2 to 16 equal parts of the rows at a time.

    Rows whose number none of these divides (17, say) are added one after the other.
    """
    while x.shape[0] > 1 and any(x.shape[0] % n == 0 for n in range(2, _MOST_SLICES + 1)):
        parts = max(n for n in range(2, _MOST_SLICES + 1) if x.shape[0] % n == 0)
        x = functools.reduce(jnp.add, jnp.split(x, parts))
    if x.shape[0] == 0:
        return jnp.zeros(x.shape[1:], x.dtype)
    return lax.fori_loop(1, x.shape[0], lambda row, total: total + x[row], x[0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def sum_all(x: jax.Array, gather: Callable[[jax.Array], jax.Array] | None = None) -> jax.Array:
    """Sums float32 (M, N), (): each row by `sum_last`, then the rows' sums, which `gather` brings
    to every device where rows are sharded."""
    of_rows = sum_last(x)
    return sum_last(of_rows if gather is None else gather(of_rows))


sum_all.defvjp(
    lambda x, gather: (sum_all(x, gather), jnp.zeros_like(x)),
    lambda gather, zeros, cotangent: (zeros + cotangent,),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def broadcast_last(x: jax.Array, width: int) -> jax.Array:
    """Repeats float32 x (..., 1) as (..., width); the derivative sums by `sum_last`."""
    return jnp.broadcast_to(x, (*x.shape[:-1], width))


broadcast_last.defvjp(
    lambda x, width: (broadcast_last(x, width), None),
    lambda width, residual, cotangent: (sum_last(cotangent)[..., None],),
)


def tree_norm(tree) -> jax.Array:
    """Returns the square root of the sum of squares of a tree's float32 arrays, (): `sum_last` adds
    each flattened array, and the arrays' sums are added in order."""

    def sum_of_squares(x: jax.Array) -> jax.Array:
        # Squared slice by slice, as `folded` adds them: XLA:CPU would store all squares first.
        parts = jnp.split(x.reshape(-1), 1 if x.size % (_MOST_SLICES * _LANES) else _MOST_SLICES)
        return sum_last(functools.reduce(jnp.add, (prevent_fma(part * part) for part in parts)))

    return jnp.sqrt(functools.reduce(jnp.add, map(sum_of_squares, jax.tree.leaves(tree))))


def max_last(x: jax.Array) -> jax.Array:
    """Returns the maximum over the last axis."""
    return folded(x, jnp.maximum).max(-1)


def stored(x: jax.Array) -> jax.Array:
    """Returns float32 `x` unchanged, in a form that a CPU computes only once: a sum with zeros.

    XLA:CPU fuses the computation of a few numbers into the loops that read them, which then repeat
    it, or a lookup in a stack, for every element. It does not fuse reductions.
    """
    if backend() != "cpu":
        return x
    first = jnp.arange(2).reshape(2, *(1,) * x.ndim) == 0
    return jnp.where(first, x, 0).sum(0)
