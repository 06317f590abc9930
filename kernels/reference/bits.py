"""FP8 and bf16 numbers as integers: what XLA:CPU converts, moves and stores slowly or inexactly.

To move FP8 or bf16 numbers, XLA:CPU widens a complete buffer and rounds it back. A scan that stacks
residuals for its backward pass did this to the full stack in every iteration, which took a fifth of
a train step. Integers are copied without conversions. So:

    keep, kept      residuals of a custom VJP, and weights that a loop reads
    scan_in_bits    a scan over arrays
    in_bits         one operation that only moves numbers: a slice, a gather over devices

E4M3 (`float8_e4m3fn`) has a sign, 4 bits of exponent with bias 7 and 3 of mantissa; 2**-6 is the
smallest normal number, 2**-9 the smallest subnormal one, 0x7F is NaN. Numbers are rounded to it by
about ten operations on integers, everywhere: the same bytes on a CPU and on a GPU, where XLA rounds
twice, to float16 first (on an H200 one number of a thousand came out one step off). XLA:CPU rounds
once, in many more operations, and takes as many to widen, which is exact.

tests/kernels/reference/test_bits.py compares `to_e4m3` with XLA on all 2**32 float32 numbers
(slow), and `widened` on all 256 codes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8rl_jax.kernels.machine import backend

E4M3 = jnp.dtype(jnp.float8_e4m3fn)
_SMALLEST_NORMAL = np.float32(2.0**-6)
_NAN = np.uint32(0x7F)
_FLOAT32_NAN = np.uint32(0x7FC00000)


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
    """Views FP8 as uint8 and float16 or bf16 as uint16; returns other types unchanged. The inverse
    is ``.view(dtype)``."""
    if x.dtype.itemsize > 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return x.view(jnp.uint8 if x.dtype.itemsize == 1 else jnp.uint16)


def in_bits(move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Computes ``move(x)``, on integers if `x` is FP8 or bf16."""
    return move(as_bytes(x)).view(x.dtype)


def keep(tree):
    """Returns `tree` with its FP8 and bf16 arrays as `Bits`."""

    def convert(x: jax.Array) -> jax.Array | Bits:
        bits = as_bytes(x)
        return x if bits.dtype == x.dtype else Bits(bits, x.dtype)

    return jax.tree.map(convert, tree)


def kept(tree):
    """Inverts `keep`."""

    def convert(x: jax.Array | Bits) -> jax.Array:
        return x.bits.view(x.dtype) if isinstance(x, Bits) else x

    return jax.tree.map(convert, tree, is_leaf=lambda x: isinstance(x, Bits))


def scan_in_bits(step: Callable, carried, xs) -> tuple:
    """Runs `lax.scan`, slicing `xs` and stacking results as `Bits`."""

    def step_in_bits(carried, x):
        carried, y = step(carried, kept(x))
        return carried, keep(y)

    carried, ys = lax.scan(step_in_bits, carried, keep(xs))
    return carried, kept(ys)


def to_e4m3(x: jax.Array) -> jax.Array:
    """Rounds float32 within +-448, or NaN, to the nearest E4M3, ties to even."""
    size = jnp.abs(x)
    # Rounded to 3 bits of mantissa, with E4M3's exponent bias instead of float32's.
    normal = (lax.reduce_precision(size, 8, 3).view(jnp.uint32) >> 20) - np.uint32((127 - 7) << 3)
    # The last bit of a float32 near 2**14 is 2**-9.
    small = (size + np.float32(2.0**14)).view(jnp.uint32) & np.uint32(0xFF)
    # NaN has a greater code than 448 and becomes 0x7F.
    code = jnp.minimum(jnp.where(size < _SMALLEST_NORMAL, small, normal), _NAN)
    code |= (x.view(jnp.uint32) >> 24) & np.uint32(0x80)
    return code.astype(jnp.uint8).view(E4M3)


def widened(x: jax.Array, dtype) -> jax.Array:
    """Converts FP8, bf16 or float32 to a `dtype` that holds every number of `x`'s type."""
    if x.dtype != E4M3 or backend() != "cpu":
        return x.astype(dtype)
    byte = x.view(jnp.uint8).astype(jnp.uint32)
    code = byte & np.uint32(0x7F)
    normal = (code << 20) + np.uint32((127 - 7) << 23)
    # 0x7F would be 480 and becomes NaN.
    normal = (normal + ((code + 1) >> 7) * (_FLOAT32_NAN - np.uint32(0x43F00000))).view(jnp.float32)
    # Subnormals: the same mantissa bits after a leading 1, which is subtracted again.
    small = ((code << 20) + np.uint32((127 - 6) << 23)).view(jnp.float32) - _SMALLEST_NORMAL
    size = jnp.where(code < 8, small, normal)
    signed = size.view(jnp.uint32) | ((byte & np.uint32(0x80)) << 24)
    return signed.view(jnp.float32).astype(dtype)
