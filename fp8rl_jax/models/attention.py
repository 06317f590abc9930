"""Grouped-query attention with RoPE and, in some models, QK-norm, biases and sinks.

K and V always pass through the KV quantiser. Under FP8 attention q passes through it too.
"""

from __future__ import annotations

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fp8rl_jax import kernels
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.kv_cache import LayerCache, StoredKV
from fp8rl_jax.models.layers import (
    Part,
    StackedLayer,
    add_bias,
    by_kernel_or_jnp,
    gain_of,
    linears,
    norm_of,
    rms_norm,
    vector,
)
from fp8rl_jax.models.packing import Places, as_sequences, seen_slots
from fp8rl_jax.models.parallel.columns import gather_or_slice, shared_input
from fp8rl_jax.models.parallel.mesh import ONE_DEVICE
from fp8rl_jax.models.parallel.specs import splits_heads
from fp8rl_jax.models.rope import apply_rope, deinterleave, softmax_scale
from fp8rl_jax.models.taps import tap, watched
from fp8rl_jax.quant import Activation, Recipe, dequantize_kv, quantize_kv
from fp8rl_jax.quant.kv import kept_by_kernel, layer_scales
from fp8rl_jax.quant.varying import varying_vjp

KEPT = "attention"  # `checkpoint_name` of the result, which a recomputed layer reads again
Scales = dict[str, jax.Array]  # `layer_scales`: of all tokens; {} if each token has its own


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OfLayer:
    """What attention reads in a layer besides projections of its input.

    Attributes:
      scales: {'q' | 'k' | 'v': ()} float32, of all tokens; {} where each token has its own.
      window: () int32, the most tokens that a query sees, or None.
      sinks: (H,) float32, as for `kernels.attention`, or None.
      biases: of the three projections, if they are still to be added; or None.
      gains: of the norms of q and k by head, if these are still to be normed; or None.
    """

    scales: Scales = dataclasses.field(default_factory=dict)
    window: jax.Array | None = None
    sinks: jax.Array | None = None
    biases: tuple[StackedLayer, ...] | None = None
    gains: tuple[StackedLayer, ...] | None = None


def _store(k: jax.Array, v: jax.Array, recipe: Recipe, scales: Scales) -> StoredKV:
    """Quantises the keys and values of one layer for the cache."""
    k, k_scale = quantize_kv(k, recipe, "k", scales.get("k"))
    v, v_scale = quantize_kv(v, recipe, "v", scales.get("v"))
    if scales:  # those of the layer stay with its weights; the cache holds only bytes
        k_scale = v_scale = None
    return StoredKV(k, v, k_scale, v_scale)


def _query(q: jax.Array, recipe: Recipe, scales: Scales):
    """Returns (q, its scale): E4M3 under FP8 attention, else unchanged."""
    return quantize_kv(q, recipe, "q", scales.get("q")) if recipe.fp8_attention else (q, None)


def _attend(
    recipe: Recipe,
    scale: float,
    query,
    cache: LayerCache,
    positions,
    layer: OfLayer,
    reader: Recipe | None = None,
) -> Activation:
    """Runs attention; returns (B, T, H * Dh) in the compute dtype.

    `reader` is the recipe of the linear layer that reads the result, if the kernel may quantise it;
    without one, the result is not quantised.
    """
    q, q_scale = query
    cache = cache.as_read(recipe.kernels)
    kv = cache.stored
    assert isinstance(kv, StoredKV)
    k_scale, v_scale = _scales(kv, layer.scales)
    run = functools.partial(kernels.attention, scale=scale)
    others = {
        "q_scale": q_scale,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "table": cache.table,
        "layer": cache.layer,
        "window": layer.window,
        "sinks": layer.sinks,
    }

    def kernel(q, k, v, positions, others, dtype, quantisation):
        return run(
            q,
            k,
            v,
            positions,
            **others,
            dtype=dtype,
            quantisation=quantisation,
            implementation="gpu",
        )

    def plain(q, k, v, positions, others):
        return run(
            q,
            k,
            v,
            positions,
            **others,
            implementation="exact" if recipe.kernels == "exact" else "reference",
            keys_by_feature=kv.keys_by_feature,
        )

    *rows, heads, dim = q.shape
    quantise = reader is not None and dim == kernels.K_BLOCK
    shape = *rows, heads * dim
    return by_kernel_or_jnp(
        reader or recipe, quantise, kernel, plain, shape, q, kv.k, kv.v, positions, others
    )


def _scales(kv: StoredKV, scales: Scales):
    return scales.get("k", kv.k_scale), scales.get("v", kv.v_scale)


def _as_read(recipe: Recipe, name: str, scales: Scales, x: jax.Array) -> jax.Array:
    """Returns q, k or v (B, T, H, Dh) as attention reads it, after quantisation, in float32."""
    if name == "q" and not recipe.fp8_attention:
        return x.astype(jnp.float32)
    return dequantize_kv(*quantize_kv(x, recipe, name, scales.get(name)))


