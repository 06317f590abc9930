"""Small floats as their bits, in which XLA:CPU slices, pads, stacks and stores them.

XLA:CPU has no code for FP8 and bf16 but conversions: it moves them through wider floats and rounds
them back, whole buffers at a time. A scan that stacks what its backward pass will read did so for
the whole stack in every turn, which was a fifth of a train step. Bits it only copies.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bits:
    """An array of FP8 or bf16 numbers as uint8 or uint16, and the type of its numbers."""

    bits: jax.Array
    dtype: jnp.dtype = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bits.shape


def as_bytes(x: jax.Array) -> jax.Array:
    """FP8 as uint8, bf16 as uint16, other types unchanged."""
    if x.dtype.itemsize > 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return lax.bitcast_convert_type(x, jnp.uint8 if x.dtype.itemsize == 1 else jnp.uint16)


def from_bytes(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """What `as_bytes` was given, of dtype `dtype`."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def as_bits(tree):
    """`tree` with its small floats as `Bits`."""

    def convert(x: jax.Array) -> jax.Array | Bits:
        bits = as_bytes(x)
        return x if bits.dtype == x.dtype else Bits(bits, x.dtype)

    return jax.tree.map(convert, tree)


def from_bits(tree):
    """What `as_bits` was given."""

    def convert(x: jax.Array | Bits) -> jax.Array:
        return from_bytes(x.bits, x.dtype) if isinstance(x, Bits) else x

    return jax.tree.map(convert, tree, is_leaf=lambda x: isinstance(x, Bits))
