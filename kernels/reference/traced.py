"""Finds a traced program's products of promised order, and tests each of them on this machine.

`probe` tests many sizes before any program exists. This module tests the sizes of a program.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8rl_jax.kernels.reference import matmul
from fp8rl_jax.kernels.reference.matmul import ORDERED, Way
from fp8rl_jax.kernels.reference.orders import float32_order
from fp8rl_jax.kernels.reference.probe import Numbers

_LOOKED_AT = 96  # number of first and of last rows and columns that are compared


@dataclasses.dataclass(frozen=True)
class Dot:
    """A `lax.dot_general` of a program, with one contracted axis.

    Attributes:
      x, w: shapes of the operands.
      dtype: dtype of both operands.
      dimension_numbers: as for `lax.dot_general`.
    """

    x: tuple[int, ...]
    w: tuple[int, ...]
    dtype: jnp.dtype
    dimension_numbers: Any

    def _order_of_axes(self, of_x: bool) -> tuple[int, ...]:
        """Returns an operand's axes: batch, then (rows, contracted) or (contracted, columns)."""
        contracted, batch = (numbers[not of_x] for numbers in self.dimension_numbers)
        ndim = len(self.x if of_x else self.w)
        free = tuple(axis for axis in range(ndim) if axis not in (*contracted, *batch))
        return (*batch, *free, *contracted) if of_x else (*batch, *contracted, *free)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Entries of the batch, rows, depth and columns."""
        x = [self.x[axis] for axis in self._order_of_axes(True)]
        columns = self.w[self._order_of_axes(False)[-1]]
        return math.prod(x[:-2]), x[-2], x[-1], columns

    def with_rows(self, rows: int) -> Dot:
        axis = self._order_of_axes(True)[-2]
        return dataclasses.replace(self, x=(*self.x[:axis], rows, *self.x[axis + 1 :]))

    def operands(self, numbers: Numbers) -> list[np.ndarray]:
        """Returns operands of these shapes, the same in every entry of the batch."""
        _, rows, _, columns = self.sizes
        operands = []
        for matrix, of_x in zip(numbers.operands(rows, columns), (True, False), strict=True):
            order = self._order_of_axes(of_x)
            shape = [(self.x if of_x else self.w)[axis] for axis in order]
            x = np.broadcast_to(matrix, shape).transpose(np.argsort(order))
            operands.append(np.ascontiguousarray(x))
        return operands


def _jaxprs(value: Any) -> Iterator[Any]:
    """Yields the jaxprs in a parameter of an equation."""
    if hasattr(value, "eqns"):
        yield value
    elif hasattr(value, "jaxpr"):
        yield from _jaxprs(value.jaxpr)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _jaxprs(each)


def ordered_dots(jaxpr: Any) -> set[Dot]:
    """Returns the dots under the scope `ORDERED` (`matmul.product`, `small_product`) in a jaxpr and
    the jaxprs inside it, except those in float64."""
    found = set()
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            for inner in _jaxprs(value):
                found |= ordered_dots(inner)
        if equation.primitive is not lax.dot_general_p:
            continue
        x, w = (variable.aval for variable in equation.invars)
        is_ours = ORDERED in str(equation.source_info.name_stack)
        if is_ours and x.dtype != jnp.float64:
            found.add(Dot(x.shape, w.shape, x.dtype, equation.params["dimension_numbers"]))
    return found


def _holds(way: Way, dot: Dot) -> bool:
    """Returns whether a product has the way's order in its first and last rows and columns."""
    _, rows, depth, columns = dot.sizes
    order = way.bf16_order if dot.dtype == jnp.bfloat16 else float32_order
    assert order
    numbers = Numbers(order, dot.dtype, depth)

    def product(x, w):
        return matmul.dot_general(x, w, dot.dimension_numbers)

    multiply = jax.jit(product, compiler_options=dict(way.options))
    found = np.asarray(multiply(*dot.operands(numbers)))
    found = found.reshape(-1, rows, columns)
    ends = [
        np.unique(np.r_[0 : min(n, _LOOKED_AT), max(n - _LOOKED_AT, 0) : n])
        for n in (rows, columns)
    ]
    entries = np.unique(np.linspace(0, len(found) - 1, 8).astype(int))
    return not numbers.differ(found[np.ix_(entries, *ends)], *ends)


def dots_that_differ(way: Way, dots: Iterable[Dot]) -> list[Dot]:
    """Returns the first three dots, by size, whose bits differ from the way's order. Each is run at
    its own size, with this process's threads."""
    by_size = sorted(dots, key=lambda dot: dot.sizes)
    return list(itertools.islice((dot for dot in by_size if not _holds(way, dot)), 3))
