"""The Triton kernels as Hopper machine code, compiled without a GPU: instructions and resources."""

import dataclasses
import functools
import re

import pytest
from h200_times import INSTRUCTIONS
from marks import quick_if

pytest.importorskip("triton", reason="needs Triton: pip install 'fp8rl_jax[dev]'")

from kernel_variants import (
    AttentionVariant,
    Pass,
    Variant,
    attention_variants,
    fast_variants,
    head_variants,
    inputs_variants,
    passes,
    tiles,
    variants,
)
from sass import SHARED_LIMIT, Machine, arithmetic_of_products

_SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)


# The quick ones: of each instruction and loop the widest tile.
_PRODUCTS = {
    "fp8 64x32x128 w4 s3, turns of 4",
    "fp8 grouped wgrad 64x128x128 w4 s4",
    "float32 32x64x32 w4 s2",
}
_ATTENTION = {
    "attention decode, fp8, 128",
    "attention decode, int8, 128, pages",
    "attention join, fp8, 128",
    "attention learner, fp8, 128",
}


@pytest.fixture(autouse=True)
def _fresh_cache(monkeypatch, tmp_path):
    """jax-triton, once imported, names an empty directory for Triton's cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def _covers(variant: Variant) -> bool:
    """The widest tiles in every use; of the others the plain product and, in FP8, the grouped one,
    which has every argument of the rest."""
    widest = max(tiles.BF16 if variant.kind == "bf16" else tiles.FP8, key=lambda t: t.columns)
    return variant.tile.columns == widest.columns or variant.name in ("fp8", "fp8 grouped", "bf16")


_VARIANTS = [v for v in variants() if str(v) in _PRODUCTS or v.wgrad or _covers(v)]


@pytest.mark.parametrize("variant", quick_if(lambda v: str(v) in _PRODUCTS, _VARIANTS), ids=str)
def test_instructions_and_resources(variant):
    machine, tile = variant.compile(), variant.tile
    assert machine.registers < 255
    assert machine.shared_bytes <= SHARED_LIMIT
    if variant.kind == "float32":
        assert not machine.matrix  # TF32 would keep 10 bits of the mantissa
        products = tile.rows * tile.columns * tile.depth
        assert machine.opcodes["FFMA"] >= products / (4 * 32 * tile.warps)  # K in a loop of 4
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
    assert machine.unfenced == 0
    assert machine.opcodes["PRMT"] < 16  # nothing is transposed byte by byte
    if variant.kind == "fp8":
        # One multiply-add an element brings a partial sum and its scale to the total.
        per_thread = tile.rows * tile.columns // (32 * tile.warps)
        assert machine.opcodes["FFMA"] == per_thread * tile.turn
        assert machine.opcodes["QGMMA"] == tile.depth // 32 * tile.turn  # no second loop
        assert machine.opcodes["FADD"] == 0
        if tile in tiles.FP8_ALONE[:2]:  # what times are predicted from; a ragged K takes four more
            assert machine.loop <= (INSTRUCTIONS[columns][1] + 5) * tile.turn
            assert machine.of_loop["BAR"] == 2
    if variant.out == "bf16":
        assert "cvt.rn.bf16" in machine.ptx  # to nearest even


def test_a_missing_fence_is_seen():
    """The compiled product without its fences, which Triton 3.6 does not write."""
    (machine,) = (v.compile() for v in variants() if str(v) == "fp8 64x32x128 w4 s3, turns of 4")
    products = machine.ptx.count("wgmma.mma_async")
    lines = [line for line in machine.ptx.splitlines() if "fence.proxy.async" not in line]
    assert dataclasses.replace(machine, ptx="\n".join(lines)).unfenced == products > 0


@pytest.mark.slow
def test_too_few_rows_take_the_other_instruction():
    """What tiles.py forbids, so that the assertion above is known to be able to fail."""
    small = Variant("fp8", tiles.Tile(32, 128, 128, 4, 3), "fp8", "fp8", "fp8")
    assert not any(name.startswith("QGMMA") for name in small.compile().matrix)


@pytest.mark.parametrize(
    "variant",
    quick_if(lambda v: v.width == 4096 and v.fp8 != "e5m2" and v.quantize, passes()),
    ids=str,
)
def test_passes_over_memory(variant):
    machine = variant.compile()
    ptx = machine.ptx
    assert not machine.matrix
    assert machine.local_bytes == 0 and machine.opcodes["LDL"] == machine.opcodes["STL"] == 0
    assert machine.registers <= 128  # half of a multiprocessor's threads or more at a time
    loads = {name for name in machine.memory if name.startswith("LDG")}
    # 16 bytes a thread; and the number of the layer whose gain it is
    assert loads == {"LDG.E.128"} | ({"LDG.E"} if variant.kernel == "rms_norm" else set())
    assert ("cvt.rn.satfinite.e4m3x2.f32" in ptx) == (variant.quantize and variant.fp8 == "fp8")
    assert ("cvt.rn.satfinite.e5m2x2.f32" in ptx) == (variant.fp8 == "e5m2")
    if variant.kernel in ("rms_norm", "gated_activation"):
        assert "cvt.rn.bf16" in ptx  # rounded even where only its quantised form is stored
    assert ("div.rn.f32" in ptx) == (variant.quantize or variant.kernel == "gated_activation")
    assert not any(name in ptx for name in ("div.full", "div.approx", "rcp.approx", "fma.rn"))


@pytest.mark.parametrize(
    "variant", quick_if(lambda v: v.biased and not v.partial, inputs_variants()), ids=str
)
def test_inputs_of_attention(variant):
    """One step or all of them: no multiply-add and exact division, whose bits the learner's single
    steps share; 16 bytes a thread; E4M3 and bf16 by the hardware's conversions."""
    machine, ptx = variant.compile(), variant.compile().ptx
    cached = variant.step == "cache"
    assert not machine.matrix
    assert machine.local_bytes == 0 and machine.opcodes["LDL"] == machine.opcodes["STL"] == 0
    assert machine.registers <= 80 and "LDG.E.128" in machine.memory
    assert not any(name in ptx for name in ("div.full", "div.approx", "rcp.approx", "fma.rn"))
    quantises = variant.step == "quantise" or (cached and variant.keys != "bf16")
    assert ("div.rn.f32" in ptx) == quantises
    assert ("cvt.rn.satfinite.e4m3x2.f32" in ptx) == (quantises and variant.keys == "fp8")
    assert ("cvt.rn.bf16x2.f32" in ptx) == (variant.step != "quantise")
    assert ("rsqrt.approx" in ptx) == (cached or variant.step == "norm")


