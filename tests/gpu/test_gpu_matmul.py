"""Products by the Triton kernel: against float64, tiles and rows against each other, speed.

Few rows take other tiles than many do: that tiles give equal bits carries a result over to the
tiles that are not compared with float64.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
import subprocess
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_checks import (
    BOUNDS,
    assert_bitwise_equal,
    assert_close,
    assert_finite,
    float64_product,
    print_kernels,
    reports,
    some,
)

from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.bench import kernel_shapes, kernel_times, kernels
from fp8rl_jax.bench.kernel_times import DTYPES, Source, blocks
from fp8rl_jax.kernels import IMPLEMENTATIONS, block_matmul
from fp8rl_jax.kernels.gpu import tiles
from fp8rl_jax.kernels.gpu.matmul import matmul

pytestmark = pytest.mark.gpu

TILES = {
    "fp8": (*tiles.FP8, *tiles.FP8_ALONE),
    "bf16": tiles.BF16,
}  # of 'wgrad' and 'float32' there is one each: nothing to compare
ROWS = (
    1,
    2,
    3,
    7,
    8,
    9,
    15,
    16,
    17,
    31,
    32,
    33,
    63,
    64,
    65,
    96,
    127,
    128,
    129,
    191,
    192,
    193,
    256,
    257,
    511,
    512,
    513,
    1000,
    1024,
    2048,
    4095,
    4096,
)
_FEW_ROWS = (1, 31, 32, 33, 64, 1000, 4096)  # of float32, which has one tile


@dataclasses.dataclass(frozen=True)
class Dense:
    """A product (rows, depth) x (depth, columns).

    Attributes:
      kind, dtype: of the operands; of the result.
      by_column: a scale for every column of the second operand (wgrad), not one per 128.
      left: dtype of the first operand instead of the kind's (E5M2 gradients).
    """

    kind: str
    rows: int
    depth: int
    columns: int
    dtype: str = "float32"
    by_column: bool = False
    left: str = ""

    def __str__(self) -> str:
        scales = ", a scale per column" if self.by_column else ""
        shape = f"{self.rows} x {self.depth} x {self.columns} -> {self.dtype}"
        return f"{self.left or self.kind} {shape}{scales}"

    def operands(self, source: Source) -> tuple:
        """(lhs, rhs, lhs_scale, rhs_scale), scales None where the kind has none."""
        lhs = source.take(jnp.dtype(self.left or DTYPES[self.kind]), self.rows, self.depth)
        rhs = source.take(DTYPES[self.kind], self.columns, self.depth).T
        if self.kind != "fp8":
            return lhs, rhs, None, None
        deep, wide = blocks(self.depth), self.columns if self.by_column else blocks(self.columns)
        return lhs, rhs, source.scales(self.rows, deep), source.scales(deep, wide)

    def product(self, tile: tiles.Tile | None = None) -> Callable:
        return exact_jit(lambda *x: matmul(*x, dtype=jnp.dtype(self.dtype), tile=tile))


_RAGGED, _DEEP = (200, 1000, 520), (130, 4096, 1024)
CASES = (
    Dense("bf16", 64, 256, 64),
    *(Dense("fp8", *shape, t) for shape in (_RAGGED, _DEEP) for t in ("float32", "bfloat16")),
    Dense("fp8", *_RAGGED, left="float8_e5m2"),
    Dense("fp8", 1, 128, 128),
    *(Dense("fp8", *shape, by_column=True) for shape in (_RAGGED, _DEEP)),
    *(Dense("bf16", *shape, t) for shape in (_RAGGED, _DEEP) for t in ("float32", "bfloat16")),
    *(Dense("float32", *shape) for shape in (_RAGGED, _DEEP)),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float64(case, source):
    """Random rows and columns of the result."""
    lhs, rhs, lhs_scale, rhs_scale = case.operands(source)
    y = case.product()(lhs, rhs, lhs_scale, rhs_scale)
    assert_finite(str(case), y)
    rows, columns = some(case.rows, 24), some(case.columns, 384)
    scales = ()
    if lhs_scale is not None:
        wide = np.asarray(rhs_scale)
        wide = wide if case.by_column else np.repeat(wide, 128, 1)
        scales = np.asarray(lhs_scale)[rows], wide[:, columns]
    want = float64_product(np.asarray(lhs[rows]), np.asarray(rhs[:, columns]), *scales)
    assert_close(str(case), np.asarray(y[rows][:, columns]), *want, BOUNDS[case.kind])


@pytest.mark.parametrize("model", kernel_shapes.MODELS)
def test_published_matrices(model, source):
    """Every dense matrix of a model, in the layer and in its weights' gradient."""
    dense = [m for m in kernel_shapes.matrices(model) if not m.experts]
    for matrix in dense:
        dtype = "float32" if matrix.kind == "float32" else "bfloat16"
        test_float64(Dense(matrix.kind, 200, matrix.depth, matrix.columns, dtype), source)
    for columns in {m.columns for m in dense if m.kind == "fp8"}:
        # wgrad contracts over tokens, a multiple of 128: ending inside a block is worse.
        test_float64(Dense("fp8", 200, 968, columns, by_column=True), source)


