"""The Mosaic products of few rows: lowered for CUDA, as machine code for an H200, and in JAX's
interpreter.

None of it needs a GPU. The interpreter came with JAX 0.11.
"""

import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200_times import PRODUCTS
from hopper import lower, products
from jax import export
from jax.experimental.pallas import mosaic_gpu as plgpu
from marks import slow

from fp8rl_jax.kernels import block_matmul
from fp8rl_jax.kernels.gpu.mosaic_decode import TILES, layer_matmuls, supports, tile_for

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
LAYERS = 3

needs_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"),
    reason=f"JAX {jax.__version__} has no public interpreter of Mosaic GPU; 0.11 has",
)


def _shapes(rows, depth, columns, dtype=jnp.bfloat16, residual=False):
    """Arguments of `layer_matmuls`, without dtype: rows, stacks, layer, their scales, residual."""
    blocks = depth // 128
    return (
        jax.ShapeDtypeStruct((rows, depth), E4M3),
        [jax.ShapeDtypeStruct((LAYERS, depth, n), E4M3) for n in columns],
        jax.ShapeDtypeStruct((), jnp.int32),
        jax.ShapeDtypeStruct((rows, blocks), jnp.float32),
        [jax.ShapeDtypeStruct((LAYERS, blocks, n // 128), jnp.float32) for n in columns],
        jax.ShapeDtypeStruct((rows, columns[0]), dtype) if residual else None,
    )


def _run(x, stacks, layer, x_scale, scales, residual, dtype=jnp.bfloat16, tile=None):
    return layer_matmuls(x, stacks, layer, x_scale, scales, dtype, residual, tile)


@pytest.mark.parametrize(
    "rows, depth, columns, residual",
    [
        (64, 4096, (4096, 1024, 1024), False),
        slow(1, 128, (128,), True),
        slow(200, 3840, (5120,), False),
    ],
)
def test_lowers_to_one_kernel_without_a_copy_of_a_layer(rows, depth, columns, residual):
    text = lower(_run, *_shapes(rows, depth, columns, residual=residual))
    assert products(text) == {"mosaic_gpu_v2": 1}
    assert "dynamic_slice" not in text and f"tensor<{depth}x{columns[0]}xf8" not in text
    for n in columns:
        assert f"tensor<{-(-rows // 8) * 8}x{n}xbf16>" in text


def test_a_program_can_be_carried():
    """Compiled here, read back elsewhere: with the custom call that JAX's export does not know."""
    pytest.importorskip("flatbuffers", reason="needs flatbuffers: pip install flatbuffers")
    shapes = _shapes(64, 512, (256,))
    known = [export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    kept = export.export(jax.jit(_run), platforms=["cuda"], disabled_checks=known)(*shapes)
    again = export.deserialize(bytearray(kept.serialize()))
    assert again.platforms == ("cuda",) and again.in_avals[0].shape == (64, 512)
    assert products(again.mlir_module()) == {"mosaic_gpu_v2": 1}


@pytest.mark.parametrize(
    "rows, depth, columns, left, right, result, wanted",
    [
        (64, 4096, (4096, 1024, 1024), E4M3, E4M3, jnp.bfloat16, True),
        (1, 128, (128,), E4M3, E4M3, jnp.float32, True),
        (255, 640, (128,), E4M3, E4M3, jnp.float32, True),
        (256, 640, (128,), E4M3, E4M3, jnp.float32, False),
        (0, 640, (128,), E4M3, E4M3, jnp.float32, False),
        (64, 257 * 128, (128,), E4M3, E4M3, jnp.float32, False),
        (64, 200, (128,), E4M3, E4M3, jnp.float32, False),
        (64, 128, (128, 200), E4M3, E4M3, jnp.float32, False),
        (64, 128, (128,), E5M2, E4M3, jnp.float32, False),
        (64, 128, (128,), E4M3, E4M3, jnp.float16, False),
        (64, 128, (128,), jnp.bfloat16, jnp.bfloat16, jnp.float32, False),
    ],
)
def test_supports(rows, depth, columns, left, right, result, wanted):
    assert supports(rows, depth, columns, (left, right, result)) is wanted


def test_tiles_of_qwen3_8b():
    """One round of programs for each: of q, k and v, o, gate and up, down."""
    together = (4096, 1024, 1024), (4096,), (12_288, 12_288), (4096,)
    for columns, (total, _, _, width) in zip(together, PRODUCTS, strict=True):
        assert sum(columns) == total and tile_for(64, columns).columns == width
        assert total // width <= 132
    assert tile_for(64, (1280, 128)).columns <= 128  # 192 does not divide them


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("blocks", [1, 32, 256])
def test_registers_and_memory_there_are(tile, dtype, blocks):
    """Shared memory: what `test_instructions_and_resources` finds compiled, by arithmetic."""
    assert tile.consumer_registers % 8 == 0
    assert 40 + tile.consumers * tile.consumer_registers <= 512
    operands = tile.stages(blocks, dtype) * (64 + tile.columns) * 128
    result = 64 * tile.columns * jnp.dtype(dtype).itemsize
    scales = 4 * blocks * (64 + tile.consumers)
    assert operands + result + scales <= 232_448 - 1024
    assert tile.stages(blocks, dtype) > 2  # two products run while a block is copied


# In the interpreter.


def _case(rows, depth, columns, dtype=jnp.bfloat16, residual=False, seed=0):
    rng = np.random.default_rng(seed)
    x, stacks, _, x_scale, scales, added = _shapes(rows, depth, columns, dtype, residual)

    def values(shape):
        return jnp.asarray(rng.standard_normal(shape.shape), shape.dtype)

    def positive(shape):
        return jnp.asarray(rng.random(shape.shape) + 0.5, jnp.float32)

    return (
        values(x),
        [values(w) for w in stacks],
        jnp.int32(1),
        positive(x_scale),
        [positive(s) for s in scales],
        None if added is None else values(added),
    )


def _interpret(*case, **keywords):
    """What the interpreter makes of the kernel, or an error where it sees a race."""
    from jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks import get_races

    parameters = plgpu.InterpretGPUParams(detect_races=True)
    with plgpu.force_gpu_interpret_mode(parameters):
        got = [np.asarray(y) for y in _run(*case, **keywords)]
    if get_races().races_found:
        raise RuntimeError("race")
    return got


@needs_interpreter
@pytest.mark.parametrize(
    "tile, rows, depth, columns",
    [
        (TILES[0], 7, 2304, (128,)),  # 18 blocks: stages go round, and a last turn of two
        slow(TILES[0], 64, 128, (256,)),
        slow(TILES[1], 65, 768, (128, 256, 128)),
        slow(TILES[2], 9, 1280, (128, 256)),
        slow(TILES[3], 70, 1024, (384,)),
    ],
    ids=str,
)
def test_equals_the_reference(tile, rows, depth, columns):
    case = _case(rows, depth, columns)
    x, stacks, layer, x_scale, scales, _ = case
    found = _interpret(*case, dtype=jnp.float32, tile=tile)
    for got, w, scale in zip(found, stacks, scales, strict=True):
        want = np.asarray(block_matmul(x, w[layer], x_scale, scale[layer]))
        assert got.dtype == np.float32 and got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=0, atol=3e-7 * np.abs(want).max())


@pytest.mark.slow
@needs_interpreter
def test_no_tile_and_no_place_changes_a_bit():
    """Nor what else is in the launch; the residual is added to the rounded product."""
    case = _case(64, 640, (384, 384))
    x, stacks, layer, x_scale, scales, _ = case
    whole = _interpret(*case, tile=TILES[3])
    one = x[3:12], stacks[1:], layer, x_scale[3:12], scales[1:]
    for tile in TILES[:3]:
        (part,) = _interpret(*one, None, tile=tile)
        np.testing.assert_array_equal(part, whole[1][3:12])
    before = jnp.asarray(np.random.default_rng(1).standard_normal((9, 384)), jnp.bfloat16)
    (total,) = _interpret(*one, before, tile=TILES[0])
    want = before.astype(jnp.float32) + whole[1][3:12].astype(jnp.float32)
    np.testing.assert_array_equal(total, np.asarray(want.astype(jnp.bfloat16)))


@needs_interpreter
def test_a_planted_race_is_seen(monkeypatch):
    """The copy engine stores a result that it may not see yet."""
    monkeypatch.setattr(plgpu, "commit_smem", lambda: None)
    with pytest.raises(RuntimeError, match="race"):
        _interpret(*_case(8, 128, (128,)), tile=TILES[0])


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
@pytest.mark.parametrize("number", range(8))
def test_instructions_and_resources(machines, number):
    from mosaic_machine import DECODE
    from sass import SHARED_LIMIT

    variant = DECODE[number]
    machine, tile = machines[variant], variant.tile
    assert machine.matrix == {f"QGMMA.64x{tile.width}x32.F32.E4M3.E4M3"}
    blocks = 4 + variant.depth // 128 % 4  # of a turn, and of the last one
    assert machine.opcodes["QGMMA"] == 4 * blocks
    # One multiply-add an element and block brings a partial sum and its scale to the total.
    assert machine.opcodes["FFMA"] == blocks * 64 * tile.width // 128
    assert machine.opcodes["FMUL"] == 2 * blocks  # a row's scale by the weight's
    assert machine.opcodes["FADD"] == 0
    # Products of two blocks run at a time, and no warp waits for another within a turn.
    waits = re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d);", machine.ptx)
    turns = 1 + (blocks > 4)
    assert sorted(waits) == ["0"] * turns + ["1"] * (blocks - turns)
    assert machine.loop < 4 * (75 if tile.width == 32 else 115)
    assert machine.opcodes["UTMALDG"] > 0 and machine.opcodes["UTMASTG"] == len(variant.columns)
    assert machine.registers <= tile.consumer_registers
    assert machine.local_bytes == machine.opcodes["LDL"] == machine.opcodes["STL"] == 0
    assert machine.shared_bytes <= SHARED_LIMIT
    if variant.dtype == "bfloat16":
        assert "cvt.rn.bf16" in machine.ptx  # to nearest even
    # float32 has more than twice bf16's bits and two: a sum in bf16 is the sum in float32, rounded.
    assert ("add.bf16x2" in machine.ptx) == variant.residual
