"""The ways in which a CPU multiplies, and the single dots that they consist of.

A way is a set of compiler options, together with the libraries that compute dots of bf16 and of
float32 operands under them. probe.py tests which way keeps its order of summation on this machine,
and for which numbers of rows and columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

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


def dot_general(x: jax.Array, w: jax.Array, dimension_numbers) -> jax.Array:
    """Computes `lax.dot_general` in float32, by the library of XLA's choice."""
    return lax.dot_general(x, w, dimension_numbers, preferred_element_type=jnp.float32)


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
