"""Layers that stay in their stack (`StackedLayer`) give the bits of layers cut out of it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_model import initial_params, quantized
from small_models import BLOCKS

from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.kernels import dispatch
from fp8rl_jax.models import (
    Tokens,
    forward,
    hidden_states,
    init_cache,
    init_paged_cache,
    init_params,
    quantize_params,
    transformer,
)
from fp8rl_jax.models.layers import StackedLayer, multiply, multiply_experts
from fp8rl_jax.models.stacks import layer_stacks
from fp8rl_jax.models.taps import Observe
from fp8rl_jax.quant import Activation, Rows, get_recipe, missing_scales, quantize, take_layer
from fp8rl_jax.quant.kv import with_scales
from fp8rl_jax.quant.qarray import E4M3

_DENSE = dataclasses.replace(BLOCKS, num_hidden_layers=3)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128)
_LATENT = dict(
    kv_lora_rank=32,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    qk_norm=False,
    first_k_dense_replace=1,
    **_EXPERTS,
)


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        pytest.param("fp8", {}, id="dense", marks=pytest.mark.slow),
        pytest.param("bf16", {}, id="bf16", marks=pytest.mark.slow),
        # Cut out: each layer has a state beside it.
        pytest.param("fp8_delayed", {}, id="states", marks=pytest.mark.slow),
        pytest.param("fp8", _EXPERTS, id="experts", marks=pytest.mark.slow),
        pytest.param("fp8", _LATENT, id="latent", marks=pytest.mark.slow),
    ],
)
def test_forward(monkeypatch, recipe, more):
    config, recipe = dataclasses.replace(_DENSE, **more), get_recipe(recipe)
    weights = quantized(initial_params(config), recipe)
    tokens = jax.random.randint(
        jax.random.key(1, impl="threefry2x32"), (3, 20), 0, config.vocab_size
    )

    def run(weights, tokens, taps=()):
        cache = init_cache(config, recipe, 3, 32)
        out = forward(
            weights, Tokens.of(tokens), config, recipe, cache=cache, observe=Observe(taps)
        )
        return out.logits, jax.tree.leaves(out.cache)

    used = []
    scan = transformer._scan_in_place
    monkeypatch.setattr(transformer, "_scan_in_place", lambda *args: used.append(1) or scan(*args))
    by_modules = exact_jit(run, static_argnums=2)(weights, tokens, ("embed",))
    assert not used
    cut_out = exact_jit(run)(weights, tokens)
    monkeypatch.setattr(transformer, "resolve", lambda _: "triton")  # as on a GPU
    in_place = exact_jit(lambda *args: run(*args))(weights, tokens)
    assert len(used) == 2 * len(layer_stacks(config)), "each stack, cut out and in place"
    for found in (cut_out, in_place):
        for one, other in zip(jax.tree.leaves(by_modules), jax.tree.leaves(found), strict=True):
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_shape_is_the_layers():
    stack = quantize(jnp.ones((5, 256, 384)), (128, 128))
    layer = StackedLayer(stack, jnp.int32(2))
    assert layer.shape == (256, 384)
    assert take_layer(layer.stack, layer.layer).scale.shape == (2, 3)


def test_products():
    rng = np.random.default_rng(0)
    stack = quantize(jnp.asarray(rng.standard_normal((3, 4, 128, 256)), jnp.float32), (128, 128))
    x = jnp.asarray(rng.standard_normal((2, 8, 128)), jnp.float32)
    recipe, experts = get_recipe("fp8"), jnp.asarray([3, 1], jnp.int32)
    one = Activation(x[0])

    def both(x, stack, take):
        grouped = multiply_experts(recipe, x, take(StackedLayer(stack, jnp.int32(1))), experts)
        dense = jax.tree.map(lambda leaf: leaf[:, 0], stack)
        return grouped, multiply(recipe, one, take(StackedLayer(dense, jnp.int32(2))), Rows())

    want = exact_jit(
        lambda x, stack: both(x, stack, lambda named: take_layer(named.stack, named.layer))
    )(x, stack)
    got = exact_jit(lambda x, stack: both(x, stack, lambda layer: layer))(x, stack)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({}, {}),
        (dict(kv="calibrated", k_dtype=E4M3, v_dtype=E4M3, fp8_attention=True), {}),
        ({}, _LATENT),
        (None, _EXPERTS),
    ],
    ids=["fp8", "calibrated", "latent", "bf16 experts"],
)
def test_both_platforms_give_the_same_tree(monkeypatch, changes, more):
    """On a machine with a GPU one program has the kernels' branches and jnp's: over rows of slots
    and over pages, which JAX compares while it traces."""
    pytest.importorskip("jax_triton", reason="needs jax-triton: pip install 'fp8rl_jax[dev]'")
    monkeypatch.setattr(dispatch, "backend", lambda: "gpu")
    monkeypatch.setattr(dispatch, "triton_installed", lambda: True)
    config = dataclasses.replace(_DENSE, **more)
    recipe = get_recipe("bf16" if changes is None else "fp8")
    recipe = dataclasses.replace(recipe, **(changes or {}))
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0, impl="threefry2x32")))
    scales = missing_scales(config.num_hidden_layers) if recipe.kv == "calibrated" else None
    table = jnp.asarray([[1], [2]], jnp.int32)

    def step(params, tokens):
        weights = quantize_params(params, recipe, with_scales({}, scales))
        caches = init_cache(config, recipe, 2, 64), init_paged_cache(config, recipe, 3, table)
        run = functools.partial(hidden_states, weights, Tokens.of(tokens), config, recipe)
        return [run(cache=cache).cache for cache in caches]

    for length in (1, 5):
        tokens = jax.ShapeDtypeStruct((2, length), jnp.int32)
        traced = jax.make_jaxpr(step)(params, tokens)
        assert "triton_kernel_call" in str(traced) and "platform_index" in str(traced)
