"""Compiles Triton kernels to Hopper machine code without a GPU, and reads what came out.

Triton carries the assembler and the disassembler that this needs. The kernels are listed in
kernel_variants.py.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import pathlib
import re
import subprocess
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOLS = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_HOPPER = GPUTarget("cuda", 90, 32)
SHARED_LIMIT = 232_448  # bytes that one program may have on Hopper


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a kernel became: machine instructions by name, resources, PTX."""

    opcodes: collections.Counter
    matrix: frozenset[str]  # full names of the tensor core instructions
    registers: int
    local_bytes: int  # stack and spills
    shared_bytes: int
    ptx: str
    memory: frozenset[str] = frozenset()  # full names of the loads and stores of global memory
    sums: tuple[
        str, ...
    ] = ()  # shape of each float32 reduction, and which thread holds which element
    ttir: str = ""  # Triton's own form of the kernel, before layouts
    dots: tuple[str, ...] = ()  # types of each product, and which thread holds which element
    loop: int = 0  # instructions of a turn of the innermost loop around a product
    of_loop: collections.Counter = dataclasses.field(default_factory=collections.Counter)  # by name

    @property
    def unfenced(self) -> int:
        """Products by wgmma that no fence separates from the copies into shared memory before
        them: wgmma reads through the asynchronous proxy what cp.async wrote through the generic
        one, and PTX's memory model orders them by fence.proxy.async alone."""
        fenced = True
        count = 0
        for line in self.ptx.splitlines():
            if "cp.async.c" in line:  # .ca or .cg
                fenced = False
            elif "fence.proxy.async" in line:
                fenced = True
            elif "wgmma.mma_async" in line:
                count += not fenced
        return count


def read_code(code: str) -> tuple[collections.Counter, frozenset[str]]:
    """Machine instructions by name, and those of the tensor core in full, of a disassembly."""
    opcode = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)")
    matrix = re.findall(r"\b((?:QGMMA|HGMMA|HMMA|IMMA)\.[\w.]+)", code)
    return collections.Counter(opcode.findall(code)), frozenset(matrix)


def innermost_loop(code: str) -> list[str]:
    """Instructions of the shortest loop with a tensor core instruction; none if none has."""
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", code)
    places = {int(address, 16): number for number, (address, _) in enumerate(lines)}
    found: list[list[str]] = []
    for end, (_, text) in enumerate(lines):
        branch = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
        start = places.get(int(branch.group(1), 16), end) if branch else end
        if any(re.search(r"MMA\.", inside) for _, inside in lines[start:end]):
            found.append([inside for _, inside in lines[start : end + 1]])
    return min(found, key=len, default=[])


def names_of(lines: list[str]) -> collections.Counter:
    """How often each name of an instruction, without what follows a point, begins a line."""
    return collections.Counter(re.match(r"(?:@!?U?P\w+ +)?([A-Z0-9_]+)", x).group(1) for x in lines)


def _tool(name: str, *arguments: str) -> str:
    run = subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True)
    return run.stdout


def compile_kernel(
    kernel,
    pointers: dict[str, str],
    constants: dict,
    warps: int,
    stages: int,
    registers: int | None = None,
):
    """Machine code of a kernel whose pointers are aligned to 16 bytes, as XLA's buffers are."""
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        signature={name: pointers.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in pointers},
    )
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
    options["maxnreg"] = registers
    compiled = triton.compile(source, target=_HOPPER, options=options)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        pathlib.Path(path).write_bytes(compiled.asm["cubin"])
        resources = _tool("cuobjdump", "--dump-resource-usage", path)
        code = _tool("cuobjdump", "-sass", path)
    loop = innermost_loop(code)
    usage = {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", resources)}
    return Machine(
        *read_code(code),
        usage["REG"],
        usage["STACK"] + usage["LOCAL"],
        compiled.metadata.shared,
        compiled.asm["ptx"],
        frozenset(re.findall(r"\b((?:LDG|STG)\.[\w.]+)", code)),
        _sums(compiled.asm["ttgir"]),
        compiled.asm["ttir"],
        _dots(compiled.asm["ttgir"]),
        len(loop),
        names_of(loop),
    )


def _written_out(text: str, types: list[str]) -> tuple[str, ...]:
    """Types of TTGIR with the names of layouts replaced by the layouts."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    return tuple(re.sub(r"#\w+", lambda m: layouts.get(m[0], m[0]), x) for x in types)


def _sums(text: str) -> tuple[str, ...]:
    """The operand types of the float32 reductions of TTGIR, layouts written out.

    Triton's lowering of a reduction orders it by operand type, axis and warps alone.
    """
    operands = re.findall(r"\"tt\.reduce\".*?\}\) : \((tensor<\w+xf32, .*?>)\) ->", text, re.DOTALL)
    return _written_out(text, operands)


def _dots(text: str) -> tuple[str, ...]:
    """The types of the products of TTGIR: they decide what a tensor core adds in which step."""
    return _written_out(text, re.findall(r"= tt\.dot .*? : (tensor<.*?)(?: loc\(|$)", text, re.M))


def arithmetic_of_products(ptx: str) -> collections.Counter:
    """How often each float expression stands in the loop around the products of a kernel.

    An expression is an instruction and its operands' expressions, down to what memory, or the
    loop's last turn, holds. Equal counts: equal arithmetic in an equal order, however the compiler
    has arranged the instructions. For kernels whose loop has no branches.
    """
    lines = ptx.splitlines()
    products = [i for i, line in enumerate(lines) if "mma.sync" in line]
    start = max(i for i in range(products[0]) if lines[i].startswith("$L__BB"))
    end = next(i for i in range(products[-1], len(lines)) if re.search(r"\bbra\b", lines[i]))
    known: dict[str, int] = {}
    found: collections.Counter = collections.Counter()
    for line in lines[start:end]:
        match = re.match(r"\s*(?:@!?%p\d+ )?([a-z]\w*\.[\w.:]+)\s+(\{.*?\}|[^,]+),(.*);", line)
        if not match:
            continue
        name, results, operands = match.groups()
        floats = re.search(r"^mma|^shfl|f32|f16", name)
        words = re.findall(r"%?\b\w+\b", operands) if floats or name == "mov.b32" else []
        value = [known.get(word, 0) if word.startswith("%") else word for word in words]
        if re.match("(mul|add|max|fma|selp).*f32", name):  # in any order: it says nothing
            value[:2] = sorted(value[:2], key=str)
        for index, register in enumerate(re.findall(r"%\w+", results)):
            if name == "mov.b32" and len(value) == 1:
                known[register] = hash(value[0])
                continue
            known[register] = hash((name, *value, index)) if floats else 0
            if floats:
                found[name, known[register]] += 1
    return found