@pytest.mark.parametrize("shape", [(200, 1024, 520), (130, 1000, 1152)], ids=str)
@pytest.mark.parametrize("kind", TILES)
def test_tiles(kind, shape, source):
    """Every tile of kernels/gpu/tiles.py gives the bits of the first of its kind."""
    case = Dense(kind, *shape)
    operands = case.operands(source)
    first, *others = TILES[kind]
    want = case.product(first)(*operands)
    assert_finite(str(first), want)
    for tile in others:
        got = case.product(tile)(*operands)
        assert_bitwise_equal(f"{case}: {tile} against {first}", got, want)


@pytest.mark.parametrize(
    ("kind", "counts"),
    [("fp8", ROWS), ("bf16", ROWS), ("float32", _FEW_ROWS)],
    ids=["fp8", "bf16", "float32"],
)
def test_rows(kind, counts, source):
    """A call of some rows gives the bits of the same rows of one call of the most.

    The rows are taken from anywhere in the large call, so that a row changes its place in a tile.
    """
    most, rng = max(counts), np.random.default_rng(0)
    case = Dense(kind, most, 512, 1152)
    lhs, rhs, lhs_scale, rhs_scale = case.operands(source)
    product = case.product()
    whole = np.asarray(product(lhs, rhs, lhs_scale, rhs_scale))
    assert_finite(str(case), whole)
    for count in counts:
        start = int(rng.integers(most - count + 1))
        rows = slice(start, start + count)
        part = product(lhs[rows], rhs, None if lhs_scale is None else lhs_scale[rows], rhs_scale)
        assert_bitwise_equal(f"{case}: {count} rows alone", part, whole[rows])


def _different(one, other):
    """() int32, in how many elements the bits differ."""
    bits = jnp.uint16 if one.dtype.itemsize == 2 else jnp.uint32
    one, other = (jax.lax.bitcast_convert_type(x, bits) for x in (one, other))
    return jnp.sum(one != other, dtype=jnp.int32)


@pytest.mark.parametrize("kind", TILES)
@pytest.mark.parametrize("rows", [64, 4096])
def test_the_same_bits_under_load(kind, rows, source, size=4096, repeats=300, load=2**28):
    """A product again and again, after every third time behind a program that fills the memory's
    queues: a read that does not wait for its copy gives other bits at some time."""
    case = Dense(kind, rows, size, size, "bfloat16")
    operands, product = case.operands(source), case.product()
    fill = exact_jit(lambda x: x + 1, donate_argnums=0)
    different = exact_jit(_different)
    first = product(*operands)
    assert_finite(str(case), first)
    memory, count = jnp.zeros(load, jnp.float32), jnp.zeros((), jnp.int32)
    for number in range(repeats):
        if number % 3 == 0:
            memory = fill(memory)
        count += different(product(*operands), first)
    assert int(count) == 0, f"{case}: {int(count)} elements had other bits in {repeats} repeats"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(300, 1024, 1152), (257, 12_288, 256), (4096, 4096, 4096)])
def test_mosaic(shape, dtype, source):
    """The Mosaic matmul, which many rows take, gives the bits of the Triton one, which few take."""
    from fp8rl_jax.kernels.gpu import mosaic_matmul

    case = Dense("fp8", *shape, dtype)
    operands = case.operands(source)
    want = case.product()(*operands)
    assert_finite(str(case), want)
    for tile in mosaic_matmul.TILES:
        run = exact_jit(lambda *x, tile=tile: mosaic_matmul.matmul(*x, case.dtype, tile))
        got = run(*operands)
        assert_bitwise_equal(f"Mosaic, {case}, {tile}", got, want)


