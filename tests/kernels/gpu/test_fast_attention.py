"""Fast attention and the gradients of attention in Triton's interpreter, against float64 and jnp.

Errors are relative, of a whole array (a ratio of norms), with a bound on either side: below the
lower one the oracle would share the kernel's roundings.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow

pytest.importorskip("triton", reason="needs Triton: pip install 'fp8rl_jax[dev]'")

from fp8rl_jax.kernels.gpu import attention as strict_attention
from fp8rl_jax.kernels.gpu import attention_gradient
from fp8rl_jax.kernels.gpu import fast_attention as fast
from fp8rl_jax.kernels.reference import attention as reference
from fp8rl_jax.kernels.reference.attention_gradient import attention_vjp_by_blocks
from fp8rl_jax.kernels.reference.probe import cpu_way

E4M3 = jnp.float8_e4m3fn
KINDS = ("float32", "bf16", "fp8", "fp8 one scale", "fp8 queries")
# Queries, heads of them, heads of keys, features: groups of 1, 4 and 8, ragged all.
SHAPES = ((70, 8, 2, 24), (33, 8, 1, 96), (150, 2, 2, 64), (20, 4, 1, 128))
# float32: sums of that type. Others: weights and ds rounded to bf16 for their products, 2**-9 of
# each at most and a half of that on average; scales, which are not powers of two, change nothing.
BOUNDS = {"float32": (3e-8, 1e-6), "others": (5e-4, 4e-3)}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch, interpreter):
    calls = []

    def triton_call(kernel, *arrays, **keywords):
        calls.append(kernel.fn.__name__)
        return interpreter.triton_call(kernel, *arrays, **keywords)

    for module in (fast, strict_attention):
        monkeypatch.setattr(module, "triton_call", triton_call)
    return calls


def _case(kind, queries, heads, kv_heads, dim, v_dim=None, slots=None, batch=1):
    """(q, k, v), scales by name, and a cotangent, which a bf16 recipe's is: exact in bf16."""
    rng = np.random.default_rng(0)
    slots, v_dim = slots or queries, v_dim or dim
    shapes = (
        (batch, queries, heads, dim),
        (batch, slots, kv_heads, dim),
        (batch, slots, kv_heads, v_dim),
        (batch, queries, heads, v_dim),
    )
    q, k, v, cotangent = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes)
    if kind == "float32":
        return (q, k, v), {}, cotangent
    q, cotangent = q.astype(jnp.bfloat16), cotangent.astype(jnp.bfloat16).astype(jnp.float32)
    if kind == "bf16":
        return (q, k.astype(jnp.bfloat16), v.astype(jnp.bfloat16)), {}, cotangent

    def scales(x):
        return jnp.asarray(rng.random(() if kind == "fp8 one scale" else x.shape[:3]) + 0.5, "f4")

    named = {"k_scale": scales(k), "v_scale": scales(v)}
    if kind == "fp8 queries":
        named["q_scale"], q = scales(q), q.astype(E4M3)
    return (q, k.astype(E4M3), v.astype(E4M3)), named, cotangent


def _forward(*arrays, **named):
    return fast.forward(fast.prepare(*arrays, **named))


def _positions(batch, length):
    return jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))


def _dequantized(operands, scales):
    return [
        attention_gradient.dequantized(x, scales.get(f"{name}_scale"))
        for name, x in zip("qkv", operands, strict=True)
    ]


def _float64(operands, scales, positions, cotangent, scale, seen=True):
    """Output, dq, dk, dv; queries of negative position see nothing. `seen` (T, S) is a further
    condition."""
    q, k, v = (np.asarray(x, np.float64) for x in _dequantized(operands, scales))
    cotangent, group = np.asarray(cotangent, np.float64), q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, group, 2) for x in (k, v))
    score = np.einsum("bthd,bshd->bhts", q, k) * scale
    seen = seen & (np.arange(k.shape[1]) <= np.asarray(positions)[:, None, :, None])
    weight = np.exp(np.where(seen, score, -np.inf) - score.max(-1, keepdims=True))
    weight /= np.maximum(weight.sum(-1, keepdims=True), 1e-300)
    dweight = np.einsum("bthd,bshd->bhts", cotangent, v)
    dscore = weight * (dweight - (weight * dweight).sum(-1, keepdims=True)) * scale

    def of_kv_heads(x):
        return x.reshape(*x.shape[:2], -1, group, x.shape[3]).sum(3)

    return (
        np.einsum("bhts,bshd->bthd", weight, v),
        np.einsum("bhts,bshd->bthd", dscore, k),
        of_kv_heads(np.einsum("bhts,bthd->bshd", dscore, q)),
        of_kv_heads(np.einsum("bhts,bthd->bshd", weight, cotangent)),
    )


