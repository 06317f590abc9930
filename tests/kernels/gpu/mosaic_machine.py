"""Compiles the Mosaic matmuls for an H200 on a machine without one, and reads the machine code.

`PYTHONPATH=tests/helpers python tests/kernels/gpu/mosaic_machine.py` prints a table. XLA compiles
for a device that is only described; Mosaic writes what it makes to a folder that
MOSAIC_GPU_DUMP_TO names, with the machine code if it finds nvdisasm, of which Triton carries one.
That happens in a process of its own (this file with a folder as argument), because it initialises
JAX's CUDA plugin.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp

from fp8rl_jax.kernels.gpu import mosaic_decode, mosaic_matmul
from fp8rl_jax.plan import h200
from fp8rl_jax.sharding import replicated

ROWS, COLUMNS, DEPTH = 4096, 4096, 4096


@dataclasses.dataclass(frozen=True)
class Variant:
    """A tile of the table and a type of the result."""

    tile: mosaic_matmul.Tile
    dtype: str
    by_column: bool = False

    def __str__(self) -> str:
        tile = self.tile
        name = f"{tile.rows}x128x128 {self.dtype}, {tile.consumers} consumers, {tile.stages} stages"
        return name + ", a scale per column" * self.by_column

    def lower(self, shape):
        return jax.jit(mosaic_matmul.matmul, static_argnums=(4, 5)).lower(
            shape(ROWS, DEPTH, dtype=jnp.float8_e4m3fn),
            shape(DEPTH, COLUMNS, dtype=jnp.float8_e4m3fn),
            shape(ROWS, DEPTH // 128),
            shape(DEPTH // 128, COLUMNS // (1 if self.by_column else 128)),
            self.dtype,
            self.tile,
        )


@dataclasses.dataclass(frozen=True)
class DecodeVariant:
    """A tile of the decode step's products, of a stack of 36 layers and 64 rows."""

    tile: mosaic_decode.Tile
    dtype: str = "bfloat16"
    columns: tuple[int, ...] = (12_288,)
    depth: int = DEPTH
    residual: bool = False

    def __str__(self) -> str:
        name = f"64x{self.tile.columns}x128 {self.dtype}, {self.tile.consumers} consumers, "
        name += f"{self.tile.stages(self.depth // 128, self.dtype)} stages"
        together = f", {len(self.columns)} weights" * (len(self.columns) > 1)
        return name + together + ", residual" * self.residual

    def lower(self, shape):
        layers, blocks = 36, self.depth // 128
        stacks = [shape(layers, self.depth, n, dtype=jnp.float8_e4m3fn) for n in self.columns]
        added = shape(64, self.columns[0], dtype=self.dtype) if self.residual else None
        return jax.jit(mosaic_decode.layer_matmuls, static_argnums=(5, 7)).lower(
            shape(64, self.depth, dtype=jnp.float8_e4m3fn),
            stacks,
            shape(dtype=jnp.int32),
            shape(64, blocks),
            [shape(layers, blocks, n // 128) for n in self.columns],
            self.dtype,
            added,
            self.tile,
        )


_TILES = mosaic_decode.TILES
DECODE = [
    *(DecodeVariant(tile) for tile in _TILES),
    DecodeVariant(_TILES[0], columns=(4096,), depth=12_288, residual=True),
    DecodeVariant(_TILES[1], columns=(4096, 1024, 1024)),
    DecodeVariant(_TILES[3], columns=(12_288, 12_288)),
    DecodeVariant(_TILES[2], "float32", depth=3840),  # 30 blocks: a last turn of two
]
VARIANTS = [Variant(tile, d) for tile in mosaic_matmul.TILES for d in ("bfloat16", "float32")]
VARIANTS += [Variant(mosaic_matmul.TILES[0], "float32", by_column=True), *DECODE]


def compile_all(variants: list = VARIANTS) -> dict[Variant | DecodeVariant, Any]:
    """Variant of `VARIANTS` -> `sass.Machine`. Registers are the most that a consumer names.

    Raises:
      AssertionError: the other process failed, with what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run(
            [sys.executable, __file__, folder, *(str(VARIANTS.index(v)) for v in variants)],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr
        return {v: _read(pathlib.Path(folder, str(VARIANTS.index(v)))) for v in variants}


def _read(folder: pathlib.Path):
    from sass import Machine, names_of, read_code

    def text(pattern: str) -> str:
        (path,) = folder.glob(pattern)
        return path.read_text()

    code, report = text("*.sass*"), text("*.ptxas")
    loop = _innermost_loop(code)
    spills = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", report)
    shared = re.findall(r"dynamic_shared_memory_size %c(\d+)_i32", text("*.mlir-passes.log"))
    return Machine(
        *read_code(code),
        # ptxas reports what a thread starts with; the warpgroups then share otherwise.
        registers=1 + max(int(n) for n in re.findall(r"\bR(\d+)\b", code)),
        local_bytes=sum(map(int, spills)),
        shared_bytes=int(shared[0]),
        ptx=text("*.ptx"),
        loop=len(loop),
        of_loop=names_of(loop),
    )


def _innermost_loop(code: str) -> list[str]:
    """`sass.innermost_loop` of nvdisasm's text, which names where a branch leads by a label."""
    places: dict[str, int] = {}
    found: list[list[str]] = []
    lines: list[str] = []
    for line in code.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            places[label.group(1)] = len(lines)
        elif (found_line := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*)", line)) and "NOP" not in line:
            lines.append(found_line.group(1))
            back = re.search(r"@!?U?P\d BRA `\((\.L_x_\d+)\)", line)  # others leave waiting loops
            body = lines[places.get(back.group(1), len(lines)) :] if back else []
            if any("MMA." in inside for inside in body):
                found.append(body)
    return min(found, key=len, default=[])


def _write_all(folder: pathlib.Path, numbers: list[int]) -> None:
    from sass import TOOLS

    (folder / "bin").mkdir()
    (folder / "bin" / "nvdisasm").symlink_to(TOOLS / "nvdisasm")
    os.environ["MOSAIC_GPU_CUDA_ROOT"] = str(folder)  # after Mosaic's import, which sets it
    os.environ["MOSAIC_GPU_DUMP_SASS"] = "1"
    sharding = replicated(h200.h200_mesh({}))

    def shape(*shape: int, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    for index in numbers:
        target = folder / str(index)
        target.mkdir()
        os.environ["MOSAIC_GPU_DUMP_TO"] = str(target)
        VARIANTS[index].lower(shape).compile()


def table() -> str:
    """Markdown: one row a variant."""
    lines = [
        "| tile, result | tensor core instruction | loop | registers | spills | shared |",
        "|---|---|---|---|---|---|",
    ]
    for variant, machine in compile_all().items():
        lines.append(
            f"| {variant} | {', '.join(sorted(machine.matrix))} | {machine.loop} | "
            f"{machine.registers} | {machine.local_bytes} B | "
            f"{machine.shared_bytes / 1024:.0f} KiB |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _write_all(pathlib.Path(sys.argv[1]), [int(number) for number in sys.argv[2:]])
    else:
        print(table())
