"""Every way in which the library calls its Triton kernels, to be compiled to machine code.

`python tests/kernels/gpu/kernel_variants.py` prints the tables of docs/studies/kernels_compiled.md.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import jax.numpy as jnp
from sass import Machine, compile_kernel

from fp8rl_jax.bench.kernel_times import DTYPES
from fp8rl_jax.kernels.arrays import K_BLOCK
from fp8rl_jax.kernels.gpu import (
    attention_gradient,
    attention_inputs,
    attention_operands,
    fast_attention,
    norm,
    tiles,
)
from fp8rl_jax.kernels.gpu.attention import attention_kernel, join_kernel
from fp8rl_jax.kernels.gpu.attention_gradient import key_gradient_kernel, query_gradient_kernel
from fp8rl_jax.kernels.gpu.attention_inputs import attention_inputs_kernel
from fp8rl_jax.kernels.gpu.fast_attention import fast_attention_kernel
from fp8rl_jax.kernels.gpu.head import (
    combine_kernel,
    head_gradient_kernel,
    head_statistics_kernel,
    logits_statistics_kernel,
)
from fp8rl_jax.kernels.gpu.matmul import grouped_wgrad_kernel, matmul_kernel

_POINTERS = {
    "fp8": "*fp8e4nv",
    "int8": "*i8",
    "e5m2": "*fp8e5",
    "bf16": "*bf16",
    "float32": "*fp32",
}


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
    together: bool = False  # three weights
    wgrad: bool = False
    depth: int = 4096
    group: int = 4096

    def __str__(self) -> str:
        t = self.tile
        turn = f", turns of {t.turn}" * (t.turn > 1)
        return f"{self.name} {t.rows}x{t.columns}x{t.depth} w{t.warps} s{t.stages}{turn}"

    def compile(self) -> Machine:
        tile = self.tile
        constants = {
            "TOTAL": 8192,
            "N": 4096,
            "K": self.depth,
            "SCALED": self.kind == "fp8",
            "STAGES": tile.stages,
            **tile.constants(self.kind),
        }
        left, right, out = (_POINTERS[name] for name in (self.left, self.right, self.out))
        if self.wgrad:
            pointers = {"x": left, "dy": right, "x_scale": "*fp32", "dy_scale": "*fp32"}
            pointers |= {"starts": "*i32", "out": out}
            return compile_kernel(
                grouped_wgrad_kernel, pointers, constants, tile.warps, tile.stages
            )
        pointers = {"x": left, "x_scale": "*fp32", "experts": "*i32", "residual": out}
        for number in ("", "1", "2"):
            pointers |= {f"w{number}": right, f"w{number}_scale": "*fp32", f"out{number}": out}
        residual = self.grouped and not self.together
        unused = ["experts"] * (not self.grouped) + ["residual"] * (not residual)
        pointers |= dict.fromkeys(unused, "*fp32")  # as `triton_call` has it
        constants |= {
            "GROUP": self.group,
            "E": 128 if self.grouped else 1,
            "GROUPED": self.grouped,
            "N1": 1024 * self.together,
            "N2": 1024 * self.together,
            "RESIDUAL": residual,
            "COLUMN_SCALES": self.column_scales,
            "TURN": tile.turn,
        }
        return compile_kernel(matmul_kernel, pointers, constants, tile.warps, tile.stages)


def variants() -> Iterator[Variant]:
    """Every tile of the tables in every use."""
    for tile in (*tiles.FP8, *tiles.FP8_ALONE):
        yield Variant("fp8", tile, "fp8", "fp8", "fp8")
        yield Variant("fp8, gradient in E5M2", tile, "fp8", "e5m2", "fp8")
        yield Variant("fp8, ragged K", tile, "fp8", "fp8", "fp8", depth=4064)
        yield Variant("fp8 grouped", tile, "fp8", "fp8", "fp8", grouped=True, group=128)
        yield Variant("fp8 together", tile, "fp8", "fp8", "fp8", grouped=True, together=True)
    for tile in tiles.WGRAD:
        yield Variant("fp8 wgrad", tile, "fp8", "fp8", "fp8", "float32", column_scales=True)
        yield Variant("fp8 grouped wgrad", tile, "fp8", "fp8", "fp8", "float32", wgrad=True)
    for tile in tiles.BF16:
        yield Variant("bf16", tile, "bf16", "bf16", "bf16", "float32")
        yield Variant("bf16 together", tile, "bf16", "bf16", "bf16", grouped=True, together=True)
    for tile in tiles.FLOAT32:
        yield Variant("float32", tile, "float32", "float32", "float32", "float32")


@dataclasses.dataclass(frozen=True)
class Pass:
    """A kernel of norm.py in one of the ways in which the library calls it."""

    kernel: str
    width: int
    rows: int = 8192
    quantize: bool = True
    fp8: str = "fp8"
    power_of_two: bool = False

    def __str__(self) -> str:
        y = " y" * (self.kernel in ("rms_norm", "gated_activation"))
        q = f" {self.fp8}" * self.quantize
        return f"{self.kernel} {self.rows}x{self.width}:{y}{q}" + " 2^n" * self.power_of_two

    def compile(self) -> Machine:
        whole, q = {"M": self.rows, "D": self.width}, {"q": _POINTERS[self.fp8], "scale": "*fp32"}
        scaling = {"FP8_MAX": 448.0, "POWER_OF_TWO": self.power_of_two}
        flags = {"QUANTIZE": self.quantize}
        tile = {"ROWS": norm.TILE_ROWS, "warps": 4}
        if self.kernel == "rms_norm":
            tile = norm.norm_tile(self.width)
            pointers = {"x": "*bf16", "weight": "*fp32", "layer": "*i32", "y": "*bf16"}
            flags["EPS"] = 1e-6
        elif self.kernel == "gated_activation":
            pointers = {"gate": "*bf16", "up": "*bf16", "y": "*bf16"}
            flags |= {"GELU": False, "CLAMPED": False}
        else:
            pointers, flags = {"x": "*bf16"}, {}
        if self.kernel == "quantize_columns":
            whole = {"T": self.rows, "D": self.width}
            tile = {"COLUMNS": norm.TILE_COLUMNS, "warps": 4}
        warps = tile.pop("warps")
        kernel = getattr(norm, f"{self.kernel}_kernel")
        return compile_kernel(kernel, pointers | q, whole | scaling | flags | tile, warps, 1)


def passes() -> Iterator[Pass]:
    """Every kernel of norm.py, stored and quantised, at widths of all tiles."""
    for width in (128, 4096, 5120, 8192, norm.MAX_WIDTH):
        yield Pass("rms_norm", width, quantize=False)
        yield Pass("rms_norm", width)
    yield Pass("gated_activation", 4096, quantize=False)
    yield Pass("gated_activation", 4096)
    for kernel in ("quantize_rows", "quantize_columns"):
        yield Pass(kernel, 4096)
        yield Pass(kernel, 4096, fp8="e5m2", power_of_two=True)


@dataclasses.dataclass(frozen=True)
class HeadVariant:
    """A kernel of the output head, for 151,936 columns; the product's tile, if it has one."""

    name: str
    tile: tiles.Tile | None = None
    kind: str = "bf16"
    depth: int = 1024

    def __str__(self) -> str:
        if not (t := self.tile):
            return f"{self.name} w4"
        return f"{self.name} {t.rows}x{t.columns}x{t.depth} w{t.warps} s{t.stages}"

    def compile(self) -> Machine:
        columns = 151_936
        types = dict.fromkeys(_HEAD_FLOAT32, "*fp32") | {"targets": "*i32"}
        operand = _POINTERS[self.kind]
        types |= {"x": operand, "w": operand, "dlogits": operand, "dlogits_t": operand}
        constants: dict = {"M": 1024, "N": columns}
        kernel = _HEAD_KERNELS[self.name.split(",")[0]]
        warps, stages = 4, 1
        if tile := self.tile:
            warps, stages = tile.warps, tile.stages
            constants |= {"K": self.depth, "WIDTH": columns, **tile.constants(self.kind)}
        elif kernel is logits_statistics_kernel:
            constants |= {"BM": 8, "BN": tiles.HEAD_COLUMNS}
        else:
            constants |= {"TILES": 1187, "WIDTH": 2048}
        names = kernel.arg_names
        return compile_kernel(
            kernel,
            {name: types[name] for name in names if name in types},
            {name: value for name, value in constants.items() if name in names},
            warps,
            stages,
        )