def _error(got, want) -> float:
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    assert got.shape == want.shape
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def _assert_close(kind, got, want):
    least, most = BOUNDS["float32" if kind == "float32" else "others"]
    for name, one, other in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        assert one.dtype == jnp.float32
        assert least < _error(one, other) < most, (name, _error(one, other))


# Every kind at one shape, two kinds at every other.
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("fp8", SHAPES[0]),
        *(slow(kind, SHAPES[0]) for kind in ("float32", "bf16", *KINDS[3:])),
        *(slow(kind, SHAPES[1]) for kind in ("float32", "fp8")),
        *(slow(kind, SHAPES[2]) for kind in ("bf16", "fp8 queries")),
        *(slow(kind, SHAPES[3]) for kind in ("float32", "fp8 one scale")),
    ],
)
def test_equals_float64(kind, shape):
    operands, scales, cotangent = _case(kind, *shape)
    positions, scale = _positions(1, shape[0]), shape[3] ** -0.5
    out, _ = _forward(*operands, positions, scale=scale, **scales)
    grads = attention_gradient.attention_vjp(*operands, positions, cotangent, scale=scale, **scales)
    want = _float64(operands, scales, positions, cotangent, scale)
    _assert_close(kind, (out, *grads), want)
    # The jnp forms, whose products are float32 on a CPU, are nearer to float64 than bf16 is.
    plain = reference.attention(*operands, positions, way=cpu_way(), scale=scale, **scales)
    whole = _dequantized(operands, scales)
    blocks = attention_vjp_by_blocks(*whole, positions, cotangent, scale=scale)
    for ours, theirs, exact in zip((out, *grads), (plain, *blocks), want, strict=True):
        assert _error(theirs, exact) < 1e-6
        assert _error(ours, theirs) < BOUNDS["others"][1]


