"""Adapters: one merged form, gradients of A and B without that of a whole weight."""

from __future__ import annotations

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drift_harness import Case, make_params, run, with_adapters
from marks import slow
from random_model import initial_params
from small_models import UNEVEN, UNEVEN_LATENT

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.kernels import round_bf16
from fp8rl_jax.models import (
    Tokens,
    forward,
    init_probes,
    init_scaling,
    quantize_params,
    rope_tables,
    trainable_params,
)
from fp8rl_jax.models import params as params_module
from fp8rl_jax.models.masters import Adapted, adapted, merged, new_adapters, trained, with_trained
from fp8rl_jax.quant import get_recipe, is_weight

_EXPERTS = dataclasses.replace(
    UNEVEN, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64
)


def _key():
    return jax.random.key(0, impl="threefry2x32")


@pytest.mark.parametrize("recipe", ["f32", "bf16", "fp8"])
def test_without_b_it_is_the_base(recipe):
    params = initial_params(UNEVEN)
    own = Adapted(params, new_adapters(params, 4, ("*",), _key()), 2.0)
    found, wanted = (exact_jit(lambda p: quantize_params(p, recipe))(p) for p in (own, params))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_merged_is_base_plus_product():
    own = with_adapters(initial_params(_EXPERTS), 3)
    found = exact_jit(merged)(own)
    layers, adapters = own.base["layers"], own.adapters["layers"]
    for place in (("self_attn", "q_proj"), ("o_proj",), ("experts", "down_proj")):
        kernel, adapter, result = layers, adapters, found["layers"]
        for name in place:
            kernel, adapter, result = kernel[name], adapter[name], result[name]
        wanted = np.asarray(kernel["kernel"], np.float64) + 2.0 * (
            np.asarray(adapter["lora_a"], np.float64) @ np.asarray(adapter["lora_b"], np.float64)
        )
        np.testing.assert_allclose(result["kernel"], wanted, atol=1e-6)
    np.testing.assert_array_equal(found["embed_tokens"], own.base["embed_tokens"])


def test_a_base_in_fp8():
    """Holds the sampler's bytes, which do not change while B is zero; others are of a file."""
    masters = jax.tree.map(round_bf16, initial_params(_EXPERTS))
    base = with_adapters(masters, 4, base="fp8").base
    wanted = exact_jit(lambda p: quantize_params(p, "fp8"))(masters)
    linear = lambda tree: [x for x in jax.tree.leaves(tree, is_leaf=is_weight) if is_weight(x)]
    assert len(linear(base)) == 7
    jax.tree.map(np.testing.assert_array_equal, linear(base), linear(wanted))
    assert base["embed_tokens"].dtype == jnp.bfloat16

    own = Adapted(base, new_adapters(base, 4, ("*",), _key()), 2.0)
    for params in (own, base):  # and the reference policy's
        found = exact_jit(lambda p: quantize_params(p, "fp8"))(params)
        jax.tree.map(np.testing.assert_array_equal, found, wanted)

    file = jax.tree.map(
        lambda x: dataclasses.replace(x, scale=x.scale * 1.01) if is_weight(x) else x,
        base,
        is_leaf=is_weight,
    )
    own = adapted(file, 4, 8.0, ("q_proj",), "fp8", _key())
    jax.tree.map(np.testing.assert_array_equal, own.base, file)
    for params in (own, own.base):  # what has no adapter is not quantised anew
        found = exact_jit(lambda p: quantize_params(p, "fp8"))(params)["layers"]
        for name in ("k_proj", "v_proj"):
            pair = found["self_attn"][name], file["layers"]["self_attn"][name]
            jax.tree.map(np.testing.assert_array_equal, *pair)
        jax.tree.map(np.testing.assert_array_equal, found["experts"], file["layers"]["experts"])
    other = exact_jit(lambda p: quantize_params(p, "bf16"))(own)["layers"]["o_proj"]["kernel"]
    assert other.dtype == jnp.bfloat16 and not is_weight(other)


def test_a_frozen_base_is_not_merged_where_no_state_needs_it():
    """Outside a program that would hold the whole model in float32."""
    own = with_adapters(initial_params(_EXPERTS), 4, base="fp8")
    with mock.patch.object(params_module, "merged", wraps=merged) as seen:
        assert init_scaling(own, "fp8") == {}
        assert len(init_probes(own, "fp8", True)) == 7
    assert all(
        isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(seen.call_args_list[0].args[0])
    )


