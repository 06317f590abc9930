"""Strict attention in Triton's interpreter: against float64, and decode against the learner.

The interpreter adds a product's terms one after another in float32, whatever the row, so equality
here is about masks, blocks, splits, tiles and rescaling. test_sass.py compares the layouts that
decide the order of sums on a GPU.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="needs Triton: pip install 'fp8rl_jax[dev]'")


from fp8rl_jax.kernels import KV_CHUNK
from fp8rl_jax.kernels.gpu import attention as strict
from fp8rl_jax.kernels.gpu import attention_operands
from fp8rl_jax.kernels.reference import attention as reference
from fp8rl_jax.kernels.reference.probe import cpu_way
from fp8rl_jax.quant import quantize

E4M3 = jnp.float8_e4m3fn
LENGTHS = (1, 63, 64, 65, 96, 97, 127, 128, 129, 511, 512, 513, 1025)
PAGE = KV_CHUNK
_SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
KINDS = ("float32", "bf16", "fp8", "fp8 one scale", "fp8 queries")
# Of keys and values in other formats, or in two.
DTYPES = {
    "int8": (jnp.int8, jnp.int8),
    "int8 and fp8": (jnp.int8, E4M3),
    "bf16 and fp8": (jnp.bfloat16, E4M3),
    "fp8 and bf16": (E4M3, jnp.bfloat16),
    "int8 and bf16": (jnp.int8, jnp.bfloat16),
}
KINDS += tuple(DTYPES)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch, interpreter):
    calls = []

    def triton_call(kernel, *arrays, **keywords):
        calls.append(kernel.fn.__name__)
        return interpreter.triton_call(kernel, *arrays, **keywords)

    monkeypatch.setattr(strict, "triton_call", triton_call)
    return calls


def _case(kind, length, heads=2, kv_heads=1, dim=16, batch=1, seed=0):
    """q, k, v and the scales by name."""
    rng = np.random.default_rng(seed)
    q, k, v = (
        jnp.asarray(rng.standard_normal((batch, length, n, dim)), jnp.float32)
        for n in (heads, kv_heads, kv_heads)
    )
    if kind == "float32":
        return (q, k, v), {}
    q = q.astype(jnp.bfloat16)
    if kind == "bf16":
        return (q, k.astype(jnp.bfloat16), v.astype(jnp.bfloat16)), {}

    def scales(x):
        shape = () if kind == "fp8 one scale" else x.shape[:3]
        return jnp.asarray(rng.random(shape) + 0.5, jnp.float32)

    named, stored = {"k_scale": scales(k), "v_scale": scales(v)}, []
    if kind == "fp8 queries":
        named["q_scale"], q = scales(q), q.astype(E4M3)
    for name, x, dtype in zip("kv", (k, v), DTYPES.get(kind, (E4M3, E4M3)), strict=True):
        if dtype == jnp.int8:
            x = jnp.clip(jnp.round(32 * x), -127, 127)
            named[f"{name}_scale"] /= 32
        elif dtype == jnp.bfloat16:
            del named[f"{name}_scale"]
        stored.append(x.astype(dtype))
    return (q, *stored), named


def _positions(batch, length):
    return jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))


def _float64(operands, scales, positions, scale):
    """The result, and the sum of its terms' magnitudes."""
    q, k, v = (np.asarray(x, np.float64) for x in operands)
    for name, x in (("q_scale", q), ("k_scale", k), ("v_scale", v)):
        if name in scales:
            x *= np.asarray(scales[name], np.float64)[..., None]
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    score = np.einsum("bthd,bshd->bhts", q, k) * scale
    seen = np.arange(k.shape[1]) <= np.asarray(positions)[:, None, :, None]
    weight = np.where(seen, np.exp(score - np.where(seen, score, -np.inf).max(-1)[..., None]), 0)
    weight /= weight.sum(-1)[..., None]
    return tuple(np.einsum("bhts,bshd->bthd", weight, x) for x in (v, np.abs(v)))


_SHAPE = (70, 4, 2, 24)  # tokens, heads of queries and of keys, features