@functools.partial(varying_vjp, static=2)
def self_attention(
    recipe: Recipe,
    scale: float,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    places: Places,
    layer: OfLayer,
) -> jax.Array:
    """Computes attention within the given sequences without a cache, for the learner.

    Queries, keys and values make the same round trip through FP8 as in the sampler. The gradient
    passes straight through the rounding, and is taken at the rounded values.

    Args:
      recipe: numerics of the layer.
      scale: factor of the scores (`softmax_scale`).
      q: (B, T, H, Dh); k, v: (B, T, Hkv, Dh), in the compute dtype.
      places: of the tokens in their rows.
      layer: scales, window and sinks.

    Returns:
      (B, T, H, Dh) in the compute dtype.
    """
    return _self_attention_forward(recipe, scale, q, k, v, places, layer)[0]


def _self_attention_forward(recipe, scale, q, k, v, places, layer):
    kv = _store(k, v, recipe, layer.scales)
    query = _query(q, recipe, layer.scales)
    residual = kernels.keep((query, kv, places, layer))
    query, cache, positions = as_sequences(query, kv, places)
    out = _attend(recipe, scale, query, cache, positions, layer).value
    return out.reshape(q.shape), (residual, jnp.zeros((0,), q.dtype))


def _self_attention_backward(recipe, scale, residual, cotangent):
    operands, like = residual
    (q, q_scale), kv, places, layer = kernels.kept(operands)
    k_scale, v_scale = _scales(kv, layer.scales)
    last, others = seen_slots(places, layer.window)
    dq, dk, dv, *dsinks = kernels.attention_vjp(
        q,
        kv.k,
        kv.v,
        last,
        cotangent.astype(jnp.float32),
        scale=scale,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        **others,
        sinks=layer.sinks,
        implementation=recipe.kernels,
    )
    dqkv = (g.astype(like.dtype) for g in (dq, dk, dv))
    of_layer = OfLayer(None, sinks=dsinks[0] if dsinks else None)  # type: ignore[arg-type]
    return *dqkv, None, of_layer


self_attention.defvjp(_self_attention_forward, _self_attention_backward)


def _rotated(config: ModelConfig, recipe: Recipe, q: jax.Array, k: jax.Array, rope):
    """Returns q and k (B, T, heads, Dh) after RoPE by the tables `rope`, cos and sin."""
    cos, sin = rope
    if config.rope_interleave:
        q, k = (deinterleave(x) for x in (q, k))
    return tuple(apply_rope(recipe, x, cos, sin) for x in (q, k))


def _add_by_head(recipe: Recipe, y: jax.Array, bias: StackedLayer) -> jax.Array:
    """Adds the bias of a projection (B, T, heads, Dh)."""
    return add_bias(recipe, ONE_DEVICE, y.reshape(*y.shape[:2], -1), bias).reshape(y.shape)


def _inputs_by_kernel(
    config: ModelConfig,
    recipe: Recipe,
    qkv: tuple[jax.Array, jax.Array, jax.Array],
    layer: OfLayer,
    rope: tuple[jax.Array, jax.Array],
    cache: LayerCache,
    positions: jax.Array,
):
    """Adds biases, applies QK-norm and RoPE, quantises, and writes keys and values to the cache.

    With biases the projections `qkv` are float32.

    Returns (q, k, `_query` of q, cache): q and k after RoPE and before quantisation.
    """

    def kernel(qkv, layer, rope, cache, positions):
        unit, stored = kernels.gpu_kernels().attention_inputs, cache.merged
        q, k, q_stored, q_scale, *arrays = unit.attention_inputs(
            *qkv,
            rope,
            layer.gains and tuple(gain.stack for gain in layer.gains),
            unit.Kept(**(kept_by_kernel(recipe) or {})),
            tuple(layer.scales.get(name) for name in "qkv"),
            eps=config.rms_norm_eps,
            interleaved=config.rope_interleave,
            cache=unit.Cache(
                (stored.k, stored.v, stored.k_scale, stored.v_scale),
                cache.layer,
                positions,
                cache.table,
            ),
            biases=layer.biases and tuple(bias.stack for bias in layer.biases),
            dtype=recipe.compute_dtype,
        )
        query = (q_stored, layer.scales.get("q", q_scale)) if recipe.fp8_attention else (q, None)
        return q, k, query, cache.with_merged(StoredKV(*arrays))

    def plain(qkv, layer, rope, cache, positions):
        if layer.biases is not None:
            pairs = zip(qkv, layer.biases, strict=True)
            qkv = [_add_by_head(recipe, y, bias) for y, bias in pairs]
        q, k, v = qkv
        if layer.gains is not None:
            norm = functools.partial(rms_norm, recipe, config.rms_norm_eps, False, ONE_DEVICE)
            q, k = (norm(x, gain).value for x, gain in zip((q, k), layer.gains, strict=True))
        q, k = _rotated(config, recipe, q, k, rope)
        cache = cache.write(_store(k, v, recipe, layer.scales), positions)
        return q, k, _query(q, recipe, layer.scales), cache

    return kernels.by_platform(recipe.kernels, kernel, plain, qkv, layer, rope, cache, positions)


