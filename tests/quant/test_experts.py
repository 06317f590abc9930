"""The rule over experts against a loop over experts, bit for bit where it promises so."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow
from oracles import quant_oracle as oracle

from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.quant import (
    BoundWeight,
    get_recipe,
    grouped_matmul,
    init_probe,
    init_site,
    matmul,
    quantize_weight,
)

_EXPERTS = np.array([0, 2, 2, 1, 0], np.int32)  # expert 3 gets no rows
_ROWS, _K, _N = 16, 192, 130


def _operands():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((len(_EXPERTS), _ROWS, _K)), jnp.bfloat16)
    x = x.at[3, 10:].set(0)  # padding
    w = jnp.asarray(rng.standard_normal((4, _K, _N)), jnp.float32)
    dy = jnp.asarray(rng.standard_normal((len(_EXPERTS), _ROWS, _N)), jnp.float32)
    return x, w, dy


def _gradients(recipe, x, w, dy):
    def run(x, w, dy):
        y, vjp = jax.vjp(lambda x, w: grouped_matmul(recipe, x, w, _EXPERTS), x, w)
        return y, *vjp(dy)

    return exact_jit(run)(x, w, dy)


_BYTES = dataclasses.replace(get_recipe("fp8_linear"), name="exact", backward="dequantized")


@pytest.mark.parametrize("name", ["fp8", *map(slow, ("bf16", "mxfp8", "fake", _BYTES))])
def test_each_tile_is_a_matmul_of_its_expert(name):
    recipe, (x, w, dy) = get_recipe(name), _operands()
    y, dx, dw = _gradients(recipe, x, w, dy)
    single = exact_jit(lambda x, w: matmul(recipe, x, w))

    @exact_jit
    def backward(x, w, dy):
        return jax.vjp(lambda x, w: matmul(recipe, x, w), x, w)[1](dy)

    expected_dw = np.zeros(w.shape)
    for tile, expert in enumerate(_EXPERTS):
        np.testing.assert_array_equal(y[tile], single(x[tile], w[expert]))
        tile_dx, tile_dw = backward(x[tile], w[expert], dy[tile])
        assert oracle.calc_diff(np.asarray(dx[tile], np.float32), tile_dx) < 1e-6
        expected_dw[expert] += np.asarray(tile_dw)
    assert oracle.calc_diff(dw, expected_dw) < 1e-10
    assert not np.asarray(dw[3]).any(), "an expert without rows has no gradient"


def test_more_rows_elsewhere_change_nothing():
    """A tile's bits do not depend on the other tiles, nor on the number of its own rows."""
    recipe, (x, w, _) = get_recipe("fp8"), _operands()
    run = exact_jit(lambda x, experts: grouped_matmul(recipe, x, w, experts))
    whole = run(x, _EXPERTS)
    np.testing.assert_array_equal(run(x[2:3], _EXPERTS[2:3])[0], whole[2])
    np.testing.assert_array_equal(run(x[:, :3], _EXPERTS), whole[:, :3])


@pytest.mark.parametrize("name", [slow("fp8"), "bf16"])
def test_tiles_without_rows_are_left_out(name):
    """Zeros come out, even of NaN; outputs and gradients of the other tiles keep their bits."""
    recipe, (x, w, dy) = get_recipe(name), _operands()
    more = jnp.full((2, *x.shape[1:]), jnp.nan, x.dtype)
    experts = np.concatenate([_EXPERTS[:3], [4, 9], _EXPERTS[3:]]).astype(np.int32)
    wider = jnp.concatenate([x[:3], more, x[3:]])
    cotangent = jnp.concatenate([dy[:3], jnp.ones((2, *dy.shape[1:])), dy[3:]])

    def run(x, w, dy):
        y, vjp = jax.vjp(lambda x, w: grouped_matmul(recipe, x, w, experts), x, w)
        return y, *vjp(dy)

    y, dx, dw = exact_jit(run)(wider, w, cotangent)
    assert not np.asarray(y[3:5]).any() and not np.asarray(dx[3:5], np.float32).any()
    plain = _gradients(recipe, x, w, dy)
    others = np.array([0, 1, 2, 5, 6])
    for ours, theirs in zip((y[others], dx[others], dw), plain, strict=True):
        np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))


