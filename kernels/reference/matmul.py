"""Matrix product with a fixed order of summation, in plain jnp: the definition and the oracle.

    block_matmul      cuts K into blocks, adds their scaled float32 partials in ascending order
      product         one block, in the order of a way of multiplying
    small_product     one block of attention's float32 operands

Every row of an output has the same bits, whatever other rows are in the batch. A rollout decodes a
few rows at a time and the learner scores full sequences; XLA's dots choose their order of summation
by shape, so the two would differ in the last bits. Here the order is part of the definition: the
contraction is split into blocks of 128, or of up to 512 where bf16 is multiplied without scales;
each block gives a float32 partial sum, which is multiplied by its scales and added.

Within a block the order must depend only on row, column and length of the contraction. XLA does not
promise this. A `Way` is a set of compiler options, together with the libraries that compute dots of
bf16 and of float32 operands under them; probe.py tests which way keeps its order on this machine,
and for which numbers of rows and columns (`Steps`), before it is used:

* **bf16 operands, by YNNPACK**, in the order of an instruction: TDPBF16PS of Intel's AMX, several
  times faster with many rows, or VDPBF16PS. No float32 copies are made. E4M3 and E5M2 are exact in
  bf16, so FP8 is converted to bf16 and multiplied this way.
* **float32 operands**, ``acc = fma(x[k], w[k], acc)`` with k ascending, by YNNPACK under
  YNN_FLAG_CONSISTENT_ARITHMETIC. All operands are multiplied this way if the CPU has no instruction
  for bf16: YNNPACK would make float32 copies of every operand there.
* **exactly**, in float64 (exact.py), if no other way holds or if asked for: any order gives the
  same bits.

`fp8rl_jax.base.exact_jit` compiles with the options of the way. The way follows from the CPU and
never from a measured time, which may differ when a run is resumed.

Not done here: speed on a GPU. On a CPU FP8 is emulated and never faster than bf16.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8rl_jax.kernels.arrays import K_BLOCK, pad_to, prevent_fma, varying_as
from fp8rl_jax.kernels.reference.bits import as_bytes, widened
from fp8rl_jax.kernels.reference.exact import exact_dot_general
from fp8rl_jax.kernels.reference.orders import AMX_DEPTH, amx_order, pairs_order

BF16_DEPTH = 512  # largest K of one product of bf16 operands, which YNNPACK does not split
FLOAT32_SIZE = 2**15  # most numbers of a right operand in float32, for the same reason
TURNED_SIZE = 2**18  # the same of 'turned': oneDNN splits larger ones by the number of rows
ORDERED = "ordered_product"  # name scope of products with a promised order, in a traced program
ONE_TERM = "one_term_product"  # of products with one term that is not 0, which have one result
_YNN = "xla_cpu_experimental_ynn_fusion_type"
_LONE_DOTS: dict[str, bool | str] = {_YNN: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
# Restricts YNNPACK to kernels that agree with each other ("numerically consistent with all other
# kernels of the same type": XNNPACK, ynnpack/kernels/dot/dot.h).
_CONSISTENT: dict[str, bool | str] = _LONE_DOTS | {"xla_cpu_enable_platform_dependent_math": False}
# Most blocks of K and pieces of columns that are unrolled. A loop over more saves compile time and
# memory and gives the same bits.
_UNROLL_K, _UNROLL_COLUMNS = 16, 16
_LARGEST = {"pieces": FLOAT32_SIZE, "turned": TURNED_SIZE}  # right operands in float32
_BF16_HOLDS = {jnp.dtype(d) for d in (jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2)}
_ROWS_BY_COLUMNS = (((1,), (0,)), ((), ()))


@dataclasses.dataclass(frozen=True)
class Steps:
    """Numbers of rows and columns of a product for which its order holds: at least `few_rows` and
    `few_columns`, multiples of `row_step` and `column_step`."""

    few_rows: int = 2
    row_step: int = 1
    few_columns: int = 1
    column_step: int = 1

    def rows(self, rows: int) -> int:
        """Rounds `rows` up to the next number of rows at which the product keeps its order."""
        return -(-max(rows, self.few_rows) // self.row_step) * self.row_step

    def columns(self, columns: int) -> int:
        """Rounds `columns` up to the next number of columns at which the product keeps its order of
        summation."""
        return -(-max(columns, self.few_columns) // self.column_step) * self.column_step

    def column_ranges(self, columns: int, most: int) -> list[tuple[int, int]]:
        """Splits `columns` columns into products (start, width) of at most `most` columns.

        The order holds for every width. The last range may overlap the one before it, and is wider
        than `columns` if the order holds for no narrower one.
        """
        width = self.columns(-(-columns // -(-columns // most)))
        if width > columns:
            width = columns // self.column_step * self.column_step
        if width < self.few_columns or not width:
            return [(0, self.columns(columns))]
        ranges = [(start, width) for start in range(0, columns - width + 1, width)]
        if left := columns - sum(ranges[-1]):
            last = self.columns(left)
            ranges.append((columns - last, last))
        return ranges


@dataclasses.dataclass(frozen=True)
class Way:
    """One way of multiplying.

    Attributes:
      name: name of the way, also in messages and the stored answer.
      options: compiler options of XLA:CPU, under which single dots may go to YNNPACK.
      bf16_order: numpy function (orders.py) that multiplies in the order of bf16 operands; None if
        these are multiplied in float32.
      float32: how float32 is multiplied. 'pieces' and 'turned' keep the order ``acc = fma(x[k],
        w[k], acc)``: 'pieces' by YNNPACK, at most `FLOAT32_SIZE` numbers of the right operand at a
        time (it splits larger ones by the number of rows); 'turned' by oneDNN, at most
        `TURNED_SIZE` at a time, with the left operand stored column by column, which YNNPACK does
        not take. 'whole': XLA's choice.
        'float64': exactly (exact.py).
      depth_step: K of one product is padded with zeros to a multiple of this, as the probe tests.
      bf16_steps, float32_steps: results of the probe for `product`, by the type of its operands.
      small_steps: result of the probe for `small_product`.
    """

    name: str
    options: Mapping[str, bool | str]
    bf16_order: Callable[[np.ndarray, np.ndarray], np.ndarray] | None
    float32: str
    depth_step: int = 8
    bf16_steps: Steps = Steps()
    float32_steps: Steps = Steps()
    small_steps: Steps = Steps()

    @property
    def exact(self) -> bool:
        return self.float32 == "float64"


# Fastest first; the first that holds is used.
WAYS = (
    # YNNPACK multiplies a few rows of less than an instruction's depth by other instructions.
    Way("amx", _LONE_DOTS, amx_order, "turned", AMX_DEPTH),
    Way("pairs", _CONSISTENT, pairs_order, "pieces"),
    Way("float32", _CONSISTENT, None, "pieces"),
)
_ANY = Steps(few_rows=1)
EXACT = Way(
    "exact", _CONSISTENT, None, "float64", bf16_steps=_ANY, float32_steps=_ANY, small_steps=_ANY
)
# For other platforms, where XLA's products have no promised order.
_EIGHT = Steps(few_rows=8)
ELSEWHERE = Way("elsewhere", {}, None, "whole", bf16_steps=_EIGHT, float32_steps=_EIGHT)


def _as_it_lies(x: jax.Array) -> jax.Array:
    """Returns `x` unchanged, stored row by row for the product that reads it.

    XLA decides by the layout of an operand, before any optimisation, whether a product goes to
    YNNPACK, and it would fold a transpose into the product. The barrier keeps the transpose
    outside, and a selection returns its result row by row. XLA removes both later.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint32)
    bits = lax.optimization_barrier(bits)
    bits = jnp.where(jnp.ones((), bool), bits, jnp.zeros((), bits.dtype))
    return lax.bitcast_convert_type(bits, x.dtype)