def _gradients(config, own: Adapted, recipe: str):
    """Of a loss by A and B: by our rule, and from the gradient of the merged weights."""
    recipe = get_recipe(recipe)
    tokens = np.random.default_rng(0).integers(0, 50, (2, 12)).astype(np.int32)
    rope = rope_tables(config, 12)

    def loss(params, masters):
        weights = quantize_params(jax.lax.stop_gradient(masters), recipe)
        paired = trainable_params(params, weights, recipe)
        return (
            jnp.sin(forward(paired, Tokens.of(tokens, rope), config, recipe).logits) ** 2
        ).mean()

    ours = exact_jit(jax.grad(lambda values: loss(with_trained(own, values), merged(own))))(
        trained(own)
    )
    whole = merged(own)
    theirs = exact_jit(jax.grad(lambda params: loss(params, params)))(whole)
    _, pull = jax.vjp(lambda values: merged(with_trained(own, values)), trained(own))
    return ours, pull(theirs)[0]


@pytest.mark.parametrize(
    ("config", "recipe", "bound"),
    [
        pytest.param(UNEVEN, "f32", 1e-5, id="f32"),
        slow(_EXPERTS, "f32", 1e-5, id="f32 experts"),
        slow(UNEVEN_LATENT, "f32", 1e-5, id="f32 latent"),
        slow(UNEVEN, "bf16", 0.02, id="bf16"),
        slow(_EXPERTS, "fp8", 0.1, id="fp8 experts"),
    ],
)
def test_gradients_are_those_through_the_merged_weights(config, recipe, bound):
    """In FP8 they differ, because the gradient of a whole weight quantises both operands anew."""
    ours, theirs = _gradients(config, with_adapters(initial_params(config), 4), recipe)
    for one, other in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert np.linalg.norm(one - other) <= bound * np.linalg.norm(other)
        assert np.linalg.norm(other) > 0


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("f32", rank=8, prompts=(1, 7), updates=1), id="f32"),
        slow(Case("f32", rank=1, prompts=(1, 7, 20), updates=2, micro_batches=3), id="f32, rank 1"),
        slow(Case("bf16", rank=64, prompts=(1, 7, 20), updates=1, remat="full"), id="bf16"),
        slow(Case("fp8_delayed", rank=8, prompts=(1, 7, 20), updates=2), id="delayed"),
        slow(Case("mxfp8", rank=8, prompts=(1, 7, 20), updates=1), id="mxfp8"),
        slow(Case("fp8", rank=8, prompts=(1, 7, 20), experts=8, updates=1), id="experts"),
        slow(
            Case("fp8", rank=8, base="fp8", prompts=(1, 7, 20), experts=8, updates=1),
            id="experts, a base in fp8",
        ),
        slow(Case("fp8", "deepseek", rank=8, layers=3, prompts=(1, 7), updates=1), id="latent"),
        slow(
            Case(
                dataclasses.replace(get_recipe("fp8"), name="ends", first_layers=1, last_layers=1),
                rank=8,
                layers=4,
                prompts=(1, 7, 20),
                updates=1,
            ),
            id="ends in bf16",
        ),
    ],
)
def test_zero_drift(case):
    result = run(dataclasses.replace(case, tap_logits=True))
    assert result.mask.sum() > 20 and result.checksum_ok
    assert result.differing() == (0, 0)
    before, after = make_params(case), result.params
    jax.tree.map(np.testing.assert_array_equal, after.base, before.base)
    pairs = zip(*map(jax.tree.leaves, (after.adapters, before.adapters)), strict=True)
    assert not any(np.array_equal(*pair) for pair in pairs), "updates move the adapters alone"


@pytest.mark.parametrize(
    ("rank", "modules", "words"),
    [
        (49, ("*",), "lora.rank is 49, and down_proj is 136 x 48: write at most 48"),
        (4, ("qproj",), "'qproj' matches no linear layer .*q_proj"),
    ],
)
def test_what_cannot_be_adapted_is_refused(rank, modules, words):
    with pytest.raises(UserError, match=words):
        new_adapters(initial_params(UNEVEN), rank, modules, _key())
