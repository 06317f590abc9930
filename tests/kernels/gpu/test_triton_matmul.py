"""The Triton matmul kernels in Triton's interpreter, against float64 and the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200_times import PRODUCTS
from marks import slow

pytest.importorskip("triton", reason="needs Triton: pip install 'fp8rl_jax[dev]'")


from fp8rl_jax.kernels import block_matmul
from fp8rl_jax.kernels.gpu import matmul as kernels
from fp8rl_jax.kernels.gpu.tiles import FP8, FP8_ALONE, Tile, matmul_tile

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
SMALL = Tile(64, 32, 128, 4, 2)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch, interpreter):
    monkeypatch.setattr(kernels, "triton_call", interpreter.triton_call)


def _blocks(count: int) -> int:
    return -(-count // 128)


def _fp8_case(rows, columns, depth, left=E4M3, right=E4M3, by_column=False, seed=0):
    rng = np.random.default_rng(seed)
    lhs = jnp.asarray(rng.standard_normal((rows, depth))).astype(left)
    rhs = jnp.asarray(rng.standard_normal((depth, columns))).astype(right)
    lhs_scale = (rng.random((rows, _blocks(depth))) + 0.5).astype(np.float32)
    wide = columns if by_column else _blocks(columns)
    rhs_scale = (rng.random((_blocks(depth), wide)) + 0.5).astype(np.float32)
    return lhs, rhs, jnp.asarray(lhs_scale), jnp.asarray(rhs_scale)


def _float64(lhs, rhs, lhs_scale, rhs_scale):
    """The product of dequantised operands, and the sum of its terms' magnitudes."""
    left, right = (np.asarray(x, np.float64) for x in (lhs, rhs))
    depth, columns = right.shape
    left = left * np.repeat(np.asarray(lhs_scale, np.float64), 128, 1)[:, :depth]
    scale = np.repeat(np.asarray(rhs_scale, np.float64), 128, 0)[:depth]
    if scale.shape[1] != columns:
        scale = np.repeat(scale, 128, 1)[:, :columns]
    right = right * scale
    return left @ right, np.abs(left) @ np.abs(right)


_MORE = ((1, 128, 128), (64, 128, 256), (65, 40, 384), (130, 129, 136))


@pytest.mark.parametrize(
    "rows, columns, depth, by_column",
    [
        (7, 200, 200, False),
        *(slow(*shape, False) for shape in _MORE),
        slow(7, 300, 200, True),
        slow(130, 129, 136, True),
    ],
)
def test_fp8_equals_float64(rows, columns, depth, by_column):
    case = _fp8_case(rows, columns, depth, by_column=by_column)
    want, size = _float64(*case)
    got = np.asarray(kernels.matmul(*case))
    assert got.dtype == np.float32 and got.shape == want.shape
    error = np.abs(got - want) / size
    assert error.max() < 3e-7
    np.testing.assert_allclose(got, np.asarray(block_matmul(*case)), rtol=2e-5, atol=2e-5)


def test_gradients_in_e5m2_by_weights_in_e4m3():
    case = _fp8_case(70, 96, 256, left=E5M2)
    want, size = _float64(*case)
    assert (np.abs(np.asarray(kernels.matmul(*case)) - want) / size).max() < 3e-7


def test_rows_do_not_see_each_other():
    lhs, rhs, lhs_scale, rhs_scale = _fp8_case(80, 64, 384)
    whole = np.asarray(kernels.matmul(lhs, rhs, lhs_scale, rhs_scale, tile=SMALL))
    for start, stop in ((0, 1), (3, 67), (64, 80), (79, 80)):
        part = kernels.matmul(lhs[start:stop], rhs, lhs_scale[start:stop], rhs_scale, tile=SMALL)
        np.testing.assert_array_equal(np.asarray(part), whole[start:stop])


@pytest.mark.parametrize("depth", [512, slow(700)])  # 4 and 6 blocks of K, the last one ragged
def test_no_tile_changes_a_bit(depth):
    """Nor how many blocks of K a turn of the loop takes; `SMALL` takes one."""
    case = _fp8_case(100, 160, depth)
    want = np.asarray(kernels.matmul(*case, tile=SMALL))
    for tile in (*FP8, *FP8_ALONE):
        np.testing.assert_array_equal(np.asarray(kernels.matmul(*case, tile=tile)), want)


def test_turns_divide_the_blocks_of_k_in_equal_memory():
    found = [FP8_ALONE[0].dividing(blocks) for blocks in (32, 30, 9)]
    assert [(tile.turn, tile.stages) for tile in found] == [(4, 3), (2, 6), (1, 12)]
    assert SMALL.dividing(32) == SMALL


def test_long_turns_where_every_program_has_a_multiprocessor():
    chosen = [(matmul_tile("fp8", 64, columns), width) for columns, _, width, _ in PRODUCTS]
    assert all(tile.columns == width for tile, width in chosen)
    assert [tile for tile, _ in chosen] == [FP8_ALONE[1], FP8_ALONE[0], FP8[2], FP8_ALONE[0]]
    assert matmul_tile("fp8", 64, 5120) == FP8[0]  # 160 programs of 32 columns
    assert matmul_tile("fp8", 8, 1024, 100) == FP8[2]  # of experts


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_result_in_sixteen_bits_is_rounded_once(dtype):
    case = _fp8_case(20, 128, 256)
    whole, rounded = kernels.matmul(*case), kernels.matmul(*case, dtype=dtype)
    np.testing.assert_array_equal(np.asarray(rounded), np.asarray(whole.astype(dtype)))