_HEAD_FLOAT32 = (
    "inverse_temperature",
    "logits",
    "top",
    "total",
    "moment",
    "chosen",
    "logp",
    "entropy",
    "logsumexp",
    "dlogp",
)
_HEAD_KERNELS = {
    "head": head_statistics_kernel,
    "head gradient": head_gradient_kernel,
    "head of logits": logits_statistics_kernel,
    "head combine": combine_kernel,
}


def head_variants() -> Iterator[HeadVariant]:
    """The output head's kernels with every tile of theirs."""
    for name in ("head", "head gradient"):
        for tile in tiles.HEAD:
            yield HeadVariant(name, tile)
        yield HeadVariant(f"{name}, ragged K", tiles.HEAD[-1], depth=1000)
        yield HeadVariant(f"{name}, float32", tiles.HEAD_FLOAT32, "float32")
    yield HeadVariant("head of logits")
    yield HeadVariant("head combine")


@dataclasses.dataclass(frozen=True)
class AttentionVariant:
    """Strict attention: 32 heads by 8, or DeepSeek's latents (`rope`)."""

    use: str  # decode or learner, or join
    keys: str = "fp8"
    width: int = 128
    queries: str = "bf16"
    scales: int = 2  # of keys and values: 0 none, 1 one, 2 per token and head
    rope: int = 0
    slots: int = 4096  # of the cache; as many queries of the learner
    paged: bool = False
    values: str = ""  # the values' type, if it is not that of the keys
    windowed: bool = False  # a window and sinks

    def __str__(self) -> str:
        q = f" by {self.queries}" * (self.queries != "bf16")
        scales = "" if self.keys != "fp8" else ", one scale" * (self.scales == 1)
        rope = f" + {self.rope}" * bool(self.rope)
        pages = ", pages" * self.paged
        keys = f"{self.keys} and {self.values}" if self.values else self.keys
        window = ", window" * self.windowed
        return f"attention {self.use}, {keys}{q}, {self.width}{rope}{scales}{pages}{window}"

    @property
    def dtypes(self) -> list[jnp.dtype]:
        """Of keys and of values."""
        return [jnp.dtype(DTYPES[kind]) for kind in (self.keys, self.values or self.keys)]

    @property
    def most_registers(self) -> int | None:
        """The bound of a thread's registers that the library sets."""
        bound = attention_operands.most_registers(self.width, *self.dtypes)
        return None if self.use == "join" else bound

    def compile(self) -> Machine:
        both, values = self.dtypes, self.values or self.keys
        wider = max(both, key=lambda dtype: dtype.itemsize)
        warps, stages = attention_operands.warps_and_stages(self.width, wider)
        types = dict.fromkeys(("q_scale", "k_scale", "v_scale", "top", "total"), "*fp32")
        types |= {"parts": "*fp32", "positions": "*i32", "q": _POINTERS[self.queries]}
        types |= dict.fromkeys(("latest", "earliest"), "*i32")
        types["table"] = "*i32" if self.paged else "*fp32"
        types["layer"] = "*fp32" if self.use == "learner" else "*i32"
        types["out"] = "*fp32" if self.use == "decode" or self.keys == "float32" else "*bf16"
        quantize = self.use == "join" and self.width == K_BLOCK
        types |= {"out_q": "*fp8e4nv" if quantize else "*fp32", "out_scale": "*fp32"}
        types |= {"window": "*i32" if self.windowed else "*fp32", "sinks": "*fp32"}
        types |= {"k": _POINTERS[self.keys], "v": _POINTERS[values]}
        types |= dict.fromkeys(("q_rope", "k_rope"), "*bf16")
        k_scales, v_scales = (self.scales * (dtype.itemsize == 1) for dtype in both)
        constants = {
            "B": 64,
            "T": self.slots if self.use == "learner" else 1,
            "S": self.slots,
            "H": 128 if self.rope else 32,
            "HKV": 1 if self.rope else 8,
            "D": self.width,
            "WIDTH": attention_operands.head_width(self.width, both[0]),
            "DR": self.rope,
            "R_WIDTH": self.rope or 16,
            "SCALE": 0.1,
            "K_SCALES": k_scales,
            "V_SCALES": v_scales,
            "Q_SCALES": 2 if self.queries == "fp8" else 0,
            "ONE_SPLIT": self.use == "decode",
            "PAGED": self.paged,
            "LAYERS": self.use != "learner",
            "WINDOWED": self.windowed,
            "SINKS": self.windowed,
            "QUANTIZE": quantize,
            "FP8_MAX": 448.0,
            "POWER_OF_TWO": False,
        }
        v_width = attention_operands.head_width(self.width, both[1])
        constants |= {"DV": self.width, "V_WIDTH": v_width}
        kernel = join_kernel if self.use == "join" else attention_kernel
        names = kernel.arg_names
        return compile_kernel(
            kernel,
            {name: types[name] for name in names if name in types},
            {name: value for name, value in constants.items() if name in names},
            *((4, 1) if self.use == "join" else (warps, stages, self.most_registers)),
        )


