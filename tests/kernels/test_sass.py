"""The Triton kernels as Hopper machine code, compiled without a GPU: instructions and resources."""

import pytest

pytest.importorskip("triton", reason="needs Triton: pip install 'fp8rl_jax[dev]'")

import sass
from sass import SHARED_LIMIT, Pass, passes, variants


@pytest.fixture(autouse=True)
def _fresh_cache(monkeypatch, tmp_path):
    """jax-triton, once imported, names an empty directory for Triton's cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("variant", list(variants()), ids=str)
def test_instructions_and_resources(variant):
    machine, tile = variant.compile(), variant.tile
    assert machine.registers < 255
    assert machine.shared_bytes <= SHARED_LIMIT
    if variant.kind == "float32":
        assert not machine.matrix  # TF32 would keep 10 bits of the mantissa
        assert (
            machine.opcodes["FFMA"] >= tile.rows * tile.columns * tile.depth / 128 / tile.warps / 32
        )
        return
    assert machine.local_bytes == 0  # no spills
    assert machine.opcodes["LDL"] == machine.opcodes["STL"] == 0
    columns = tile.columns
    types = {"fp8": "E4M3", "e5m2": "E5M2"}
    expected = {
        "fp8": f"QGMMA.64x{columns}x32.F32.{types.get(variant.left)}.E4M3",
        "bf16": f"HGMMA.64x{columns}x16.F32.BF16",
    }[variant.kind]
    assert machine.matrix == {expected}  # and no HMMA, whose FP8 goes through f16
    assert machine.opcodes["LDGSTS"] > 0  # operands reach shared memory without registers
    assert machine.opcodes["PRMT"] < 16  # nothing is transposed byte by byte
    if variant.kind == "fp8":
        # One multiply-add an element brings a partial sum and its scale to the total.
        per_thread = tile.rows * tile.columns // (32 * tile.warps)
        assert machine.opcodes["FFMA"] == per_thread
    if variant.out == "bf16":
        assert "cvt.rn.bf16" in machine.ptx  # to nearest even


def test_too_few_rows_take_the_other_instruction():
    """What tiles.py forbids, so that the assertion above is known to be able to fail."""
    small = sass.Variant("fp8", sass.tiles.Tile(32, 128, 128, 4, 3), "fp8", "fp8", "fp8")
    assert not any(name.startswith("QGMMA") for name in small.compile().matrix)


@pytest.mark.parametrize("variant", list(passes()), ids=str)
def test_passes_over_memory(variant):
    machine = variant.compile()
    ptx = machine.ptx
    assert not machine.matrix
    assert machine.local_bytes == 0 and machine.opcodes["LDL"] == machine.opcodes["STL"] == 0
    assert machine.registers <= 128  # half of a multiprocessor's threads or more at a time
    loads = {name for name in machine.memory if name.startswith("LDG")}
    assert loads == {"LDG.E.128"}  # 16 bytes a thread
    assert ("cvt.rn.satfinite.e4m3x2.f32" in ptx) == (variant.quantize and variant.fp8 == "fp8")
    assert ("cvt.rn.satfinite.e5m2x2.f32" in ptx) == (variant.fp8 == "e5m2")
    if variant.kernel in ("rms_norm", "gated_silu"):
        assert "cvt.rn.bf16" in ptx  # rounded even where only its quantised form is stored
    assert ("div.rn.f32" in ptx) == (variant.quantize or variant.kernel == "gated_silu")
    assert not any(name in ptx for name in ("div.full", "div.approx", "rcp.approx", "fma.rn"))


@pytest.mark.parametrize("width", [128, 1000, 4096])
def test_one_order_of_summation(width):
    """What a norm also writes, and for how many rows, leaves its float32 sums as they are.

    Without the kernel's hint on contiguity Triton spreads the values over threads by the widest of
    the stores, and the fused norm adds in another order than the plain one.
    """
    ways = [(8192, True, False), (1, True, False), (8191, True, True), (8192, False, True)]
    first, *others = [Pass("rms_norm", width, *way).compile().sums for way in ways]
    assert len(first) == 2  # elements of a block, then blocks of a row
    assert all(other == first for other in others)
