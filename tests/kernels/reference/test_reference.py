"""Canonical matmul and attention: right, and independent of everything that must not matter."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import quick_if, slow

from fp8rl_jax import kernels
from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.kernels.reference import attention as reference
from fp8rl_jax.kernels.reference import matmul
from fp8rl_jax.kernels.reference.probe import cpu_way
from fp8rl_jax.quant import get_recipe, quantize_kv


def _same_bits(a, b):
    np.testing.assert_array_equal(np.asarray(a).view(np.int32), np.asarray(b).view(np.int32))


def test_repeat_last():
    """As numpy repeats, whatever stands beside: what is not finite stays where it is."""
    x = np.float32([[[1.5, np.nan, 3e38]], [[np.inf, 0.1, 2**-126]]])
    found = np.asarray(exact_jit(matmul.repeat_last, static_argnums=1)(x, 5))
    np.testing.assert_array_equal(found, np.repeat(x, 5, axis=-1))


@pytest.mark.parametrize("k", [64, 300, 2304, *map(slow, (128, 1024))])
@pytest.mark.parametrize("scaled", [False, True])
def test_matmul_against_float64(k, scaled):
    rng = np.random.default_rng(k)
    blocks, n = -(-k // 128), 200
    x = rng.standard_normal((33, k)).astype(np.float32)
    w = rng.standard_normal((k, n)).astype(np.float32)
    sx = (rng.random((33, blocks)) + 0.5).astype(np.float32) if scaled else None
    sw = (rng.random((blocks, 2)) + 0.5).astype(np.float32) if scaled else None
    y = exact_jit(kernels.block_matmul)(x, w, sx, sw)
    x64, w64 = x.astype(np.float64), w.astype(np.float64)
    if scaled:
        x64 = x64 * np.repeat(sx, 128, 1)[:, :k]
        w64 = w64 * np.repeat(np.repeat(sw, 128, 0)[:k], 128, 1)[:, :n]
    np.testing.assert_allclose(y, x64 @ w64, rtol=0, atol=2e-5 * np.sqrt(k))


@pytest.mark.parametrize("k", [slow(300), 2304])
def test_matmul_rows_are_independent(k):
    """Row 0 has the same bits among 1, 3, 8, 100 and 1000 rows."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1000, k)).astype(np.float32)
    w = rng.standard_normal((k, 259)).astype(np.float32)
    f = exact_jit(kernels.block_matmul)
    whole = np.asarray(f(x, w))
    for rows in (1, 3, 8, 100):
        _same_bits(f(x[:rows], w), whole[:rows])


