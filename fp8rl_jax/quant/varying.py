"""Operands of a custom VJP under shard_map: all of them must vary over the same mesh axes.

Inside `jax.shard_map` JAX types an array that is equal on all devices (invarying) differently from
one that differs by device (varying). A custom VJP returns gradients that differ by device, also for
shared operands. If shared operands are marked as varying beforehand, JAX sums their gradients over
the devices, as for its own primitives: `varying_vjp` is a `jax.custom_vjp` that marks them. Outside
shard_map nothing happens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from fp8rl_jax.kernels import axes_of
from fp8rl_jax.quant import scaling
from fp8rl_jax.quant.operands import OperandProbe

_T = TypeVar("_T")


_pcast = functools.partial(lax.pcast, to="varying")


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _pcast_amax(amax: jax.Array, axes: tuple) -> jax.Array:
    """Marks a shared amax probe as varying; its cotangent is the maximum over the devices."""
    return _pcast(amax, axes)


def _maximum(axes: tuple, residual, cotangent: jax.Array):
    bits = lax.bitcast_convert_type(cotangent, jnp.uint32)  # on the bits, so that NaN stays
    return (lax.bitcast_convert_type(lax.pmax(bits, axes), jnp.float32),)


_pcast_amax.defvjp(lambda amax, axes: (_pcast_amax(amax, axes), None), _maximum)


def share(tree):
    """Returns a tree with every array marked as varying over the union of their axes.

    Gradients of shared arrays are then summed over the devices; observations of an `OperandProbe`
    are combined: counts by sum, amaxes by maximum.
    """
    axes = axes_of(tree)
    return spread(axes, tree) if axes else tree


class varying_vjp(Generic[_T]):
    """A `jax.custom_vjp` that passes its operands through `share` first.

    Used as a decorator: ``@functools.partial(varying_vjp, static=1)``. The first `static` arguments
    are static (`nondiff_argnums`); `defvjp` as for `jax.custom_vjp`.
    """

    def __init__(self, function: Callable[..., _T], static: int = 0):
        self._rule = jax.custom_vjp(function, nondiff_argnums=tuple(range(static)))
        self._static = static
        self.defvjp = self._rule.defvjp
        functools.update_wrapper(self, function)

    def __call__(self, *arguments) -> _T:
        return self._rule(*arguments[: self._static], *share(arguments[self._static :]))


def spread(axes: frozenset, tree):
    """Returns a tree with every array marked as varying over `axes`, too.

    bf16 is marked as float32, which changes no value, so that its gradients are summed in float32.
    """

    def mark(leaf, pcast=_pcast) -> jax.Array:
        leaf = jnp.asarray(leaf)
        missing = tuple(sorted(axes - axes_of(leaf)))
        if not missing:
            return leaf
        wide = leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf
        return pcast(wide, missing).astype(leaf.dtype)

    def visit(node):
        if not isinstance(node, OperandProbe):
            return mark(node)
        amax = None if node.amax is None else mark(node.amax, _pcast_amax)
        return OperandProbe(amax, None if node.counts is None else mark(node.counts))

    return jax.tree.map(visit, tree, is_leaf=lambda node: isinstance(node, OperandProbe))


def repeat_probe(probe, count: int):
    """Returns a probe for `count` uses in a scan: its arrays get an axis (count, ...) in front.

    JAX would add the observations of all uses; here amaxes are combined by maximum, counts by sum.
    """
    return jax.tree.map(
        lambda node: OperandProbe(
            *(
                x if x is None else repeat(x, count)
                for x, repeat in ((node.amax, _repeat_amax), (node.counts, _repeat))
            )
        ),
        probe,
        is_leaf=lambda node: isinstance(node, OperandProbe),
    )


def _repeat(x: jax.Array, count: int) -> jax.Array:
    return jnp.broadcast_to(x, (count, *x.shape))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _repeat_amax(amax: jax.Array, count: int) -> jax.Array:
    """Repeats like `_repeat`; the cotangent is the maximum over the uses."""
    return _repeat(amax, count)


_repeat_amax.defvjp(
    lambda amax, count: (_repeat(amax, count), None),
    lambda count, residual, cotangent: (scaling.find_amax(cotangent, 0),),
)
