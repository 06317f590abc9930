"""Operands of a custom VJP under shard_map: all of them must vary over the same mesh axes.

Inside `jax.shard_map` an array that every device shares is typed apart from one that differs by
device. A custom VJP returns gradients that differ by device, also for shared operands; marking
these as varying beforehand lets JAX sum their gradients over the devices, as its own rules do.
Outside shard_map nothing happens.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from fp8rl_jax.quant import formats
from fp8rl_jax.quant.site import OperandProbe


def axes_of(tree) -> frozenset:
    """Mesh axes over which arrays of a tree differ."""
    axes = (jax.typeof(jnp.asarray(x)).manual_axis_type.varying for x in jax.tree.leaves(tree))
    return frozenset().union(*axes)


_pcast = functools.partial(lax.pcast, to="varying")


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _pcast_amax(amax: jax.Array, axes: tuple) -> jax.Array:
    """A shared probe, marked as varying; its cotangent is the maximum over the devices."""
    return _pcast(amax, axes)


def _maximum(axes: tuple, residual, cotangent: jax.Array):
    bits = lax.bitcast_convert_type(cotangent, jnp.uint32)  # on the bits, so that NaN stays
    return (lax.bitcast_convert_type(lax.pmax(bits, axes), jnp.float32),)


_pcast_amax.defvjp(lambda amax, axes: (_pcast_amax(amax, axes), None), _maximum)


def share(*trees):
    """The arguments, with every array marked as varying over the axes of any of them.

    Gradients of shared arrays are then summed over the devices; what an `OperandProbe` observed is
    combined: counts by sum, amaxes by maximum.
    """
    axes = axes_of(trees)
    return spread(axes, *trees) if axes else trees


def spread(axes: frozenset, *trees):
    """The arguments, with every array marked as varying over `axes` (and what it varies over).

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

    return jax.tree.map(visit, trees, is_leaf=lambda node: isinstance(node, OperandProbe))


def repeat_probe(probe, count: int):
    """A probe for each of `count` uses in a scan: its arrays with an axis (count, ...) in front.

    JAX would add what the uses observe; here amaxes are combined by maximum, counts by sum.
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
    """`_repeat`; the cotangent is the maximum of the uses."""
    return _repeat(amax, count)


_repeat_amax.defvjp(
    lambda amax, count: (_repeat(amax, count), None),
    lambda count, residual, cotangent: (formats.amax(cotangent, 0),),
)