def test_bad_values_stay_in_their_rows_and_columns():
    lhs, rhs, lhs_scale, rhs_scale = _fp8_case(40, 160, 256)
    lhs_scale = lhs_scale.at[3, 1].set(jnp.nan)
    lhs = lhs.at[5, 200].set(jnp.nan)
    rhs_scale = rhs_scale.at[1, 1].set(jnp.nan)
    got = np.isnan(np.asarray(kernels.matmul(lhs, rhs, lhs_scale, rhs_scale)))
    want = np.zeros_like(got)
    want[[3, 5]], want[:, 128:] = True, True
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "rows, columns, depth", [(33, 70, 100), *(slow(*s) for s in ((64, 64, 96), (1, 200, 129)))]
)
def test_float32_equals_float64(rows, columns, depth):
    rng = np.random.default_rng(1)
    lhs = rng.standard_normal((rows, depth)).astype(np.float32)
    rhs = rng.standard_normal((depth, columns)).astype(np.float32)
    got = np.asarray(kernels.matmul(jnp.asarray(lhs), jnp.asarray(rhs)))
    want = lhs.astype(np.float64) @ rhs.astype(np.float64)
    assert (np.abs(got - want) / (np.abs(lhs) @ np.abs(rhs))).max() < 3e-7


def test_a_batch_runs_as_a_loop():
    cases = [_fp8_case(9, 64, 128, seed=seed) for seed in range(3)]
    stacked = [jnp.stack(parts) for parts in zip(*cases, strict=True)]
    got = jax.vmap(kernels.matmul)(*stacked)
    for case, result in zip(cases, got, strict=True):
        np.testing.assert_array_equal(np.asarray(result), np.asarray(kernels.matmul(*case)))


def test_scales_belong_to_fp8():
    lhs, rhs, lhs_scale, rhs_scale = _fp8_case(8, 16, 128)
    with pytest.raises(ValueError, match="scales belong to FP8 operands"):
        kernels.matmul(lhs.astype(jnp.bfloat16), rhs, lhs_scale, rhs_scale)


@pytest.mark.parametrize(
    "rows, experts",
    [
        (8, [0, 0, 2, 3, 3]),
        (8, [1, 3, 3, 4, 4]),
        slow(64, [0, 0, 2, 3, 3]),
        slow(128, [1, 3, 3, 4, 4]),
        slow(8, [4] * 5),
    ],
    ids=str,
)
def test_grouped_equals_a_product_per_group(rows, experts):
    count, columns, depth = 4, 160, 256
    x, _, x_scale, _ = _fp8_case(len(experts) * rows, columns, depth)
    x, x_scale = x.reshape(-1, rows, depth), x_scale.reshape(-1, rows, 2)
    weights = [_fp8_case(1, columns, depth, seed=seed)[1::2] for seed in range(count)]
    w, w_scale = (jnp.stack(parts) for parts in zip(*weights, strict=True))
    got = kernels.grouped_matmul(x, w, jnp.asarray(experts, jnp.int32), x_scale, w_scale)
    assert got.shape == (len(experts), rows, columns)
    for group, expert in enumerate(experts):
        if expert == count:
            np.testing.assert_array_equal(np.asarray(got[group]), 0)
            continue
        want = kernels.matmul(x[group], w[expert], x_scale[group], w_scale[expert])
        np.testing.assert_array_equal(np.asarray(got[group]), np.asarray(want))


@pytest.mark.parametrize(
    "experts, rows",
    [([0, 0, 2, 3], 128), slow([0, 0, 2, 3], 256), slow([1, 1, 1, 4], 128), slow([4] * 4, 128)],
    ids=str,
)
def test_grouped_wgrad_equals_float64(experts, rows):
    count, columns, depth = 4, 96, 72
    rng = np.random.default_rng(3)
    groups = len(experts)
    x = jnp.asarray(rng.standard_normal((groups, rows, depth))).astype(E4M3)
    dy = jnp.asarray(rng.standard_normal((groups, rows, columns))).astype(E4M3)
    scales = [
        (rng.random((groups, rows // 128, n)) + 0.5).astype(np.float32) for n in (depth, columns)
    ]
    ids = jnp.asarray(experts, jnp.int32)
    got = np.asarray(kernels.grouped_wgrad(x, dy, ids, count, *map(jnp.asarray, scales)))
    left, right = (
        np.asarray(v, np.float64) * np.repeat(s.astype(np.float64), 128, 1)
        for v, s in zip((x, dy), scales, strict=True)
    )
    want, size = np.zeros(got.shape), np.full(got.shape, 1e-30)
    for group, expert in enumerate(experts):
        if expert < count:
            want[expert] += left[group].T @ right[group]
            size[expert] += np.abs(left[group]).T @ np.abs(right[group])
    assert (np.abs(got - want) / size).max() < 3e-7