@dataclasses.dataclass(frozen=True)
class InputsVariant:
    """What stands before attention, of 32 heads by 8: all steps into a cache, or one step."""

    step: str  # cache, norm, rope or quantise
    keys: str = "fp8"
    width: int = 128
    paged: bool = False
    biased: bool = False
    partial: bool = False  # half of a head is rotated

    def __str__(self) -> str:
        name = f"inputs {self.step}, {self.keys}, {self.width}"
        name += ", pages" * self.paged + ", biases" * self.biased
        return name + ", half of a head" * self.partial

    def compile(self) -> Machine:
        stored = {"fp8": "*u8", "int8": "*i8", "bf16": "*u16"}[self.keys]
        names = attention_inputs_kernel.arg_names
        types = dict.fromkeys(names[: names.index("B")], "*fp32")
        types |= dict.fromkeys(("q_out", "k_out"), "*bf16")
        types |= dict.fromkeys(("q", "k", "v"), "*fp32" if self.biased else "*bf16")
        types |= dict.fromkeys(("layer", "positions", "table"), "*i32")
        types |= {"q_stored": "*fp8e4nv"}
        types |= dict.fromkeys(("k_stored", "v_stored", "k_same", "v_same"), stored)
        cached = self.step == "cache"
        constants = {
            "B": 64,
            "T": 1,
            "H": 32,
            "HKV": 8 if cached else 0,
            "D": self.width,
            "WIDTH": self.width // 2,
            "EPS": 1e-6,
            "BIAS": self.biased,
            "NORM": cached or self.step == "norm",
            "ROPE": cached or self.step == "rope",
            "PARTIAL": self.partial,
            "INTERLEAVED": False,
            "Q_SCALES": 2 if self.step == "quantise" else 0,
            "K_SCALES": 0 if self.keys == "bf16" else 2,
            "V_SCALES": 0 if self.keys == "bf16" else 2,
            "POWER_OF_TWO": False,
            "SLOTS": 4096 if cached else 0,
            "PAGED": self.paged,
            "ROWS": attention_inputs.ROWS,
        }
        return compile_kernel(attention_inputs_kernel, types, constants, 4, 1)


