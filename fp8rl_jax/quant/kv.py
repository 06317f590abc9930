"""Quantisation of stored keys and values: E4M3 with one dynamic scale per (token, kv head).

The sampler's cache and the learner's attention both go through `quantize_kv`, so the learner sees
exactly the keys that the rollout read. Scales depend on one token alone: no calibration, nothing
that can be stale, and no dependence on the rest of the batch.
"""

from __future__ import annotations

import jax

from fp8rl_jax.quant.dot_general import compute_value
from fp8rl_jax.quant.formats import round_bf16
from fp8rl_jax.quant.qarray import quantize
from fp8rl_jax.quant.recipe import Recipe


def quantize_kv(x: jax.Array, recipe: Recipe) -> tuple[jax.Array, jax.Array | None]:
    """Keys or values as the cache stores them.

    Args:
      x: (..., Hkv, Dh), keys after QK-norm and RoPE, or values.
      recipe: the side's recipe; with `kv_quantized` the result is FP8.

    Returns:
      (stored, scale): (..., Hkv, Dh) E4M3 and (..., Hkv) float32; or the compute dtype and None.
    """
    if not recipe.kv_quantized:
        return compute_value(x, recipe), None
    q = quantize(round_bf16(x), (-1,), power_of_two=recipe.power_of_two)
    return q.qvalue, q.scale[..., 0]