@pytest.mark.slow
@pytest.mark.parametrize("width", [1000, *map(_SLOW, (128, 4096))])
def test_one_order_of_summation(width):
    """What a norm also writes, and for how many rows, leaves its float32 sums as they are.

    Without the kernel's hint on contiguity Triton spreads the values over threads by the widest of
    the stores, and the fused norm adds in another order than the plain one.
    """
    ways = [(8192, False), (1, False), (8191, True)]
    first, *others = [Pass("rms_norm", width, *way).compile().sums for way in ways]
    assert len(first) == 2  # elements of a block, then blocks of a row
    assert all(other == first for other in others)


@pytest.mark.parametrize(
    "variant",
    quick_if(lambda v: str(v) in ("head 128x128x64 w8 s4", "head combine w4"), head_variants()),
    ids=str,
)
def test_output_head(variant):
    machine, tile = variant.compile(), variant.tile
    assert machine.registers < 255
    assert machine.shared_bytes <= SHARED_LIMIT
    assert machine.local_bytes == 0
    assert machine.opcodes["LDL"] == machine.opcodes["STL"] == 0
    if tile is None:
        assert not machine.matrix
        return
    if variant.kind == "float32":
        assert not machine.matrix  # TF32 would keep 10 bits of the mantissa
        assert machine.opcodes["FFMA"] >= tile.rows * tile.columns * tile.depth / 32 / tile.warps
        return
    assert machine.matrix == {f"HGMMA.64x{tile.columns}x16.F32.BF16"}
    assert machine.opcodes["LDGSTS"] > 0
    assert machine.unfenced == 0
    assert machine.opcodes["FFMA"] == 0  # a scaled logit is rounded before anything is taken off


@pytest.mark.slow
def test_logits_of_the_product_and_of_memory_take_the_same_arithmetic():
    """Three sums a row of integers, which have no order; no addition is left out, none fused."""
    arithmetic = []
    for name, elements in (("head", 64), ("head of logits", 8)):  # of a thread
        machine = next(v for v in head_variants() if v.name == name).compile()
        combiners = re.findall(r'"tt.reduce".*?= (arith\.\w+)', machine.ttir, re.DOTALL)
        assert sorted(combiners) == ["arith.addi"] * 3 + ["arith.maximumf"]
        assert machine.opcodes["FADD"] >= 6 * elements and machine.opcodes["FFMA"] == 0
        arithmetic.append(set(re.findall(r"\b(?:add|sub|mul|fma|max|ex2)[.\w]*f32", machine.ptx)))
    assert arithmetic[0] == arithmetic[1]
    assert "max.NaN.f32" in arithmetic[0]


