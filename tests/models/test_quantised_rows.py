"""Norms and gates that quantise their result in passing give the bits of those that do not.

In jnp, which is what other platforms than a GPU would run of a program for both;
tests/kernels/gpu/test_model.py has the kernels.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_model import initial_params, quantized
from small_models import BLOCKS

from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.models import Swap, Tokens, forward, layers, trainable_params
from fp8rl_jax.models.taps import Observe
from fp8rl_jax.quant import Operand, get_recipe, power_of_two, static
from fp8rl_jax.quant.operands import fuses_quantisation
from fp8rl_jax.quant.scaling import dynamic

_FP8 = dataclasses.replace(get_recipe("fp8"), kernels="triton")


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (_FP8, True),
        (dataclasses.replace(_FP8, activation=Operand(policy=power_of_two(dynamic()))), True),
        (dataclasses.replace(_FP8, activation=Operand(policy=static(8.0))), False),
        (dataclasses.replace(_FP8, activation=Operand(block=(1, 32))), False),
        (dataclasses.replace(_FP8, compute_dtype=jnp.float32), False),
        (dataclasses.replace(_FP8, kernels="reference"), False),
        (get_recipe("bf16"), False),
    ],
    ids=["fp8", "powers of two", "static", "1x32", "float32", "reference", "bf16"],
)
def test_which_recipes(recipe, expected):
    assert fuses_quantisation(recipe) == expected


@pytest.fixture
def fused(monkeypatch):
    """Switches the fusion on, as kernels would, and says how often it was used."""
    used = []

    def switch():
        monkeypatch.setattr(layers, "fuses_quantisation", lambda recipe: bool(recipe.activation))
        quantise = layers.quantize_activation

        def count(*args):
            used.append(1)
            return quantise(*args)

        monkeypatch.setattr(layers, "quantize_activation", count)
        return used

    return switch


def _run(recipe, swaps=None, remat="none"):
    """Logits and gradient of a model on one batch."""
    params = initial_params(BLOCKS)
    tokens = jax.random.randint(
        jax.random.key(1, impl="threefry2x32"), (3, 20), 0, BLOCKS.vocab_size
    )
    weights = quantized(params, recipe)

    def loss(params):
        paired = trainable_params(params, weights, recipe)
        out = forward(
            paired,
            Tokens.of(tokens),
            BLOCKS,
            recipe,
            observe=Observe(swaps=swaps or {}, remat=remat),
        )
        return jax.nn.log_softmax(out.logits)[..., 0].sum(), out.logits

    return exact_jit(jax.value_and_grad(loss, has_aux=True))(params)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
def test_bits(fused, remat):
    want = _run(get_recipe("fp8"), remat=remat)
    used = fused()
    got = _run(get_recipe("fp8"), remat=remat)
    assert used
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["input_layernorm/output", "gated", "self_attn/q_proj/input"])
def test_swapped_values_are_read(fused, name):
    """What a swap puts in the place of a value reaches the products behind it."""
    width = BLOCKS.intermediate_size if name == "gated" else BLOCKS.hidden_size
    value = jax.random.normal(jax.random.key(2, impl="threefry2x32"), (2, 3, 20, width))
    swaps = {name: Swap(jnp.asarray([False, True]), value)}
    want = _run(get_recipe("fp8"), swaps)
    used = fused()
    got = _run(get_recipe("fp8"), swaps)
    assert used
    np.testing.assert_array_equal(np.asarray(got[0][1]), np.asarray(want[0][1]))
    assert np.any(np.asarray(got[0][1]) != np.asarray(_run(get_recipe("fp8"))[0][1]))
