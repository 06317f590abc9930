"""Sizes of blocks, and operations on arrays in forms whose bits XLA cannot change.

The reference and the GPU kernels share them. XLA contracts products into fused multiply-adds, drops
roundings, and adds in an order of its choice, by the shape of an array and by what stands around an
operation; a decode step and a train step would then compute the same numbers differently. So:

    prevent_fma                a product that is rounded before it is added
    round_bf16, rounded        a rounding that stays
    sum_last, sum_rows, ...    sums in a written order

A reduction of XLA:CPU has no fixed order: it adds number by number, or, in a fusion, as LLVM
reassociates it (`fadd reassoc`), depending on the shape of the array. Here slices of the last axis
are added lane by lane, in ascending order, until 16 numbers are left, which are added by halves.
This is also several times faster. Maxima are the same in any order. `sum_rows` sums over rows,
`sum_all` over all numbers, and `broadcast_last` has a derivative that sums in this order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from fp8rl_jax.kernels.machine import backend

K_BLOCK = 128  # entries of a contraction, and columns of a weight, that share a scale
KV_CHUNK = 64  # cache slots that attention reads at a time: a page
KV_STEP = 4 * KV_CHUNK  # cache slots that a step of decoding reads on a CPU
EXP_LANES = 16  # XLA:CPU's exp uses only vector code if the last axis is a multiple of this
# Of the argument s of `gated_activation`: s(x) = GELU_FACTOR * x * (1 + GELU_CUBE * x^2).
GELU_FACTOR, GELU_CUBE = 2 * math.sqrt(2 / math.pi), 0.044715
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0  # of gpt-oss's activation
_BELOW_ALL = -3.4e38
_LANES = 16  # numbers that one instruction combines
_MOST_SLICES = 16  # slices combined in one step, in registers
_LARGEST = {
    jnp.dtype(jnp.float8_e4m3fn): 448.0,
    jnp.dtype(jnp.float8_e5m2): 57344.0,
    jnp.dtype(jnp.int8): 127.0,
}


def fp8_max(dtype) -> float:
    """Returns the largest finite value of a format of one byte: 448 (E4M3), 57344 (E5M2), or 127
    (INT8, whose numbers reach as far on both sides).

    Raises:
      ValueError: `dtype` is not one of the three.
    """
    if jnp.dtype(dtype) not in _LARGEST:
        raise ValueError(
            f"{jnp.dtype(dtype)} is no format of one byte; use float8_e4m3fn, float8_e5m2 or int8"
        )
    return _LARGEST[jnp.dtype(dtype)]


def prevent_fma(product: jax.Array) -> jax.Array:
    """Returns `product` unchanged, in a form that XLA cannot contract into a fused multiply-add.

    LLVM contracts ``a * b + c`` depending on how many users ``a * b`` has, which differs between
    a forward-only program and a train step. Hence a maximum with -3.4e38 between product and
    addition. NaN passes; smaller products and -inf become -3.4e38.
    """
    return jnp.maximum(product, jnp.float32(_BELOW_ALL))


def round_bf16(x: jax.Array) -> jax.Array:
    """Rounds to bf16, to nearest even, in a form that XLA does not simplify away."""
    if x.dtype == jnp.bfloat16:
        return x
    return lax.reduce_precision(x.astype(jnp.float32), 8, 7).astype(jnp.bfloat16)


def rounded(x: jax.Array, dtype) -> jax.Array:
    """Rounds `x` to `dtype`, in a form that XLA does not simplify away."""
    return round_bf16(x) if dtype == jnp.bfloat16 else x.astype(dtype)


def pad_to(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    """Pads `x` with zeros to a multiple of `multiple` entries along an axis."""
    missing = -x.shape[axis] % multiple
    if not missing:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return jnp.pad(x, widths)


def axes_of(tree) -> frozenset:
    """Returns the mesh axes over which any array of a tree varies, inside a shard_map."""
    axes = (jax.typeof(jnp.asarray(x)).manual_axis_type.varying for x in jax.tree.leaves(tree))
    return frozenset().union(*axes)


def varying_as(results, *trees):
    """Types `results`, inside a shard_map, as varying over every axis that an array varies over.
    `trees`: arrays, or trees of them."""
    axes = axes_of(trees)
    return lax.pcast(results, tuple(sorted(axes)), to="varying") if axes else results


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
