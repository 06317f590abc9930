"""States of scaling policies in a linen model: bits of the way by hand, and a falling loss."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.errors import ScopeCollectionNotFound
from marks import slow

from fp8rl_jax.quant import get_recipe, init_probe, init_site, make_dot_general, update_site
from fp8rl_jax.quant.linen import PROBES, SCALING, Fp8DotGeneral, update_scaling

_X = jax.random.normal(jax.random.key(0, impl="threefry2x32"), (32, 24))
_Y = jnp.sin(2 * _X[:, :8])
_MATRIX = (((1,), (0,)), ((), ()))


def _dense(features: int, recipe: str) -> nn.Dense:
    return nn.Dense(
        features, use_bias=False, dot_general_cls=functools.partial(Fp8DotGeneral, recipe)
    )


def by_hand(w: jax.Array, steps: int) -> list:
    """Weights and states of a layer after each step of SGD, with site and probe passed by hand."""
    recipe = get_recipe("fp8_delayed")
    site, zeros = init_site(recipe, w.shape), init_probe(recipe, w.shape, False, weight=True)

    @jax.jit
    def step(w, site):
        def loss(w, probe):
            return ((make_dot_general(recipe, site, probe)(_X, w, _MATRIX) - _Y) ** 2).mean()

        grad, seen = jax.grad(loss, (0, 1))(w, zeros)
        return w - grad, update_site(recipe, site, seen.amaxes)

    found = []
    for _ in range(steps):
        w, site = step(w, site)
        found.append((w, site))
    return found


def assert_same(one, other) -> None:
    """The leaves of two trees have equal bits."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_same_bits_as_by_hand():
    layer = _dense(8, "fp8_delayed")
    variables = jax.jit(layer.init)(jax.random.key(1, impl="threefry2x32"), _X)
    params, scaling, probes = (variables[name] for name in ("params", SCALING, PROBES))

    @jax.jit
    def step(params, scaling):
        def loss(params, probes):
            y = layer.apply({"params": params, SCALING: scaling, PROBES: probes}, _X)
            return ((y - _Y) ** 2).mean()

        grads, seen = jax.grad(loss, (0, 1))(params, probes)
        return jax.tree.map(jnp.subtract, params, grads), update_scaling(scaling, seen)

    moved = []
    for w, site in by_hand(params["kernel"], 3):
        params, scaling = step(params, scaling)
        ours = scaling["Fp8DotGeneral_0"]["site"].site
        assert_same((params["kernel"], ours), (w, site))
        moved.append(float(ours.gradient.state["history"][0, 0, 0]))
    assert len({*moved}) > 1 and min(moved) > 0


@pytest.mark.parametrize("recipe", [slow("fp8_delayed"), "fp8"])
def test_two_layers_train(recipe):
    model = nn.Sequential([_dense(48, recipe), nn.gelu, _dense(8, recipe)])
    variables = jax.jit(model.init)(jax.random.key(1, impl="threefry2x32"), _X)
    assert (SCALING in variables) == (PROBES in variables) == (recipe == "fp8_delayed")
    optimizer = optax.adam(1e-2)
    state = optimizer.init(variables["params"])

    @jax.jit
    def step(variables, state):
        def loss(params, probes):
            y = model.apply(variables | {"params": params, PROBES: probes}, _X)
            return ((y - _Y) ** 2).mean()

        params, probes = variables["params"], variables.get(PROBES, {})
        value, (grads, seen) = jax.value_and_grad(loss, (0, 1))(params, probes)
        updates, state = optimizer.update(grads, state)
        new = {"params": optax.apply_updates(params, updates)}
        if SCALING in variables:
            new[SCALING] = update_scaling(variables[SCALING], seen)
        return variables | new, state, value

    losses = []
    for _ in range(20):
        variables, state, value = step(variables, state)
        losses.append(float(value))
    assert losses[-1] < 0.5 * losses[0]
    without = {name: value for name, value in variables.items() if name != PROBES}
    assert_same(model.apply(variables, _X), model.apply(without, _X))


def test_states_that_are_missing():
    layer = _dense(8, "fp8_delayed")
    params = layer.init(jax.random.key(1, impl="threefry2x32"), _X)["params"]
    with pytest.raises(ScopeCollectionNotFound, match=SCALING):
        layer.apply({"params": params}, _X)


def test_axes_of_the_batch_have_states_of_their_own():
    layer = nn.DenseGeneral(
        6, axis=-1, batch_dims=(0,), dot_general_cls=functools.partial(Fp8DotGeneral, "fp8_delayed")
    )
    variables = jax.jit(layer.init)(jax.random.key(1, impl="threefry2x32"), jnp.ones((3, 4, 24)))
    (site,) = (found["site"].site for found in variables[SCALING].values())
    assert site.weight.age.shape == (3,)
    assert layer.apply(variables, jnp.ones((3, 4, 24))).shape == (3, 4, 6)
