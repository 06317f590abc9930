"""FP8 and bf16 arrays viewed as integers, for XLA:CPU to slice, pad, stack and store.

To move FP8 or bf16 numbers, XLA:CPU widens a complete buffer and rounds it back. A scan that stacks
residuals for its backward pass did this to the full stack in every iteration, which took a fifth of
a train step. Integers are copied without conversions. So:

    keep, kept      residuals of a custom VJP, and weights that a loop reads
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
    """An array of FP8 or bf16 numbers as uint8 or uint16, with the numbers' dtype."""

    bits: jax.Array
    dtype: jnp.dtype = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bits.shape


def as_bytes(x: jax.Array) -> jax.Array:
    """Views FP8 as uint8 and float16 or bf16 as uint16; returns other types unchanged."""
    if x.dtype.itemsize > 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return lax.bitcast_convert_type(x, jnp.uint8 if x.dtype.itemsize == 1 else jnp.uint16)


def from_bytes(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Inverts `as_bytes` of an array of dtype `dtype`."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def in_bits(move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Computes ``move(x)``, on integers if `x` is FP8 or bf16."""
    return from_bytes(move(as_bytes(x)), x.dtype)


def keep(tree):
    """Returns `tree` with its FP8 and bf16 arrays as `Bits`."""

    def convert(x: jax.Array) -> jax.Array | Bits:
        bits = as_bytes(x)
        return x if bits.dtype == x.dtype else Bits(bits, x.dtype)

    return jax.tree.map(convert, tree)


def kept(tree):
    """Inverts `keep`."""

    def convert(x: jax.Array | Bits) -> jax.Array:
        return from_bytes(x.bits, x.dtype) if isinstance(x, Bits) else x

    return jax.tree.map(convert, tree, is_leaf=lambda x: isinstance(x, Bits))


def scan_in_bits(step: Callable, carried, xs) -> tuple:
    """Runs `lax.scan`, slicing `xs` and stacking results as `Bits`."""

    def step_in_bits(carried, x):
        carried, y = step(carried, kept(x))
        return carried, keep(y)

    carried, ys = lax.scan(step_in_bits, carried, keep(xs))
    return carried, kept(ys)
