"""Compiles the Mosaic matmul for an H200 on a machine without one, and reads the machine code.

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

from fp8rl_jax.kernels.gpu import mosaic_matmul
from fp8rl_jax.plan import h200
from fp8rl_jax.sharding import replicated

ROWS, COLUMNS, DEPTH = 4096, 4096, 4096


@dataclasses.dataclass(frozen=True)
class Variant:
    """A tile of the table and a type of the result."""

    tile: mosaic_matmul.Tile
    dtype: str

    def __str__(self) -> str:
        tile = self.tile
        return f"{tile.rows}x128x128 {self.dtype}, {tile.consumers} consumers, {tile.stages} stages"


VARIANTS = [Variant(tile, d) for tile in mosaic_matmul.TILES for d in ("bfloat16", "float32")]


def compile_all() -> dict[Variant, Any]:
    """Variant -> `sass.Machine`. Registers are the most that a consumer names.

    Raises:
      AssertionError: the other process failed, with what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run(
            [sys.executable, __file__, folder],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr
        return {v: _read(pathlib.Path(folder, str(i))) for i, v in enumerate(VARIANTS)}


def _read(folder: pathlib.Path):
    from sass import Machine, read_code

    def text(pattern: str) -> str:
        (path,) = folder.glob(pattern)
        return path.read_text()

    code, report = text("*.sass*"), text("*.ptxas")
    spills = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", report)
    shared = re.findall(r"dynamic_shared_memory_size %c(\d+)_i32", text("*.mlir-passes.log"))
    return Machine(
        *read_code(code),
        # ptxas reports what a thread starts with; the warpgroups then share otherwise.
        registers=1 + max(int(n) for n in re.findall(r"\bR(\d+)\b", code)),
        local_bytes=sum(map(int, spills)),
        shared_bytes=int(shared[0]),
        ptx=text("*.ptx"),
    )


def _write_all(folder: pathlib.Path) -> None:
    from sass import TOOLS

    (folder / "bin").mkdir()
    (folder / "bin" / "nvdisasm").symlink_to(TOOLS / "nvdisasm")
    os.environ["MOSAIC_GPU_CUDA_ROOT"] = str(folder)  # after Mosaic's import, which sets it
    os.environ["MOSAIC_GPU_DUMP_SASS"] = "1"
    sharding = replicated(h200.h200_mesh({}))
    blocks = DEPTH // 128

    def shape(*shape: int, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    for index, variant in enumerate(VARIANTS):
        target = folder / str(index)
        target.mkdir()
        os.environ["MOSAIC_GPU_DUMP_TO"] = str(target)
        jax.jit(mosaic_matmul.fp8_matmul, static_argnums=(4, 5)).lower(
            shape(ROWS, DEPTH, dtype=jnp.float8_e4m3fn),
            shape(DEPTH, COLUMNS, dtype=jnp.float8_e4m3fn),
            shape(ROWS, blocks),
            shape(blocks, COLUMNS // 128),
            variant.dtype,
            variant.tile,
        ).compile()


def table() -> str:
    """Markdown: one row a variant."""
    lines = [
        "| tile, result | tensor core instruction | registers | spills | shared |",
        "|---|---|---|---|---|",
    ]
    for variant, machine in compile_all().items():
        lines.append(
            f"| {variant} | {', '.join(sorted(machine.matrix))} | {machine.registers} | "
            f"{machine.local_bytes} B | {machine.shared_bytes / 1024:.0f} KiB |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _write_all(pathlib.Path(sys.argv[1]))
    else:
        print(table())
