"""Block sizes and array helpers that the reference and the GPU kernels share."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

K_BLOCK = 128  # entries of a contraction, and columns of a weight, that share a scale
KV_CHUNK = 64  # cache slots that attention reads at a time: a page
KV_STEP = 4 * KV_CHUNK  # cache slots that a step of decoding reads on a CPU
EXP_LANES = 16  # XLA:CPU's exp uses only vector code if the last axis is a multiple of this
_BELOW_ALL = -3.4e38
_LARGEST = {
    jnp.dtype(jnp.float8_e4m3fn): 448.0,
    jnp.dtype(jnp.float8_e5m2): 57344.0,
    jnp.dtype(jnp.int8): 127.0,
}


def fp8_max(dtype) -> float:
    """Returns the largest finite value of a format of one byte: 448 (E4M3), 57344 (E5M2), or 127
    (INT8, whose numbers reach as far on both sides).

    Raises:
      ValueError: `dtype` is not one of the three.
    """
    if jnp.dtype(dtype) not in _LARGEST:
        raise ValueError(
            f"{jnp.dtype(dtype)} is no format of one byte; use float8_e4m3fn, float8_e5m2 or int8"
        )
    return _LARGEST[jnp.dtype(dtype)]


# Of the argument s of `gated_activation`: s(x) = GELU_FACTOR * x * (1 + GELU_CUBE * x^2).
GELU_FACTOR, GELU_CUBE = 2 * math.sqrt(2 / math.pi), 0.044715
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0  # of gpt-oss's activation


def prevent_fma(product: jax.Array) -> jax.Array:
    """Returns `product` unchanged, in a form that XLA cannot contract into a fused multiply-add.

    LLVM contracts ``a * b + c`` depending on how many users ``a * b`` has, which differs between
    a forward-only program and a train step. Hence a maximum with -3.4e38 between product and
    addition. NaN passes; smaller products and -inf become -3.4e38.
    """
    return jnp.maximum(product, jnp.float32(_BELOW_ALL))


def round_bf16(x: jax.Array) -> jax.Array:
    """Rounds to bf16, to nearest even, in a form that XLA does not simplify away."""
    if x.dtype == jnp.bfloat16:
        return x
    return lax.reduce_precision(x.astype(jnp.float32), 8, 7).astype(jnp.bfloat16)


def rounded(x: jax.Array, dtype) -> jax.Array:
    """Rounds `x` to `dtype`, in a form that XLA does not simplify away."""
    return round_bf16(x) if dtype == jnp.bfloat16 else x.astype(dtype)


def pad_to(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    """Pads `x` with zeros to a multiple of `multiple` entries along an axis."""
    missing = -x.shape[axis] % multiple
    if not missing:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return jnp.pad(x, widths)


def varying_as(results, *arrays: jax.Array):
    """Types `results`, inside a shard_map, as varying over every axis that an array varies over."""
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))
    return lax.pcast(results, tuple(sorted(axes)), to="varying") if axes else results
