"""Calibrated KV scales: right against numpy, frozen for all rows, never a plausible default.

Proven: the scales of a two-layer model are ``amax * margin / 448`` with the amaxes of q, k and v of
a float64 decoder (which reads K and V through a numpy cache of E4M3), over real tokens alone;
stored codes then stay below the maximum; a scale that is missing
makes NaN of everything, one that is too small is counted; `quantize_kv` and `kv_health` give the
bytes and counts of numpy, for what saturates and for what is not finite.

"""

from __future__ import annotations

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow
from oracles import decoder_oracle, quant_oracle

from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.batch import of_sequences, pack
from fp8rl_jax.models import ModelConfig, Tokens, forward, init_cache, param_shapes, quantize_params
from fp8rl_jax.models import rope_tables as make_rope
from fp8rl_jax.models.kv_cache import LayerCache
from fp8rl_jax.models.taps import Observe
from fp8rl_jax.quant import calibrated_scales, get_recipe, kv_health, missing_scales, quantize_kv
from fp8rl_jax.quant.kv import is_fresh, with_scales
from fp8rl_jax.rollout import make_calibrate

_MODEL = ModelConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
_LENGTHS = np.int32([12, 5, 9, 1])
_ROPE = make_rope(_MODEL, 16)
_CALIBRATED = dataclasses.replace(get_recipe("f32"), kv="calibrated")


@functools.cache
def _params():
    return decoder_oracle.random_params(param_shapes(_MODEL), 0)


def _tokens(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50, (4, 12)).astype(np.int32)


@functools.cache
def _calibrate(recipe):
    return make_calibrate(_MODEL, recipe)


def _scales(recipe="f32", tokens=None, lengths=_LENGTHS, params=None, step=3, capacity=0):
    tokens = _tokens() if tokens is None else tokens
    program, batch = _calibrate(recipe), of_sequences(tokens, lengths)
    if capacity:
        batch, _ = pack(batch, tokens.shape[1], capacity, 1)
    params = _params() if params is None else params
    return jax.device_get(program(params, {}, batch, np.int32(step), _ROPE))


