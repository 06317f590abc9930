"""Parameter trees: initialisation, quantisation for the forward pass, and their checksum.

One tree, three forms with the same structure: float32 masters (what is trained), `quantize_params`
of them (what the sampler holds: FP8 bytes for linear layers, bf16 for embedding and head, float32
norms), and `trainable_params`, which pairs the two for the learner's forward pass.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.layers import rope_tables
from fp8rl_jax.models.transformer import Transformer
from fp8rl_jax.quant import (
    QArray,
    Recipe,
    TrainableWeight,
    block_health,
    compute_value,
    get_recipe,
    quantize_weight,
)


def init_params(config: ModelConfig, key: jax.Array):
    """Random float32 parameters: {'embed_tokens', 'layers': {...}, 'norm', ['lm_head']}.

    Layer parameters are stacked along a first axis of length num_hidden_layers.
    """
    tokens = jnp.zeros((1, 1), jnp.int32)
    cos, sin = (jnp.asarray(t)[tokens] for t in rope_tables(config, 1))
    module = Transformer(config, get_recipe("f32"))
    return module.init(key, tokens, None, tokens, cos, sin)["params"]


def _role(path) -> str:
    """'linear', 'table' (embedding and head) or 'norm', by the leaf's place in the tree."""
    names = [entry.key for entry in path]
    if names[-1] == "kernel":
        return "linear"
    return "norm" if names[-1] == "weight" else "table"


def quantize_params(params, recipe: Recipe | str):
    """What the forward pass reads: QArray for linear layers, compute dtype for tables.

    The result depends on values and recipe alone, so rollout and learner hold the same bytes.
    """
    recipe = get_recipe(recipe)

    def convert(path, leaf):
        role = _role(path)
        if role == "linear" and recipe.quantized:
            return quantize_weight(leaf, recipe)
        return leaf if role == "norm" else compute_value(leaf, recipe)

    return jax.tree_util.tree_map_with_path(convert, params)


def trainable_params(params, weights):
    """Pairs masters with the bytes that the forward pass reads (both trees of one structure).

    Differentiate with respect to `params`; `weights` must come from outside the differentiated
    function, or pass through `lax.stop_gradient`.
    """

    def pair(path, master, value):
        if _role(path) == "norm":
            return master
        return TrainableWeight(lax.stop_gradient(value), master)

    return jax.tree_util.tree_map_with_path(
        pair, params, weights, is_leaf=lambda x: isinstance(x, QArray)
    )


def weight_health(params, weights) -> dict[str, jax.Array]:
    """`block_health` of every quantised weight, added up."""
    masters = jax.tree.leaves(params)
    values = jax.tree.leaves(weights, is_leaf=lambda x: isinstance(x, QArray))
    counts = [
        block_health(compute_value(m, get_recipe("bf16")), q)
        for m, q in zip(masters, values, strict=True)
        if isinstance(q, QArray)
    ]
    return jax.tree.map(lambda *n: sum(n), *counts) if counts else {}


def checksum(tree) -> jax.Array:
    """A 32-bit hash of every byte of a tree, uint32, independent of sharding.

    Each leaf's words are mixed with their index (the finaliser of MurmurHash3 by Austin Appleby,
    public domain) and added, which is exact and has no order; leaves are then chained.
    """
    total = jnp.uint32(0)
    for leaf in jax.tree.leaves(tree):
        bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]
        words = lax.bitcast_convert_type(leaf, bits).reshape(-1).astype(jnp.uint32)
        index = lax.iota(jnp.uint32, words.size)
        mixed = _mix(words ^ _mix(index + np.uint32(1)))
        total = _mix(total * np.uint32(31) + mixed.sum(dtype=jnp.uint32))
    return total


def _mix(h: jax.Array) -> jax.Array:
    h = (h ^ (h >> 16)) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * np.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
