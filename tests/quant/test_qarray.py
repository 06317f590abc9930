"""The canonical quantiser against an independent oracle, bit for bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import slow
from oracles import quant_oracle as oracle

from fp8rl_jax.kernels import fp8_max, round_bf16
from fp8rl_jax.quant import block_health, quantize
from fp8rl_jax.quant.qarray import saturating_cast
from fp8rl_jax.quant.scaling import find_amax


def _sample(shape, seed, spread=3.0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp(spread * rng.standard_normal(shape))
    return x.astype(np.float32)


def _assert_equals_oracle(x, block_shape, power_of_two, jit=True):
    def run(x):
        return quantize(x, block_shape, power_of_two=power_of_two)

    q = (jax.jit(run) if jit else run)(x)
    full = (1,) * (x.ndim - len(block_shape)) + tuple(block_shape)
    codes, scale = oracle.quantize_blocks(np.asarray(x, np.float32), full, power_of_two)
    np.testing.assert_array_equal(np.asarray(q.qvalue).view(np.uint8), codes)
    np.testing.assert_array_equal(np.asarray(q.scale), scale)


_SHAPES = [
    ((256, 384), (128, 128)),
    ((100, 300), (1, 128)),
    ((3, 5, 32), (-1,)),
    ((64, 200), (-1, -1)),
]


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize(
    ("shape", "block", "jit"),
    [
        *((*case, True) for case in _SHAPES),
        (*_SHAPES[1], False),
        *(slow(*case, False) for case in _SHAPES if case != _SHAPES[1]),
    ],
)
def test_equals_the_oracle(shape, block, power_of_two, jit):
    x = _sample(shape, 0)
    x.flat[3] = 0.0
    _assert_equals_oracle(x, block, power_of_two, jit)


@settings(max_examples=6, deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 300),
    block=st.sampled_from([(1, 128), (128, 128), (-1, 32), (7, 5), (-1, -1)]),
    power_of_two=st.booleans(),
    bf16=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_equals_the_oracle_at_any_shape(rows, columns, block, power_of_two, bf16, seed):
    """Ragged edges, odd blocks, bf16 and float32."""
    x = _sample((rows, columns), seed)
    x = x.astype(ml_dtypes.bfloat16) if bf16 else x
    _assert_equals_oracle(x, block, power_of_two)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_exact_powers_of_two(power_of_two):
    """Every amax that is a power of two, where floor and ceiling of a logarithm go wrong."""
    x = np.zeros((200, 128), np.float32)
    x[:, 0] = 2.0 ** np.arange(-100, 100)
    x[:, 1] = x[:, 0] * 0.7
    _assert_equals_oracle(x, (1, 128), power_of_two)


def test_overflowing_quotient_is_the_largest_float():
    x = np.full((1, 128), 1e-37, np.float32)
    q = quantize(jnp.asarray(x), (1, 128))
    assert np.isfinite(np.asarray(q.qvalue, np.float32)).all()
    assert (np.asarray(q.qvalue, np.float32) > 0).all()


@pytest.mark.parametrize(
    ("bad", "jit"),
    [
        (np.nan, True),
        (-np.inf, True),
        *(slow(x, False) for x in (np.nan, np.inf)),
        slow(np.inf, True),
    ],
)
def test_a_bad_value_poisons_its_block_and_no_other(bad, jit):
    x = _sample((4, 256), 1)
    x[2, 200] = bad

    def run(x):
        return quantize(x, (1, 128))

    q = (jax.jit(run) if jit else run)(x)
    bad_elements = np.isnan(np.asarray(q.qvalue, np.float32))
    assert bad_elements[2, 128:].all() and bad_elements.sum() == 128
    assert np.isnan(np.asarray(q.scale)).sum() == 1
    assert float(block_health(jnp.asarray(x), q)["nonfinite_blocks"]) == 1


def test_amax_keeps_nan_and_inf():
    x = np.ones((3, 128), np.float32)
    x[0, 7], x[1, 9] = np.nan, -np.inf
    found = np.asarray(jax.jit(lambda x: find_amax(x, 1))(x))
    assert np.isnan(found[0]) and np.isinf(found[1]) and found[2] == 1


def test_cast_saturates_and_equals_ml_dtypes():
    values = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    values = values[np.isfinite(values)]
    ours = np.asarray(saturating_cast(jnp.asarray(values), jnp.float8_e4m3fn)).view(np.uint8)
    theirs = np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    keep = np.abs(values) >= np.finfo(np.float32).tiny  # denormals are flushed
    np.testing.assert_array_equal(ours[keep], theirs[keep])


def test_round_bf16_survives_jit():
    x = _sample((64, 64), 2)
    rounded = jax.jit(lambda x: round_bf16(x).astype(jnp.float32) * 1.0)(x)
    np.testing.assert_array_equal(
        np.asarray(rounded), x.astype(ml_dtypes.bfloat16).astype(np.float32)
    )


def test_dequantize_is_close_and_not_equal():
    x = _sample((130, 257), 3, spread=0.0)
    q = quantize(jnp.asarray(x), (1, 128))
    error = np.abs(np.asarray(q.dequantize()) - x) / np.abs(x).max()
    assert 1e-3 < error.max() < 2**-4


def test_health_counts():
    x = np.zeros((1, 128), np.float32)
    x[0, :3] = 448.0, 1e-4, -1e-4
    counts = block_health(jnp.asarray(x), quantize(jnp.asarray(x), (1, 128)))
    assert {k: float(v) for k, v in counts.items()} == {
        "saturated": 0,
        "underflowed": 2,
        "nonfinite_blocks": 0,
        "elements": 128,
    }


def test_saturation_is_counted_where_a_scale_is_too_small():
    x = jnp.full((1, 128), 500.0)
    q = quantize(jnp.full((1, 128), 448.0), (1, 128))
    assert float(block_health(x, q)["saturated"]) == 128


def test_errors():
    with pytest.raises(ValueError, match="more axes"):
        quantize(jnp.ones((4,)), (1, 128))
    with pytest.raises(ValueError, match="write sizes >= 1"):
        quantize(jnp.ones((4, 4)), (1, 0))
    with pytest.raises(ValueError, match="no format of one byte"):
        fp8_max(jnp.bfloat16)
