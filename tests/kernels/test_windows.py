"""Sliding windows and sinks of attention, in jnp and in Triton's interpreter.

The oracle loops in float64 over queries and over the keys that each one sees.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow

from fp8rl_jax import kernels
from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.kernels.reference import attention as reference
from fp8rl_jax.kernels.reference.probe import cpu_way

HEADS, KV_HEADS, DIM, SCALE = 4, 2, 32, 0.3
_ALL = 2**30  # a window that hides nothing
_CASES = {"window": (5, False), "sinks": (0, True), "both": (70, True)}
_LENGTH = 150
_QUICK = ["both", slow("window"), slow("sinks")]


def _operands(length=_LENGTH, kind="float32", batch=2):
    rng = np.random.default_rng(0)
    shapes = ((batch, length, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    q, k, v = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    sinks = jnp.asarray(rng.standard_normal(HEADS) + 1, jnp.float32)
    if kind == "float32":
        return (q, k, v), {}, sinks
    unit = 32 if kind == "int8" else 1
    dtype = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn, "bf16": jnp.bfloat16}[kind]
    k, v = (jnp.clip(x * unit, -127, 127).astype(dtype) for x in (k, v))
    scales = {}
    if kind != "bf16":
        for name in ("k_scale", "v_scale"):
            scales[name] = jnp.asarray(rng.random(k.shape[:3]) + 0.5, jnp.float32) / unit
    return (q.astype(jnp.bfloat16), k, v), scales, sinks


def _positions(batch, length, start=0):
    return jnp.broadcast_to(start + jnp.arange(length, dtype=jnp.int32), (batch, length))


def _settings(window, sinks):
    found = {"window": jnp.int32(window)} if window else {}
    return found | ({} if sinks is None else {"sinks": sinks})


def _slots(window, sinks):
    """As `_settings`, of the functions of gradients."""
    found = {"oldest": _positions(2, _LENGTH) - window + 1} if window else {}
    return found | ({} if sinks is None else {"sinks": sinks})


def _oracle(operands, scales, window, sinks):
    """The result in float64, query by query."""
    q, k, v = (np.asarray(x, np.float64) for x in operands)
    k, v = (
        x * np.asarray(scales.get(f"{n}_scale", 1.0))[..., None] for n, x in (("k", k), ("v", v))
    )
    out = np.zeros_like(q)
    for b, t, h in np.ndindex(q.shape[:3]):
        seen = slice(max(0, t - window + 1) if window else 0, t + 1)
        kv_head = h // (HEADS // KV_HEADS)
        weight = np.exp(k[b, seen, kv_head] @ q[b, t, h] * SCALE)
        total = weight.sum() + (0 if sinks is None else np.exp(float(sinks[h])))
        out[b, t, h] = weight @ v[b, seen, kv_head] / total
    return out


def _case(name):
    window, sunk = _CASES[name]
    operands, scales, sinks = _operands()
    return operands, scales, window, sinks if sunk else None


@pytest.mark.parametrize("name", _QUICK)
def test_jnp_equals_the_oracle(name):
    operands, scales, window, sinks = _case(name)
    run = functools.partial(kernels.attention, scale=SCALE, **_settings(window, sinks))
    got = run(*operands, _positions(2, _LENGTH), implementation="reference")
    want = _oracle(operands, scales, window, sinks)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)
    assert np.abs(np.asarray(got) - _oracle(operands, scales, 0, None)).max() > 0.1


@pytest.mark.parametrize("kind", ["int8", slow("float32")])
@pytest.mark.parametrize("name", _QUICK)
def test_decode_equals_learner(name, kind):
    """One query over a longer cache whose other slots hold garbage, at every border."""
    window, sunk = _CASES[name]
    operands, scales, sinks = _operands(400, kind, 1)
    more = _settings(window, sinks if sunk else None)
    run = exact_jit(functools.partial(reference.attention, scale=SCALE, way=cpu_way()))
    whole = run(*operands, _positions(1, 400), **scales, **more)
    q, *cached = operands
    for position in (0, 4, 5, 63, 64, 69, 70, 133, 134, 255, 256, 399):
        hidden = np.arange(470) > position
        k, v = (jnp.pad(x, ((0, 0), (0, 70), (0, 0), (0, 0))) for x in cached)
        k, v = (jnp.where(hidden[:, None, None], jnp.asarray(77, x.dtype), x) for x in (k, v))
        padded = {n: jnp.pad(x, ((0, 0), (0, 70), (0, 0))) for n, x in scales.items()}
        at = jnp.full((1, 1), position, jnp.int32)
        one = run(q[:, position : position + 1], k, v, at, **padded, **more)
        np.testing.assert_array_equal(
            np.asarray(one[:, 0]).view(np.int32), np.asarray(whole[:, position]).view(np.int32)
        )


@pytest.mark.parametrize("name", _QUICK)
def test_gradients(name):
    """Against autodiff of the plain formula, sinks included; and no window is a window of all."""
    operands, _, window, sinks = _case(name)
    more = _slots(window or _ALL, sinks)
    slot = jnp.arange(_LENGTH)
    seen = (slot <= slot[:, None]) & (slot > slot[:, None] - (window or _ALL))

    def plain(q, k, v, sinks):
        k, v = (jnp.repeat(x, HEADS // KV_HEADS, 2) for x in (k, v))
        score = jnp.where(seen, jnp.einsum("bthd,bshd->bhts", q, k) * SCALE, -jnp.inf)
        if sinks is not None:
            sink = jnp.broadcast_to(sinks[:, None, None], (*score.shape[:3], 1))
            score = jnp.concatenate([score, sink], -1)
        weight = jax.nn.softmax(score, -1)[..., :_LENGTH]
        return jnp.einsum("bhts,bshd->bthd", weight, v)

    out, vjp = jax.vjp(plain, *operands, sinks)
    cotangent = jnp.asarray(np.random.default_rng(1).standard_normal(out.shape), jnp.float32)
    given = (*operands, _positions(2, _LENGTH), cotangent)
    got = kernels.attention_vjp(*given, scale=SCALE, implementation="reference", **more)
    want = [x for x in vjp(cotangent) if x is not None]
    assert len(got) == len(want) == (3 if sinks is None else 4)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())


@pytest.fixture
def on_gpu(monkeypatch, interpreter):
    pytest.importorskip("triton", reason="needs Triton: pip install 'fp8rl_jax[dev]'")
    from fp8rl_jax.kernels import gpu

    for module in (gpu.attention, gpu.fast_attention):
        monkeypatch.setattr(module, "triton_call", interpreter.triton_call)
    return gpu


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("both", "int8"),
        slow("both", "float32"),
        slow("both", "fp8"),
        slow("window", "float32"),
        slow("sinks", "bf16"),
    ],
)
def test_kernels(name, kind, on_gpu):
    """Strict attention: near the oracle; its two forms and a decode step give the same bits."""
    window, sunk = _CASES[name]
    length = 700  # two splits
    operands, scales, sinks = _operands(length, kind, 1)
    sinks = sinks if sunk else None
    run = functools.partial(
        on_gpu.attention.attention, scale=SCALE, **scales, **_settings(window, sinks)
    )
    positions = _positions(1, length)
    few = slice(520, 600)  # queries that see both splits, and such as see one
    q, *cached = operands
    whole = run(q[:, few], *cached, positions[:, few], one_split=False)
    want = _oracle(operands, scales, window, sinks)[:, few]
    assert np.abs(np.asarray(whole) - want).max() < (2e-5 if kind == "float32" else 0.02)
    for position in (520, 580, 599):
        at = slice(position, position + 1)
        one = run(q[:, at], *cached, positions[:, at], one_split=True)
        np.testing.assert_array_equal(
            np.asarray(one[:, 0]).view(np.int32),
            np.asarray(whole[:, position - 520]).view(np.int32),
        )


@pytest.mark.parametrize("name", _QUICK)
def test_gradient_kernels(name, on_gpu):
    operands, _, window, sinks = _case(name)
    more = _slots(window, sinks)
    cotangent = jnp.asarray(np.random.default_rng(1).standard_normal(operands[0].shape), "f4")
    given = (*operands, _positions(2, _LENGTH), cotangent)
    got = on_gpu.attention_gradient.attention_vjp(*given, scale=SCALE, **more)
    want = kernels.attention_vjp(*given, scale=SCALE, implementation="reference", **more)
    for ours, theirs in zip(got, want, strict=True):
        assert np.linalg.norm(ours - theirs) < 1e-5 * np.linalg.norm(theirs)
