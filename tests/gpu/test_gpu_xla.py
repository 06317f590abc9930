"""What a run computes in several programs has equal bits in the sampler's shapes and the learner's.

Rotation and the quantiser of keys and values run in a decode step for one token of every sequence,
and in the learner for all tokens of a sequence. XLA quantises weights, in the refit and in the
train step.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_checks import assert_bitwise_equal

from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.models import ModelConfig, init_params, quantize_params, rope_tables
from fp8rl_jax.models.rope import apply_rope
from fp8rl_jax.quant import get_recipe
from fp8rl_jax.quant.kv import quantize_kv

pytestmark = pytest.mark.gpu

MODEL = ModelConfig(
    vocab_size=512,
    hidden_size=1024,
    intermediate_size=1536,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=128,
)


def rotated_and_quantised(x, cos, sin):
    recipe = get_recipe("fp8")
    x = apply_rope(recipe, x, cos, sin)
    return x, *quantize_kv(x, recipe, "k")


def test_rotation_and_kv_quantiser(source, tokens=4096, heads=8):
    """All tokens of a sequence at once; then 64 of them as a decode step's, written to a cache."""
    x = source.take(jnp.bfloat16, 1, tokens, heads, MODEL.head_dim) * source.scales(1, tokens, 1, 1)
    x = x.astype(jnp.bfloat16)
    cos, sin = (jnp.asarray(t)[None] for t in rope_tables(MODEL, tokens))
    whole = exact_jit(rotated_and_quantised)(x, cos, sin)
    some = np.sort(np.random.default_rng(0).choice(tokens, min(64, tokens), replace=False))
    one = [y[0, some][:, None] for y in (x, cos, sin)]
    alone = exact_jit(rotated_and_quantised)(*one)
    want = [y[0, some][:, None] for y in whole]
    assert_bitwise_equal("rotation and quantiser, a token at a time", alone, want)

    def written(cache, scales, x, cos, sin):
        _, q, s = rotated_and_quantised(x, cos, sin)
        rows = jnp.arange(len(some))
        return cache.at[rows, 1].set(q[:, 0]), scales.at[rows, 1].set(s[:, 0])

    cache = jnp.zeros((len(some), 3, heads, MODEL.head_dim), want[1].dtype)
    got = exact_jit(written)(cache, jnp.zeros(cache.shape[:3]), *one)
    got = [y[:, 1:2] for y in got]
    assert_bitwise_equal("rotation and quantiser, written to a cache", got, want[1:])


def test_weights():
    """Quantised alone as in a refit, and within a program that takes gradients too."""
    params = exact_jit(lambda key: init_params(MODEL, key))(jax.random.key(0, impl="threefry2x32"))
    recipe = get_recipe("fp8")
    alone = exact_jit(lambda p: quantize_params(p, recipe))(params)

    def updated(p):
        moved = jax.tree.map(lambda x: x - 1e-3 * jnp.sign(x) * x * x, p)
        weights = quantize_params(p, recipe)
        return moved, weights, jax.tree.map(lambda x: x.astype(jnp.float32).sum(), weights)

    assert_bitwise_equal("weights", exact_jit(updated)(params)[1], alone)