def test_matmul_loop_equals_unrolled(monkeypatch):
    """The form of the loop over K is a matter of compile time, not of bits."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((40, 1024)).astype(np.float32)
    w = rng.standard_normal((1024, 256)).astype(np.float32)
    unrolled = exact_jit(lambda x, w: kernels.block_matmul(x, w))(x, w)
    monkeypatch.setattr(matmul, "_UNROLL_K", 1)
    looped = exact_jit(lambda x, w: kernels.block_matmul(x, w))(x, w)
    _same_bits(unrolled, looped)


def _qkv(batch=2, t=70, heads=4, kv_heads=2, dim=32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((batch, t, heads, dim), (batch, t, kv_heads, dim), (batch, t, kv_heads, dim))
    return tuple(rng.standard_normal(s).astype(np.float32) for s in shapes)


def _naive(q, k, v):
    """Plain loops in float64."""
    out = np.zeros(q.shape)
    group = q.shape[2] // k.shape[2]
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            for h in range(q.shape[2]):
                keys, values = k[b, : t + 1, h // group], v[b, : t + 1, h // group]
                s = keys.astype(np.float64) @ q[b, t, h] / np.sqrt(q.shape[3])
                p = np.exp(s - s.max())
                out[b, t, h] = (p / p.sum()) @ values
    return out


def _positions(batch, t):
    return np.broadcast_to(np.arange(t, dtype=np.int32), (batch, t))


_run = exact_jit(
    lambda q, k, v, p, ks=None, vs=None: kernels.attention(
        q, k, v, p, scale=q.shape[-1] ** -0.5, k_scale=ks, v_scale=vs
    )
)


@pytest.mark.parametrize("t,kv_heads", [(5, 4), (70, 2), (140, 1)])
def test_attention_against_loops(t, kv_heads):
    q, k, v = _qkv(t=t, kv_heads=kv_heads)
    np.testing.assert_allclose(_run(q, k, v, _positions(2, t)), _naive(q, k, v), atol=2e-6)


@pytest.mark.parametrize(
    ("recipe", "length"),
    quick_if(
        lambda case: case in (("fp8", 129), ("fp8", 65), ("f32", 97)),
        itertools.product(("fp8", "f32"), (1, 64, 65, 96, 97, 128, 129, 300)),
    ),
)
def test_one_query_equals_all_queries(length, recipe):
    """Decode (one query over a long cache) == prefill (all queries), FP8 cache included."""
    q, k, v = _qkv(t=length, dim=64)
    recipe = get_recipe(recipe)
    (k, ks), (v, vs) = exact_jit(lambda *kv: [quantize_kv(x, recipe, "k") for x in kv])(k, v)
    whole = np.asarray(_run(q, k, v, _positions(2, length), ks, vs))

    def longer(x):  # a cache with other tokens' leftovers behind the length
        x = None if x is None else np.asarray(x)
        return None if x is None else np.concatenate([x, x, x[:, :5]], axis=1)

    last = np.full((2, 1), length - 1, np.int32)
    one = _run(q[:, -1:], *(longer(x) for x in (k, v)), last, *(longer(x) for x in (ks, vs)))
    _same_bits(one[:, 0], whole[:, -1])


@pytest.mark.parametrize("form", ["plain", slow("quantised"), slow("latent"), slow("pages")])
def test_blocks_of_queries_change_no_bits(form):
    """Of many queries each block stops at its own last position; a window skips what is before."""
    length, rng = 530, np.random.default_rng(3)
    q, k, v = _qkv(2, length, 4, 2, 32)
    positions, more = _positions(2, length) + jnp.asarray([[0], [7]], jnp.int32), {}
    k, v = (jnp.pad(x, ((0, 0), (0, 80), (0, 0), (0, 0))) for x in (k, v))
    if form == "plain":
        more = {"window": jnp.int32(90), "sinks": jnp.asarray([0.3, -1, 2, 0], jnp.float32)}
    if form == "quantised":
        recipe = dataclasses.replace(get_recipe("fp8_blockwise"), fp8_attention=True)
        (q, q_scale), (k, k_scale), (v, v_scale) = (
            quantize_kv(x, recipe, name) for name, x in (("q", q), ("k", k), ("v", v))
        )
        more = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    if form == "latent":
        shapes = {"q_rope": (2, length, 4, 16), "k_rope": (2, length + 80, 2, 16)}
        more = {n: jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for n, s in shapes.items()}
    if form == "pages":
        pad = ((0, 0), (0, -(length + 80) % 64), (0, 0), (0, 0))
        k, v = (jnp.pad(x, pad).reshape(-1, 64, 2, 32) for x in (k, v))
        more = {"table": jnp.arange(len(k), dtype=jnp.int32).reshape(2, -1)}

    def run(q, k, v, positions, more, **own):
        return reference.attention(q, k, v, positions, scale=0.2, way=cpu_way(), **more, **own)

    whole = np.asarray(exact_jit(run)(q, k, v, positions, more))
    by_query = ("q_scale", "q_rope")
    for first in (0, 100, 250, 400, 529):
        own = np.s_[:, first : first + 100]
        part = {n: x[own] if n in by_query else x for n, x in more.items()}
        _same_bits(exact_jit(run)(q[own], k, v, positions[own], part), whole[own])


def test_loop_over_keys_equals_unrolled(monkeypatch):
    q, k, v = _qkv(t=250)
    unlimited = _positions(2, 250)
    monkeypatch.setattr(reference, "_UNROLL_KV", 100)
    unrolled = exact_jit(lambda *a: kernels.attention(*a, scale=0.2))(q, k, v, unlimited)
    monkeypatch.setattr(reference, "_UNROLL_KV", 1)
    looped = exact_jit(lambda *a: kernels.attention(*a, scale=0.2))(q, k, v, unlimited)
    _same_bits(unrolled, looped)


def test_folded_scales_equal_dequantised_values():
    q, k, v = _qkv(t=40)
    recipe = get_recipe("fp8")
    (kq, ks), (vq, vs) = exact_jit(lambda *kv: [quantize_kv(x, recipe, "k") for x in kv])(k, v)
    folded = _run(q, kq, vq, _positions(2, 40), ks, vs)
    plain = _naive(
        q,
        np.asarray(kq, np.float32) * np.asarray(ks)[..., None],
        np.asarray(vq, np.float32) * np.asarray(vs)[..., None],
    )
    np.testing.assert_allclose(folded, plain, atol=2e-6)
    assert np.abs(plain - _naive(q, k, v)).max() > 1e-3, "FP8 keys and values have an error"


def test_attention_gradient():
    """attention_vjp against JAX's derivative of a plain softmax attention."""
    q, k, v = _qkv(t=37)
    positions = _positions(2, 37)
    cotangent = np.random.default_rng(9).standard_normal(q.shape).astype(np.float32)

    def plain(q, k, v):
        k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
        s = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
        s = jnp.where(np.tril(np.ones((37, 37), bool)), s, -jnp.inf)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s, -1), v)

    scale = q.shape[-1] ** -0.5
    ours = exact_jit(lambda *a: kernels.attention_vjp(*a, scale=scale))
    theirs = jax.jit(lambda q, k, v, cotangent: jax.vjp(plain, q, k, v)[1](cotangent))
    gradients = ours(q, k, v, positions, cotangent), theirs(q, k, v, cotangent)
    for a, b in zip(*gradients, strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5)


