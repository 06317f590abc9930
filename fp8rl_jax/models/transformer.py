"""The one forward function. Learner, prefill and decode call it; there is no other.

Layers are stacked and run under a scan. `forward` is pure: parameters, tokens, positions, cache
and rotary tables are arguments; the new cache is part of the result.
"""

from __future__ import annotations

import math

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from fp8rl_jax.models.attention import Attention
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.kv_cache import KVCache
from fp8rl_jax.models.layers import RMSNorm, linear, replicate, rope_tables, silu
from fp8rl_jax.models.logprobs import head_logits, output_head
from fp8rl_jax.quant import (
    QArray,
    Recipe,
    TrainableWeight,
    block_health,
    compute_value,
    get_recipe,
    quantize_kv,
    quantize_rows,
)

REMAT = ("none", "full")


@flax.struct.dataclass
class ForwardOutput:
    """Result of `forward`.

    Attributes:
      logits: (B, T, V) float32, or None with ``output='hidden'``.
      hidden: (B, T, D) after the final norm, in the compute dtype.
      cache: the cache with the new keys and values, or None.
      aux: {'finite': (L,) bool, whether each layer's output holds only finite numbers, and with
        collect_health 'health': {operand: {count name: (L,) float32}}}.
    """

    logits: jax.Array | None
    hidden: jax.Array
    cache: KVCache | None
    aux: dict


class DecoderLayer(nn.Module):
    """Pre-norm attention and gated MLP, residual stream rounded to the compute dtype."""

    config: ModelConfig
    recipe: Recipe
    collect_health: bool

    def _health(self, x: jax.Array) -> dict[str, jax.Array]:
        rows = x.reshape(-1, x.shape[-1])
        return block_health(rows, quantize_rows(rows, self.recipe))

    @nn.compact
    def __call__(self, x, cache, positions, cos, sin):
        config, recipe = self.config, self.recipe
        residual_scale = 1 / math.sqrt(2 * config.num_hidden_layers)
        h = RMSNorm(config.rms_norm_eps, recipe, name="input_layernorm")(x)
        a, cache, (k, v) = Attention(config, recipe, name="self_attn")(
            h, cache, positions, cos, sin
        )
        o = linear(recipe, config.hidden_size, "o_proj", residual_scale)(a)
        x = compute_value(x.astype(jnp.float32) + o.astype(jnp.float32), recipe)
        h2 = RMSNorm(config.rms_norm_eps, recipe, name="post_attention_layernorm")(x)
        gate = linear(recipe, config.intermediate_size, "gate_proj")(h2)
        up = linear(recipe, config.intermediate_size, "up_proj")(h2)
        gated = silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
        gated = compute_value(gated, recipe)
        down = linear(recipe, config.hidden_size, "down_proj", residual_scale)(gated)
        x = compute_value(x.astype(jnp.float32) + down.astype(jnp.float32), recipe)
        aux: dict = {"finite": jnp.isfinite(x.astype(jnp.float32)).all()}
        if self.collect_health and recipe.quantized:
            counts = [self._health(operand) for operand in (h, a, h2, gated)]
            aux["health"] = {"activations": jax.tree.map(lambda *n: sum(n), *counts)}
            if recipe.kv_quantized:
                counts = [_kv_health(x, recipe) for x in (k, v)]
                aux["health"]["kv"] = jax.tree.map(lambda *n: sum(n), *counts)
        return x, (cache, aux)


def _kv_health(x: jax.Array, recipe: Recipe) -> dict[str, jax.Array]:
    stored, scale = quantize_kv(x, recipe)
    assert scale is not None
    return block_health(x, QArray(stored, scale[..., None], (-1,)))


class Transformer(nn.Module):
    """Embedding, a scan over `DecoderLayer`, final norm; the head is applied outside."""

    config: ModelConfig
    recipe: Recipe
    remat: str = "none"
    collect_health: bool = False

    @nn.compact
    def __call__(self, tokens, cache, positions, cos, sin):
        config, recipe = self.config, self.recipe
        init = nn.initializers.normal(config.embedding_init_std)
        shape = (config.vocab_size, config.hidden_size)
        table = replicate(self.param("embed_tokens", init, shape))
        x = compute_value(_embed(table, tokens), recipe)
        layer = DecoderLayer
        if self.remat == "full":
            layer = nn.remat(layer, prevent_cse=False)
        layers = nn.scan(
            layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast, nn.broadcast, nn.broadcast),
            length=config.num_hidden_layers,
        )(config, recipe, self.collect_health, name="layers")
        x, (cache, aux) = layers(x, cache, positions, cos, sin)
        x = RMSNorm(config.rms_norm_eps, recipe, name="norm")(x)
        if not config.tie_word_embeddings:
            head_init = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
            self.param("lm_head", head_init, shape[::-1])
        return x, cache, aux


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


def _embed(table: jax.Array | TrainableWeight, tokens: jax.Array) -> jax.Array:
    if isinstance(table, TrainableWeight):
        return _lookup(table.value, table.master, tokens)
    return table[tokens]


def forward(
    params,
    tokens: jax.Array,
    config: ModelConfig,
    recipe: Recipe | str,
    *,
    positions: jax.Array | None = None,
    cache: KVCache | None = None,
    rope: tuple[jax.Array, jax.Array] | None = None,
    remat: str = "none",
    output: str = "logits",
    collect_health: bool = False,
) -> ForwardOutput:
    """Runs the decoder on tokens (B, T).

    Args:
      params: parameter tree; leaves are float32 masters, or what `quantize_params` returns, or
        `trainable_params` of both. All three give the same bits.
      tokens: (B, T) int32, right-padded.
      config: shapes.
      recipe: numerics of this side, a Recipe or its name.
      positions: (B, T) int32; by default 0..T-1. A token's cache slot is its position.
      cache: keys and values so far; None attends within `tokens` alone (the learner).
      rope: tables of `rope_tables`, passed as arguments of the surrounding jit; when None they
        are made here (convenient, but outside the zero-drift promise).
      remat: 'none' keeps every activation for the backward pass, 'full' recomputes each layer.
      output: 'logits' or 'hidden'.
      collect_health: also count what quantisation lost, per layer and operand class.

    Returns:
      ForwardOutput.

    Raises:
      ValueError: `remat` or `output` is not one of the values above.
    """
    if remat not in REMAT:
        raise ValueError(f"remat is {remat!r}; write one of {', '.join(REMAT)}")
    if output not in ("logits", "hidden"):
        raise ValueError(f"output is {output!r}; write 'logits' or 'hidden'")
    recipe = get_recipe(recipe)
    batch, length = tokens.shape
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    tables = rope or rope_tables(config, cache.k.shape[2] if cache is not None else length)
    cos, sin = (jnp.asarray(table)[positions] for table in tables)
    module = Transformer(config, recipe, remat, collect_health)
    out: tuple = module.apply({"params": params}, tokens, cache, positions, cos, sin)
    hidden, cache, aux = out
    logits = None
    if output == "logits":
        rows = hidden.reshape(batch * length, -1)
        logits = head_logits(rows, output_head(params, config), recipe)
        logits = logits.reshape(batch, length, -1)
    return ForwardOutput(logits, hidden, cache, aux)
