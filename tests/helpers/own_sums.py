"""Finds the sums of a traced program whose order is XLA's own: products and reductions of floats.

Their bits depend on instructions and threads. What is left out: products in float64, which
kernels/reference/exact.py makes exact; maxima and minima; additions into places one after the other
(scatter-add), which XLA:CPU makes in the order of the updates.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from jax._src.source_info_util import summarize
from jax.extend import core

from fp8rl_jax.kernels.reference.matmul import ONE_TERM

_SUMS = (
    "dot_general",
    "conv_general_dilated",
    "reduce_sum",
    "reduce_prod",
    "cumsum",
    "cumprod",
    "cumlogsumexp",
    "reduce_window_sum",
    "reduce_window",
    "reduce",
)


def _inner(value) -> Iterator:
    if isinstance(value, core.ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, core.Jaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from _inner(entry)


def _is_sum(equation) -> bool:
    if equation.primitive.name not in _SUMS or ONE_TERM in str(equation.source_info.name_stack):
        return False
    operand = equation.invars[0].aval
    if not jnp.issubdtype(operand.dtype, jnp.floating) or operand.dtype == jnp.float64:
        return False
    if equation.primitive.name in ("dot_general", "conv_general_dilated"):
        (contracted, _), _ = equation.params["dimension_numbers"]
        return int(np.prod([operand.shape[axis] for axis in contracted])) > 1
    if equation.primitive.name.startswith("cum"):
        return operand.shape[equation.params["axis"]] > 2
    return operand.size > 2 * equation.outvars[0].aval.size  # two numbers have one sum


def own_sums(jaxpr) -> dict[str, int]:
    """Counts them by 'primitive shape -> shape at file:line (function)'."""
    counts: dict[str, int] = {}
    waiting = [jaxpr.jaxpr]
    while waiting:
        for equation in waiting.pop().eqns:
            if _is_sum(equation):
                place = summarize(equation.source_info)
                shapes = " ".join(str(x.aval.str_short()) for x in equation.invars)
                name = f"{equation.primitive.name} {shapes} at {place}"
                counts[name] = counts.get(name, 0) + 1
            for value in equation.params.values():
                waiting.extend(_inner(value))
    return counts