# Every kind at one shape; every other shape with operands of four bytes, of one, and of both of two
# and one.
@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        (_SHAPE, "float32"),
        (_SHAPE, "int8 and fp8"),
        *(_SLOW(_SHAPE, k) for k in KINDS if k not in ("float32", "int8 and fp8")),
        *(_SLOW((33, 8, 1, 96), kind) for kind in ("float32", "fp8", "int8 and bf16")),
        *(_SLOW((20, 4, 4, 128), kind) for kind in ("float32", "int8", "bf16 and fp8")),
        *(_SLOW((600, 1, 1, 16), kind) for kind in ("float32", "fp8", "fp8 and bf16")),
    ],
)
def test_equals_float64(shape, kind):
    """Weights are rounded for the product with values, to bf16 or, beside bytes, to float16: up to
    2**-8 or 2**-11 of each term. The sum of weights is not rounded. Nothing else is larger than
    some float32 roundings.
    """
    length, *_, dim = shape
    operands, scales = _case(kind, *shape)
    positions = _positions(1, length)
    got = strict.attention(*operands, positions, scale=dim**-0.5, **scales)
    assert got.dtype == jnp.float32
    want, size = _float64(operands, scales, positions, dim**-0.5)
    size = np.maximum(size, 1e-9)  # a value in INT8 may be 0
    error = (np.abs(np.asarray(got) - want) / size).max()
    bf16_values = kind.endswith("bf16")
    assert error < {"float32": 2e-6}.get(kind, 2**-8 if bf16_values else 1.01 * 2**-11)
    plain = reference.attention(*operands, positions, way=cpu_way(), scale=dim**-0.5, **scales)
    assert (np.abs(np.asarray(got) - np.asarray(plain)) / size).max() < 2**-8


def _same(one, other):
    np.testing.assert_array_equal(np.asarray(one).view(np.int32), np.asarray(other).view(np.int32))


def _garbage_behind(x, slots):
    """A longer cache whose other slots hold NaN, in FP8, bf16 or float32; in INT8 numbers."""
    if not x.ndim:
        return x
    fill = 77 if x.dtype == jnp.int8 else jnp.nan
    tail = jnp.full((x.shape[0], slots, *x.shape[2:]), fill, x.dtype)
    return jnp.concatenate([x, tail], 1)


def _decode(operands, scales, position, slots=37, **more):
    """One query at a position, over a cache of that many keys and then garbage."""
    q, k, v = operands
    n = position + 1
    scales = dict(scales)
    q_scale = scales.pop("q_scale", None)
    if q_scale is not None and q_scale.ndim:
        q_scale = q_scale[:, position:n]
    k, v = (_garbage_behind(x[:, :n], slots) for x in (k, v))
    scales = {s: _garbage_behind(x[:, :n] if x.ndim else x, slots) for s, x in scales.items()}
    at = jnp.full((q.shape[0], 1), position, jnp.int32)
    return strict.attention(
        q[:, position:n], k, v, at, scale=0.3, q_scale=q_scale, **scales, **more
    )


@pytest.mark.parametrize(
    ("kind", "lengths"),
    [
        ("fp8", (1, 64, 513)),
        _SLOW("int8 and fp8", (65, 513)),
        *(_SLOW(kind, LENGTHS) for kind in ("fp8", "float32", "int8 and bf16")),
        *(_SLOW(kind, (65, 513)) for kind in ("bf16", "fp8 one scale", "int8", "bf16 and fp8")),
    ],
)
def test_decode_equals_learner_at_every_border(kind, lengths, interpreted):
    """A learner's queries all at once, in whole splits; a decode step's one, in its own program."""
    operands, scales = _case(kind, max(lengths), heads=1)
    whole = strict.attention(
        *operands, _positions(1, max(lengths)), scale=0.3, one_split=False, **scales
    )
    assert interpreted == ["attention_kernel"]
    for length in lengths:
        one = _decode(operands, scales, length - 1)
        _same(one[:, 0], whole[:, length - 1])
    assert interpreted.count("join_kernel") == sum(n + 37 > strict.SPLIT for n in lengths)


