"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, 2.1), always in its absorbed form.

A token's keys and values of all heads are linear in one latent c, and all heads share the rotated
part of the key. Instead of making keys and values from the cache, their matrices are absorbed into
the query and the result::

    c, k_r  = norm(W_a x), rope(W_r x)             stored in the cache: R + Dr numbers a token
    score   = (W_kb_h^T q_h) . c + q_rh . k_r      one "head" of keys for all heads of queries
    out_h   = W_vb_h (sum_s p_s c_s)

Decode needs this form for its speed; prefill and learner run the same one, so that all three have
the same bits. The latent passes through the KV quantiser (one scale a token); the rotated part
stays in the compute dtype, as it is small and carries the positions. The two absorbed products are
per head: `grouped_matmul` with heads as experts.

The latents' norms use an epsilon of 1e-6 and ignore `rms_norm_eps`, as in DeepSeek's models.
"""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from fp8rl_jax import kernels
from fp8rl_jax.models.kv_cache import LayerCache, StoredLatent
from fp8rl_jax.models.layers import Kernel, LayerWeight, Part, RMSNorm, linear, multiply_experts
from fp8rl_jax.models.packing import Places, as_sequences, seen_slots
from fp8rl_jax.models.rope import apply_rope, deinterleave, softmax_scale
from fp8rl_jax.models.taps import tap
from fp8rl_jax.quant import Activation, Recipe, compute_value, dequantize_kv, quantize_kv
from fp8rl_jax.quant.varying import varying_vjp

_LATENT_EPS = 1e-6


def _store(latent: jax.Array, rope: jax.Array, recipe: Recipe) -> StoredLatent:
    """Quantises latents (B, T, R) for the cache; rotated keys (B, T, Dr) stay as given."""
    stored, scale = quantize_kv(latent, recipe, "k")
    return StoredLatent(stored, scale, rope)


def _as_read(recipe: Recipe, latent: jax.Array) -> jax.Array:
    """Returns latents (B, T, R) as attention reads them, after quantisation, float32."""
    return dequantize_kv(*quantize_kv(latent, recipe, "k"))


def _attend(recipe: Recipe, q, q_rope, cache: LayerCache, positions, scale: float) -> jax.Array:
    cache = cache.as_read(recipe.kernels)
    stored = cache.stored
    assert isinstance(stored, StoredLatent)
    latent = stored.latent[..., None, :]
    latent_scale = None if stored.scale is None else stored.scale[..., None]
    return kernels.attention(
        q,
        latent,
        latent,
        positions,
        scale=scale,
        table=cache.table,
        layer=cache.layer,
        k_scale=latent_scale,
        v_scale=latent_scale,
        q_rope=q_rope,
        k_rope=stored.rope[..., None, :],
        implementation=recipe.kernels,
    )


@functools.partial(varying_vjp, static=2)
def latent_self_attention(
    recipe: Recipe,
    scale: float,
    q: jax.Array,
    q_rope: jax.Array,
    latent: jax.Array,
    rope: jax.Array,
    places: Places,
) -> jax.Array:
    """Computes attention within the given sequences without a cache, for the learner.

    The gradient passes straight through the latents' rounding, and is taken at the rounded values.

    Args:
      recipe: numerics of the layer.
      scale: factor of the scores (`softmax_scale`).
      q: (B, T, H, R), absorbed; q_rope: (B, T, H, Dr), both in the compute dtype.
      latent: (B, T, R); rope: (B, T, Dr), both in the compute dtype.
      places: of the tokens in their rows.

    Returns:
      (B, T, H, R) float32, sums of latents.
    """
    return _forward(recipe, scale, q, q_rope, latent, rope, places)[0]


def _forward(recipe, scale, q, q_rope, latent, rope, places):
    stored = _store(latent, rope, recipe)
    (queries, rotated), cache, positions = as_sequences((q, q_rope), stored, places)
    out = _attend(recipe, queries, rotated, cache, positions, scale)
    return out.reshape(q.shape), kernels.keep((q, q_rope, stored, places))


def _backward(recipe, scale, residual, cotangent):
    q, q_rope, stored, places = kernels.kept(residual)
    last, others = seen_slots(places)
    latent = dequantize_kv(stored.latent, stored.scale)
    keys = jnp.concatenate([latent, stored.rope.astype(jnp.float32)], -1)[:, :, None]
    queries = jnp.concatenate([q, q_rope], -1)
    dqueries, dkeys, dvalues = kernels.attention_vjp(
        queries,
        keys,
        latent[:, :, None],
        last,
        cotangent,
        scale=scale,
        **others,
        implementation=recipe.kernels,
    )
    width = latent.shape[-1]
    dlatent = dkeys[:, :, 0, :width] + dvalues[:, :, 0]
    grads = (dqueries[..., :width], dqueries[..., width:], dlatent, dkeys[:, :, 0, width:])
    return (*(g.astype(q.dtype) for g in grads), None)


latent_self_attention.defvjp(_forward, _backward)


def by_head(recipe: Recipe, devices: int, x: jax.Array, weight: LayerWeight) -> jax.Array:
    """Multiplies x (B, T, H, n) by each head's matrix (H, n, m), to the compute dtype.

    `devices` is the number of devices that share the rows, 1 inside a shard_map.
    """
    batch, length, heads, width = x.shape
    rows = x.transpose(2, 0, 1, 3).reshape(heads, batch * length, width)
    y = multiply_experts(recipe, rows, weight, jnp.arange(heads, dtype=jnp.int32), devices)
    y = compute_value(y, recipe)
    return y.reshape(heads, batch, length, -1).transpose(1, 2, 0, 3)


class LatentAttention(Part):
    """Multi-head latent attention: projects the input to latents of keys and values (and of queries
    if the model has them), applies RoPE, and attends over the latents."""

    @nn.compact
    def __call__(self, x: Activation, cache: LayerCache | None, positions, cos, sin, window):
        """Runs attention on x (B, T, D), `Places` of its tokens, cos/sin (B, T, Dr/2); `window` is
        None.

        Returns ((B, T, H * v_head_dim), cache, {'latent': (B, T, 1, R) before quantisation}).
        """
        assert window is None and self.parallel.tensor == 1  # refused before
        config = self.config
        recipe = self.recipe
        rank = config.kv_lora_rank
        nope = config.qk_nope_head_dim
        if config.q_lora_rank:
            q = linear(self, "q_a_proj")(x)
            normed = RMSNorm(_LATENT_EPS, recipe, self.parallel, True, name="q_a_layernorm")(q)
            q = linear(self, "q_b_proj")(normed)
        else:
            q = linear(self, "q_proj")(x)
        q = q.reshape(*x.shape[:2], config.num_attention_heads, nope + config.qk_rope_head_dim)
        compressed = linear(self, "kv_a_proj_with_mqa")(x)
        latent = RMSNorm(_LATENT_EPS, recipe, self.parallel, name="kv_a_layernorm")(
            compressed[..., :rank]
        ).value
        q_rope = q[..., nope:]
        k_rope = compressed[..., None, rank:]
        if config.rope_interleave:
            q_rope, k_rope = (deinterleave(y) for y in (q_rope, k_rope))
        q_rope, k_rope = (apply_rope(recipe, y, cos, sin) for y in (q_rope, k_rope))
        q_rope = tap(self, "q_rope", q_rope)
        k_rope = tap(self, "k_rope", k_rope)[:, :, 0]
        k_b = Kernel(config, self.parallel, name="k_b_proj")()
        absorbed = by_head(recipe.for_module("k_b_proj"), self.parallel.devices, q[..., :nope], k_b)
        absorbed = tap(self, "q_absorbed", absorbed)
        latent = tap(self, "latent_read", latent, functools.partial(_as_read, recipe))
        scale = softmax_scale(config)
        if cache is None:
            out = latent_self_attention(recipe, scale, absorbed, q_rope, latent, k_rope, positions)
        else:
            cache = cache.write(_store(latent, k_rope, recipe), positions)
            out = _attend(recipe, absorbed, q_rope, cache, positions, scale)
        out = tap(self, "attention", compute_value(out, recipe))
        v_b = Kernel(config, self.parallel, name="v_b_proj")()
        out = by_head(recipe.for_module("v_b_proj"), self.parallel.devices, out, v_b)
        out = tap(self, "values", out)
        return out.reshape(*x.shape[:2], -1), cache, {"latent": latent[:, :, None]}
