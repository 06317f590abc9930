"""The norm, activation and quantising kernels in Triton's interpreter, against float64 and quant.

Bitwise: fused kernels against unfused ones, and the quantisers against `quant.quantize`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow

pytest.importorskip("triton", reason="needs Triton: pip install 'fp8rl_jax[dev]'")

from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl_jax.kernels.gpu import matmul as products
from fp8rl_jax.kernels.gpu import norm as kernels
from fp8rl_jax.models.activations import gated_activation
from fp8rl_jax.models.layers import rms_norm
from fp8rl_jax.models.parallel.mesh import ONE_DEVICE
from fp8rl_jax.quant import get_recipe, quantize

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
EPS = 1e-6
_few = settings(max_examples=12, deadline=None)


@pytest.fixture(scope="module", autouse=True)
def interpreted(interpreter):
    with pytest.MonkeyPatch.context() as patch:
        for module in (kernels, products):
            patch.setattr(module, "triton_call", interpreter.triton_call)
        yield


def _normal(*shape: int, seed: int = 0, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def _bits(x) -> np.ndarray:
    x = np.asarray(x)
    return x.view(f"u{x.itemsize}")


def _assert_same(left, right):
    """Equal bits; NaN, whose sign and payload say nothing, equals NaN."""
    assert left.shape == right.shape and left.dtype == right.dtype
    lost = np.isnan(np.asarray(left, np.float32))
    np.testing.assert_array_equal(lost, np.isnan(np.asarray(right, np.float32)))
    np.testing.assert_array_equal(_bits(left)[~lost], _bits(right)[~lost])


def _assert_all_same(left, right):
    for one, other in zip(left, right, strict=True):
        _assert_same(one, other)


_quantize = jax.jit(quantize, static_argnums=(1, 2, 3))


def _norm64(x, weight):
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    return x / np.sqrt((x * x).mean(1, keepdims=True) + EPS) * weight


def _silu64(gate, up):
    gate, up = np.asarray(gate, np.float64), np.asarray(up, np.float64)
    return gate / (1 + np.exp(-gate)) * up


def _ulps(got, want) -> float:
    """Largest error of float32 `got` in units of its own last place."""
    return float((np.abs(got - want) / np.spacing(np.abs(want).astype(np.float32))).max())


@pytest.mark.parametrize(
    "rows, width",
    [(9, 100), (2, 3000), *(slow(*s) for s in ((1, 128), (5, 576), (3, 1024), (1, 8192)))],
)
def test_norm_is_within_three_ulp_of_float64(rows, width):
    x, weight = _normal(rows, width) * 3, _normal(width, seed=1, dtype=jnp.float32)
    got = kernels.rms_norm(x, weight, EPS, jnp.float32)
    want = _norm64(x, weight)
    assert _ulps(np.asarray(got), want) < 3  # two products, the mean and its root round
    rounded = kernels.rms_norm(x, weight, EPS)
    assert rounded.dtype == jnp.bfloat16
    _assert_same(rounded, got.astype(jnp.bfloat16))
    # The definition on a CPU differs in the order of its sum: by one bf16 ulp, rarely.
    defined = np.asarray(
        rms_norm(get_recipe("bf16"), EPS, False, ONE_DEVICE, x, weight).value, np.float64
    )
    np.testing.assert_allclose(np.asarray(rounded, np.float64), defined, rtol=2**-7)
    assert (np.asarray(rounded, np.float64) != defined).mean() < 0.005


def test_norm_of_float32_and_of_zeros():
    x, weight = _normal(4, 300, dtype=jnp.float32).at[2].set(0), jnp.ones(300, jnp.bfloat16)
    got = np.asarray(kernels.rms_norm(x, weight, EPS, jnp.float32))
    assert _ulps(got[[0, 1, 3]], _norm64(x, weight)[[0, 1, 3]]) < 3
    np.testing.assert_array_equal(got[2], 0)


@pytest.mark.parametrize("rows, width", [slow(1, 64), (40, 129), slow(7, 384)])
def test_activation_is_close_to_float64(rows, width):
    gate, up = _normal(rows, width) * 6, _normal(rows, width, seed=1)
    got = kernels.gated_activation(gate, up, "silu", jnp.float32)
    np.testing.assert_allclose(np.asarray(got), _silu64(gate, up), rtol=1e-6)
    rounded = kernels.gated_activation(gate, up)
    _assert_same(rounded, got.astype(jnp.bfloat16))
    defined = gated_activation(get_recipe("bf16"), "silu", False, gate, up).value
    assert (np.asarray(rounded) != np.asarray(defined)).mean() < 0.005


def test_gelu_is_close_to_float64():
    gate, up = _normal(40, 129) * 3, _normal(40, 129, seed=1)
    got = kernels.gated_activation(gate, up, "gelu_pytorch_tanh", jnp.float32)
    x, y = (np.asarray(z, np.float64) for z in (gate, up))
    want = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) * y
    np.testing.assert_allclose(np.asarray(got), want, rtol=2e-6, atol=1e-7)


def test_clamped_swiglu_is_close_to_float64():
    gate, up = _normal(40, 129) * 9, _normal(40, 129, seed=1) * 9
    gate, up = gate.at[3, 5].set(jnp.nan), up.at[4, 6].set(jnp.nan)
    got = np.asarray(kernels.gated_activation(gate, up, "clamped_swiglu", jnp.float32))
    x, y = (np.asarray(z, np.float64) for z in (gate, up))
    x, y = np.minimum(x, 7), np.clip(y, -7, 7)
    np.testing.assert_allclose(got, x / (1 + np.exp(-1.702 * x)) * (y + 1), rtol=2e-6, atol=1e-7)
    assert np.isnan(got).sum() == 2


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_activation_at_its_ends(activation):
    """Where exp overflows the gate is closed; NaN stays."""
    gate = jnp.array([[-3e38, -200.0, -0.0, 0.0, 200.0, 3e38, jnp.nan]], jnp.bfloat16)
    one = jnp.ones_like(gate)
    got = np.asarray(kernels.gated_activation(gate, one, activation, jnp.float32))[0]
    want = np.array([0, 0, 0, 0, 200, gate[0, 5], np.nan], np.float32)
    np.testing.assert_array_equal(got, want)


shapes = st.tuples(st.integers(1, 12), st.integers(1, 700))
formats = st.sampled_from([E4M3, E5M2])
quantisations = st.builds(kernels.Quantisation, formats, st.booleans())


@_few
@given(shapes, quantisations, st.integers(-30, 30))
def test_fused_norm_is_the_norm_then_the_quantiser(shape, quantisation, exponent):
    x = _normal(*shape, seed=shape[1])
    weight = _normal(shape[1], seed=2, dtype=jnp.float32) * 2.0**exponent
    y = kernels.rms_norm(x, weight, EPS)
    kept, *fused = kernels.rms_norm(x, weight, EPS, quantisation=quantisation)
    _assert_all_same(fused, kernels.quantize_rows(y, **dataclasses.asdict(quantisation)))
    _assert_same(kept, y)


@_few
@given(shapes, quantisations)
def test_fused_activation_is_the_activation_then_the_quantiser(shape, quantisation):
    gate, up = _normal(*shape, seed=shape[1]) * 4, _normal(*shape, seed=3)
    y = kernels.gated_activation(gate, up)
    kept, *fused = kernels.gated_activation(gate, up, quantisation=quantisation)
    _assert_all_same(fused, kernels.quantize_rows(y, **dataclasses.asdict(quantisation)))
    _assert_same(kept, y)


def _hard_rows(width: int, dtype) -> jnp.ndarray:
    """Amaxes from 2**-100 to 3e38; zeros of both signs; NaN and inf in one block of a row."""
    exponents = np.concatenate([np.arange(-100, 127, 9.0), [126.5, 127.8]])
    rows = np.random.default_rng(4).uniform(-1, 1, (len(exponents) + 5, width))
    rows[: len(exponents)] *= 2.0 ** exponents[:, None]
    rows[-5], rows[-4] = 0, -0.0
    rows[-3, width // 2], rows[-2, 0], rows[-1, -1] = np.nan, np.inf, -np.inf
    return jnp.asarray(rows, dtype)


@pytest.mark.parametrize(
    ("dtype", "power_of_two"),
    [(E4M3, False), slow(E4M3, True), slow(E5M2, False), (E5M2, True)],
    ids=["e4m3-float32", "e4m3-power of two", "e5m2-float32", "e5m2-power of two"],
)
def test_quantisers_give_the_librarys_bits(dtype, power_of_two):
    for width, given_as in ((300, jnp.bfloat16), (128, jnp.float32)):
        x = _hard_rows(width, given_as)
        want = _quantize(x, (1, 128), dtype, power_of_two)
        q, scale = kernels.quantize_rows(x, dtype, power_of_two)
        _assert_all_same((q, scale), (want.qvalue, want.scale.T))
        assert np.isnan(np.asarray(scale)).sum() == 3
        want = _quantize(x.T, (128, 1), dtype, power_of_two)
        q, scale = kernels.quantize_columns(x.T, dtype, power_of_two)
        _assert_all_same((q, scale), (want.qvalue.T, want.scale))


def _numpy_quantised(x, dtype, power_of_two: bool):
    """Bytes and scales (rows, blocks) of 1x128 blocks of finite normal values, block by block."""
    x = np.asarray(x, np.float32)
    largest = np.float32(jnp.finfo(dtype).max)
    q, scales = np.empty(x.shape, dtype), np.empty((len(x), -(-x.shape[1] // 128)), np.float32)
    for row, block in np.ndindex(scales.shape):
        where = row, slice(128 * block, 128 * block + 128)
        s = largest / max(abs(x[where]))
        if power_of_two:
            s = np.float32(2.0 ** (np.frexp(s)[1] - 1))
        q[where], scales[row, block] = (x[where] * s).astype(dtype), np.float32(1) / s
    return q, scales


@pytest.mark.slow
@_few
@given(st.integers(1, 300), st.integers(1, 150), formats, st.booleans())
def test_quantisers_at_any_shape(rows, width, dtype, power_of_two):
    x = _normal(rows, width, seed=rows)
    q, scale = _numpy_quantised(x, dtype, power_of_two)
    _assert_all_same(kernels.quantize_rows(x, dtype, power_of_two), (q, scale.T))
    q, scale = _numpy_quantised(x.T, dtype, power_of_two)
    _assert_all_same(kernels.quantize_columns(x, dtype, power_of_two), (q, scale.T))


def test_quantiser_is_a_nearest_neighbour_in_float64():
    """Written anew: of all FP8 values none is nearer to x * s than the chosen one."""
    x = _normal(6, 256)
    q, scale = (np.asarray(v) for v in kernels.quantize_rows(x))
    grid = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float64)
    grid = np.unique(grid[np.isfinite(grid)])
    blocks = np.asarray(x, np.float64).reshape(6, 2, 128)
    amax = np.abs(blocks).max(2)
    np.testing.assert_allclose(scale.T, amax / 448, rtol=2e-7)
    s = (np.float32(448) / amax.astype(np.float32)).astype(np.float64)
    scaled = blocks * s[:, :, None]
    nearest = np.abs(scaled[..., None] - grid).min(-1)
    chosen = np.abs(scaled - q.astype(np.float64).reshape(6, 2, 128))
    assert (chosen <= nearest + 448 * 2**-24).all()  # x * s is rounded to float32 in between


def test_rows_do_not_see_each_other():
    """Alone, in other company and at another place of a program: the same bits."""
    x, weight = _normal(41, 200), _normal(200, seed=1, dtype=jnp.float32)
    up = _normal(41, 200, seed=5)

    def everything(x, up):
        named = {"quantisation": kernels.Quantisation()}
        normed, gated = (
            kernels.rms_norm(x, weight, EPS, **named),
            kernels.gated_activation(x, up, **named),
        )
        return normed, gated, kernels.quantize_rows(x)

    whole = everything(x.at[20].set(jnp.nan), up)
    for rows in (slice(0, 1), slice(3, 20), slice(21, 41)):
        for part, full in zip(everything(x[rows], up[rows]), whole, strict=True):
            *values, scale = full
            _assert_all_same(part, [*(v[rows] for v in values), scale[:, rows]])


def test_nothing_hides_a_bad_row():
    """A norm spreads NaN over its row, an activation over one block, neither further."""
    x, weight = _normal(6, 300).at[2, 7].set(jnp.nan).at[4, 290].set(jnp.inf), jnp.ones(300)
    for one in kernels.rms_norm(x, weight, EPS, quantisation=kernels.Quantisation())[1:]:
        lost = np.isnan(np.asarray(one, np.float32))
        lost = lost.T if lost.shape[0] == 3 else lost
        assert lost[2].all() and not lost[[0, 1, 3, 5]].any()
    _, q, scale = kernels.gated_activation(x, jnp.ones_like(x), quantisation=kernels.Quantisation())
    want = np.zeros((6, 3), bool)
    want[2, 0] = want[4, 2] = True
    np.testing.assert_array_equal(np.isnan(np.asarray(scale)).T, want)
    np.testing.assert_array_equal(
        np.isnan(np.asarray(q, np.float32)), np.repeat(want, 128, 1)[:, :300]
    )


@pytest.mark.slow
def test_matmul_takes_the_quantised_rows():
    x, w = _normal(20, 256), _normal(256, 64, seed=1)
    q, scale = kernels.quantize_rows(x)
    right = quantize(w, (128, 128))
    got = products.matmul(q, right.qvalue, scale.T, right.scale)
    left = quantize(x, (1, 128))
    left, right = (np.asarray(v.dequantize(), np.float64) for v in (left, right))
    np.testing.assert_allclose(np.asarray(got), left @ right, rtol=1e-5, atol=1e-4)


def test_weight_gradient_takes_the_quantised_columns():
    """dw = x^T dy over a ragged number of tokens, with the error that E4M3 must have."""
    x, dy = _normal(600, 96), _normal(600, 64, seed=1)
    (left, left_scale), (right, right_scale) = map(kernels.quantize_columns, (x, dy))
    got = np.asarray(products.matmul(left, right.T, left_scale.T, right_scale), np.float64)
    want = np.asarray(x, np.float64).T @ np.asarray(dy, np.float64)
    difference = 1 - 2 * (got * want).sum() / ((got * got).sum() + (want * want).sum())
    assert 5.5e-4 < difference < 7.5e-4


def test_bad_arguments_are_named():
    x = jnp.ones((2, 128), jnp.bfloat16)
    with pytest.raises(ValueError, match="float16 is no format of one byte"):
        kernels.quantize_rows(x, jnp.float16)
    wide = kernels.MAX_WIDTH + 128
    with pytest.raises(ValueError, match=f"rows of {wide} are too wide"):
        kernels.rms_norm(jnp.ones((1, wide)), jnp.ones(wide), EPS)
