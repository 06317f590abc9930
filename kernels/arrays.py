"""Block sizes and array helpers that the reference and the GPU kernels share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

K_BLOCK = 128  # of a contraction, and columns of a weight, that share a scale
KV_CHUNK = 64  # cache slots that attention reads at a time: a page
EXP_LANES = 16  # exp over a last axis that is a multiple of this takes the vector code throughout
_BELOW_ALL = -3.4e38
_FP8_MAX = {jnp.dtype(jnp.float8_e4m3fn): 448.0, jnp.dtype(jnp.float8_e5m2): 57344.0}


def fp8_max(dtype) -> float:
    """Largest finite value of an FP8 format: 448 (E4M3) or 57344 (E5M2).

    Raises:
      ValueError: `dtype` is not one of the two formats.
    """
    if jnp.dtype(dtype) not in _FP8_MAX:
        raise ValueError(f"{jnp.dtype(dtype)} is no FP8 format; use float8_e4m3fn or float8_e5m2")
    return _FP8_MAX[jnp.dtype(dtype)]


def prevent_fma(product: jax.Array) -> jax.Array:
    """Returns `product` unchanged, in a form that XLA cannot contract into a fused multiply-add.

    LLVM contracts ``a * b + c`` depending on how many users ``a * b`` has, which differs between
    a forward-only program and a train step. A maximum with a number below every finite product
    stands between the two. NaN passes; -inf becomes -3.4e38.
    """
    return jnp.maximum(product, jnp.float32(_BELOW_ALL))


def round_bf16(x: jax.Array) -> jax.Array:
    """Rounds to bf16, to nearest even, in a form that XLA does not simplify away."""
    if x.dtype == jnp.bfloat16:
        return x
    return lax.reduce_precision(x.astype(jnp.float32), 8, 7).astype(jnp.bfloat16)


def rounded(x: jax.Array, dtype) -> jax.Array:
    """`x` in `dtype`, rounded at this place."""
    return round_bf16(x) if dtype == jnp.bfloat16 else x.astype(dtype)


def pad_to(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    """`x` padded with zeros to a multiple of `multiple` entries along an axis."""
    missing = -x.shape[axis] % multiple
    if not missing:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return jnp.pad(x, widths)


def varying_as(results, *arrays: jax.Array):
    """`results` typed under shard_map as differing by device as any of `arrays` does."""
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))
    return lax.pcast(results, tuple(sorted(axes)), to="varying") if axes else results
