"""The kernel between projections and attention, in Triton's interpreter.

Bitwise: RoPE and quantisation against the model's own in jnp; one kernel of several steps against
several kernels of one; a cache written in place against scatters. The norm against float64.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import kv_formats
import numpy as np
import pytest
from marks import slow

pytest.importorskip("triton", reason="needs Triton: pip install 'fp8rl_jax[dev]'")

from fp8rl_jax.kernels.gpu import attention_inputs as kernels
from fp8rl_jax.kernels.gpu.attention_inputs import Cache, Kept
from fp8rl_jax.models.kv_cache import LayerCache, StoredKV
from fp8rl_jax.models.rope import apply_rope, deinterleave
from fp8rl_jax.quant import get_recipe, quantize_kv
from fp8rl_jax.quant.kv import kept_by_kernel
from fp8rl_jax.quant.qarray import E4M3, INT8

_EPS = 1e-6
_FP8 = get_recipe("fp8_blockwise")
_CALIBRATED = dataclasses.replace(_FP8, kv="calibrated")
_QUERIES = dataclasses.replace(_FP8, fp8_attention=True)
_BY = {"dynamic": "row", "calibrated": "given", "none": "none"}


@pytest.fixture(scope="module", autouse=True)
def interpreted(interpreter):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "triton_call", interpreter.triton_call)
        yield


def _inputs(features: int, dtype=jnp.bfloat16, batch: int = 2, tokens: int = 3):
    rng = np.random.default_rng(features)
    shapes = [(batch, tokens, heads, features) for heads in (4, 2, 2)]
    q, k, v = (jnp.asarray(3 * rng.standard_normal(shape), dtype) for shape in shapes)
    angle = rng.standard_normal((batch, tokens, features // 2)).astype(np.float32) * 9
    gains = tuple(jnp.asarray(rng.standard_normal(features), jnp.float32) for _ in "qk")
    return (q, k, v), (jnp.cos(angle), jnp.sin(angle)), gains


def _single(q, k, v, rope, gains, kept, scales=(None,) * 3, dtypes=(E4M3, E4M3), **more):
    """What `attention_inputs` returns for a cache of these tokens, by calls of one array each."""

    def call(x, rope, gain, kind, scale, dtype=E4M3):
        gains = gain if gain is None else (gain, gain)
        how = Kept(q=kind, power_of_two=kept.power_of_two, dtype=dtype or E4M3)
        given = (scale, None, None)
        return kernels.attention_inputs(x, None, None, rope, gains, how, given, **more)[:4]

    q_gain, k_gain = gains or (None, None)
    q, _, q_stored, q_scale = call(q, rope, q_gain, kept.q, scales[0])
    k, _, k_stored, k_scale = call(k, rope, k_gain, kept.k, scales[1], dtypes[0])
    more.pop("interleaved", None)  # values have no pairs
    v, _, v_stored, v_scale = call(v, None, None, kept.v, scales[2], dtypes[1])
    k_stored, v_stored = (
        x if how == "none" else stored
        for x, how, stored in ((k, kept.k, k_stored), (v, kept.v, v_stored))
    )
    return q, k, q_stored, q_scale, k_stored, v_stored, k_scale, v_scale


def _assert_same(found, wanted):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        one, other = (np.asarray(x).view(f"u{x.dtype.itemsize}") for x in (one, other))
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("features", "recipe", "interleaved"),
    [
        pytest.param(64, get_recipe("fp8"), "half", id="half of a head"),
        slow(128, get_recipe("bf16"), "half", id="half of a head, bf16"),
        pytest.param(64, _QUERIES, False, id="fp8"),
        slow(128, get_recipe("bf16"), False, id="bf16"),
        slow(96, get_recipe("f32"), True, id="f32"),
        slow(64, _CALIBRATED, True, id="calibrated"),
        slow(32, _FP8, False, id="keys and values"),
        pytest.param(32, get_recipe("fp8"), False, id="int8"),
        slow(64, kv_formats.RECIPES["int8_bf16"], False, id="int8 and bf16"),
    ],
)
def test_rope_and_quantisation_are_the_models(features, recipe, interleaved):
    (q, k, v), rope, _ = _inputs(features, recipe.compute_dtype)
    if interleaved == "half":  # of a head's features are rotated
        rope, interleaved = tuple(table[..., : features // 4] for table in rope), False
    q = q.at[0, 1].set(0)
    k = k.at[0, 0, 1, 5].set(jnp.nan)
    if recipe.quantized:
        v = v.at[1, 0, 0, 3].set(jnp.inf)
    scales = (None,) * 3
    if recipe.kv == "calibrated":
        scales = tuple(jnp.float32(x) for x in (0.01, 0.02, 0.03))

    def model(q, k, v):
        turn = deinterleave if interleaved else lambda x: x
        q, k = (apply_rope(recipe, turn(x), *rope) for x in (q, k))
        query, (k8, ks), (v8, vs) = (
            quantize_kv(x, recipe, name, scale)
            for name, x, scale in zip("qkv", (q, k, v), scales, strict=True)
        )
        return q, k, *(query if recipe.fp8_attention else (None, None)), k8, v8, ks, vs

    by, kept = _BY[recipe.kv], Kept(**kept_by_kernel(recipe))
    dtypes = [recipe.stored_dtype(name) for name in "kv"]
    found = _single(q, k, v, rope, None, kept, scales, interleaved=interleaved, dtypes=dtypes)
    wanted = jax.jit(model)(q, k, v)
    if by == "given":  # the model hands these scales on
        wanted = (*wanted[:3], None, *wanted[4:6], None, None)
    _assert_finite_same(found, wanted)


def _assert_finite_same(found, wanted):
    """Equal bits; NaN, whose sign and payload say nothing, equals NaN."""

    def plain(x):
        return jnp.where(jnp.isnan(x.astype(jnp.float32)), jnp.ones_like(x), x)

    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(*(np.isnan(np.asarray(x, np.float32)) for x in (one, other)))
    _assert_same(jax.tree.map(plain, found), jax.tree.map(plain, wanted))


@pytest.mark.parametrize("interleaved", [False, slow(True)])
def test_steps_at_once_or_one_by_one(interleaved):
    """What a run that watches values does gives the bits of one that does not."""
    (q, k, v), rope, gains = _inputs(96)
    call = functools.partial(_single, eps=_EPS, interleaved=interleaved)
    at_once = call(q, k, v, rope, gains, Kept("row"))
    normed_q, normed_k, *_ = call(q, k, v, None, gains, Kept())
    turned_q, turned_k, *_ = call(normed_q, normed_k, v, rope, None, Kept())
    one_by_one = call(turned_q, turned_k, v, None, None, Kept("row"), interleaved=False)
    _assert_same(at_once, one_by_one)
    assert not np.array_equal(np.asarray(normed_q), np.asarray(turned_q))


@pytest.mark.parametrize("features", [64, slow(96), slow(128), slow(256)])
def test_norm_is_within_three_ulp_of_float64(features):
    (q, k, v), _, gains = _inputs(features, jnp.float32)
    stack = [jnp.stack([jnp.zeros_like(g), g]) for g in gains]
    found = _single(
        q, k, v, None, tuple(stack), Kept(k="none", v="none"), eps=_EPS, layer=jnp.int32(1)
    )
    for x, gain, got in zip((q, k), gains, found, strict=False):
        x, gain, got = (np.asarray(y, np.float64) for y in (x, gain, got))
        want = x / np.sqrt((x * x).mean(-1, keepdims=True) + _EPS) * gain
        assert (np.abs(got - want) / np.spacing(np.abs(want).astype(np.float32))).max() < 3


@pytest.mark.parametrize("paged", [True, slow(False)])
@pytest.mark.parametrize(
    "recipe",
    [
        _FP8,
        slow(get_recipe("bf16"), id="bf16"),
        slow(_CALIBRATED, id="calibrated"),
        slow(kv_formats.RECIPES["int8_fp8"], id="int8 and fp8"),
        slow(kv_formats.RECIPES["bf16_fp8"], id="bf16 and fp8"),
        pytest.param(kv_formats.RECIPES["int8_bf16"], id="int8 and bf16"),  # one has scales
    ],
    ids=["fp8", *[None] * 5],
)
def test_cache_in_place(recipe, paged):
    """It writes what a scatter writes, nothing else, and nothing for a position without a slot."""
    (q, k, v), rope, gains = _inputs(64)
    scales = (None,) * 3 if recipe.kv != "calibrated" else (jnp.float32(0.1),) * 3
    dtypes = [recipe.stored_dtype(name) for name in "kv"]
    bits = [{None: jnp.uint16, INT8: INT8}.get(dtype, jnp.uint8) for dtype in dtypes]
    layers, slots = 3, 128
    first = (layers * 5, 64) if paged else (layers * 2, slots)
    table = None
    if paged:
        table = jnp.asarray([[4, 1], [4, 2]], jnp.int32) + 5 * jnp.arange(3)[:, None, None]
    positions = jnp.asarray([[0, 63, 64], [1, 127, 200]], jnp.int32)
    arrays = [jnp.full((*first, 2, 64), 7, dtype) for dtype in bits]
    for dtype in dtypes:
        own = recipe.kv == "dynamic" and dtype is not None
        arrays.append(jnp.full((*first, 2), 7.0) if own else None)
    kept = Kept(**kept_by_kernel(recipe))
    operands = {"rope": rope, "kept": kept, "scales": scales, "eps": _EPS}
    found = kernels.attention_inputs(
        q,
        k,
        v,
        gains=tuple(jnp.stack([g + 1, g, g - 1]) for g in gains),
        cache=Cache(tuple(arrays), jnp.int32(1), positions, table),
        **operands,
    )
    fresh = _single(q, k, v, gains=gains, dtypes=dtypes, **operands)
    _assert_same(found[:2], fresh[:2])
    whole = (lambda x: x) if paged else lambda x: x.reshape(layers, 2, *x.shape[1:])
    stored = StoredKV(*(None if x is None else whole(x) for x in arrays))
    cache = LayerCache(stored, jnp.int32(1), table)
    for token in range(3):
        rows = slice(0, 1 if token == 2 else 2)  # the second sequence's last token has no slot
        new = StoredKV(*(None if x is None else x[rows, token : token + 1] for x in fresh[4:]))
        cache = _write(cache, new, positions[rows, token : token + 1])
    wanted = cache.stored
    _assert_same(
        [whole(x) for x in found[4:] if x is not None],
        [x for x in (wanted.k, wanted.v, wanted.k_scale, wanted.v_scale) if x is not None],
    )


def test_biases():
    """Added to float32 projections and rounded once, they give the bits of what was added before;
    a kernel that leaves one out, or takes another layer's, is seen."""
    (q, k, v), rope, gains = _inputs(64, jnp.float32)
    rng = np.random.default_rng(1)
    stacks = [
        jnp.asarray(rng.standard_normal((3, x.shape[2] * 64)), jnp.float32) for x in (q, k, v)
    ]
    positions = jnp.asarray([[0, 63, 64], [1, 127, 5]], jnp.int32)
    arrays = tuple(jnp.full((6, 128, 2, 64), 7, jnp.uint8) for _ in "kv")
    arrays += tuple(jnp.full((6, 128, 2), 7.0) for _ in "kv")

    def run(q, k, v, **more):
        cache = Cache(arrays, jnp.int32(1), positions, None)
        stack = tuple(jnp.stack([g + 1, g, g - 1]) for g in gains)
        return kernels.attention_inputs(
            q, k, v, rope, stack, Kept("row"), eps=_EPS, cache=cache, **more
        )

    def added(x, bias):
        return (x + bias[1].reshape(x.shape[2:])).astype(jnp.bfloat16)

    wanted = run(*map(added, (q, k, v), stacks))
    _assert_same(run(q, k, v, biases=tuple(stacks), dtype=jnp.bfloat16), wanted)
    for left_out in range(3):
        fewer = [x * (i != left_out) for i, x in enumerate(stacks)]
        found = run(q, k, v, biases=tuple(fewer), dtype=jnp.bfloat16)
        same = [np.array_equal(*map(np.asarray, pair)) for pair in zip(found, wanted, strict=True)]
        assert not all(same)


def _write(cache: LayerCache, new: StoredKV, positions) -> LayerCache:
    """Runs `LayerCache.write` for the first sequences alone."""
    count = positions.shape[0]
    if cache.table is not None:
        part = dataclasses.replace(cache, table=cache.table[:, :count]).write(new, positions)
        return dataclasses.replace(cache, stored=part.stored)
    first = jax.tree.map(lambda x: x[:, :count], cache.stored)
    part = LayerCache(first, cache.layer).write(new, positions).stored
    stored = jax.tree.map(lambda x, y: x.at[:, :count].set(y), cache.stored, part)
    return dataclasses.replace(cache, stored=stored)