def test_shapes_are_checked():
    with pytest.raises(ValueError, match=r"takes \(M, K\) and \(K, N\)"):
        kernels.block_matmul(jnp.ones((2, 3)), jnp.ones((4, 5)))


@pytest.mark.slow
@pytest.mark.parametrize("recipe_name", ["bf16", "fp8"])
def test_keys_by_feature(recipe_name):
    """The same bits from a cache whose keys lie feature by feature, in rows and in pages."""
    rng, recipe = np.random.default_rng(0), get_recipe(recipe_name)
    q, k, v = (
        jnp.asarray(rng.standard_normal((2, length, heads, 48)), jnp.bfloat16)
        for length, heads in ((3, 4), (384, 2), (384, 2))
    )
    (k, k_scale), (v, v_scale) = (quantize_kv(x, recipe, "k") for x in (k, v))
    positions, turned = jnp.int32([[0, 63, 64], [5, 200, 383]]), jnp.moveaxis(k, 1, 3)
    named = {"scale": 0.2, "way": cpu_way(), "k_scale": k_scale, "v_scale": v_scale}

    def attend(k, v, **more):
        return exact_jit(lambda q, k, v: reference.attention(q, k, v, positions, **named | more))(
            q, k, v
        )

    want = attend(k, v)
    _same_bits(attend(turned, v, keys_by_feature=True), want)
    pages = {"table": jnp.arange(12, dtype=jnp.int32).reshape(2, 6)}
    v = v.reshape(12, 64, 2, 48)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        pages[name] = None if scale is None else scale.reshape(12, 64, 2)
    _same_bits(attend(k.reshape(12, 64, 2, 48), v, **pages), want)
    turned = jnp.moveaxis(k.reshape(12, 64, 2, 48), 1, 3)
    _same_bits(attend(turned, v, keys_by_feature=True, **pages), want)


@pytest.mark.slow
def test_wide_values():
    """More features than one product of float32 keeps in order: few queries and many."""
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.standard_normal((1, 140, 2, width)), jnp.bfloat16)
        for width in (64, 64, 576)
    )
    positions = jnp.arange(140, dtype=jnp.int32)[None]
    attend = exact_jit(
        lambda q, positions: reference.attention(q, k, v, positions, scale=0.2, way=cpu_way())
    )
    whole = attend(q, positions)
    for one in (3, 70, 139):
        _same_bits(attend(q[:, one : one + 1], positions[:, one : one + 1])[:, 0], whole[:, one])