def test_logsumexp():
    operands, _, _ = _case("float32", 20, 2, 1, 16)
    _, got = _forward(*operands, _positions(1, 20), scale=0.25)
    q, k, _ = (np.asarray(x, np.float64) for x in operands)
    score = np.einsum("bthd,bshd->bths", q, np.repeat(k, 2, 2)) * 0.25
    weight = np.exp(score) * (np.arange(20) <= np.arange(20)[:, None])[None, :, None]
    np.testing.assert_allclose(np.asarray(got), np.log2(weight.sum(-1)), rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", [slow("float32"), "fp8"])
def test_positions_in_any_order(kind):
    """Two sequences, one in descending order with queries that see nothing, one a prefill's later
    part; values of another width, more slots than queries, some of which nobody sees."""
    operands, scales, cotangent = _case(kind, 90, 4, 2, 32, v_dim=16, slots=200, batch=2)
    positions = jnp.stack([jnp.arange(150, 60, -1), jnp.arange(100, 190)]).astype(jnp.int32)
    positions = positions.at[0, 40:45].set(-1).at[0, 0].set(199)
    out, _ = _forward(*operands, positions, scale=0.2, **scales)
    unseeing = np.asarray(positions) < 0
    np.testing.assert_array_equal(np.isnan(np.asarray(out)).all((2, 3)), unseeing)
    grads = attention_gradient.attention_vjp(*operands, positions, cotangent, scale=0.2, **scales)
    assert not np.asarray(grads[0])[unseeing].any()
    out = jnp.where(unseeing[..., None, None], 0.0, out)
    _assert_close(kind, (out, *grads), _float64(operands, scales, positions, cotangent, 0.2))
    assert not np.asarray(grads[1])[1, 190:].any() and not np.asarray(grads[2])[1, 190:].any()


_GAPS = (170, 30, 200, 60), 96  # lengths of sequences in a row, slots that two of them share


@pytest.mark.parametrize(
    ("kind", "window", "lengths", "share"),
    [
        ("float32", 40, (70, 10, 60, 20), 34),
        *(slow(*case, *_GAPS) for case in (("float32", 0), ("fp8", 0), ("float32", 70))),
        slow("fp8", 40, *_GAPS),
    ],
)
def test_gaps(kind, window, lengths, share):
    """Four sequences in a row, of which the second and the last see the start of the first: tiles
    of one sequence, whose gaps hold blocks of keys, and tiles of several; also with a window."""
    count = sum(lengths)
    operands, scales, cotangent = _case(kind, count, 2, 1, 32)
    starts = np.repeat(np.cumsum((0, *lengths[:-1])), lengths)
    shared = np.repeat([0, share, 0, share], lengths)
    begins = np.where(shared, 0, starts)
    ends = begins + shared
    slot = np.arange(count)
    if window:
        least = shared + slot - starts - window + 1  # a position within the sequence
        own = starts + least - shared
        begins = np.where(least < shared, begins + np.maximum(least, 0), own)
    seen = (slot >= begins[:, None]) & ((slot < ends[:, None]) | (slot >= starts[:, None]))
    bounds = {
        "oldest": jnp.asarray(begins[None], jnp.int32),
        "gap": jnp.asarray(np.stack([ends, starts], 1)[None], jnp.int32),
    }
    arrays, named = (*operands, _positions(1, count)), scales | bounds
    out, _ = _forward(*arrays, scale=0.2, **named)
    grads = attention_gradient.attention_vjp(*arrays, cotangent, scale=0.2, **named)
    want = _float64(operands, scales, arrays[3], cotangent, 0.2, seen)
    _assert_close(kind, (out, *grads), want)


def test_what_lies_behind_every_query_is_not_read():
    """A longer cache of garbage, as prefill has it."""
    (q, k, v), _, _ = _case("bf16", 40, 4, 1, 32, slots=300)
    k, v = (x.at[:, 40:].set(jnp.nan) for x in (k, v))
    got, _ = _forward(q, k, v, _positions(1, 40), scale=0.2)
    want, _ = _forward(q, k[:, :40], v[:, :40], _positions(1, 40), scale=0.2)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_large_scores():
    (q, k, v), _, cotangent = _case("bf16", 150, 2, 1, 64)
    k = k.at[:, 130:].multiply(40.0)
    operands, positions = (q, k, v), _positions(1, 150)
    grads = attention_gradient.attention_vjp(*operands, positions, cotangent, scale=0.5)
    _, *want = _float64(operands, {}, positions, cotangent, 0.5)
    for got, exact in zip(grads, want, strict=True):
        assert _error(got, exact) < 1e-2


@pytest.mark.slow
def test_heads_that_are_too_wide_for_the_kernels(interpreted):
    operands, scales, cotangent = _case("fp8", 9, 2, 1, 320, v_dim=272)
    positions = _positions(1, 9)
    grads = attention_gradient.attention_vjp(*operands, positions, cotangent, scale=0.1, **scales)
    assert not interpreted
    want = _float64(operands, scales, positions, cotangent, 0.1)[1:]
    assert max(map(_error, grads, want)) < 1e-6


def test_arguments_are_checked():
    (q, k, v), _, _ = _case("bf16", 8, 4, 2, 16)
    positions = _positions(1, 8)
    with pytest.raises(ValueError, match="do not fit keys"):
        fast.prepare(q[:, :, :3], k, v, positions, scale=1.0)
    with pytest.raises(ValueError, match="do not fit keys"):
        fast.prepare(q, k, v[:, :7], positions, scale=1.0)
    with pytest.raises(ValueError, match="do not fit queries"):
        fast.prepare(q, k, v, positions[:, :7], scale=1.0)
