"""The one forward function. Learner, prefill and decode call it; there is no other.

Layers are stacked and run under a scan. `forward` is pure: parameters, tokens, positions, cache
and rotary tables are arguments; the new cache is part of the result.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from fp8rl_jax.models import tensor_parallel
from fp8rl_jax.models.attention import Attention
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.kv_cache import KVCache
from fp8rl_jax.models.layers import RMSNorm, gated_silu, linear, replicate, rope_tables
from fp8rl_jax.models.logprobs import head_logits, output_head
from fp8rl_jax.models.moe import Experts, Kernel, mixture, token_logits, token_routes
from fp8rl_jax.models.taps import SWAPS, TAPS, Swap, by_module, by_name, tap
from fp8rl_jax.quant import (
    BoundWeight,
    KVScales,
    Recipe,
    compute_value,
    get_recipe,
    kv_health,
    quantize_kv,
)
from fp8rl_jax.quant.formats import amax
from fp8rl_jax.quant.varying import share

REMAT = ("none", "full")
LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@flax.struct.dataclass
class ForwardOutput:
    """Result of `forward`.

    Attributes:
      logits: (B, T, V) float32, or None with ``output='hidden'``.
      hidden: (B, T, D) after the final norm, in the compute dtype.
      cache: the cache with the new keys and values, or None.
      aux: {'finite': (L,) bool, whether each layer's output holds only finite numbers; with
        collect_health 'kv_health': {count name: (L,) float32}; with collect_amax 'kv_amax':
        {'q' | 'k' | 'v': (L, B) float32}; with taps 'taps': {name: (L, B, T, ...), or (B, T, ...)
        outside the layers}; with experts 'expert_tokens': (L, E) int32, tokens within `lengths`
        that each expert got}.
    """

    logits: jax.Array | None
    hidden: jax.Array
    cache: KVCache | None
    aux: dict


class DecoderLayer(nn.Module):
    """Pre-norm attention and gated MLP or experts, residual stream rounded to the compute dtype."""

    config: ModelConfig
    recipe: Recipe
    collect_health: bool
    collect_amax: bool
    tensor: int = 1

    @nn.compact
    def __call__(self, x, cache, scales, positions, cos, sin, valid):
        config, recipe = self.config, self.recipe
        residual_scale = 1 / math.sqrt(2 * config.num_hidden_layers)
        h = RMSNorm(config.rms_norm_eps, recipe, name="input_layernorm")(x)
        a, cache, qkv = Attention(config, recipe, self.tensor, name="self_attn")(
            h, cache, scales, positions, cos, sin
        )
        o = linear(recipe, config.hidden_size, "o_proj", residual_scale, self.tensor)(a)
        o = tensor_parallel.hold(o, config.hidden_size)
        x = compute_value(x.astype(jnp.float32) + o.astype(jnp.float32), recipe)
        x = tap(self, "residual_attention", x)
        h2 = RMSNorm(config.rms_norm_eps, recipe, name="post_attention_layernorm")(x)
        aux: dict = {}
        if config.num_experts:
            router = Kernel((config.hidden_size, config.num_experts), name="router")()
            experts = Experts(config, residual_scale, name="experts")()
            logits = tap(self, "router_logits", token_logits(h2, router))
            weights, chosen = token_routes(config, logits)
            chosen = tap(self, "router_experts", chosen)
            weights = tap(self, "router_weights", weights)
            down, tokens = mixture(config, recipe, h2, valid, weights, chosen, experts)
            down = tap(self, "experts_output", down)
            aux["expert_tokens"] = tokens
        else:
            features = dict.fromkeys(("gate_proj", "up_proj"), config.intermediate_size)
            h2 = tensor_parallel.shared_input(h2, recipe, features, self.tensor)
            gate = linear(recipe, config.intermediate_size, "gate_proj", tensor=self.tensor)(h2)
            up = linear(recipe, config.intermediate_size, "up_proj", tensor=self.tensor)(h2)
            gated = gated_silu(recipe, gate, tensor_parallel.hold(up, gate.shape[-1]))
            gated = tap(self, "gated", gated)
            down = linear(recipe, config.hidden_size, "down_proj", residual_scale, self.tensor)(
                gated
            )
            down = tensor_parallel.hold(down, config.hidden_size)
        x = compute_value(x.astype(jnp.float32) + down.astype(jnp.float32), recipe)
        x = tap(self, "residual_mlp", x)
        aux["finite"] = jnp.isfinite(x.astype(jnp.float32)).all()
        if self.collect_health and recipe.kv_quantized:
            names = "qkv" if recipe.fp8_attention else "kv"
            counts = [_kv_health(qkv[name], recipe, (scales or {}).get(name)) for name in names]
            aux["kv_health"] = jax.tree.map(lambda *n: sum(n), *counts)
        if self.collect_amax:
            aux["kv_amax"] = {name: _sequence_amax(y, valid) for name, y in qkv.items()}
        return x, (cache, tensor_parallel.combine(aux) if self.tensor > 1 else aux)


def _kv_health(x: jax.Array, recipe: Recipe, scale: jax.Array | None) -> dict[str, jax.Array]:
    stored, scale = quantize_kv(x, recipe, scale)
    assert scale is not None
    return kv_health(x, stored, scale, recipe)


def _sequence_amax(x: jax.Array, valid: jax.Array) -> jax.Array:
    """(B,) largest absolute value of (B, T, H, Dh) at the tokens where (B, T) `valid` is True."""
    return amax(jnp.where(valid[:, :, None, None], x, 0), (1, 2, 3))


class Transformer(nn.Module):
    """Embedding, a scan over `DecoderLayer`, final norm; the head is applied outside.

    Layers under one recipe are one scan; with the first or last layers in bf16 there are up to
    three (`Recipe.layer_segments`). With `tensor` above 1 it runs within
    `tensor_parallel.split_columns`, on parameters that exist already.
    """

    config: ModelConfig
    recipe: Recipe
    remat: str = "none"
    collect_health: bool = False
    collect_amax: bool = False
    tensor: int = 1

    @nn.compact
    def __call__(self, tokens, cache, kv_scales, positions, cos, sin, valid):
        config, recipe = self.config, self.recipe
        init = nn.initializers.normal(config.embedding_init_std)
        shape = (config.vocab_size, config.hidden_size)
        table = replicate(self.param("embed_tokens", init, shape))
        x = tap(self, "embed", compute_value(_embed(table, tokens), recipe))
        layer = DecoderLayer
        if self.remat == "full":
            layer = nn.remat(layer, prevent_cse=False)
        caches, auxes = [], []
        for index, run in enumerate(recipe.layer_segments(config.num_hidden_layers)):
            name, span, run_recipe = run
            layers = nn.scan(
                layer,
                variable_axes={"params": 0, TAPS: 0, SWAPS: 0},
                split_rngs={"params": True},
                in_axes=(0, 0) + (nn.broadcast,) * 4,
                length=span.stop - span.start,
                # That check traces without the types that tell who holds what under shard_map.
                check_constancy_invariants=self.tensor == 1,
            )(config, run_recipe, self.collect_health, self.collect_amax, self.tensor, name=name)
            stored = cache.runs[index] if cache is not None else None
            scales = jax.tree.map(lambda s, span=span: s[span], kv_scales)
            x, (stored, aux) = layers(x, stored, scales, positions, cos, sin, valid)
            caches.append(stored)
            auxes.append(aux)
        x = RMSNorm(config.rms_norm_eps, recipe, name="norm")(x)
        if not config.tie_word_embeddings and self.is_initializing():
            head_init = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
            self.param("lm_head", head_init, shape[::-1])
        cache = KVCache(tuple(caches)) if cache is not None else None
        return x, cache, jax.tree.map(lambda *xs: jnp.concatenate(xs), *auxes)


@jax.custom_vjp
def _lookup(value: jax.Array, master: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of `value`; the gradient goes to `master`, added up in float32."""
    del master
    return value[tokens]


