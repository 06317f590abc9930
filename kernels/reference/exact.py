"""Products whose sums are exact, so that the order of summation cannot change a bit.

Sums are made in float64, which holds 53 bits. E4M3 numbers are multiples of 2**-9 up to 448, so
their products are multiples of 2**-18 below 2**18 and 128 of them add up to less than 2**25: 43
bits, exact in any order.

Other operands are split into two signed integers of 22 bits, scaled by the largest number of their
row (left) or column (right) in this block of K:
``x = (high + low / 2**22) * 2**(e - 22)``, |x| < 2**e.
A product of two integers takes 44 bits, the sum of 128 of them 51. Of the four products, low by low
is left out: the error is below 2**-43 of the largest number of the row times that of the column.
The other three are added in one order and rounded to float32 once. E4M3 numbers in a wider type
have no low part, and give the bits of E4M3.

An operand that is infinite gives NaN.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from fp8rl_jax.kernels.arrays import K_BLOCK
from fp8rl_jax.kernels.reference.bits import E4M3, widened

_BITS = 22  # of a slice, without its sign


def _dot(x: jax.Array, w: jax.Array, dimension_numbers) -> jax.Array:
    return lax.dot_general(x, w, dimension_numbers, preferred_element_type=jnp.float64)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """Returns 2**exponent in float64, for an int64 exponent in float64's range."""
    return lax.bitcast_convert_type((exponent + 1023) << 52, jnp.float64)


def _slices(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Splits float32 into (high, low, exponent): integers in float64, and int64 exponents with size
    1 along the contracted `axis`."""
    largest = jnp.max(jnp.abs(x), axis=axis, keepdims=True)
    exponent = (lax.bitcast_convert_type(largest, jnp.int32) >> 23).astype(jnp.int64) - 126
    x = x.astype(jnp.float64) * _power_of_two(_BITS - exponent)
    high = lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)
    low = lax.round((x - high) * 2.0**_BITS, lax.RoundingMethod.TO_NEAREST_EVEN)
    return high, low, exponent


def exact_dot_general(x: jax.Array, w: jax.Array, dimension_numbers) -> jax.Array:
    """Computes `lax.dot_general` in float32, each sum exact before it is rounded (see the module).

    Args:
      x, w: FP8, bf16 or float32; one axis of at most 128 is contracted.
      dimension_numbers: as for `lax.dot_general`.
    """
    ((of_x,), (of_w,)), _ = dimension_numbers
    assert x.shape[of_x] <= K_BLOCK
    with jax.enable_x64(True):
        if x.dtype == w.dtype == E4M3:
            x, w = (widened(operand, jnp.float32).astype(jnp.float64) for operand in (x, w))
            return _dot(x, w, dimension_numbers).astype(jnp.float32)
        x_high, x_low, x_exponent = _slices(widened(x, jnp.float32), of_x)
        w_high, w_low, w_exponent = _slices(widened(w, jnp.float32), of_w)
        low = _dot(x_high, w_low, dimension_numbers) + _dot(x_low, w_high, dimension_numbers)
        total = _dot(x_high, w_high, dimension_numbers) + low * 2.0**-_BITS
        # The power of two of each result: a product over the contracted axis, of length 1 here.
        x_scale, w_scale = (_power_of_two(e - _BITS) for e in (x_exponent, w_exponent))
        return (total * _dot(x_scale, w_scale, dimension_numbers)).astype(jnp.float32)
