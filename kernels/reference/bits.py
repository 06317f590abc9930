"""Small floats as their bits, in which XLA:CPU slices, pads, stacks and stores them.

XLA:CPU can only convert FP8 and bf16: to move such numbers, it widens a complete buffer and rounds
it back. A scan that stacks what its backward pass will read did this to the complete stack in every
iteration, which took a fifth of a train step. It copies bits without conversions. So:

    keep, kept      what a custom VJP keeps for its backward pass; weights that a loop reads
    scan_in_bits    a scan over arrays
    in_bits         one operation that only moves numbers: a slice, a gather over devices
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bits:
    """An array of FP8 or bf16 numbers as uint8 or uint16, and the type of its numbers."""

    bits: jax.Array
    dtype: jnp.dtype = dataclasses.field(metadata={"static": True})


def as_bytes(x: jax.Array) -> jax.Array:
    """FP8 as uint8, bf16 as uint16, other types unchanged."""
    if x.dtype.itemsize > 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return lax.bitcast_convert_type(x, jnp.uint8 if x.dtype.itemsize == 1 else jnp.uint16)


def from_bytes(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """What `as_bytes` was given, of dtype `dtype`."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def in_bits(move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """``move(x)``, applied to the bits of small floats."""
    return from_bytes(move(as_bytes(x)), x.dtype)


def keep(tree):
    """`tree` with its small floats as `Bits`."""

    def convert(x: jax.Array) -> jax.Array | Bits:
        bits = as_bytes(x)
        return x if bits.dtype == x.dtype else Bits(bits, x.dtype)

    return jax.tree.map(convert, tree)


def kept(tree):
    """What `keep` was given."""

    def convert(x: jax.Array | Bits) -> jax.Array:
        return from_bytes(x.bits, x.dtype) if isinstance(x, Bits) else x

    return jax.tree.map(convert, tree, is_leaf=lambda x: isinstance(x, Bits))


def scan_in_bits(step: Callable, carried, xs) -> tuple:
    """`lax.scan` that slices `xs`, and stacks its results, as bits."""

    def step_in_bits(carried, x):
        carried, y = step(carried, kept(x))
        return carried, keep(y)

    carried, ys = lax.scan(step_in_bits, carried, keep(xs))
    return carried, kept(ys)
