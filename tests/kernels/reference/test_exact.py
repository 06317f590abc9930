"""Exact products: no order, and nothing beside a row and a column, changes a bit."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.kernels import attention, attention_vjp, block_matmul, matmul_at_once, tree_norm
from fp8rl_jax.kernels.reference.exact import exact_dot_general
from fp8rl_jax.kernels.reference.matmul import dot_general
from fp8rl_jax.models import router
from fp8rl_jax.quant import get_recipe, make_dot_general

_E4M3 = jnp.float8_e4m3fn
_PLAIN = (((1,), (0,)), ((), ()))


def _numbers(shape: tuple[int, ...], dtype, spread: float = 1.0, seed: int = 0) -> jax.Array:
    """Normal numbers times log-normal ones; of `spread` 3 a row spans eight orders of magnitude."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp(rng.standard_normal(shape) * spread)
    return jnp.asarray(np.clip(x, -448, 448), dtype)


def _product(x, w) -> np.ndarray:
    return np.asarray(exact_jit(lambda x, w: exact_dot_general(x, w, _PLAIN))(x, w))


@pytest.mark.parametrize("spread", [0.0, 3.0])
@pytest.mark.parametrize("dtype", [_E4M3, jnp.bfloat16, jnp.float32])
def test_no_order_matters(dtype, spread):
    """Depth permuted, rows alone, columns alone, and numpy's own order for E4M3. The same
    permutation changes float32's sums."""
    x, w = _numbers((33, 128), dtype, spread), _numbers((128, 70), dtype, spread, 1)
    whole = _product(x, w)
    order = np.random.default_rng(2).permutation(128)
    np.testing.assert_array_equal(_product(x[:, order], w[order]), whole)
    np.testing.assert_array_equal(_product(x[:1], w), whole[:1])
    np.testing.assert_array_equal(_product(x[5:8], w[:, -1:]), whole[5:8, -1:])
    x, w = x.astype(jnp.float32), w.astype(jnp.float32)
    as_float32 = [dot_general(a, b, _PLAIN) for a, b in ((x, w), (x[:, order], w[order]))]
    assert spread == 0 or (as_float32[0] != as_float32[1]).mean() > 0.1


@pytest.mark.parametrize("spread", [0.0, 3.0])
@pytest.mark.parametrize("dtype", [_E4M3, jnp.bfloat16, jnp.float32])
def test_as_exact_as_float32_can_be(dtype, spread):
    """Against Python's integers: half of the last bit, and 2**-43 of the largest numbers a term."""
    x, w = _numbers((5, 128), dtype, spread), _numbers((128, 6), dtype, spread, 1)
    found = _product(x, w)
    scaled = [
        [[int(v * 2.0**200) for v in row] for row in np.asarray(a).astype(np.float64)]
        for a in (x, w.T)
    ]
    for i, row in enumerate(scaled[0]):
        for j, column in enumerate(scaled[1]):
            want = sum(a * b for a, b in zip(row, column, strict=True))
            error = abs(int(float(found[i, j]) * 2.0**400) - want)
            largest = max(map(abs, row)) * max(map(abs, column))
            assert error <= abs(want) / 2**24 * 1.001 + 128 * largest / 2**43
            if dtype == _E4M3:
                assert error <= abs(want) / 2**24 * 1.001


@pytest.mark.parametrize("held", [jnp.bfloat16, jnp.float32])
def test_e4m3_in_a_wider_type_gives_the_same_bits(held):
    x, w = _numbers((9, 128), _E4M3, 2.0), _numbers((128, 40), _E4M3, 2.0, 1)
    np.testing.assert_array_equal(_product(x.astype(held), w.astype(held)), _product(x, w))
    np.testing.assert_array_equal(_product(x, w.astype(held)), _product(x, w))


def test_rows_of_zeros_and_what_is_not_finite():
    x, w = _numbers((4, 128), jnp.float32), _numbers((128, 3), jnp.float32, 0, 1)
    x = x.at[0].set(0).at[1, 5].set(jnp.nan).at[2, 7].set(jnp.inf)
    found = _product(x, w)
    assert (found[0] == 0).all() and np.isnan(found[1:3]).all() and np.isfinite(found[3]).all()


def test_axes_of_the_batch():
    x, w = _numbers((2, 5, 3, 64), jnp.float32), _numbers((2, 3, 64, 7), jnp.float32, 0, 1)
    axes = (((3,), (2,)), ((0, 2), (0, 1)))
    found = exact_jit(lambda x, w: exact_dot_general(x, w, axes))(x, w)
    for batch, chunk in np.ndindex(2, 3):
        one = _product(x[batch, :, chunk], w[batch, chunk])
        np.testing.assert_array_equal(found[batch, chunk], one)


def _attended(rows: slice):
    """(output, gradients) of exact attention of those rows of a batch, past a page of keys."""
    q, k, v, cotangent = (_numbers((3, 90, h, 32), jnp.bfloat16, 0, h) for h in (4, 2, 2, 4))
    positions = jnp.broadcast_to(jnp.arange(90, dtype=jnp.int32), (3, 90))
    arrays = [x[rows] for x in (q, k, v, positions)]
    cotangent = cotangent[rows].astype(jnp.float32)

    @exact_jit
    def run(arrays, cotangent):
        keywords = {"scale": 0.2, "implementation": "exact"}
        floats = [x.astype(jnp.float32) for x in arrays[:3]]
        gradients = attention_vjp(*floats, arrays[3], cotangent, **keywords)
        return attention(*arrays, **keywords), *gradients

    return run(arrays, cotangent)


def test_attention_and_its_gradients():
    for whole, part in zip(_attended(slice(None)), _attended(slice(1, 2)), strict=True):
        np.testing.assert_array_equal(whole[1:2], part)


def test_gradients_are_sums_of_exact_blocks():
    x, w = _numbers((300, 257), jnp.float32), _numbers((257, 130), jnp.float32, 0, 1)
    blocks = exact_jit(lambda x, w: block_matmul(x, w, implementation="exact"))(x, w)
    at_once = exact_jit(lambda x, w: matmul_at_once(x, w, "exact"))(x, w)
    np.testing.assert_array_equal(at_once, blocks)


@pytest.mark.parametrize("layer", ["linear", "router"])
def test_no_product_of_a_layer_is_made_otherwise(layer):
    """Forward and backward: every dot of the program is one of float64."""
    x, w = _numbers((64, 128), jnp.float32), _numbers((128, 64), jnp.float32, 0, 1)
    if layer == "linear":
        recipe = dataclasses.replace(get_recipe("fp8"), kernels="exact")
        multiply = lambda x, w: make_dot_general(recipe)(x, w, _PLAIN)
    else:
        multiply = lambda x, w: router.router_logits(x, w, implementation="exact")
    gradient = jax.grad(lambda x, w: jnp.sin(multiply(x, w)).sum(), argnums=(0, 1))
    text = jax.jit(gradient).lower(x, w).as_text()
    dots = [line for line in text.splitlines() if "dot_general" in line]
    # repeat_last multiplies by 1 and 0, which is exact in any type.
    others = [line for line in dots if "xf64>" not in line and "tensor<2x128xf32>" not in line]
    assert len(dots) >= 3 and not others


def test_norm():
    tree = {"a": _numbers((37, 50), jnp.float32), "b": _numbers((3,), jnp.float32, 0, 1)}
    want = np.sqrt(sum((np.asarray(x, np.float64) ** 2).sum() for x in tree.values()))
    assert float(exact_jit(tree_norm)(tree)) == pytest.approx(want, rel=1e-6)