@pytest.mark.parametrize(
    ("kind", "group"),
    [("fp8", 4), *(_SLOW(*c) for c in (("fp8", 1), ("float32", 8), ("fp8 queries", 8)))],
)
def test_groups(kind, group):
    operands, scales = _case(kind, 70, heads=2 * group, kv_heads=2, dim=32, batch=2)
    whole = strict.attention(*operands, _positions(2, 70), scale=0.3, **scales)
    for position in (0, 17, 63, 64, 69):
        _same(_decode(operands, scales, position)[:, 0], whole[:, position])


@pytest.mark.parametrize(
    ("kind", "dim"), [("fp8", 96), *(_SLOW(*c) for c in (("fp8", 128), ("float32", 64)))]
)
def test_widths(kind, dim):
    operands, scales = _case(kind, 66, dim=dim)
    whole = strict.attention(*operands, _positions(1, 66), scale=0.3, **scales)
    for position in (5, 63, 65):
        _same(_decode(operands, scales, position)[:, 0], whole[:, position])


@pytest.mark.slow  # over pages it is quick
@pytest.mark.parametrize("kind", ["fp8", "float32"])
def test_prefill_in_pieces_and_other_sequences(kind):
    """Queries that start anywhere in a tile, beside sequences of other lengths."""
    operands, scales = _case(kind, 200, dim=32, batch=3)
    whole = strict.attention(*operands, _positions(3, 200), scale=0.3, **scales)
    for start, stop in ((0, 7), (7, 100), (99, 200)):
        q = operands[0][:, start:stop]
        positions = _positions(3, 200)[:, start:stop]
        part = strict.attention(q, *operands[1:], positions, scale=0.3, **scales)
        _same(part, whole[:, start:stop])
    order = jnp.asarray([2, 0])
    moved = {n: x[order] for n, x in scales.items()}
    positions = jnp.asarray([[150, 3], [199, 20]], jnp.int32)  # in any order within a tile
    rows = order[:, None]
    q, k, v = operands
    part = strict.attention(q[rows, positions], k[order], v[order], positions, scale=0.3, **moved)
    _same(part, whole[rows, positions])


@pytest.mark.parametrize(
    ("kind", "slots"), [("fp8", 500), *(_SLOW(*c) for c in (("fp8", 0), ("float32", 1100)))]
)
def test_who_takes_a_split_changes_nothing(kind, slots):
    operands, scales = _case(kind, 600)
    first = _decode(operands, scales, 599, one_split=True)
    _same(_decode(operands, scales, 599, slots, one_split=False), first)
    _same(_decode(operands, scales, 599, slots, one_split=True), first)


_SIZES = {  # of the values' scales, by key
    "any": lambda rng: np.exp(rng.uniform(-60, 9, 200)),
    "tiny": lambda rng: np.full(200, 2.0**-50),
    "rising": lambda rng: np.logspace(-14, 4, 200),
    "falling": lambda rng: np.logspace(4, -14, 200),
    "zero": lambda rng: np.where(rng.random(200) < 0.3, 0, 2.0**-20),
}


@pytest.mark.parametrize("name", ["any", *(_SLOW(name) for name in _SIZES if name != "any")])
def test_scales_of_values_of_any_size(name):
    """Weights keep their bits beside tiny and large scales, whichever come first."""
    (q, k, v), scales = _case("fp8", 200)
    size = _SIZES[name](np.random.default_rng(3))
    scales["v_scale"] = jnp.asarray(size[None, :, None], jnp.float32)
    whole = strict.attention(q, k, v, _positions(1, 200), scale=0.3, **scales)
    want, terms = _float64((q, k, v), scales, _positions(1, 200), 0.3)
    error = np.abs(np.asarray(whole) - want) / np.maximum(terms, 1e-30)
    assert error.max() < 1.01 * 2**-11
    for position in (0, 63, 64, 130, 199):
        _same(_decode((q, k, v), scales, position)[:, 0], whole[:, position])


