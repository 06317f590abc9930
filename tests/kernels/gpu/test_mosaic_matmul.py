"""The Mosaic matmul: lowered for CUDA, as machine code for an H200, and in JAX's interpreter.

None of it needs a GPU. The interpreter came with JAX 0.11.
"""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper import lower, products
from jax.experimental.pallas import mosaic_gpu as plgpu

from fp8rl_jax.kernels import block_matmul
from fp8rl_jax.kernels.gpu import mosaic_matmul
from fp8rl_jax.kernels.gpu.mosaic_matmul import TILES, matmul, supports, tile_for

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
HEIGHTS = [str(tile.rows) for tile in TILES]
TALL, SHORT = TILES[1], TILES[0]

needs_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"),
    reason=f"JAX {jax.__version__} has no public interpreter of Mosaic GPU; 0.11 has",
)


def _shapes(rows, columns, depth, lead=(), by_column=False):
    wide = columns if by_column else columns // 128
    shapes = (rows, depth), (depth, columns), (rows, depth // 128), (depth // 128, wide)
    dtypes = E4M3, E4M3, jnp.float32, jnp.float32
    pairs = zip(shapes, dtypes, strict=True)
    return [jax.ShapeDtypeStruct((*lead, *shape), dtype) for shape, dtype in pairs]


@pytest.mark.parametrize("tile", TILES, ids=HEIGHTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "rows, columns, depth", [(4096, 4096, 4096), (1000, 512, 1024), (257, 128, 128)]
)
def test_lowers_to_one_kernel(rows, columns, depth, dtype, tile):
    operands = _shapes(rows, columns, depth)
    text = lower(lambda *a: matmul(*a, dtype=jnp.dtype(dtype), tile=tile), *operands)
    assert products(text) == {"mosaic_gpu_v2": 1}
    result = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    assert f"-> (tensor<{rows}x{columns}x{result}>" in text


def test_a_batch_is_one_kernel_in_a_loop():
    text = lower(jax.vmap(matmul), *_shapes(256, 128, 256, lead=(3,)))
    assert products(text) == {"mosaic_gpu_v2": 1} and "stablehlo.while" in text


@pytest.mark.parametrize(
    "rows, columns, depth, left, right, result, wanted",
    [
        (4096, 4096, 4096, E4M3, E4M3, jnp.float32, True),
        (257, 128, 128, E4M3, E4M3, jnp.bfloat16, True),
        (255, 128, 128, E4M3, E4M3, jnp.bfloat16, False),
        (512, 200, 128, E4M3, E4M3, jnp.bfloat16, False),
        (512, 128, 200, E4M3, E4M3, jnp.bfloat16, False),
        (512, 128, 0, E4M3, E4M3, jnp.bfloat16, False),
        (512, 128, 128, E5M2, E4M3, jnp.bfloat16, False),
        (512, 128, 128, jnp.bfloat16, jnp.bfloat16, jnp.bfloat16, False),
        (512, 128, 128, E4M3, E4M3, jnp.float16, False),
    ],
)
def test_supports(rows, columns, depth, left, right, result, wanted):
    assert supports(rows, depth, columns, (left, right, result)) is wanted
    lhs, rhs, *scales = _shapes(rows, columns, depth)
    lhs, rhs = jax.ShapeDtypeStruct(lhs.shape, left), jax.ShapeDtypeStruct(rhs.shape, right)
    if not wanted:
        with pytest.raises(AssertionError):
            jax.eval_shape(lambda *a: matmul(*a, dtype=result), lhs, rhs, *scales)


def test_scales_of_another_shape_or_type_are_refused():
    lhs, rhs, lhs_scale, rhs_scale = _shapes(256, 256, 384)
    for_others = jax.ShapeDtypeStruct((3, 128), jnp.float32)
    sixteen = jax.ShapeDtypeStruct(lhs_scale.shape, jnp.bfloat16)
    for scales in ((lhs_scale, for_others), (sixteen, rhs_scale)):
        with pytest.raises(AssertionError):
            jax.eval_shape(matmul, lhs, rhs, *scales)


def test_tile_with_the_fewest_idle_programs():
    assert tile_for(4096, 4096) == SHORT  # 8 rounds of 128 rows, not 6 of 192
    assert tile_for(192 * 132, 128) == TALL  # 1 round of 192 rows, not 2 of 128
    assert tile_for(384 * 64, 128 * 132) == TALL  # equally long
    assert tile_for(384 * 64, 128 * 132, by_column=True) == SHORT


# In the interpreter.


def _case(rows, columns, depth, seed=0, by_column=False):
    rng = np.random.default_rng(seed)
    lhs, rhs, lhs_scale, rhs_scale = _shapes(rows, columns, depth, by_column=by_column)
    values = [rng.standard_normal(x.shape) for x in (lhs, rhs)]
    scales = [rng.random(x.shape) + 0.5 for x in (lhs_scale, rhs_scale)]
    return (
        *(jnp.asarray(x).astype(E4M3) for x in values),
        *(jnp.asarray(x, jnp.float32) for x in scales),
    )


def _interpret(*case, programs=1, **keywords):
    """What the interpreter makes of the kernel, or an error where it sees a race."""
    from jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks import get_races

    parameters = plgpu.InterpretGPUParams(detect_races=True)
    with pytest.MonkeyPatch.context() as patch, plgpu.force_gpu_interpret_mode(parameters):
        patch.setattr(mosaic_matmul, "MULTIPROCESSORS", programs)
        got = np.asarray(matmul(*case, **keywords))
    if get_races().races_found:
        raise RuntimeError("race")
    return got


@needs_interpreter
@pytest.mark.parametrize("tile", TILES, ids=HEIGHTS)
@pytest.mark.parametrize(
    "rows, columns, depth, programs",
    [
        (256, 128, 128, 132),  # one step: fewer than there are stages
        (300, 256, 384, 1),  # ragged; one program takes every tile, and stages go round
        (260, 256, 896, 2),
    ],
)
def test_equals_float64(rows, columns, depth, programs, tile):
    case = _case(rows, columns, depth)
    left, right, left_scale, right_scale = (np.asarray(x, np.float64) for x in case)
    left = left * np.repeat(left_scale, 128, 1)
    right = right * np.repeat(np.repeat(right_scale, 128, 0), 128, 1)
    got = _interpret(*case, programs=programs, tile=tile)
    assert got.dtype == np.float32 and got.shape == (rows, columns)
    error = np.abs(got - left @ right) / (np.abs(left) @ np.abs(right))
    assert error.max() < 3e-7
    np.testing.assert_allclose(got, np.asarray(block_matmul(*case)), rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@needs_interpreter
def test_a_scale_per_column():
    """As the gradient of a weight has it; with scales of whole blocks it is the other product."""
    lhs, rhs, lhs_scale, rhs_scale = _case(300, 256, 384, by_column=True)
    got = _interpret(lhs, rhs, lhs_scale, rhs_scale, programs=2)
    want = np.asarray(block_matmul(lhs, rhs, lhs_scale, rhs_scale))
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    assert np.abs(got - want).max() < 3e-7 * np.abs(want).max()


@needs_interpreter
def test_rows_do_not_see_each_other():
    """Bitwise, whatever the tile and a row's place in it."""
    lhs, rhs, lhs_scale, rhs_scale = _case(400, 128, 256)
    whole = _interpret(lhs, rhs, lhs_scale, rhs_scale, programs=2, tile=TALL)
    for tile, start, stop in ((SHORT, 0, 256), (TALL, 3, 290), (SHORT, 143, 400)):
        part = lhs[start:stop], rhs, lhs_scale[start:stop], rhs_scale
        np.testing.assert_array_equal(_interpret(*part, tile=tile), whole[start:stop])


@needs_interpreter
def test_bf16_is_the_float32_result_rounded_once():
    case = _case(256, 128, 256)
    whole, rounded = _interpret(*case), _interpret(*case, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(rounded, whole.astype(jnp.bfloat16))


@needs_interpreter
def test_bad_values_stay_in_their_rows_and_columns():
    lhs, rhs, lhs_scale, rhs_scale = _case(256, 256, 256)
    lhs = lhs.at[200, 7].set(jnp.nan)
    lhs_scale = lhs_scale.at[3, 1].set(jnp.nan)
    rhs_scale = rhs_scale.at[1, 1].set(jnp.nan)
    got = np.isnan(_interpret(lhs, rhs, lhs_scale, rhs_scale, tile=TALL))
    want = np.zeros_like(got)
    want[[3, 200]], want[:, 128:] = True, True
    np.testing.assert_array_equal(got, want)


@needs_interpreter
def test_a_planted_race_is_seen(monkeypatch):
    """A store's buffer is filled again while the copy engine reads it."""
    monkeypatch.setattr(plgpu, "wait_smem_to_gmem", lambda *_, **__: None)
    with pytest.raises(RuntimeError, match="race"):
        _interpret(*_case(256, 128, 128))


# As machine code.


@pytest.fixture(scope="module")
def machines():
    pytest.importorskip("triton", reason="needs Triton's nvdisasm: pip install triton")
    for package in ("jax_cuda13_plugin", "jax_plugins", "jax_plugins.xla_cuda13"):
        if not importlib.util.find_spec(package):
            pytest.skip("needs XLA's compiler: pip install jax-cuda13-plugin jax-cuda13-pjrt")
    from mosaic_machine import compile_all

    return compile_all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tile", TILES, ids=HEIGHTS)
def test_instructions_and_resources(machines, tile, dtype):
    from mosaic_machine import Variant
    from sass import SHARED_LIMIT

    machine = machines[Variant(tile, dtype)]
    assert machine.matrix == {"QGMMA.64x128x32.F32.E4M3.E4M3"}  # and no HMMA
    assert machine.opcodes["QGMMA"] == 128 // 32  # the loop over K is not unrolled
    assert machine.opcodes["UTMALDG"] > 0 and machine.opcodes["UTMASTG"] > 0  # TMA both ways
    assert machine.opcodes["USETMAXREG"] == 2
    assert machine.registers <= tile.consumer_registers
    assert machine.local_bytes == machine.opcodes["LDL"] == machine.opcodes["STL"] == 0
    assert machine.shared_bytes <= SHARED_LIMIT
    # One multiply-add an element brings a partial sum and its scale to the total, as in Triton's.
    assert machine.opcodes["FFMA"] == 64 * 128 // 128
    assert machine.opcodes["FADD"] == 0
    if dtype == "bfloat16":
        assert "cvt.rn.bf16" in machine.ptx  # to nearest even


@pytest.mark.slow
def test_instructions_with_a_scale_per_column(machines):
    """As Triton's: a partial sum by its row's scale, then one multiply-add with its column's."""
    from mosaic_machine import Variant
    from sass import SHARED_LIMIT

    machine = machines[Variant(SHORT, "float32", by_column=True)]
    assert machine.matrix == {"QGMMA.64x128x32.F32.E4M3.E4M3"} and machine.opcodes["QGMMA"] == 4
    assert machine.opcodes["FFMA"] == machine.opcodes["FMUL"] == 64 * 128 // 128
    assert machine.opcodes["FADD"] == 0
    assert machine.registers <= SHORT.consumer_registers and machine.shared_bytes <= SHARED_LIMIT
    assert machine.local_bytes == machine.opcodes["LDL"] == machine.opcodes["STL"] == 0


@pytest.mark.parametrize("tile", TILES, ids=HEIGHTS)
def test_warpgroups_share_the_registers_there_are(tile):
    """Of 65,536, and 512 for one thread of each warpgroup."""
    assert tile.producer_registers % 8 == tile.consumer_registers % 8 == 0
    assert tile.producer_registers + tile.consumers * tile.consumer_registers <= 512