@pytest.mark.slow
def test_bytes_with_master():
    """Quantised experts give the bits of plain ones, and the gradient goes to the master."""
    recipe, (x, w, dy) = get_recipe("fp8"), _operands()
    y, dx, dw = _gradients(recipe, x, w, dy)
    bound = BoundWeight(quantize_weight(w, recipe)[0], jnp.zeros_like(w))

    def run(x, master, dy):
        def product(x, master):
            return grouped_matmul(recipe, x, BoundWeight(bound.value, master), _EXPERTS)

        y, vjp = jax.vjp(product, x, master)
        return y, *vjp(dy)

    for ours, plain in zip(exact_jit(run)(x, bound.master, dy), (y, dx, dw), strict=True):
        np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(plain, np.float32))


def test_observations_are_combined_by_maximum():
    """Two tiles of one expert: the larger amax, not the sum; a fresh state for every expert."""
    recipe, (x, w, dy) = get_recipe("fp8_delayed"), _operands()
    state, probe = init_site(recipe, w.shape), init_probe(recipe, w.shape, True, weight=True)

    def loss(probe, x, w):
        return (grouped_matmul(recipe, x, BoundWeight(w, None, state, probe), _EXPERTS) * dy).sum()

    seen = exact_jit(jax.grad(loss))(probe, x, w)
    for expert in range(4):
        tiles = expert == _EXPERTS
        largest = np.abs(np.asarray(x, np.float32)[tiles]).max() if tiles.any() else 0.0
        assert seen.activation.amax[expert].item() == largest
        assert seen.activation.counts[expert][3] == tiles.sum() * _ROWS * _K
        rounded = np.asarray(dy.astype(jnp.bfloat16), np.float32)
        largest = np.abs(rounded[tiles]).max() if tiles.any() else 0.0
        assert seen.gradient.amax[expert].item() == largest


def test_bf16_experts_add_up_in_float32():
    """600 tiles of ones: a sum in bf16 would stall at 2048."""
    x, w = jnp.ones((600, 8, 128), jnp.bfloat16), jnp.ones((1, 128, 128), jnp.bfloat16)
    experts = jnp.zeros(600, jnp.int32)
    recipe = get_recipe("fp8")
    dw = exact_jit(jax.grad(lambda w: grouped_matmul(recipe, x, w, experts).sum()))(w)
    assert dw.dtype == jnp.bfloat16 and float(dw[0, 0, 0]) == 4800


@pytest.mark.slow
def test_float32_inputs_have_float32_gradients():
    """As for `matmul`: x is rounded on its way in, its gradient is not."""
    recipe = get_recipe("fp8")
    x, w, dy = _operands()
    x = x.astype(jnp.float32)
    _, dx, _ = _gradients(recipe, x, w, dy)

    def single(x, w, dy):
        return jax.vjp(lambda x: matmul(recipe, x, w), x)[1](dy)[0]

    assert dx.dtype == jnp.float32
    expected = exact_jit(single)(x[1], w[_EXPERTS[1]], dy[1])
    np.testing.assert_allclose(dx[1], expected, rtol=1e-6)


@pytest.mark.slow
def test_works_under_shard_map():
    """Tiles over a mesh axis, experts shared by its devices."""
    recipe, (x, w, dy) = get_recipe("fp8_delayed"), _operands()
    state, probe = init_site(recipe, w.shape), init_probe(recipe, w.shape, True, weight=True)
    mesh = jax.make_mesh((1,), ("tiles",), axis_types=(jax.sharding.AxisType.Auto,))
    tiles, whole = jax.sharding.PartitionSpec("tiles"), jax.sharding.PartitionSpec()

    def run(x, w, probe, experts):
        return grouped_matmul(recipe, x, BoundWeight(w, None, state, probe), experts)

    def gradients(run):
        def loss(w, probe):
            return (run(x, w, probe, jnp.asarray(_EXPERTS)) * dy).sum()

        return exact_jit(jax.grad(loss, (0, 1)))(w, probe)

    specs = (tiles, whole, whole, tiles)
    mapped = gradients(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=tiles))
    for ours, plain in zip(jax.tree.leaves(mapped), jax.tree.leaves(gradients(run)), strict=True):
        np.testing.assert_array_equal(ours, plain)
