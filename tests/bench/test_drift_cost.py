"""Benchmark `drift-cost`: the naive forms compute the same thing, and they drift."""

from __future__ import annotations

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow
from tiny_run import CONFIG

from benchmarks import __main__ as benchmarks
from benchmarks.drift_cost import (
    drift_cost,
    format_cost_table,
    naive_attention,
    naive_matmul,
    naively,
)
from fp8rl_jax import kernels
from fp8rl_jax.base import exact_jit
from fp8rl_jax.config import load_config
from fp8rl_jax.kernels import reference
from fp8rl_jax.kernels.reference.probe import cpu_way
from fp8rl_jax.models.router import router_logits
from fp8rl_jax.quant import quantize, scaled_matmul

_TINY = str(CONFIG)


@pytest.mark.parametrize("shape", [slow((5, 128, 128)), slow((3, 300, 200)), (9, 64, 40)])
def test_naive_matmul(shape):
    """Within float32's error of the blockwise form, scaled and unscaled, ragged edges too."""
    rows, depth, columns = shape
    rng = np.random.default_rng(depth)
    x = jnp.asarray(rng.standard_normal((rows, depth)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((depth, columns)), jnp.float32)
    qx, qw = quantize(x, (1, 128)), quantize(w, (128, 128))
    for arguments in ((x, w), (qx.qvalue, qw.qvalue, qx.scale, qw.scale)):
        exact, naive = (jax.jit(f)(*arguments) for f in (kernels.block_matmul, naive_matmul))
        np.testing.assert_allclose(naive, exact, atol=3e-5 * depth**0.5)
        assert float(jnp.abs(naive).max()) > 1


@pytest.mark.parametrize("scaled", [slow(False), True])
def test_naive_attention(scaled):
    """Within float32's error of the chunked form, past one chunk, grouped, with and without FP8."""
    rng = np.random.default_rng(0)
    shapes = ((2, 3, 4, 32), (2, 100, 2, 32), (2, 100, 2, 32))
    q, k, v = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes)
    positions = jnp.asarray([[0, 50, 99], [7, 8, 70]], jnp.int32)
    scales = {}
    if scaled:
        (k, v), names = (quantize(x, (-1,)) for x in (k, v)), ("k_scale", "v_scale")
        scales = {n: x.scale[..., 0] for n, x in zip(names, (k, v), strict=True)}
        k, v = k.qvalue, v.qvalue
    scales |= {"window": jnp.int32(60), "sinks": jnp.asarray([0.5, -1, 2, 3], jnp.float32)}
    exact, naive = (
        jax.jit(functools.partial(f, scale=0.2))(q, k, v, positions, **scales)
        for f in (kernels.attention, naive_attention)
    )
    np.testing.assert_allclose(naive, exact, atol=2e-6)
    table = jnp.asarray([[2, 0], [3, 1]])

    def pages(x):
        x = jnp.pad(x, [(0, 0), (0, 28)] + [(0, 0)] * (x.ndim - 2))
        pool = jnp.full((4, 64, *x.shape[2:]), np.nan, x.dtype)
        return pool.at[table].set(x.reshape(2, 2, 64, *x.shape[2:]))

    scales |= {name: pages(x) for name, x in scales.items() if name.endswith("_scale")}
    run = functools.partial(naive_attention, scale=0.2)
    paged = jax.jit(run)(q, pages(k), pages(v), positions, table=table, **scales)
    np.testing.assert_allclose(paged, exact, atol=2e-6)
    by_feature = jax.jit(functools.partial(run, keys_by_feature=True))
    turned = by_feature(q, jnp.moveaxis(pages(k), 1, 3), pages(v), positions, table=table, **scales)
    np.testing.assert_array_equal(turned, paged)


def test_naive_functions_take_what_they_replace():
    for naive, exact in (
        (naive_attention, reference.attention.attention),
        (naive_matmul, reference.matmul.block_matmul),
    ):
        assert [*inspect.signature(naive).parameters] == [*inspect.signature(exact).parameters]


def test_naive_attention_of_latents():
    """With further features of queries and keys, as multi-head latent attention has them."""
    rng = np.random.default_rng(0)
    shapes = {"q": (2, 3, 4, 32), "k": (2, 70, 1, 32), "q_rope": (2, 3, 4, 16)}
    shapes["k_rope"] = (2, 70, 1, 16)
    x = {n: jnp.asarray(rng.standard_normal(s), jnp.float32) for n, s in shapes.items()}
    positions = jnp.asarray([[0, 50, 69], [7, 8, 64]], jnp.int32)
    exact, naive = (
        jax.jit(functools.partial(f, scale=0.2, way=cpu_way()))(**x, v=x["k"], positions=positions)
        for f in (reference.attention.attention, naive_attention)
    )
    np.testing.assert_allclose(naive, exact, atol=2e-6)


def test_every_product_of_a_naive_program_is_naive():
    """Those of linear layers and of a router have the bits of one dot, and others outside."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((6, 1024)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((1024, 128)), jnp.float32)
    qx, qw = quantize(x, (1, 128)), quantize(w, (128, 128))

    def run():
        return jax.jit(router_logits)(x, w), jax.jit(scaled_matmul)(qx, qw)

    exact = run()
    jax.clear_caches()
    with naively():
        naive = run()
    jax.clear_caches()
    wanted = (
        jax.jit(naive_matmul)(x, w),
        jax.jit(naive_matmul)(qx.qvalue, qw.qvalue, qx.scale, qw.scale),
    )
    for found, other, want in zip(naive, exact, wanted, strict=True):
        np.testing.assert_array_equal(found, want)
        assert (np.asarray(found) != np.asarray(other)).any()


@pytest.mark.slow
def test_exact_programs_do_not_drift_and_naive_ones_do():
    """Float32 shows it at any size. What was replaced stands again afterwards."""
    before = (reference.matmul.block_matmul, exact_jit.compiler_options)
    config = load_config(_TINY, [])
    (row,) = drift_cost(config, ["f32"], repeats=1)
    assert row["exact_drift_max"] == 0.0
    assert 0 < row["naive_drift_max"] < 1e-4
    numbers = {k: v for k, v in row.items() if k.endswith("_s")}
    assert len(numbers) == 4 and row["decode_ratio"] > 0 and row["train_ratio"] > 0
    text = format_cost_table([row])
    assert "0 exactly" in text and "f32" in text
    assert (reference.matmul.block_matmul, exact_jit.compiler_options) == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--repeats=0"], "--repeats is 0"),
        (["--recipes=fp9"], "unknown recipe 'fp9'"),
        (["fast"], "'fast' is not understood"),
    ],
)
def test_bad_input_is_one_sentence(arguments, said, capsys):
    assert benchmarks.run(["drift-cost", "--config", _TINY, *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
