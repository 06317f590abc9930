"""States of scaling policies in an nnx model: bits of the way by hand, and a falling loss."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from marks import slow
from test_linen import _X, _Y, assert_same, by_hand

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.quant.nnx import Fp8DotGeneral, Probe, Scaling, update_scaling


class _Model(nnx.Module):
    """Layers of the given widths, with gelu between them."""

    def __init__(self, recipe: str, *widths: int):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List(
            nnx.Linear(*shape, use_bias=False, dot_general=Fp8DotGeneral(recipe, shape), rngs=rngs)
            for shape in itertools.pairwise(widths)
        )

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = nnx.gelu(layer(x))
        return self.layers[-1](x)


@nnx.jit
def _step(model, optimizer):
    def loss(model):
        return ((model(_X) - _Y) ** 2).mean()

    wanted = nnx.DiffState(0, nnx.Any(nnx.Param, Probe))
    value, grads = nnx.value_and_grad(loss, argnums=wanted)(model)
    grads, seen = nnx.split_state(grads, nnx.Param, Probe)
    optimizer.update(model, grads)
    update_scaling(model, seen)
    return value


def test_same_bits_as_by_hand():
    model = _Model("fp8_delayed", 24, 8)
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    (layer,) = model.layers
    for w, site in by_hand(layer.kernel[...], 3):
        _step(model, optimizer)
        assert_same((layer.kernel[...], layer.dot_general.scaling.get_value()), (w, site))
    assert not any(jnp.any(x) for x in jax.tree.leaves(layer.dot_general.probe.get_value()))


@pytest.mark.parametrize("recipe", ["fp8_delayed", slow("fp8")])
def test_two_layers_train(recipe):
    model = _Model(recipe, 24, 48, 8)
    assert len(jax.tree.leaves(nnx.state(model, Scaling))) == (18 if recipe != "fp8" else 0)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    losses = [float(_step(model, optimizer)) for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]


def test_a_state_needs_the_shape_of_its_weight():
    Fp8DotGeneral("fp8")
    with pytest.raises(UserError, match="weight_shape"):
        Fp8DotGeneral("fp8_delayed")
