"""Rotary position embedding (Su et al., arXiv:2104.09864) and its extensions to long contexts."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from fp8rl_jax.kernels import by_platform, gpu_kernels, prevent_fma
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.quant import Recipe, compute_value
from fp8rl_jax.quant.varying import varying_vjp


def frequencies(config: ModelConfig) -> np.ndarray:
    """Returns the radians per position of every pair of features, float64 (rope_dim / 2,).

    * linear: all frequencies are divided by the factor.
    * llama3: the bands of Llama 3.1 (`rope_scaling` of its config.json). Slow frequencies are
      divided by the factor, fast ones are kept, those between are interpolated.
    * yarn: "NTK by parts" (arXiv:2309.00071, section 3.2), a ramp over pairs of features. Its ends
      are rounded to integers, as in most models that were released with it, unless
      `rope_truncate` is False.
    """
    half = config.rope_dim // 2
    plain = config.rope_theta ** (-np.arange(half) / half)
    context = config.rope_original_max_position_embeddings
    if config.rope_type == "default":
        return plain
    if config.rope_type == "linear":
        return plain / config.rope_factor
    if config.rope_type == "llama3":
        turns = context * plain / (2 * np.pi)
        low = config.rope_low_freq_factor
        kept = np.clip((turns - low) / (config.rope_high_freq_factor - low), 0, 1)
        return plain * (kept + (1 - kept) / config.rope_factor)

    def pair(turns: float) -> float:
        """Returns the (fractional) pair that makes `turns` turns within the original context."""
        return half * math.log(context / (turns * 2 * math.pi)) / math.log(config.rope_theta)

    ends = pair(config.rope_beta_fast), pair(config.rope_beta_slow)
    if config.rope_truncate:
        ends = math.floor(ends[0]), math.ceil(ends[1])
    first = max(ends[0], 0)
    last = min(ends[1], 2 * half - 1)
    divided = np.clip((np.arange(half) - first) / max(last - first, 1e-3), 0, 1)
    return plain * (1 - divided + divided / config.rope_factor)


def _yarn_temperature(factor: float, mscale: float) -> float:
    """Returns ``0.1 m ln(factor) + 1`` (arXiv:2309.00071, equation 22, with DeepSeek's m)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def softmax_scale(config: ModelConfig) -> float:
    """Returns the factor of the scores: 1/sqrt(Dh), times YaRN's temperature squared if set."""
    head_dim = config.qk_nope_head_dim + config.rope_dim if config.latent else config.head_dim
    scale = 1 / math.sqrt(config.query_pre_attn_scalar or head_dim)
    if config.rope_type == "yarn" and config.rope_mscale_all_dim:
        scale *= _yarn_temperature(config.rope_factor, config.rope_mscale_all_dim) ** 2
    return scale


def _amplitude(config: ModelConfig) -> float:
    """Returns the tables' factor: the part of YaRN's temperature that `softmax_scale` lacks."""
    if config.rope_type != "yarn":
        return 1.0
    temperature = functools.partial(_yarn_temperature, config.rope_factor)
    if config.rope_mscale and config.rope_mscale_all_dim:
        return temperature(config.rope_mscale) / temperature(config.rope_mscale_all_dim)
    return temperature(1.0)


def rope_tables(config: ModelConfig, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns cos and sin of the rotary angles, float32 (length, rope_dim / 2), made by numpy; with
    `rope_local_base_freq` (length, rope_dim): beside them those of layers with a window.

    Tables are arguments of every program. If a program computed them, XLA might fold them with
    another implementation of cos than the one it runs.
    """
    radians = frequencies(config)
    if config.rope_local_base_freq:
        half = config.rope_dim // 2
        local = config.rope_local_base_freq ** (-np.arange(half) / half)
        radians = np.concatenate([radians, local])
    angle = np.arange(length)[:, None] * radians
    amplitude = _amplitude(config)
    return tuple((f(angle) * amplitude).astype(np.float32) for f in (np.cos, np.sin))


def deinterleave(x: jax.Array) -> jax.Array:
    """Reorders (..., n): neighbouring pairs (0, 1), (2, 3), ... become pairs (0, n/2), ..."""
    return jnp.swapaxes(x.reshape(*x.shape[:-1], -1, 2), -1, -2).reshape(x.shape)


@functools.partial(varying_vjp, static=1)
def apply_rope(recipe: Recipe, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates (B, T, H, Dh) by tables (B, T, Dh/2), halves paired. Tables (B, T, Dh/4) rotate the
    first half of a head's features, the others stay.

    Keeps only the tables for the backward pass, which rotates the gradient back.
    """

    def plain(x, cos, sin):
        rotated = 2 * cos.shape[-1]
        rest = x[..., rotated:].astype(jnp.float32)
        first, second = jnp.split(x[..., :rotated].astype(jnp.float32), 2, axis=-1)
        cos = cos[:, :, None]
        sin = sin[:, :, None]
        rotated = jnp.concatenate(
            [
                prevent_fma(first * cos) - prevent_fma(second * sin),
                prevent_fma(second * cos) + prevent_fma(first * sin),
                *([rest] if rest.shape[-1] else []),
            ],
            -1,
        )
        return compute_value(rotated, recipe)

    def kernel(x, cos, sin):
        return gpu_kernels().attention_inputs.rotate(compute_value(x, recipe), cos, sin)

    return by_platform(recipe.kernels, kernel, plain, x, cos, sin)


def _apply_rope_forward(recipe, x, cos, sin):
    return apply_rope(recipe, x, cos, sin), (cos, sin, jnp.zeros((0,), x.dtype))


def _apply_rope_backward(recipe, residual, cotangent):
    cos, sin, like = residual
    return apply_rope(recipe, cotangent, cos, -sin).astype(like.dtype), None, None


apply_rope.defvjp(_apply_rope_forward, _apply_rope_backward)