@functools.cache
def _attention(*way) -> Machine:
    return AttentionVariant(*way).compile()


# Every variant but for 64 features in bf16 and float32, and 96 and 128 of one of the two: FP8 has
# these widths, and 96 is the one that is padded.
_LESS = {(64, "bf16"), (64, "float32"), (96, "bf16"), (128, "float32")}
_PLAIN = {
    f"attention {use}, {keys}{' by float32' * (keys == 'float32')}, {width}"
    for use in ("decode", "learner")
    for width, keys in _LESS
}


@pytest.mark.parametrize(
    "variant",
    quick_if(
        lambda v: str(v) in _ATTENTION, [v for v in attention_variants() if str(v) not in _PLAIN]
    ),
    ids=str,
)
def test_attention(variant):
    machine = _attention(*dataclasses.astuple(variant))
    assert machine.registers < 255 or variant.rope  # a query of 576 features takes most of them
    assert machine.shared_bytes <= SHARED_LIMIT
    assert machine.of_loop["LDL"] == machine.of_loop["STL"] == 0
    # The assembler puts up to four words aside where one more program then fits beside the others;
    # latents in pages have no register left for the second address, float32 in Triton 3.6 for more,
    # and a learner's 256 features for the rounding of the result, behind the loop.
    most = 40 if variant.queries == "float32" else 24 if variant.paged and variant.rope else 16
    if variant.use == "learner" and variant.keys == "bf16" and variant.width == 256:
        most = 32
    if bound := variant.most_registers:
        assert machine.registers <= bound  # so that another warp shares a scheduler
        most = 120
    assert machine.local_bytes <= most and machine.opcodes["LDL"] <= most - 8
    assert "ex2.approx" in machine.ptx and "div.full" not in machine.ptx
    assert not re.search(r"\b(atom|red)\.", machine.ptx)
    if variant.use == "join":
        assert not machine.matrix
        return
    assert machine.opcodes["LDGSTS"] > 0  # keys and values reach shared memory without registers
    assert "cp.async.cg" in machine.ptx  # 16 bytes at a time
    assert machine.opcodes["F2F"] == 0
    if variant.queries == "float32":
        assert not machine.matrix  # TF32 would keep 10 bits of the mantissa
        return
    kinds = {variant.keys, variant.values or variant.keys}
    pairs = kinds & {"fp8", "int8"}
    matrix = {"HMMA.16816.F32.BF16"} if variant.rope or "bf16" in kinds else set()
    assert machine.matrix == matrix | ({"HMMA.16816.F32"} if pairs else set())
    # Two E4M3 an instruction, at most one permutation for them (INT8: one for two), and no loads of
    # single bytes.
    if "int8" not in kinds:
        assert machine.opcodes["PRMT"] <= (machine.opcodes["F2FP"] if pairs else 0)
    assert not any(name.startswith(("LDG.E.U8", "LDG.E.S8")) for name in machine.memory)
    values = variant.values or variant.keys
    assert ("cvt.rn.bf16" if values == "bf16" else "cvt.rn.f16") in machine.ptx  # weights, to even


@pytest.mark.parametrize(
    "keys, queries, width",
    [
        ("fp8", "bf16", 128),
        *(_SLOW("fp8", "bf16", width) for width in (64, 96, 256)),
        _SLOW("fp8", "fp8", 128),
        *(_SLOW("bf16", "bf16", width) for width in (128, 256)),
        *(_SLOW("float32", "float32", width) for width in (96, 256)),
    ],
)
def test_decode_and_learner_add_in_one_order(keys, queries, width):
    """Products, sums and the rest are the same whether a program takes one split or all."""
    decode, learner = (
        _attention(u, keys, width, queries, 2, 0, 4096) for u in ("decode", "learner")
    )
    _assert_same_order(decode, learner, keys, queries)


@pytest.mark.slow
@pytest.mark.parametrize("keys", ["int8", "bf16"])
def test_windows_keep_the_order(keys):
    """Of one split and of all, and of pages: the window's comparisons are integers'."""
    rest = (keys, 128, "bf16", 2, 0, 4096)
    decode, paged, learner = (
        _attention(use, *rest, pages, "", True)
        for use, pages in (("decode", False), ("decode", True), ("learner", False))
    )
    for other in (paged, learner):
        _assert_same_order(decode, other, keys, "bf16")