def _lookup_forward(value, master, tokens):
    return value[tokens], (jnp.zeros((0,), master.dtype), master.shape, tokens)


def _lookup_backward(residual, cotangent):
    like, shape, tokens = residual
    grad = jnp.zeros(shape, jnp.float32).at[tokens].add(cotangent.astype(jnp.float32))
    return None, grad.astype(like.dtype), None


_lookup.defvjp(_lookup_forward, _lookup_backward)


def _embed(table: jax.Array | BoundWeight, tokens: jax.Array) -> jax.Array:
    if isinstance(table, BoundWeight):
        return _lookup(*share(table.value, table.master, tokens))
    return table[tokens]


def forward(
    params,
    tokens: jax.Array,
    config: ModelConfig,
    recipe: Recipe | str,
    *,
    positions: jax.Array | None = None,
    lengths: jax.Array | None = None,
    cache: KVCache | None = None,
    kv_scales: KVScales | None = None,
    rope: tuple[jax.Array, jax.Array] | None = None,
    remat: str = "none",
    output: str = "logits",
    collect_health: bool = False,
    collect_amax: bool = False,
    taps: Collection[str] = (),
    swaps: dict[str, Swap] | None = None,
) -> ForwardOutput:
    """Runs the decoder on tokens (B, T).

    Args:
      params: parameter tree; leaves are float32 masters (under recipes without stateful policies
        or segments of layers), or what `quantize_params` returns, or `trainable_params` of both.
        All three give the same bits.
      tokens: (B, T) int32, right-padded.
      config: shapes.
      recipe: numerics of this side, a Recipe or its name.
      positions: (B, T) int32; by default 0..T-1. A token's cache slot is its position.
      lengths: (B,) int32, real tokens of each row; only `collect_amax` and the count of tokens
        per expert read them.
      cache: keys and values so far; None attends within `tokens` alone (the learner).
      kv_scales: of `calibrated_scales`, for recipes with kv='calibrated'.
      rope: tables of `rope_tables`, passed as arguments of the surrounding jit; when None they
        are made here (convenient, but outside the zero-drift promise).
      remat: 'none' keeps every activation for the backward pass, 'full' recomputes each layer.
      output: 'logits' or 'hidden'.
      collect_health: also count what the quantisation of K and V (and of q under FP8 attention)
        lost, per layer.
      collect_amax: also return the amax of q, k and v, per layer and sequence.
      taps: names of intermediate values to return; see models/taps.py.
      swaps: values that take the place of intermediate ones, by name.

    Returns:
      ForwardOutput.

    Raises:
      ValueError: `remat` or `output` is not one of the values above, or `kv_scales` are missing.
    """
    if remat not in REMAT:
        raise ValueError(f"remat is {remat!r}; write one of {', '.join(REMAT)}")
    if output not in ("logits", "hidden"):
        raise ValueError(f"output is {output!r}; write 'logits' or 'hidden'")
    recipe = get_recipe(recipe)
    batch, length = tokens.shape
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    if recipe.kv == "calibrated" and kv_scales is None:
        raise ValueError(
            f"recipe {recipe.name!r} stores K and V with calibrated scales; pass kv_scales"
        )
    tables = rope or rope_tables(config, cache.slots if cache is not None else length)
    cos, sin = (jnp.asarray(table)[positions] for table in tables)
    valid = positions < (length if lengths is None else lengths[:, None])
    scales = kv_scales.layer_scales() if kv_scales and recipe.kv == "calibrated" else None
    parts = tensor_parallel.size()
    if parts > 1 and (taps or swaps):
        raise ValueError(
            "intermediate values lie in parts where mesh.tensor is above 1; set it to 1"
        )
    module = Transformer(config, recipe, remat, collect_health, collect_amax, parts)
    runs = recipe.layer_segments(config.num_hidden_layers)
    swapped = {SWAPS: by_module(swaps, runs)} if swaps else {}

    def apply(params, *arguments) -> tuple:
        variables = {"params": params} | swapped
        if not taps:
            return module.apply(variables, *arguments)
        (hidden, cache, aux), collected = module.apply(variables, *arguments, mutable=[TAPS])
        values = by_name(collected[TAPS], [name for name, _, _ in runs])
        found = {name: values[name] for name in taps if name in values}
        return hidden, cache, aux | {"taps": found}

    if parts > 1:
        apply = tensor_parallel.split_columns(apply, config, recipe, parts)
    hidden, cache, aux = apply(params, tokens, cache, scales, positions, cos, sin, valid)
    logits = None
    if output == "logits":
        rows = hidden.reshape(batch * length, -1)
        logits = head_logits(rows, output_head(params, config), recipe)
        logits = logits.reshape(batch, length, -1)
    return ForwardOutput(logits, hidden, cache, aux)
