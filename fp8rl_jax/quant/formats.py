"""Facts of the FP8 formats, an exact amax, rounding to bf16, and the saturating cast.

E4M3 (`float8_e4m3fn`): 4 exponent bits, 3 mantissa bits, largest value 448, no infinity. E5M2: 5
and 2, largest 57344. Source: Micikevicius et al., arXiv:2209.05433.

Why each helper exists (measured on XLA:CPU): a float32 maximum of absolute values drops NaN there;
JAX's cast to E4M3 turns everything above 464 into NaN instead of saturating; and XLA may drop a
float32 -> bf16 -> float32 round trip, so the rounding is written as `reduce_precision`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8rl_jax.kernels import folded, to_e4m3
from fp8rl_jax.kernels.arrays import fp8_max as fp8_max
from fp8rl_jax.kernels.arrays import round_bf16 as round_bf16

E4M3 = jnp.float8_e4m3fn
E5M2 = jnp.float8_e5m2
FLOAT32_MAX = np.float32(np.finfo(np.float32).max)
# Halfway to the value that would follow the largest one: beyond, rounding to nearest overflows.
ROUNDING_LIMIT = {jnp.dtype(E4M3): 464.0, jnp.dtype(E5M2): 61440.0}
# Bits of the largest finite value; inf and NaN are above them.
LARGEST_CODE = {jnp.dtype(E4M3): np.uint8(0x7E), jnp.dtype(E5M2): np.uint8(0x7B)}
_INF_BITS = np.uint32(0x7F800000)
_SIGN_MASK = np.uint32(0x7FFFFFFF)


def amax(x: jax.Array, axis: int | tuple[int, ...], keepdims: bool = False) -> jax.Array:
    """Largest absolute value in float32; NaN wins over inf, inf over every number.

    Taken on the integer bits: exact, independent of order, and NaN cannot get lost.
    """
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) & _SIGN_MASK
    if bits.ndim - 1 in {a % bits.ndim for a in ((axis,) if isinstance(axis, int) else axis)}:
        bits = folded(bits, jnp.maximum)
    return lax.bitcast_convert_type(bits.max(axis=axis, keepdims=keepdims), jnp.float32)


def is_finite_amax(value: jax.Array) -> jax.Array:
    """True where an amax (float32, not negative) is neither NaN nor infinite."""
    return lax.bitcast_convert_type(value, jnp.uint32) < _INF_BITS


def floor_power_of_two(s: jax.Array) -> jax.Array:
    """Rounds positive float32 values down to a power of two, on the bits."""
    bits = lax.bitcast_convert_type(s, jnp.uint32) & np.uint32(0xFF800000)
    return lax.bitcast_convert_type(bits, jnp.float32)


def saturating_cast(x: jax.Array, dtype) -> jax.Array:
    """Clips float32 to the finite range of `dtype`, then rounds to nearest even; NaN stays NaN."""
    limit = jnp.float32(fp8_max(dtype))
    x = jnp.clip(x, -limit, limit)
    return to_e4m3(x) if jnp.dtype(dtype) == E4M3 else x.astype(dtype)


def cast_at_scale(x: jax.Array, s: jax.Array, dtype) -> jax.Array:
    """`saturating_cast` of x * s for an s that does not come from x itself, all float32.

    An element that is NaN or infinite becomes NaN alone: its neighbours must not depend on it.
    """
    return saturating_cast(jnp.where(jnp.isfinite(x), x * s, jnp.nan), dtype)