# `lax.dot_general` to float32, by the library of XLA's choice.
dot_general = functools.partial(lax.dot_general, preferred_element_type=jnp.float32)


def dot(x: jax.Array, w: jax.Array, axis: int = 1) -> jax.Array:
    """Multiplies x by w in float32, contracting `axis` of x, by the library of XLA's choice."""
    return dot_general(x, w, (((axis,), (0,)), ((), ())))


def bf16_dot(x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiplies (M, K) by (K, N), bf16, by YNNPACK."""
    return dot(_as_it_lies(x), _as_it_lies(w))


def float32_dot(way: Way, x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiplies (M, K) by (K, N), float32, as `Way.float32` says."""
    if way.float32 == "pieces":
        return dot(_as_it_lies(x), w)
    return dot(lax.optimization_barrier(x.T), w, 0) if way.float32 == "turned" else dot(x, w)


def small_dot(way: Way, x: jax.Array, w: jax.Array, dimension_numbers) -> jax.Array:
    """Computes `lax.dot_general` of float32 operands, as `Way.float32` says."""
    if way.float32 == "turned":
        ((of_x,), of_w), (batch, batch_w) = dimension_numbers
        rows = (axis for axis in range(x.ndim) if axis not in (*batch, of_x))
        x = lax.optimization_barrier(x.transpose(*batch, of_x, *rows))
        dimension_numbers = ((len(batch),), of_w), (tuple(range(len(batch))), batch_w)
    return dot_general(x, w, dimension_numbers)


def in_bf16(way: Way, x_dtype, w_dtype) -> bool:
    """Returns whether operands of these types are multiplied as bf16."""
    return way.bf16_order is not None and {jnp.dtype(x_dtype), jnp.dtype(w_dtype)} <= _BF16_HOLDS


def product(way: Way, x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiplies x (M, K) by w (K, N) in the order of `way`, to float32.

    Args:
      way: way of multiplying.
      x, w: FP8, bf16 or float32. K at most `BF16_DEPTH` if `in_bf16`, else 128; M and N multiples
        of the way's steps; w in float32 at most `_LARGEST` numbers.
    """
    if way.exact:
        return exact_dot_general(x, w, _ROWS_BY_COLUMNS)
    x = pad_to(x, 1, way.depth_step)
    w = pad_to(w, 0, way.depth_step)
    with jax.named_scope(ORDERED):
        if in_bf16(way, x.dtype, w.dtype):
            return bf16_dot(widened(x, jnp.bfloat16), widened(w, jnp.bfloat16))
        return float32_dot(way, widened(x, jnp.float32), widened(w, jnp.float32))


def small_product(way: Way, x: jax.Array, w: jax.Array, dimension_numbers) -> jax.Array:
    """Computes `lax.dot_general` of float32 operands in the order of `way`.

    Args:
      way: way of multiplying.
      x, w: float32; rows allowed by `Way.small_steps`, columns in the last axis of `w`; one axis
        of at most 128 contracted, at most `FLOAT32_SIZE` numbers of `w` per batch entry.
      dimension_numbers: as for `lax.dot_general`.
    """
    if way.exact:
        return exact_dot_general(x, w, dimension_numbers)
    columns = w.shape[-1]
    missing = way.small_steps.columns(columns) - columns
    w = jnp.pad(w, [(0, 0)] * (w.ndim - 1) + [(0, missing)]) if missing else w
    with jax.named_scope(ORDERED):
        return small_dot(way, x, w, dimension_numbers)[..., :columns]


def repeat_last(x: jax.Array, times: int) -> jax.Array:
    """Repeats each entry of `x` (..., n) float32 `times` times, (..., n * times).

    Computes x * 1 + 0 * 0 by a matrix product, which is exact. XLA:CPU would fuse jnp.repeat into
    the operations that read it, which then look up each number: this took several times as long as
    the rest of a scaled product.
    """
    pairs = jnp.stack([x.reshape(-1), jnp.zeros(x.size, x.dtype)], axis=1)
    ones = jnp.stack([jnp.ones(times, x.dtype), jnp.zeros(times, x.dtype)])
    with jax.named_scope(ONE_TERM):
        repeated = lax.dot_general(
            pairs, ones, (((1,), (0,)), ((), ())), precision=lax.Precision.HIGHEST
        )
    return repeated.reshape(*x.shape[:-1], x.shape[-1] * times)


def _pad_parts(x: jax.Array, parts: int, rows: int) -> jax.Array:
    """Pads each part of (parts * n, K) with zeros at its end, to (parts * rows, K)."""
    each = x.shape[0] // parts
    depth = x.shape[1]
    x = x.reshape(parts, each, depth)
    return jnp.pad(x, ((0, 0), (0, rows - each), (0, 0))).reshape(parts * rows, depth)


def block_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_scale: jax.Array | None = None,
    rhs_scale: jax.Array | None = None,
    *,
    way: Way,
    devices: int = 1,
) -> jax.Array:
    """Multiplies lhs by rhs in a fixed order of summation; a row's bits do not depend on others.

    Args:
      lhs: (M, K), any float type that float32 holds exactly (E4M3, E5M2, bf16, float32).
      rhs: (K, N), also of such a type.
      lhs_scale: (M, KB) float32 with KB = ceil(K / 128), or None for unscaled operands.
      rhs_scale: (KB, ceil(N / 128)) or (KB, N) float32; None exactly if `lhs_scale` is.
      way: way of multiplying a block.
      devices: devices of the mesh, over some or all of whose axes XLA divides the rows.

    Returns:
      (M, N) float32: ``sum_b (lhs_b @ rhs_b) * lhs_scale_b * rhs_scale_b``, b ascending.

    A product of bf16 or FP8 operands may have other bits than one of the same numbers in float32.
    The scheme (a float32 partial per 128 of K, scaled, then added) is that of DeepSeek-V3,
    arXiv:2412.19437, section 3.3.2.
    """
    if lhs.ndim != 2 or rhs.ndim != 2 or lhs.shape[1] != rhs.shape[0]:
        raise ValueError(f"block_matmul takes (M, K) and (K, N), got {lhs.shape} and {rhs.shape}")
    assert (lhs_scale is None) == (rhs_scale is None)
    rows = lhs.shape[0]
    columns = rhs.shape[1]
    dtypes = (lhs.dtype, rhs.dtype)
    as_bf16 = in_bf16(way, lhs.dtype, rhs.dtype)
    lhs = as_bytes(lhs)
    rhs = as_bytes(rhs)
    steps = way.bf16_steps if as_bf16 else way.float32_steps
    parts = math.gcd(rows, devices)  # XLA splits rows only between parts
    each = rows // parts
    height = steps.rows(each)
    if height != each:
        lhs, lhs_scale = jax.tree.map(lambda x: _pad_parts(x, parts, height), (lhs, lhs_scale))
    if rhs_scale is not None and rhs_scale.shape[1] != columns:
        rhs_scale = repeat_last(rhs_scale, K_BLOCK)[:, :columns]
    depth = K_BLOCK
    most = columns
    if not as_bf16 and way.float32 in _LARGEST:
        most = _LARGEST[way.float32] // depth
    elif lhs_scale is None and as_bf16:
        padded = -(-lhs.shape[1] // K_BLOCK) * K_BLOCK
        depth = max(d for d in range(K_BLOCK, BF16_DEPTH + 1, K_BLOCK) if padded % d == 0)
    ranges = steps.column_ranges(columns, most)
    if (more := ranges[0][1] - columns) > 0:
        pad = ((0, 0), (0, more))
        rhs, rhs_scale = jax.tree.map(lambda x: jnp.pad(x, pad), (rhs, rhs_scale))
    multiply = functools.partial(_sum_of_blocks, way, dtypes, depth, lhs, rhs, lhs_scale, rhs_scale)
    like = varying_as(jnp.zeros((lhs.shape[0], columns)), lhs, rhs)
    total = _by_columns(multiply, like, ranges)
    if height != each:
        total = total.reshape(parts, height, -1)[:, :each].reshape(rows, total.shape[1])
    return total


def _by_columns(multiply: Callable, like: jax.Array, ranges: list[tuple[int, int]]) -> jax.Array:
    """Joins ``multiply(start, width)`` of the ranges of columns; `like`: zeros of the result's
    shape."""
    columns = like.shape[1]
    if len(ranges) <= _UNROLL_COLUMNS:
        pieces = []
        for (start, width), (end, _) in itertools.pairwise([*ranges, (columns, 0)]):
            pieces.append(multiply(start, width)[:, : end - start])
        # A range may begin before the previous one ends: the later one gives the overlap.
        return jnp.concatenate(pieces, axis=1) if len(pieces) > 1 else pieces[0]
    width = ranges[0][1]
    last = columns - width

    def add(piece: jax.Array, total: jax.Array) -> jax.Array:
        start = jnp.minimum(piece * width, last)
        return lax.dynamic_update_slice(total, multiply(start, width), (0, start))

    return lax.fori_loop(0, len(ranges), add, like)


def _sum_of_blocks(
    way: Way,
    dtypes,
    depth: int,
    lhs,
    rhs,
    lhs_scale,
    rhs_scale,
    first: int | jax.Array,
    columns: int,
) -> jax.Array:
    """Computes `columns` columns of the product from `first` on; operands are bytes (`as_bytes`).

    The weights are not padded along K: the rest of K after the full blocks is one more block.
    """
    blocks, tail = divmod(lhs.shape[1], depth)

    def partial(block: int | jax.Array, deep: int = depth) -> jax.Array:
        start = block * depth
        left = lax.dynamic_slice_in_dim(lhs, start, deep, 1)
        right = lax.dynamic_slice(rhs, (start, first), (deep, columns))
        partial_sum = product(way, left.view(dtypes[0]), right.view(dtypes[1]))
        if lhs_scale is None:
            return partial_sum
        left_scale = lax.dynamic_slice_in_dim(lhs_scale, block, 1, 1)
        right_scale = lax.dynamic_slice(rhs_scale, (block, first), (1, columns))
        return prevent_fma(partial_sum * (left_scale * right_scale))

    total = partial(0, min(depth, lhs.shape[1]))
    if blocks <= _UNROLL_K:
        for block in range(1, blocks):
            total = total + partial(block)
    else:
        total = lax.fori_loop(1, blocks, lambda block, acc: acc + partial(block), total)
    return total + partial(blocks, tail) if tail and blocks else total


def matmul_at_once(x: jax.Array, w: jax.Array, way: Way) -> jax.Array:
    """Multiplies x (M, K) by w (K, N) to float32, for any K, in no fixed order.

    Under an exact way it is `block_matmul`.
    """
    if way.exact:
        return block_matmul(x, w, way=way)
    dtype = jnp.bfloat16 if in_bf16(way, x.dtype, w.dtype) else jnp.float32
    x = widened(x, dtype)
    w = widened(w, dtype)
    # Without the barrier XLA would fold a transpose of the result into a product of bf16.
    return lax.optimization_barrier(bf16_dot(x, w)) if dtype == jnp.bfloat16 else dot(x, w)
