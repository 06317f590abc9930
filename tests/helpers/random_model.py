"""Models with random weights for tests, at little cost.

A test's own programs are what it is there for: `init_params` takes as long to compile as a small
one, and `quantize_params`, called outside a program, compiles every operation by itself.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.models import ModelConfig, init_params, init_scaling, quantize_params
from fp8rl_jax.quant import Recipe, calibrated_scales
from fp8rl_jax.quant.kv import with_scales


def initial_params(config: ModelConfig, seed: int = 0):
    """Float32 parameters distributed as `init_params` draws them, drawn by numpy."""
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0, impl="threefry2x32")))
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        names = [entry.key for entry in path]
        if names[-1] == "weight":
            return jnp.ones(leaf.shape, jnp.float32)
        if names[-1].endswith("bias"):
            return jnp.zeros(leaf.shape, jnp.float32)
        deviation = 0.02 if names[-1] == "sinks" else 1 / math.sqrt(leaf.shape[-2])
        if names == ["embed_tokens"]:
            deviation = config.embedding_init_std
        elif names[-2:-1] in (["o_proj"], ["down_proj"]):  # they write to the residual stream
            deviation /= math.sqrt(2 * config.num_hidden_layers)
        return jnp.asarray(deviation * rng.standard_normal(leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def quantized(params, recipe):
    """The sampler's weights; stateful policies have seen the parameters once."""
    return _made(params, recipe, None)


def _made(params, recipe, scales):
    def make(p):
        return quantize_params(p, recipe, with_scales(init_scaling(p, recipe), scales))

    return exact_jit(make)(params)


def rollout_weights(model: ModelConfig, recipe: Recipe, seed: int = 1):
    """Random rollout weights of two layers; with calibrated scales of 3 / 448 if the recipe has
    such."""
    scales = None
    if recipe.kv == "calibrated":
        amax = {name: jnp.full(2, 3.0) for name in "qkv"}
        scales = calibrated_scales(amax, 1.0, jnp.int32(0))
    return _made(initial_params(model, seed), recipe, scales)
