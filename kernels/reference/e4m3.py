"""Conversions of E4M3 to and from wider floats.

Numbers are rounded by about ten operations on integers, everywhere: the same bytes on a CPU and on
a GPU, where XLA rounds twice, to float16 first (on an H200 one number of a thousand came out one
step off). XLA:CPU rounds once, in many more operations, and takes as many to widen, which is exact.

E4M3 (`float8_e4m3fn`): sign, 4 bits of exponent with bias 7, 3 of mantissa; 2**-6 is the smallest
normal number, 2**-9 the smallest subnormal one, 0x7F is NaN.

tests/kernels/reference/test_e4m3.py compares `to_e4m3` with XLA on all 2**32 float32 numbers
(slow), and `widened` on all 256 codes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8rl_jax.kernels.machine import backend

E4M3 = jnp.dtype(jnp.float8_e4m3fn)
_SMALLEST_NORMAL = np.float32(2.0**-6)
_NAN = np.uint32(0x7F)
_FLOAT32_NAN = np.uint32(0x7FC00000)


def _float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


def to_e4m3(x: jax.Array) -> jax.Array:
    """Rounds float32 within +-448, or NaN, to the nearest E4M3, ties to even."""
    size = jnp.abs(x)
    # Rounded to 3 bits of mantissa, with E4M3's exponent bias instead of float32's.
    normal = (_bits(lax.reduce_precision(size, 8, 3)) >> 20) - np.uint32((127 - 7) << 3)
    # The last bit of a float32 near 2**14 is 2**-9.
    small = _bits(size + np.float32(2.0**14)) & np.uint32(0xFF)
    # NaN has a greater code than 448 and becomes 0x7F.
    code = jnp.minimum(jnp.where(size < _SMALLEST_NORMAL, small, normal), _NAN)
    code |= (_bits(x) >> 24) & np.uint32(0x80)
    return lax.bitcast_convert_type(code.astype(jnp.uint8), E4M3)


def widened(x: jax.Array, dtype) -> jax.Array:
    """Converts FP8, bf16 or float32 to a `dtype` that holds every number of `x`'s type."""
    if x.dtype != E4M3 or backend() != "cpu":
        return x.astype(dtype)
    byte = lax.bitcast_convert_type(x, jnp.uint8).astype(jnp.uint32)
    code = byte & np.uint32(0x7F)
    normal = (code << 20) + np.uint32((127 - 7) << 23)
    # 0x7F would be 480 and becomes NaN.
    normal = _float(normal + ((code + 1) >> 7) * (_FLOAT32_NAN - np.uint32(0x43F00000)))
    # Subnormals: the same mantissa bits after a leading 1, which is subtracted again.
    small = _float((code << 20) + np.uint32((127 - 6) << 23)) - _SMALLEST_NORMAL
    size = jnp.where(code < 8, small, normal)
    signed = _float(_bits(size) | ((byte & np.uint32(0x80)) << 24))
    return signed.astype(dtype)
