"""The products of a traced program whose order is promised, tried one by one on this machine.

`probe` tries many sizes before any program is there. This looks at the sizes that a program has.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8rl_jax.kernels.reference import ways
from fp8rl_jax.kernels.reference.orders import float32_order
from fp8rl_jax.kernels.reference.probe import Numbers
from fp8rl_jax.kernels.reference.ways import ORDERED, Way

_LOOKED_AT = 96  # of the first and of the last rows and columns of a product


@dataclasses.dataclass(frozen=True)
class Dot:
    """A `lax.dot_general` with one contracted axis, as a program has it.

    Attributes:
      x, w: shapes.
      dtype: of both operands.
      dimension_numbers: as `lax.dot_general` takes them.
    """

    x: tuple[int, ...]
    w: tuple[int, ...]
    dtype: jnp.dtype
    dimension_numbers: Any

    def _order_of_axes(self, of_x: bool) -> tuple[int, ...]:
        """Axes of an operand: the batch, then (rows, contracted) or (contracted, columns)."""
        contracted, batch = (numbers[not of_x] for numbers in self.dimension_numbers)
        ndim = len(self.x if of_x else self.w)
        free = tuple(axis for axis in range(ndim) if axis not in (*contracted, *batch))
        return (*batch, *free, *contracted) if of_x else (*batch, *contracted, *free)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(entries of the batch, rows, depth, columns)."""
        x = [self.x[axis] for axis in self._order_of_axes(True)]
        columns = self.w[self._order_of_axes(False)[-1]]
        return math.prod(x[:-2]), x[-2], x[-1], columns

    def with_rows(self, rows: int) -> Dot:
        axis = self._order_of_axes(True)[-2]
        return dataclasses.replace(self, x=(*self.x[:axis], rows, *self.x[axis + 1 :]))

    def operands(self, numbers: Numbers) -> list[np.ndarray]:
        """Operands of these shapes, the same in every entry of the batch."""
        _, rows, _, columns = self.sizes
        operands = []
        for matrix, of_x in zip(numbers.operands(rows, columns), (True, False), strict=True):
            order = self._order_of_axes(of_x)
            shape = [(self.x if of_x else self.w)[axis] for axis in order]
            x = np.broadcast_to(matrix, shape).transpose(np.argsort(order))
            operands.append(np.ascontiguousarray(x))
        return operands


def _jaxprs(value: Any) -> Iterator[Any]:
    """The jaxprs in a parameter of an equation."""
    if hasattr(value, "eqns"):
        yield value
    elif hasattr(value, "jaxpr"):
        yield from _jaxprs(value.jaxpr)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _jaxprs(each)


def ordered_dots(jaxpr: Any) -> set[Dot]:
    """The products of a jaxpr, and of those within it, that `products` made; none in float64."""
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
            numbers = equation.params["dimension_numbers"]
            found.add(Dot(x.shape, w.shape, x.dtype, numbers))
    return found


def _holds(way: Way, dot: Dot) -> bool:
    """Whether a product has the bits of the way's order in its first and last rows and columns."""
    _, rows, depth, columns = dot.sizes
    order = way.bf16_order if dot.dtype == jnp.bfloat16 else float32_order
    assert order
    numbers = Numbers(order, dot.dtype, depth)
    multiply = lambda x, w: ways.dot_general(x, w, dot.dimension_numbers)
    multiply = jax.jit(multiply, compiler_options=dict(way.options))
    found = np.asarray(multiply(*dot.operands(numbers)))
    found = found.reshape(-1, rows, columns)
    ends = [
        np.unique(np.r_[0 : min(n, _LOOKED_AT), max(n - _LOOKED_AT, 0) : n])
        for n in (rows, columns)
    ]
    entries = np.unique(np.linspace(0, len(found) - 1, 8).astype(int))
    return not numbers.differ(found[np.ix_(entries, *ends)], *ends)


def dots_that_differ(way: Way, dots: Iterable[Dot]) -> list[Dot]:
    """Those whose bits are not those of the way's order, multiplied at their own sizes, with this
    process's threads. Ends at the third."""
    differ: list[Dot] = []
    for dot in sorted(dots, key=lambda dot: dot.sizes):
        if not _holds(way, dot):
            differ.append(dot)
            if len(differ) == 3:
                break
    return differ