@pytest.mark.parametrize("one_split", [True, False])
def test_quantises_its_result(one_split):
    """As the next product's rows: a head of 128 features is a block."""
    (q, k, v), scales = _case("fp8", 66, dim=128)
    run = functools.partial(
        strict.attention, scale=0.1, dtype=jnp.bfloat16, one_split=one_split, **scales
    )
    operands = q[:, 63:], k, v, _positions(1, 66)[:, 63:]
    plain = run(*operands)
    result, stored, scale = run(*operands, quantisation=strict.Quantisation())
    np.testing.assert_array_equal(*(np.asarray(x).view(np.uint16) for x in (result, plain)))
    wanted = quantize(plain.reshape(3, 256), (1, 128))
    np.testing.assert_array_equal(*(np.asarray(x).view(np.uint8) for x in (stored, wanted.qvalue)))
    np.testing.assert_array_equal(scale, wanted.scale.T)


def test_queries_beyond_float16():
    """They are cut at its largest number; NaN stays NaN, in its row."""
    (q, k, v), scales = _case("fp8", 70)
    large = q.at[:, 3].multiply(1e30).at[:, 5, 0, 0].set(jnp.nan)
    got = strict.attention(large, k, v, _positions(1, 70), scale=0.3, **scales)
    cut = jnp.clip(large, -65504, 65504).at[:, 5].set(q[:, 5])
    want = strict.attention(cut, k, v, _positions(1, 70), scale=0.3, **scales)
    assert np.isnan(got[:, 5, 0]).all() and np.isfinite(got[:, 3]).all()
    rows = np.arange(70) != 5
    _same(got[:, rows], want[:, rows])


def test_large_scores_and_values_that_cancel():
    """Later splits with far larger scores; values of -0.0 and of one sign each."""
    (q, k, v), _ = _case("float32", 700, heads=1)
    k = k.at[:, 520:].multiply(60.0)
    v = v.at[..., 0].set(-0.0).at[:, 600:, :, 1].set(0.0).at[:, :600, :, 1].set(-1e-38)
    last = slice(496, 700)
    positions = _positions(1, 700)[:, last]
    whole = strict.attention(q[:, last], k, v, positions, scale=0.3, one_split=False)
    assert np.isfinite(whole).all()
    for position in (511, 520, 640, 699):
        one = _decode((q, k, v), {}, position, one_split=True)
        _same(one[:, 0], whole[:, position - 496])
        assert not np.signbit(one[..., 0]).any()  # not even of zero