def _assert_same_order(decode, learner, keys, queries):
    assert len(decode.dots) == (4 if keys in ("fp8", "int8") else 2) and len(decode.sums) == 2
    assert decode.dots == learner.dots and decode.sums == learner.sums
    if queries == "bf16":  # FP8: LLVM writes -inf as 1 * -inf in one of the two
        found = arithmetic_of_products(decode.ptx)
        assert found == arithmetic_of_products(learner.ptx)
        results = sum(n for (name, _), n in found.items() if name.startswith("mma"))
        assert results == 4 * decode.opcodes["HMMA"]


@pytest.mark.parametrize("use", ["decode", _SLOW("learner")])
@pytest.mark.parametrize(
    "keys, width, rope", [("fp8", 128, 0), _SLOW("bf16", 128, 0), _SLOW("fp8", 512, 64)]
)
def test_pages_change_no_arithmetic(use, keys, width, rope):
    """Nor how many keys are on their way: shared memory holds as many stages of them."""
    rest = (use, keys, width, "bf16", 2, rope, 4096)
    one, other = _attention(*rest), _attention(*rest, True)
    assert one.dots == other.dots and one.sums == other.sums
    assert arithmetic_of_products(one.ptx) == arithmetic_of_products(other.ptx)
    assert one.shared_bytes == other.shared_bytes
    assert one.opcodes["LDGSTS"] == other.opcodes["LDGSTS"]


def test_pages_are_counted_in_64_bits():
    """A pool of all layers holds more than 2**31 numbers: its page's number is widened first."""
    ttir = _attention("decode", "fp8", 128, "bf16", 2, 0, 4096, True).ttir
    assert re.search(r"arith\.extsi %\w+ : i32 to i64.*\n.*arith\.muli %\w+, %c512_i64 : i64", ttir)
    starts = re.findall(r"tt\.addptr %\w+, %\w+ : !tt\.ptr<f8E4M3FN>, (i\d+)", ttir)
    assert starts.count("i64") == 2  # keys and values; the head's own begin in 32 bits


@pytest.mark.parametrize(
    "use, slots", [("learner", 1003), _SLOW("learner", 300), _SLOW("decode", 1003)]
)
def test_lengths_change_no_arithmetic(use, slots):
    rest = ("fp8", 128, "bf16", 2, 0)
    one, other = _attention("decode", *rest, 4096), _attention(use, *rest, slots)
    assert one.dots == other.dots and one.sums == other.sums
    assert arithmetic_of_products(one.ptx) == arithmetic_of_products(other.ptx)


def _less(variant) -> bool:
    """FP8 queries, a factor of a tile, but for the gradient of the keys; gradients with first slots
    but no gaps; float32 of 128 features, where 256 have the same tiles."""
    if variant.q_scaled:
        return variant.use != "dk dv"
    if variant.bounded and not variant.gapped:
        return variant.use != "forward"
    return variant.kind == "float32" and variant.width == 128 and variant.use != "dk dv"


@pytest.mark.parametrize(
    "variant",
    quick_if(
        lambda v: v.width == 128 and v.use == "forward" and v.gapped,
        [variant for variant in fast_variants() if not _less(variant)],
    ),
    ids=str,
)
def test_fast_attention(variant):
    machine, tile = variant.compile(), variant.tile
    assert machine.shared_bytes <= SHARED_LIMIT
    assert machine.registers <= 255
    # Gradients of 256 features take more words than there are registers; others none, or a few.
    spilled = {"float32": 216, "bf16": 48}[variant.kind] if variant.width == 256 else 16
    assert machine.local_bytes <= spilled
    assert "ex2.approx" in machine.ptx
    assert not re.search(r"\b(atom|red)\.", machine.ptx)
    if variant.kind == "float32":
        assert not machine.matrix  # TF32 would keep 10 bits of the mantissa
        return
    assert machine.matrix and all(name.startswith("HGMMA.64x") for name in machine.matrix)
    if variant.width <= 128:  # wider ones are split over two groups of warps
        across = tile.rows if variant.use == "dk dv" else tile.keys
        assert f"HGMMA.64x{across}x16.F32.BF16" in machine.matrix
    assert machine.opcodes["LDGSTS"] > 0  # operands reach shared memory without registers
    assert machine.unfenced == 0
    assert machine.opcodes["PRMT"] <= 1
    assert "cvt.rn.bf16" in machine.ptx  # weights and ds, to nearest even
