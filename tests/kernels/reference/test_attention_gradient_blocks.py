"""Gradients of attention in jnp, in blocks: against the reference, and their memory."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow

from fp8rl_jax.kernels import dispatch
from fp8rl_jax.kernels.reference import attention_gradient
from fp8rl_jax.kernels.reference.attention_gradient import attention_vjp_by_blocks
from fp8rl_jax.kernels.reference.probe import cpu_way


def attention_vjp(*arrays, **settings):
    return attention_gradient.attention_vjp(*arrays, way=cpu_way(), **settings)


def _positions(batch, length):
    return jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))


@pytest.mark.parametrize(
    ("queries", "slots", "heads", "kv_heads", "dims", "window", "gap"),
    [
        slow(37, 37, 4, 2, (32, 32), 0, 0),
        slow(600, 700, 4, 2, (32, 16), 70, 0),
        (100, 150, 4, 1, (32, 16), 0, 0),
        slow(600, 700, 4, 1, (32, 16), 0, 0),
        slow(1100, 1100, 2, 2, (16, 16), 600, 0),
        slow(1400, 1400, 2, 2, (16, 16), 1400, 620),
        (330, 400, 4, 2, (16, 32), 330, 150),
    ],
)
def test_gradients_equal_the_references(queries, slots, heads, kv_heads, dims, window, gap):
    """Also those of sinks; blocks before a window and within all gaps are skipped."""
    rng = np.random.default_rng(0)
    shapes = (
        (2, queries, heads, dims[0]),
        (2, slots, kv_heads, dims[0]),
        (2, slots, kv_heads, dims[1]),
        (2, queries, heads, dims[1]),
    )
    q, k, v, cotangent = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes)
    positions = _positions(2, queries) + jnp.asarray([[0], [slots - queries]], jnp.int32)
    more: dict = {}
    if window:
        sinks = jnp.asarray(rng.standard_normal(heads) + 3, jnp.float32)
        more = {"oldest": positions - window + 1, "sinks": sinks}
    if gap:  # every query leaves slots out, up to whole blocks
        leave = jnp.clip(positions - gap, 0, None) // 2
        more["gap"] = jnp.stack([leave, leave + gap], 2)

    def both(*x, **more):
        runs = (attention_vjp_by_blocks, attention_vjp)
        return tuple(run(*x, scale=dims[0] ** -0.5, **more) for run in runs)

    got, want = jax.jit(both)(q, k, v, positions, cotangent, **more)
    assert len(got) == (4 if window else 3)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == jnp.float32
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=1e-5)


def test_long_sequences_take_them(monkeypatch):
    """By the dispatch, with windows and sinks; not where gradients are exact, too."""
    monkeypatch.setattr(dispatch, "_LONG", 8)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 20, n, 16)), jnp.float32) for n in (4, 2, 2))
    more = {"oldest": _positions(2, 20) - 4, "sinks": jnp.asarray([0.1, 2, -1, 3], jnp.float32)}
    arrays = q, k, v, _positions(2, 20), q
    unit = dispatch.reference.attention_gradient
    want = jax.jit(functools.partial(attention_vjp, scale=0.3))(*arrays, **more)
    for way, name in (("reference", "attention_vjp_by_blocks"), ("exact", "attention_vjp")):
        run = functools.partial(dispatch.attention_vjp, scale=0.3, implementation=way)
        with mock.patch.object(unit, name, wraps=getattr(unit, name)) as seen:
            got = jax.jit(run)(*arrays, **more)
        assert seen.called
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=1e-5)


def _temporary_bytes(function, length):
    heads = jax.ShapeDtypeStruct((1, length, 8, 64), jnp.float32)
    kv = jax.ShapeDtypeStruct((1, length, 2, 64), jnp.float32)
    positions = jax.ShapeDtypeStruct((1, length), jnp.int32)
    compiled = jax.jit(lambda *x: function(*x, scale=0.1)).lower(heads, kv, kv, positions, heads)
    return compiled.compile().memory_analysis().temp_size_in_bytes


def test_gradients_hold_no_matrix_of_scores():
    matrix = 4 * 8 * 4096**2
    blocks = _temporary_bytes(attention_vjp_by_blocks, 4096)
    assert _temporary_bytes(attention_vjp, 4096) > matrix
    assert blocks < matrix / 10
    assert _temporary_bytes(attention_vjp_by_blocks, 8192) < 2.5 * blocks


@pytest.mark.slow
def test_gradients_under_shard_map():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((1, 40, n, 16)), jnp.float32) for n in (4, 2, 2))
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    positions = _positions(1, 40)
    run = jax.shard_map(
        lambda *x: attention_vjp_by_blocks(*x, scale=0.3), mesh=mesh, in_specs=spec, out_specs=spec
    )
    for a, b in zip(
        jax.jit(run)(q, k, v, positions, q),
        attention_vjp(q, k, v, positions, q, scale=0.3),
        strict=True,
    ):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=1e-5)