def _in_pages(caches, lengths):
    """Caches with equal beginnings, the same as pools of pages in any order, and their table.

    Sequences of a page or more share the first. NaN in pages that nobody has and behind each
    sequence's end, and no page's number behind its last.
    """
    counts = [-(-n // PAGE) for n in lengths]
    pages = sum(counts) + 3
    ids = iter(np.random.default_rng(7).permutation(pages))
    table = np.full((len(lengths), max(counts) + 1), 10**9, np.int32)
    for row, count in zip(table, counts, strict=True):
        row[:count] = [next(ids) for _ in range(count)]
    sharing = np.flatnonzero(np.asarray(lengths) >= PAGE)
    table[sharing, 0] = table[sharing[:1], 0]
    whole, pools = {}, {}
    for name, x in caches.items():
        whole[name] = pools[name] = x
        if not x.ndim:
            continue
        x = np.array(x)
        x[sharing, :PAGE] = x[sharing[:1], :PAGE]
        pool = np.full((pages, PAGE, *x.shape[2:]), 77 if x.dtype == np.int8 else np.nan, x.dtype)
        for sequence, row, length in zip(x, table, lengths, strict=True):
            for page, start in zip(row, range(0, length, PAGE), strict=False):
                part = sequence[start : min(start + PAGE, length)]
                pool[page, : len(part)] = part
        whole[name], pools[name] = jnp.asarray(x), jnp.asarray(pool)
    return whole, pools, jnp.asarray(table)


def _pages_equal_one_piece(q, caches, starts, **more):
    """Queries at positions from `starts` on, the last of a sequence; returns the result."""
    positions = jnp.asarray(starts, jnp.int32)[:, None] + jnp.arange(q.shape[1], dtype=jnp.int32)
    whole, pools, table = _in_pages(caches, [start + q.shape[1] for start in starts])
    want = strict.attention(q, positions=positions, scale=0.3, **whole, **more)
    got = strict.attention(q, positions=positions, scale=0.3, table=table, **pools, **more)
    assert np.isfinite(got).all()
    _same(got, want)
    return got


def _queries_and_caches(kind, lengths, queries=1, **more):
    """Queries and their scale; keys, values and their scales, by name."""
    (q, k, v), scales = _case(kind, max(lengths), batch=len(lengths), **more)
    first = {"q": q, "q_scale": scales.pop("q_scale", None)}
    first = {n: x if x is None or not x.ndim else x[:, :queries] for n, x in first.items()}
    return first, {"k": k, "v": v, **scales}


_IN_PAGES = ("float32", "bf16", "fp8 one scale", "fp8 queries", "int8 and bf16", "bf16 and fp8")


@pytest.mark.parametrize("kind", ["fp8", *map(_SLOW, _IN_PAGES)])
def test_decode_from_pages(kind, interpreted):
    lengths = (1, 63, 64, 65, 96, 97, 127, 128, 129, 511, 512, 513)
    first, caches = _queries_and_caches(kind, lengths)
    starts = [n - 1 for n in lengths]
    joined = _pages_equal_one_piece(caches=caches, starts=starts, **first)
    assert interpreted == ["attention_kernel", "join_kernel"] * 2
    if kind == "fp8":
        alone = _pages_equal_one_piece(caches=caches, starts=starts, one_split=False, **first)
        _same(alone, joined)


@pytest.mark.parametrize("kind", ["fp8", *map(_SLOW, ("float32", *_IN_PAGES[3:]))])
def test_prefill_of_a_piece_from_pages(kind):
    """Queries from anywhere in a page on, over several."""
    first, caches = _queries_and_caches(kind, (131, 70, 100), 70, kv_heads=2)
    _pages_equal_one_piece(caches=caches, starts=(61, 0, 30), **first)


@pytest.mark.slow
@pytest.mark.parametrize("queries", [1, 40])
def test_thousands_of_keys_from_pages(queries):
    first, caches = _queries_and_caches("fp8", (4097, 1500), queries)
    _pages_equal_one_piece(caches=caches, starts=(4097 - queries, 1500 - queries), **first)


@pytest.mark.parametrize("kind", [_SLOW("bf16"), "fp8", _SLOW("int8")])
def test_latents_from_pages(kind):
    lengths = (65, 130)
    first, caches = _queries_and_caches(kind, lengths, heads=8, dim=64)
    rng = np.random.default_rng(1)
    rope = jnp.asarray(rng.standard_normal((2, max(lengths), 9, 16)), jnp.bfloat16)
    caches |= {"v": caches["k"][..., :32], "k_rope": rope[:, :, 8:]}
    starts = [n - 1 for n in lengths]
    _pages_equal_one_piece(caches=caches, starts=starts, q_rope=rope[:, :1, :8], **first)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bf16", "fp8", "int8"])
def test_latents_with_rotated_keys(kind):
    """Multi-head latent attention: values of another width, further features."""
    (q, k, _), scales = _case(kind, 70, heads=8, dim=64)
    rng = np.random.default_rng(1)
    q_rope, k_rope = (
        jnp.asarray(rng.standard_normal((1, 70, n, 16)), jnp.bfloat16) for n in (8, 1)
    )
    v = k[..., :32]

    def run(start, **more):
        at = _positions(1, 70)[:, start:]
        return strict.attention(
            q[:, start:],
            k,
            v,
            at,
            scale=0.1,
            q_rope=q_rope[:, start:],
            k_rope=k_rope,
            **scales,
            **more,
        )

    whole = run(0)
    want = reference.attention(
        q, k, v, _positions(1, 70), scale=0.1, q_rope=q_rope, k_rope=k_rope, way=cpu_way(), **scales
    )
    size = np.abs(np.asarray(v, np.float32)).max() * (1.5 if scales else 1)
    assert np.abs(np.asarray(whole) - np.asarray(want)).max() < size * 2**-9
    _same(run(69, one_split=True), whole[:, 69:])
    _same(run(64), whole[:, 64:])


@pytest.mark.parametrize("count", [6, _SLOW(130)])  # a program counts 128 at once
def test_programs_share_the_list_of_splits(count, monkeypatch):
    """Each takes several, of sequences of one split or three, or of none; with a window."""
    lengths = np.ones(count, np.int32)
    lengths[[0, 3, -2]] = 1100, 0, 600
    (q, *cached), _ = _case("float32", 1100, heads=1, batch=count)
    positions = jnp.asarray(lengths)[:, None] - 1
    monkeypatch.setattr(attention_operands, "MOST_PROGRAMS", count // 3)
    run = functools.partial(strict.attention, scale=0.3, window=jnp.int32(100))
    got = run(q[:, :1], *cached, positions, one_split=True)
    assert np.isnan(got[3]).all() and np.isfinite(np.delete(got, 3, 0)).all()
    some = np.array([0, 1, -3, -2, -1])
    alone = run(q[some, :1], *(x[some] for x in cached), positions[some], one_split=False)
    _same(got[some], alone)


@pytest.mark.parametrize("one_split", [True, False])
def test_a_query_without_a_position_has_no_result(one_split):
    """Its tile sees no key, so that no part of it was written."""
    (q, k, v), _ = _case("float32", 600, heads=1)
    positions = jnp.asarray([[-1]])
    got = strict.attention(q[:, :1], k, v, positions, scale=0.3, one_split=one_split)
    assert np.isnan(got).all()


def test_bad_values_stay_with_the_rows_that_see_them():
    """But for earlier rows of the same tile, which 0 * NaN reaches."""
    (q, k, v), _ = _case("float32", 70, heads=1)
    got = strict.attention(q, k.at[:, 40].set(jnp.nan), v, _positions(1, 70), scale=0.3)
    np.testing.assert_array_equal(np.isnan(got).all((0, 2, 3)), np.arange(70) >= 40)
    got = strict.attention(q, k, v.at[:, 40].set(jnp.inf), _positions(1, 70), scale=0.3)
    np.testing.assert_array_equal(np.isfinite(got).all((0, 2, 3)), np.arange(70) < 32)


def test_arguments_are_checked():
    (q, k, v), _ = _case("bf16", 8, heads=4, kv_heads=2)
    positions = _positions(1, 8)

    def attention(q=q, k=k, v=v, positions=positions, **more):
        strict.attention(q, k, v, positions, scale=1.0, **more)

    with pytest.raises(ValueError, match="do not fit keys"):
        attention(q=q[:, :, :3])
    with pytest.raises(ValueError, match="do not fit keys"):
        attention(v=v[:, :7])
    with pytest.raises(ValueError, match="do not fit queries"):
        attention(positions=positions[:, :7])
    with pytest.raises(ValueError, match="E4M3, INT8, bf16 or float32, got float16"):
        attention(k=k.astype(jnp.float16))
    with pytest.raises(ValueError, match=r"k_scale \(1, 8\) must be"):
        attention(k_scale=jnp.ones((1, 8)))
    rope = jnp.ones((1, 8, 4, 16))
    with pytest.raises(ValueError, match=r"k_rope .* does not fit keys"):
        attention(q_rope=rope, k_rope=rope[:, :7, :2])
    table, pages = jnp.zeros((1, 3), jnp.int32), jnp.ones((5, PAGE, 2, 16), jnp.bfloat16)
    for wrong in (table[0], table[:0], table.astype(jnp.float32)):
        with pytest.raises(ValueError, match=r"table .* must be int32 of \(1, pages of"):
            attention(k=pages, v=pages, table=wrong)
    with pytest.raises(ValueError, match="must have 64 slots"):
        attention(table=table)
    with pytest.raises(ValueError, match=r"k_scale .* or \(5, 64, 2\)"):
        attention(k=pages, v=pages, table=table, k_scale=jnp.ones((1, 192, 2)))
    with pytest.raises(ValueError, match="256 in float32"):
        wide = jnp.ones((1, 8, 2, 512))
        attention(q=wide, k=wide, v=wide)