class Attention(Part):
    """Projections, QK-norm if any, RoPE, and attention over the cache or the sequence itself."""

    @nn.compact
    def __call__(self, x: Activation, cache: LayerCache | None, positions, cos, sin, window):
        """Runs attention on x (B, T, D), `Places` of its tokens, cos/sin (B, T, Dh/2); `window`
        () int32 is the most tokens that a query sees, or None.

        Returns ((B, T, H*Dh), cache, {'q' | 'k' | 'v': (B, T, heads, Dh)} before quantisation);
        where devices share the heads, H counts this device's heads.
        """
        recipe = self.recipe
        scale = softmax_scale(self.config)
        sharers = self.parallel.tensor if splits_heads(self.config, self.parallel.tensor) else 1
        sinks = vector(self, self.config, self.parallel, "sinks", nn.initializers.normal(0.02))
        if sinks is not None:
            sinks = gather_or_slice(sinks, self.config.num_attention_heads // sharers)
        scales = layer_scales(self.variables.get("params", {}), recipe)
        layer = OfLayer(scales, window, sinks)
        # One kernel makes attention's inputs from the projections and writes to the cache, with the
        # bits of a kernel for each step.
        one_kernel = (
            cache is not None
            and not watched(self)
            and kernels.resolve(recipe.kernels) != "reference"
            and kept_by_kernel(recipe) is not None
        )
        (q, k, v), biases, gains = self._projected(x, sharers, one_kernel)
        if one_kernel and cache is not None:
            inputs = dataclasses.replace(layer, biases=biases, gains=gains)
            q, k, query, cache = _inputs_by_kernel(
                self.config, recipe, (q, k, v), inputs, (cos, sin), cache, positions
            )
            reader = recipe.for_module("o_proj") if self.parallel.tensor == 1 else None
            read = _attend(recipe, scale, query, cache, positions, layer, reader)
            return read, cache, {"q": q, "k": k, "v": v}
        q, k = _rotated(self.config, recipe, q, k, (cos, sin))
        q = tap(self, "q_rope", q)
        k = tap(self, "k_rope", k)
        q, k, v = (
            tap(self, f"{name}_read", y, functools.partial(_as_read, recipe, name, scales))
            for name, y in (("q", q), ("k", k), ("v", v))
        )
        if cache is None:
            out = self_attention(recipe, scale, q, k, v, positions, layer)
        else:
            cache = cache.write(_store(k, v, recipe, scales), positions)
            query = _query(q, recipe, scales)
            out = _attend(recipe, scale, query, cache, positions, layer).value.reshape(q.shape)
        out = tap(self, "attention", checkpoint_name(out, KEPT))
        return Activation(out.reshape(*x.shape[:-1], -1)), cache, {"q": q, "k": k, "v": v}

    def _projected(self, x: Activation, sharers: int, by_kernel: bool) -> tuple:
        """Projects x (B, T, D); `sharers` devices have a part of the heads each. `by_kernel`: one
        kernel makes attention's inputs; it also adds the biases, unless the sums are normed first,
        and norms the heads.

        Returns (q, k and v (B, T, heads, Dh), biases, gains): what the kernel has to add and to
        norm by, or None.
        """
        config = self.config
        kv_width = config.num_key_value_heads * config.head_dim
        widths = {
            "q_proj": config.num_attention_heads * config.head_dim,
            "k_proj": kv_width,
            "v_proj": kv_width,
        }
        x = shared_input(x, self.recipe, widths, self.parallel.tensor)
        norm = norm_of(config, self.recipe, self.parallel)
        norms_rows = config.qk_norm and not config.qk_norm_by_head
        apart = by_kernel and config.qkv_bias and self.parallel.tensor == 1 and not norms_rows
        q, k, v = linears(self, list(widths), x, adds_bias=not apart)
        if norms_rows:
            q = norm(name="q_norm")(gather_or_slice(q, widths["q_proj"])).value
            k = norm(name="k_norm")(gather_or_slice(k, kv_width)).value
        q, k, v = (
            gather_or_slice(y, width // sharers).reshape(*x.shape[:-1], -1, config.head_dim)
            for y, width in zip((q, k, v), widths.values(), strict=True)
        )
        norms_heads = config.qk_norm and config.qk_norm_by_head
        if norms_heads and not by_kernel:
            q = norm(name="q_norm")(q).value
            k = norm(name="k_norm")(k).value
        biases = gains = None
        params = self.variables.get("params", {})
        if apart:
            biases = tuple(params[name]["bias"] for name in widths)
        if norms_heads and by_kernel:
            weights = [params["q_norm"]["weight"], params["k_norm"]["weight"]]
            gains = tuple(gain_of(weight, config.unit_offset_norms) for weight in weights)
        return (q, k, v), biases, gains