@functools.cache
def _expected_amax() -> dict[str, np.ndarray]:
    """{'q' | 'k' | 'v': (L, B)} of the float64 decoder, whose attention reads K and V in E4M3."""
    amax = {name: np.zeros((2, 4)) for name in "qkv"}
    attend = decoder_oracle._attend
    for row, length in enumerate(_LENGTHS):
        calls = []

        def read(q, k, v, calls=calls):
            calls.append((q, k, v))
            k, v = (quant_oracle.fake_kv(x.astype(np.float32)) for x in (k, v))
            return attend(q, k.astype(np.float64), v.astype(np.float64))

        with mock.patch.object(decoder_oracle, "_attend", read):
            decoder_oracle.sequence_logits(_params(), _MODEL, _tokens()[row, :length])
        assert len(calls) == 8, "two layers of four heads"
        for index, call in enumerate(calls):
            for name, x in zip("qkv", call, strict=True):
                place = amax[name][index // 4]
                place[row] = max(place[row], np.abs(x).max())
    return amax


def _by_name(scales) -> dict:
    return {name: getattr(scales, name) for name in "qkv"}


def _assert_same(one, other):
    """Equal scales, bit for bit."""
    for name, scale in _by_name(one).items():
        np.testing.assert_array_equal(scale, _by_name(other)[name], err_msg=name)


# Against the oracle.


@pytest.mark.parametrize("margin", [1.05, slow(2.0)])
def test_scales_are_those_of_the_largest_value(margin):
    """Float32 weights: every scale of both layers to float32 accuracy; the step is kept."""
    found = _scales(dataclasses.replace(get_recipe("f32"), kv_margin=margin), step=7)
    assert int(found.step) == 7
    for name, amax in _expected_amax().items():
        scale = getattr(found, name)
        assert scale.shape == (2,) and scale.dtype == np.float32
        np.testing.assert_allclose(scale, amax.max(1) * margin / 448, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("recipe", "low", "high"), [slow("bf16", 2e-3, 0.01), ("fp8", 0.015, 0.07)]
)
def test_scales_of_rounded_models(recipe, low, high):
    """Under bf16 and FP8 linear layers: near the oracle, within recorded bounds, two-sided."""
    found = _by_name(_scales(recipe))
    errors = [
        np.abs(found[name] / (amax.max(1) * 1.05 / 448) - 1)
        for name, amax in _expected_amax().items()
    ]
    assert low < np.max(errors) < high


@pytest.mark.slow
def test_layers_in_bf16():
    """Runs of layers under two recipes give one scale a layer, in order: the first layer's are
    those of bf16, bit for bit, and not those of FP8."""
    mixed = _by_name(_scales(dataclasses.replace(get_recipe("fp8"), first_layers=1)))
    plain, quantised = (_by_name(_scales(name)) for name in ("bf16", "fp8"))
    assert all(scale.shape == (2,) for scale in mixed.values())
    assert all(mixed[name][0] == plain[name][0] for name in "qkv")
    assert any(mixed[name][0] != quantised[name][0] for name in "qkv")
    assert any(mixed[name][1] != plain[name][1] for name in "qkv")


# What must not matter, and what must.


@pytest.mark.parametrize("recipe", ["f32", "fp8"])
def test_packed_rows_have_the_same_scales(recipe):
    """Rows of two sequences in two micro-batches: bit for bit those of padded rows."""
    _assert_same(_scales(recipe), _scales(recipe, capacity=128))


@pytest.mark.parametrize("recipe", ["f32", "fp8"])
def test_padding_is_ignored(recipe):
    """Other tokens behind each row's length: not a bit changes. In front of it: scales change."""
    tokens, other = _tokens(), _tokens(seed=1)
    real = np.arange(12) < _LENGTHS[:, None]
    _assert_same(_scales(recipe), _scales(recipe, np.where(real, tokens, other)))
    changed = _by_name(_scales(recipe, np.where(real, other, tokens)))
    assert all((changed[n] != s).any() for n, s in _by_name(_scales(recipe)).items())


def test_lengths_say_what_is_padding():
    """With the whole rows counted, a larger value turns up in what was padding."""
    whole = _by_name(_scales(lengths=np.int32([12] * 4)))
    partial = _by_name(_scales())
    assert all((whole[name] >= partial[name]).all() for name in "qkv")
    assert any((whole[name] > partial[name]).any() for name in "qkv")


def test_order_of_sequences_does_not_matter():
    """A maximum: rows in another order, or twice, give the same bits."""
    order = [2, 0, 3, 1]
    _assert_same(_scales(), _scales(tokens=_tokens()[order], lengths=_LENGTHS[order]))


@pytest.mark.parametrize("kv", ["none", "dynamic", "calibrated"])
def test_scales_do_not_depend_on_those_they_replace(kv):
    """The recipe's own way of storing K and V, and FP8 attention, change no bit."""
    recipe = dataclasses.replace(get_recipe("f32"), kv=kv, fp8_attention=kv != "none")
    _assert_same(_scales(recipe), _scales())


# What the scales are for.


@functools.cache
def _program(recipe, cached=False):
    def run(params, tokens, scales):
        return forward(
            quantize_params(params, recipe, with_scales({}, scales)),
            Tokens.of(tokens, _ROPE),
            _MODEL,
            recipe,
            cache=init_cache(_MODEL, recipe, 4, 12) if cached else None,
            observe=Observe(collect=("kv_health",)),
        )

    return exact_jit(run)


def _run(scales, recipe=_CALIBRATED, cached=False):
    return jax.device_get(_program(recipe, cached)(_params(), _tokens(), scales))


def _times(scales, factor: float):
    return dataclasses.replace(scales, **{n: s * factor for n, s in _by_name(scales).items()})


def test_stored_codes_keep_the_margin():
    """The first layer's keys and values are those that were measured: the largest code is the one
    of 448 / 1.05, not the maximum, and not zero. Behind a changed attention it may be the next."""
    out = _run(_scales(lengths=np.int32([12] * 4)), cached=True)
    (run,) = out.cache.runs
    assert run.k_scale is None and run.v_scale is None
    numbers = LayerCache(run).as_read("reference").stored
    for stored in (numbers.k, numbers.v):
        largest = np.abs(stored.astype(np.float32)).max((1, 2, 3, 4))
        assert largest[0] == 416.0 <= 448 / 1.05
        assert 384.0 <= largest[1] <= 448.0
    assert out.aux["kv_health"]["saturated"].tolist() == [0, 0]


def test_scales_that_are_too_small_are_counted():
    """A quarter of the scale: some values saturate in every layer, and all are finite."""
    scales = _scales(lengths=np.int32([12] * 4))
    out = _run(_times(scales, 0.25))
    health = out.aux["kv_health"]
    assert (health["saturated"] > 0).all() and (health["nonfinite_blocks"] == 0).all()
    assert (health["elements"] == 2 * 4 * 12 * 2 * 16).all(), "keys and values"
    assert np.isfinite(out.logits).all()
    assert (_run(scales).logits != out.logits).any()


@pytest.mark.parametrize(("attention", "cached"), [slow(False, False), (True, True)])
def test_missing_scales_make_nan_of_everything(attention, cached):
    """Before the first calibration no logit is a number, and every layer's tensors are counted."""
    recipe = dataclasses.replace(_CALIBRATED, fp8_attention=attention)
    missing = missing_scales(2)
    assert all(np.isnan(s).all() for s in _by_name(missing).values())
    assert int(missing.step) == -1
    out = _run(missing, recipe, cached)
    assert np.isnan(out.logits).all()
    tensors = 3 if attention else 2  # q too under FP8 attention
    assert out.aux["kv_health"]["nonfinite_blocks"].tolist() == [tensors, tensors]


def test_one_missing_scale_is_enough():
    """NaN for the values of the second layer alone."""
    scales = _scales()
    v = np.float32([scales.v[0], np.nan])
    out = _run(dataclasses.replace(scales, v=v))
    assert np.isnan(out.logits).all()
    assert out.aux["finite"].tolist() == [True, False]
    assert out.aux["kv_health"]["nonfinite_blocks"].tolist() == [0, 1]


def test_without_scales_nothing_runs():
    """Neither the forward pass nor the quantiser takes a calibrated recipe without its scales."""
    with pytest.raises(ValueError, match=r"calibrated scales, which these weights lack"):
        forward(_params(), Tokens.of(_tokens()), _MODEL, _CALIBRATED)
    with pytest.raises(ValueError, match=r"calibrated scales: pass this layer's"):
        quantize_kv(jnp.ones((3, 4)), _CALIBRATED, "k")


def test_is_fresh():
    """No scales, scales of this step, and the two kinds that would clip unseen."""
    fresh = calibrated_scales({name: jnp.ones(2) for name in "qkv"}, 1.05, jnp.int32(4))
    assert is_fresh({}, 4) and is_fresh(with_scales({}, fresh), 4)
    assert not is_fresh(with_scales({}, fresh), 5) and not is_fresh(with_scales({}, fresh), 3)
    assert not is_fresh(with_scales({}, missing_scales(2)), 0)


# One tensor.


def _of_amax(amax, margin=1.05) -> np.ndarray:
    return np.asarray(
        calibrated_scales({name: jnp.float32(amax) for name in "qkv"}, margin, jnp.int32(0)).k
    )


@pytest.mark.parametrize("margin", [1.05, *map(slow, (1.0, 1.5))])
def test_scale_of_an_amax(margin):
    """Two true float32 quotients, bit for bit, over many powers of ten."""
    amax = np.float32(10.0) ** np.arange(-20, 21, dtype=np.float32) * np.float32(1.37)
    s = np.float32(448) / (amax * np.float32(margin))
    np.testing.assert_array_equal(_of_amax(amax, margin), np.float32(1) / s)


def test_scale_of_an_infinite_amax_is_missing():
    """What is not finite stays visible."""
    np.testing.assert_array_equal(np.isnan(_of_amax([np.inf, 1.0])), [True, False])


def test_scale_of_an_amax_that_is_nan_is_missing():
    """NaN in one sequence must not give a scale that clips the others unseen."""
    np.testing.assert_array_equal(np.isnan(_of_amax([np.nan, 1.0])), [True, False])


def test_a_token_that_is_nan_leaves_no_scale():
    """The same through a model: an embedding that is NaN, in one sequence of four."""
    params = jax.tree.map(np.array, _params())
    alone = np.setdiff1d(_tokens()[1, :5], _tokens()[[0, 2, 3]])[0]
    params["embed_tokens"][alone] = np.nan
    found = _by_name(_scales(params=params))
    assert all(np.isnan(scale).all() for scale in found.values())


def test_scale_of_zeros():
    """As `calibrated_scales` says it."""
    np.testing.assert_array_equal(_of_amax([0.0]), np.float32([1.05]) / np.float32(448))


_VALUES = np.float32(
    [0, -0.0, 1, -1, 0.3, 447, 448, 460, 464, 466, -470, 1e4, 3e38, -3e38, 1e-3, 0.004, 1e-30]
)


def _tensor(*values: float) -> np.ndarray:
    """Keys (2, 3, 2, 8): small random numbers, the values above in every size, and these."""
    x = np.random.default_rng(0).standard_normal(96).astype(np.float32)
    x[: _VALUES.size], x[-1 - len(values) : -1] = _VALUES, values
    return x.reshape(2, 3, 2, 8)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("scale", [0.37, *map(slow, (1.0, 1.05 / 448, 100.0))])
def test_quantize_kv_with_a_given_scale(scale, dtype):
    """Bytes of numpy: rounded to bf16, multiplied by 1 / scale, clipped; NaN and inf become NaN
    alone. The scale comes back as it is."""
    x = jnp.asarray(_tensor(np.nan, np.inf, -np.inf), dtype)
    stored, given = jax.jit(lambda x, s: quantize_kv(x, _CALIBRATED, "k", s))(x, jnp.float32(scale))
    rounded = quant_oracle.round_bf16(np.asarray(x.astype(jnp.float32)))
    multiplier = np.float32(1) / np.float32(scale)
    codes, _ = quant_oracle.quantize_given(rounded, (-1,) * 4, multiplier.reshape(1, 1, 1, 1))
    found = np.asarray(stored).view(np.uint8)
    nan = np.isnan(np.asarray(stored).astype(np.float32))
    np.testing.assert_array_equal(nan, ~np.isfinite(rounded))
    np.testing.assert_array_equal(found[~nan], codes[~nan])
    assert nan.sum() == 3
    assert given.shape == () and given == np.float32(scale)


def test_quantize_kv_with_a_missing_scale():
    """Every byte is NaN."""
    stored, _ = quantize_kv(jnp.asarray(_tensor()), _CALIBRATED, "k", jnp.float32(np.nan))
    assert np.isnan(np.asarray(stored).astype(np.float32)).all()


@pytest.mark.parametrize("scale", [0.37, *map(slow, (1.0, 0.5, 100.0))])
def test_health_of_a_given_scale(scale):
    """Values beyond 464 scales, values that became zero, all values, and no bad block."""
    x = quant_oracle.round_bf16(_tensor())
    stored, given = quantize_kv(jnp.asarray(x), _CALIBRATED, "k", jnp.float32(scale))
    health = {
        name: float(n) for name, n in kv_health(jnp.asarray(x), stored, given, _CALIBRATED).items()
    }
    zero = (np.asarray(stored).view(np.uint8) & 0x7F) == 0
    expected = {
        "saturated": np.count_nonzero(np.abs(x) > 464 * np.float32(scale)),
        "underflowed": np.count_nonzero((x != 0) & zero),
        "nonfinite_blocks": 0,
        "elements": 96,
    }
    assert health == expected
    assert health["saturated"] > 0 and health["underflowed"] > 0


@pytest.mark.parametrize(("values", "scale"), [([np.nan], 1.0), ([np.inf], 1.0), ([], np.nan)])
def test_health_of_what_is_not_finite(values, scale):
    """A tensor is one block, and is counted once, whether a value or the scale is not finite."""
    x = jnp.asarray(_tensor(*values))
    stored, given = quantize_kv(x, _CALIBRATED, "k", jnp.float32(scale))
    assert float(kv_health(x, stored, given, _CALIBRATED)["nonfinite_blocks"]) == 1
