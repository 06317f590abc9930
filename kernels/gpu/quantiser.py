"""Scales of FP8 blocks, from the bits of their amax: the quantiser of fp8rl_jax/quant/qarray.py.

True quotients; amax on the integer bits, exact in any order, with NaN above inf above every number.
There is no clipping before the cast: |x| <= amax and s <= fl(max / amax), so |x * s| exceeds the
largest FP8 value by at most one float32 ulp and rounds to it.
"""

import dataclasses

import jax.numpy as jnp
import triton
import triton.language as tl

E4M3 = jnp.float8_e4m3fn
INF_BITS = tl.constexpr(0x7F800000)  # `magnitude_bits` of infinity
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_EXPONENT = tl.constexpr(-0x800000)  # sign and exponent, as int32
_LARGEST = tl.constexpr(3.4028234663852886e38)


@dataclasses.dataclass(frozen=True)
class Quantisation:
    """Quantisation of blocks of 128 numbers: FP8 format, and whether scales are powers of two."""

    dtype: jnp.dtype = E4M3
    power_of_two: bool = False


@triton.jit
def magnitude_bits(x):
    """Returns the bits of |x| as int32, in the order of |x|, with inf above and NaN above inf."""
    return x.to(tl.int32, bitcast=True) & _MAGNITUDE


@triton.jit
def block_scales(amax_bits, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """Returns a block's multiplier and the scale to store, from the bits of its amax."""
    zero = amax_bits == 0
    s = tl.div_rn(FP8_MAX, tl.where(zero, 1.0, amax_bits.to(tl.float32, bitcast=True)))
    s = tl.where(zero, 1.0, tl.minimum(s, _LARGEST))
    if POWER_OF_TWO:
        s = (s.to(tl.int32, bitcast=True) & _EXPONENT).to(tl.float32, bitcast=True)
    s = tl.where(amax_bits < INF_BITS, s, float("nan"))
    return s, tl.div_rn(1.0, s)
