"""Grouped-query attention with QK-norm and RoPE; K and V always pass through the KV quantiser."""

from __future__ import annotations

import functools
import math

import flax.linen as nn
import jax

from fp8rl_jax import kernels
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.kv_cache import KVCache
from fp8rl_jax.models.layers import RMSNorm, apply_rope, linear
from fp8rl_jax.quant import Recipe, compute_value, quantize_kv


def _store(k: jax.Array, v: jax.Array, recipe: Recipe) -> KVCache:
    """Keys and values of one layer as the cache holds them."""
    (k, k_scale), (v, v_scale) = quantize_kv(k, recipe), quantize_kv(v, recipe)
    return KVCache(k, v, k_scale, v_scale)


def _attend(q: jax.Array, kv: KVCache, positions: jax.Array) -> jax.Array:
    return kernels.attention(
        q, kv.k, kv.v, positions,
        scale=1 / math.sqrt(q.shape[-1]), k_scale=kv.k_scale, v_scale=kv.v_scale,
    )  # fmt: skip


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def self_attention(
    recipe: Recipe, q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array
) -> jax.Array:
    """Attention of a whole sequence to itself, as the learner runs it.

    Keys and values make the same round trip through FP8 as in the sampler's cache; the gradient
    is straight through the rounding, taken at the rounded values.

    Args:
      q: (B, T, H, Dh); k, v: (B, T, Hkv, Dh), in the compute dtype.
      positions: (B, T) int32.

    Returns:
      (B, T, H, Dh) float32.
    """
    return _attend(q, _store(k, v, recipe), positions)


def _self_attention_forward(recipe, q, k, v, positions):
    kv = _store(k, v, recipe)
    return _attend(q, kv, positions), (q, kv, positions)


def _self_attention_backward(recipe, residual, cotangent):
    q, kv, positions = residual
    k, v = kv.k.astype("float32"), kv.v.astype("float32")
    if kv.k_scale is not None and kv.v_scale is not None:
        k, v = k * kv.k_scale[..., None], v * kv.v_scale[..., None]
    grads = kernels.attention_vjp(q, k, v, positions, cotangent, scale=1 / math.sqrt(q.shape[-1]))
    return (*(g.astype(q.dtype) for g in grads), None)


self_attention.defvjp(_self_attention_forward, _self_attention_backward)


class Attention(nn.Module):
    """Projections, QK-norm, RoPE, and attention over the cache or over the sequence itself."""

    config: ModelConfig
    recipe: Recipe

    @nn.compact
    def __call__(self, x, cache: KVCache | None, positions, cos, sin):
        """x (B, T, D), positions (B, T), cos/sin (B, T, Dh/2) -> ((B, T, H*Dh), cache)."""
        config, recipe = self.config, self.recipe
        heads, kv_heads, dim = (
            config.num_attention_heads, config.num_key_value_heads, config.head_dim
        )  # fmt: skip
        batch, length, _ = x.shape
        q = linear(recipe, heads * dim, "q_proj")(x).reshape(batch, length, heads, dim)
        k = linear(recipe, kv_heads * dim, "k_proj")(x).reshape(batch, length, kv_heads, dim)
        v = linear(recipe, kv_heads * dim, "v_proj")(x).reshape(batch, length, kv_heads, dim)
        q = RMSNorm(config.rms_norm_eps, recipe, name="q_norm")(q)
        k = RMSNorm(config.rms_norm_eps, recipe, name="k_norm")(k)
        q, k = apply_rope(q, cos, sin, recipe), apply_rope(k, cos, sin, recipe)
        if cache is None:
            out = self_attention(recipe, q, k, v, positions)
        else:
            cache = cache.write(_store(k, v, recipe), positions)
            out = _attend(q, cache, positions)
        return compute_value(out, recipe).reshape(batch, length, heads * dim), cache, (k, v)
