"""One decoder layer: attention, then a gated MLP or experts, with norms before or after each."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fp8rl_jax.models.attention import Attention
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.feed_forward import gated_mlp, sparse_mlp
from fp8rl_jax.models.latent_attention import LatentAttention
from fp8rl_jax.models.layers import Part, linears, norm_of
from fp8rl_jax.models.parallel.columns import combine, gather_or_slice
from fp8rl_jax.models.stacks import ALL, LayerSpec
from fp8rl_jax.models.taps import tap
from fp8rl_jax.quant import Recipe, as_activation, kv_health, quantize_kv
from fp8rl_jax.quant.kv import layer_scales
from fp8rl_jax.quant.products import plus
from fp8rl_jax.quant.scaling import find_amax


class PerLayer(NamedTuple):
    """Inputs that differ by layer, scanned with the layers.

    Attributes:
      number: () int32, the layer's index in the cache, or None.
      window: () int32, the most tokens that a query sees (`stacks.layer_windows`), or None.
    """

    number: Any
    window: jax.Array | None


class DecoderLayer(Part):
    """Attention and feed-forward part; the residual stream is in the compute dtype.

    ::

        pre_norms          x + f(norm(x))
        and sandwich_norms x + norm(f(norm(x)))
        sandwich_norms     x + norm(f(x))
    """

    spec: LayerSpec
    collect: tuple[str, ...]

    @nn.compact
    def __call__(self, carried, per_layer: PerLayer, positions, cos, sin, valid):
        """Runs one layer, a step of a scan over layers.

        Args:
          carried: (x (B, T, D), the cache of the run of layers or None).
          per_layer: inputs of this layer.
          positions: `Places` of the tokens; cos, sin, valid: (B, T, ...), see `hidden_states`.

        Returns:
          (carried with the new values, aux).
        """
        x, cache = carried
        if cache is not None:
            cache = dataclasses.replace(cache, layer=per_layer.number)
        config = self.config
        recipe = self.recipe
        norm = norm_of(config, recipe, self.parallel)
        h = norm(quantise=True, name="input_layernorm")(x) if config.pre_norms else as_activation(x)
        attention = LatentAttention if config.latent else Attention
        cos, sin = _own_tables(config, per_layer.window, cos, sin)
        a, cache, qkv = attention(config, recipe, self.parallel, name="self_attn")(
            h, cache, positions, cos, sin, per_layer.window
        )
        before_mlp = "post_attention_layernorm"
        residual = None if config.sandwich_norms else x
        (y,) = linears(self, ["o_proj"], as_activation(a), residual)
        if config.sandwich_norms:
            y = gather_or_slice(y, x.shape[-1])
            y = plus(x, norm(name="attention_norm")(y).value, recipe)
            before_mlp = "pre_feedforward_layernorm"
        x = tap(self, "residual_attention", y)
        mlp = not self.spec.experts or config.n_shared_experts > 0  # experts quantise after sorting
        h2 = norm(quantise=mlp, name=before_mlp)(x) if config.pre_norms else as_activation(x)
        aux: dict = {}
        residual = None if config.sandwich_norms or self.spec.experts else x
        if self.spec.experts:
            y, aux = sparse_mlp(self, h2, valid, self.collect)
        else:
            y = gated_mlp(self, h2, config.intermediate_size, residual)
        if config.sandwich_norms:
            y = norm(name="post_feedforward_layernorm")(y).value
        x = tap(self, "residual_mlp", y if residual is not None else plus(x, y, recipe))
        aux["finite"] = jnp.isfinite(x.astype(jnp.float32)).all()
        if "kv_health" in self.collect and recipe.kv_quantized:
            names = [name for name in qkv if recipe.stored_dtype(name) is not None]
            scales = layer_scales(self.variables["params"]["self_attn"], recipe)
            counts = [_kv_health(qkv[name], recipe, name, scales.get(name)) for name in names]
            aux["kv_health"] = jax.tree.map(lambda *n: sum(n), *counts)
        if "kv_amax" in self.collect:
            valid_only = {n: jnp.where(valid[:, :, None, None], y, 0) for n, y in qkv.items()}
            aux["kv_amax"] = {name: find_amax(y, (1, 2, 3)) for name, y in valid_only.items()}
        aux = combine(aux) if self.parallel.inside else aux
        return (x, cache and dataclasses.replace(cache, layer=None)), aux


def _own_tables(
    config: ModelConfig, window: jax.Array | None, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns a layer's part of the rotary tables (`rope_tables`)."""
    if window is None or not config.rope_local_base_freq:
        return cos, sin
    half = config.rope_dim // 2
    cos, sin = (jnp.where(window < ALL, x[..., half:], x[..., :half]) for x in (cos, sin))
    return cos, sin


def _kv_health(
    x: jax.Array, recipe: Recipe, name: str, scale: jax.Array | None
) -> dict[str, jax.Array]:
    x = jax.lax.stop_gradient(x)  # kernels have no derivative
    stored, scale = quantize_kv(x, recipe, name, scale)
    assert scale is not None
    return kv_health(x, stored, scale, recipe)