@reports
@pytest.mark.parametrize("shape", [(300, 1024, 1152), (4096, 4096, 12_288)])
def test_mosaic_with_a_scale_per_column(shape, source):
    """The option `mosaic`: gradients of weights have the bits of Triton's."""
    from fp8rl_jax.kernels.gpu import mosaic_matmul

    case = Dense("fp8", *shape, by_column=True)
    operands = case.operands(source)
    got = exact_jit(mosaic_matmul.matmul)(*operands)
    assert_bitwise_equal(str(case), got, case.product()(*operands))


@reports
@pytest.mark.parametrize("model", ["targets", *kernel_shapes.MODELS])
def test_speed(model, source, ceilings, record_property):
    """A line for each product: the squares and experts of the targets, or a model's largest."""
    found = kernel_shapes.target_cases()
    if model != "targets":
        found = [c for c in kernel_shapes.cases([model], quick=True) if c not in found]
    for case in found:
        row = kernels.row(case, kernel_times.time_case(case, source), ceilings)
        record_property("row", row)
        print(kernels.line(row))


_SHAPES = (
    (64, 4096, 4096),
    (64, 12_288, 4096),
    (64, 4096, 6144),
    (64, 4096, 24_576),
    (4096, 4096, 4096),
)


@reports
@pytest.mark.parametrize("kind", TILES)
def test_speed_of_tiles(kind, source, tmp_path):
    """Each tile's microseconds in a profile: without the gaps between launches."""
    from fp8rl_jax.kernels.gpu import mosaic_decode, mosaic_matmul

    for shape in _SHAPES:
        case = Dense(kind, *shape, "bfloat16")
        moved = (shape[0] * shape[1] + shape[1] * shape[2]) * (1 if kind == "fp8" else 2)
        calls = [case.operands(source) for _ in range(max(2, min(12, round(2e8 / moved))))]
        ways: dict[str, Callable] = {str(tile): case.product(tile) for tile in TILES[kind]}
        if kind == "fp8" and shape[0] >= mosaic_matmul.FEWEST_ROWS:
            for tile in mosaic_matmul.TILES:
                run = functools.partial(mosaic_matmul.matmul, dtype=jnp.bfloat16, tile=tile)
                ways[f"Mosaic {tile}"] = exact_jit(run)
        if kind == "fp8" and shape[0] < mosaic_matmul.FEWEST_ROWS:
            for few in mosaic_decode.TILES:
                if shape[2] % few.columns == 0:
                    run = functools.partial(mosaic_decode.matmul, dtype=jnp.bfloat16, tile=few)
                    ways[f"Mosaic {few}"] = exact_jit(run)
        for number, (name, way) in enumerate(ways.items()):
            print_kernels(f"{case}, {name}", moved, calls, way, tmp_path / f"{shape} {number}")


_FEW = _SHAPES[:4]  # of a decode step of Qwen3-8B


@reports
@pytest.mark.parametrize("shape", _FEW, ids=str)
def test_speed_of_few_rows(shape, source, tmp_path):
    """Each implementation that kernels/dispatch.py has for a GPU, in a profile, and whether it has
    the bits of Triton's product."""
    case = Dense("fp8", *shape, "bfloat16")
    moved = shape[0] * shape[1] + shape[1] * shape[2]
    calls = [case.operands(source) for _ in range(max(2, min(12, round(2e8 / moved))))]
    want = case.product()(*calls[0])
    for name in (name for name in IMPLEMENTATIONS if name not in ("auto", "reference", "exact")):
        way = exact_jit(functools.partial(block_matmul, implementation=name, dtype=jnp.bfloat16))
        print_kernels(f"{case}, {name}", moved, calls, way, tmp_path / name)
        print(f"  elements with other bits: {int(_different(way(*calls[0]), want))}")


@reports
@pytest.mark.parametrize(
    "shapes", [[(4096,) * 3], [(8192,) * 3], _FEW], ids=["4096", "8192", "few rows"]
)
def test_speed_of_torch(shapes, record_property):
    """PyTorch's blockwise product, in a process of its own."""
    program = pathlib.Path(__file__).with_name("torch_products.py")
    command = [sys.executable, "-P", str(program), *map(json.dumps, shapes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    for shape, line in zip(shapes, done.stdout.splitlines(), strict=True):
        found = json.loads(line)
        record_property("torch", {"shape": shape} | found)
        if "error" in found:
            pytest.fail(f"not measured: {found['error']}")
        rows, depth, columns = shape
        rates = f"{2.0 * math.prod(shape) / found['us'] / 1e6:.0f} TFLOPS"
        rates += f", {(rows + columns) * depth / found['us'] / 1e6:.2f} TB/s"
        print(f"{rows} x {depth} x {columns}: {found['us']:.1f} us, {rates}: {found['form']}")
