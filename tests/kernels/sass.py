"""Compiles Triton kernels to Hopper machine code without a GPU, and reads what came out.

`python tests/kernels/sass.py` prints the table of docs/kernels.md. Triton carries the assembler and
the disassembler that this needs.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Iterator

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fp8rl_jax.kernels import tiles
from fp8rl_jax.kernels.triton_matmul import grouped_wgrad_kernel, matmul_kernel

TOOLS = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_HOPPER = GPUTarget("cuda", 90, 32)
SHARED_LIMIT = 232_448  # bytes that one program may have on Hopper
_POINTERS = {"fp8": "*fp8e4nv", "e5m2": "*fp8e5", "bf16": "*bf16", "float32": "*fp32"}


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a kernel became: machine instructions by name, resources, PTX."""

    opcodes: collections.Counter
    matrix: frozenset[str]  # full names of the tensor core instructions
    registers: int
    local_bytes: int  # stack and spills
    shared_bytes: int
    ptx: str


def read_code(code: str) -> tuple[collections.Counter, frozenset[str]]:
    """Machine instructions by name, and those of the tensor core in full, of a disassembly."""
    opcode = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)")
    matrix = re.findall(r"\b((?:QGMMA|HGMMA|HMMA|IMMA)\.[\w.]+)", code)
    return collections.Counter(opcode.findall(code)), frozenset(matrix)


def _tool(name: str, *arguments: str) -> str:
    run = subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True)
    return run.stdout


def compile_kernel(kernel, pointers: dict[str, str], constants: dict, warps: int, stages: int):
    """Machine code of a kernel whose pointers are aligned to 16 bytes, as XLA's buffers are."""
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        signature={name: pointers.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in pointers},
    )
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=_HOPPER, options=options)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        pathlib.Path(path).write_bytes(compiled.asm["cubin"])
        resources = _tool("cuobjdump", "--dump-resource-usage", path)
        code = _tool("cuobjdump", "-sass", path)
    usage = {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", resources)}
    return Machine(
        *read_code(code),
        usage["REG"],
        usage["STACK"] + usage["LOCAL"],
        compiled.metadata.shared,
        compiled.asm["ptx"],
    )


@dataclasses.dataclass(frozen=True)
class Variant:
    """A kernel in one of the ways in which the library calls it."""

    name: str
    tile: tiles.Tile
    kind: str
    left: str
    right: str
    out: str = "bf16"
    grouped: bool = False
    column_scales: bool = False
    wgrad: bool = False
    depth: int = 4096
    group: int = 4096

    def __str__(self) -> str:
        t = self.tile
        return f"{self.name} {t.rows}x{t.columns}x{t.depth} w{t.warps} s{t.stages}"

    def compile(self) -> Machine:
        tile = self.tile
        constants = {
            "TOTAL": 8192, "N": 4096, "K": self.depth, "BM": tile.rows, "BN": tile.columns,
            "BK": tile.depth, "BAND": tiles.BAND, "SCALED": self.kind == "fp8",
            "PRECISION": "ieee" if self.kind == "float32" else "tf32",
        }  # fmt: skip
        left, right, out = (_POINTERS[name] for name in (self.left, self.right, self.out))
        if self.wgrad:
            pointers = {"x": left, "dy": right, "x_scale": "*fp32", "dy_scale": "*fp32"}
            pointers |= {"starts": "*i32", "out": out}
            return compile_kernel(
                grouped_wgrad_kernel, pointers, constants, tile.warps, tile.stages
            )
        pointers = {"x": left, "w": right, "x_scale": "*fp32", "w_scale": "*fp32"}
        pointers |= {"experts": "*i32", "out": out}
        constants |= {
            "GROUP": self.group, "E": 128 if self.grouped else 1, "GROUPED": self.grouped,
            "COLUMN_SCALES": self.column_scales,
        }  # fmt: skip
        return compile_kernel(matmul_kernel, pointers, constants, tile.warps, tile.stages)


def variants() -> Iterator[Variant]:
    """Every tile of the tables in every use."""
    fp8 = dict.fromkeys(tiles.FP8_FEW_ROWS + tiles.FP8_MANY_ROWS)
    for tile in fp8:
        yield Variant("fp8", tile, "fp8", "fp8", "fp8")
        yield Variant("fp8, gradient in E5M2", tile, "fp8", "e5m2", "fp8")
        yield Variant("fp8, ragged K", tile, "fp8", "fp8", "fp8", depth=4064)
        yield Variant("fp8 grouped", tile, "fp8", "fp8", "fp8", grouped=True, group=128)
    for tile in tiles.WGRAD:
        yield Variant("fp8 wgrad", tile, "fp8", "fp8", "fp8", "float32", column_scales=True)
        yield Variant("fp8 grouped wgrad", tile, "fp8", "fp8", "fp8", "float32", wgrad=True)
    for tile in dict.fromkeys(tiles.BF16_FEW_ROWS + tiles.BF16_MANY_ROWS):
        yield Variant("bf16", tile, "bf16", "bf16", "bf16", "float32")
    for tile in tiles.FLOAT32:
        yield Variant("float32", tile, "float32", "float32", "float32", "float32")


def table() -> str:
    """Markdown: one row a variant."""
    lines = [
        "| kernel, tile, warps, stages | tensor core instruction | registers | spills | shared |",
        "|---|---|---|---|---|",
    ]
    for variant in variants():
        machine = variant.compile()
        matrix = ", ".join(sorted(machine.matrix)) or f"none ({machine.opcodes['FFMA']} FFMA)"
        lines.append(
            f"| {variant} | {matrix} | {machine.registers} | {machine.local_bytes} B | "
            f"{machine.shared_bytes / 1024:.0f} KiB |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