def inputs_variants() -> Iterator[InputsVariant]:
    """Every step, and all into a cache."""
    for step in ("norm", "rope", "quantise"):
        yield InputsVariant(step)
    for width in (64, 128, 256):
        yield InputsVariant("cache", width=width)
    yield InputsVariant("cache", paged=True)
    yield InputsVariant("cache", "bf16", paged=True)
    yield InputsVariant("cache", "int8", paged=True)
    yield InputsVariant("cache", paged=True, biased=True)
    yield InputsVariant("cache", "int8", paged=True, biased=True, partial=True)


def attention_variants() -> Iterator[AttentionVariant]:
    """Decode and learner for the widths and types of the models."""
    for use in ("decode", "learner"):
        for width in (64, 96, 128, 256):
            yield AttentionVariant(use, "fp8", width)
            yield AttentionVariant(use, "bf16", width)
            yield AttentionVariant(use, "float32", width, "float32")
        yield AttentionVariant(use, queries="fp8")
        yield AttentionVariant(use, scales=1)
        yield AttentionVariant(use, "fp8", 512, rope=64)
        yield AttentionVariant(use, "bf16", 512, rope=64)
        for keys, width, rope in (("fp8", 128, 0), ("bf16", 128, 0), ("fp8", 512, 64)):
            yield AttentionVariant(use, keys, width, rope=rope, paged=True)
        for keys, values in (("int8", ""), ("int8", "fp8"), ("bf16", "fp8"), ("int8", "bf16")):
            yield AttentionVariant(use, keys, values=values, paged=True)
        yield AttentionVariant(use, "int8", 512, rope=64)
        yield AttentionVariant(use, "int8", paged=use == "decode", windowed=True)
        yield AttentionVariant(use, "bf16", 256, windowed=True)
    yield AttentionVariant("join")
    yield AttentionVariant("join", windowed=True)
    yield AttentionVariant("join", width=512)


@dataclasses.dataclass(frozen=True)
class FastVariant:
    """Fast attention or a kernel of its gradients: 32 heads by 8, 4,096 tokens."""

    use: str  # forward, dq or dk dv
    kind: str = "bf16"  # of the operands
    width: int = 128
    scaled: bool = True  # keys and values were E4M3
    q_scaled: bool = False
    bounded: bool = False  # first slots and sinks
    gapped: bool = False

    def __str__(self) -> str:
        scales = " of fp8" * self.scaled + " by fp8" * self.q_scaled
        tile = self.tile
        size = f"{tile.rows}x{tile.keys} w{tile.warps} s{tile.stages}"
        size += ", first slots" * self.bounded + " and gaps" * self.gapped
        return f"fast attention {self.use}, {self.kind}{scales}, {self.width}, {size}"

    @property
    def tile(self) -> fast_attention.Tile:
        table = _FAST[self.use][1]["bfloat16" if self.kind == "bf16" else self.kind]
        return table[min(width for width in table if width >= self.width)]

    def compile(self) -> Machine:
        types = dict.fromkeys(("q", "k", "v", "dout"), _POINTERS[self.kind])
        types |= dict.fromkeys(("q_scale", "k_scale", "v_scale", "logsumexp", "delta"), "*fp32")
        types |= dict.fromkeys(("out", "dq", "dk", "dv"), "*fp32") | {"positions": "*i32"}
        types |= {"oldest": "*i32" if self.bounded else "*fp32", "sinks": "*fp32"}
        types["gap"] = "*i32" if self.gapped else "*fp32"
        width, kernel, tile = 1 << (self.width - 1).bit_length(), _FAST[self.use][0], self.tile
        constants = {
            "T": 4096,
            "S": 4096,
            "H": 32,
            "HKV": 8,
            "D": self.width,
            "DV": self.width,
            "WIDTH": width,
            "V_WIDTH": width,
            "SCALE": 0.1,
            "Q_SCALED": self.q_scaled,
            "KV_SCALED": self.scaled,
            "BOUNDED": self.bounded,
            "GAPPED": self.gapped,
            "SINKS": self.bounded,
            "ROWS": tile.rows,
            "KEYS": tile.keys,
        }
        pointers = {name: types[name] for name in kernel.arg_names if name in types}
        return compile_kernel(kernel, pointers, constants, tile.warps, tile.stages)


_FAST = {
    "forward": (fast_attention_kernel, fast_attention.TILES),
    "dq": (query_gradient_kernel, attention_gradient.QUERY_TILES),
    "dk dv": (key_gradient_kernel, attention_gradient.KEY_TILES),
}


def fast_variants() -> Iterator[FastVariant]:
    """Forward and gradients for the widths and types of the models."""
    for use in _FAST:
        for width in (64, 96, 128, 256):
            yield FastVariant(use, width=width)
        for width in (128, 256):
            yield FastVariant(use, "float32", width, scaled=False)
        yield FastVariant(use, scaled=False)
        yield FastVariant(use, q_scaled=True)
        yield FastVariant(use, bounded=True)
        yield FastVariant(use, bounded=True, gapped=True)


def table() -> str:
    """Markdown: one row a variant."""
    lines = [
        "| kernel, tile, warps, stages | tensor core instruction | registers | spills | shared |",
        "|---|---|---|---|---|",
    ]
    for variant in itertools.chain(
        variants(), head_variants(), attention_variants(), fast_variants()
    ):
        machine = variant.compile()
        matrix = ", ".join(sorted(machine.matrix)) or f"none ({machine.opcodes['FFMA']} FFMA)"
        lines.append(
            f"| {variant} | {matrix} | {machine.registers} | {machine.local_bytes} B | "
            f"{machine.shared_bytes / 1024:.0f} KiB |"
        )
    return "\n".join(lines)


def pass_table() -> str:
    """Markdown: one row for each of `passes` and `inputs_variants`; instructions without padding at
    the end."""
    lines = [
        "| kernel, shape, results | global memory | instructions | registers | spills | shared |",
        "|---|---|---|---|---|---|",
    ]
    for variant in itertools.chain(passes(), inputs_variants()):
        machine = variant.compile()
        count = sum(machine.opcodes.values()) - machine.opcodes["NOP"]
        lines.append(
            f"| {variant} | {', '.join(sorted(machine.memory))} | {count} | {machine.registers} | "
            f"{machine.local_bytes} B | {machine.shared_bytes / 1024:.1f} KiB |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
    print(pass_table())
