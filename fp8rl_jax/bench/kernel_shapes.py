"""Which calls `fp8rl bench kernels` times: products of published models, and attention.

A decode step multiplies a few rows by every matrix of a layer; a train step multiplies thousands,
three times: fprop, dgrad (contracts over the outputs) and wgrad (over the rows). A `Product` is one
of those in the terms of the kernel: rows x depth by depth x columns. `Attention` has the heads of
Qwen3-8B: decode over pages of 8 to 256 sequences, and prefill of one.

Not here: the absorbed matrices of latent attention, which have no kernel yet, and its heads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from fp8rl_jax.kernels import K_BLOCK, KV_CHUNK
from fp8rl_jax.models import init_params
from fp8rl_jax.models.moe import make_tiles, tile_rows
from fp8rl_jax.models.presets import preset

MODELS = ("qwen3_8b", "qwen3_30b_a3b", "llama3p1_8b")
ROWS = (1, 8, 64, 128, 256, 4096, 16_384, 65_536)
TRAINING = 4096  # from so many rows on a product is a train step's: dgrad and wgrad too
_ALL_LAYERS_AT = 64  # rows at which every matrix is run; elsewhere a model's largest
_SQUARES = (4096, 8192)
HEADS, KV_HEADS, WIDTH = 32, 8, 128
_BATCHES, _LENGTHS, _TOKENS = (8, 32, 128, 256), (4096, 8192, 32_768), (4096, 16_384)

L2 = 60e6  # bytes, of an H100 or H200
ROTATED = 4 * L2  # bytes of operands that one program reads at least
IN_FLIGHT = 4e-3  # seconds that a sample lasts at least, by the estimate
_MEMORY = 16e9  # bytes that the operands and results of one program may take
_MOST_CALLS = 192  # in a program; more would be spent on its arguments
# Estimates that choose the number of calls; what is reported is measured.
_BYTES_PER_S, _FLOPS_PER_S = 4e12, {"fp8": 1.2e15, "bf16": 7e14, "float32": 4e13, "attention": 1e14}


class Matrix(NamedTuple):
    """A weight: `kind` of its product, (depth, columns), and for experts how many of them."""

    kind: str
    depth: int
    columns: int
    experts: int = 0
    top_k: int = 0

    @property
    def size(self) -> int:
        return self.depth * self.columns * max(self.experts, 1)


@dataclasses.dataclass(frozen=True)
class Product:
    """One product.

    Attributes:
      name: model and layers, such as 'qwen3_8b gate/up'.
      gemm: 'fprop', 'dgrad' or 'wgrad'.
      kind: 'fp8', 'bf16' or 'float32', of the operands.
      rows, depth, columns: of the product; `rows` are tokens where there are experts.
      experts, top_k: matrices, and how many of them a token takes; 0 for a dense product.
    """

    name: str
    gemm: str
    kind: str
    rows: int
    depth: int
    columns: int
    experts: int = 0
    top_k: int = 0

    @property
    def multiplied(self) -> int:
        """Rows that are multiplied: of experts, `top_k` a token, padding not counted."""
        return self.rows * max(self.top_k, 1)

    @property
    def flops(self) -> float:
        return 2.0 * self.multiplied * self.depth * self.columns

    @property
    def item(self) -> int:
        """Bytes of an operand's element."""
        return {"fp8": 1, "bf16": 2, "float32": 4}[self.kind]

    @property
    def weight_bytes(self) -> int:
        """Of the second operand, without scales; of experts, as many as random choices hit."""
        if self.experts and self.gemm == "wgrad":
            return self.multiplied * self.columns * self.item
        used = 1.0
        if self.experts:
            used = self.experts * (1 - (1 - self.top_k / self.experts) ** self.rows)
        return round(used * self.depth * self.columns * self.item)

    @property
    def held_bytes(self) -> int:
        """Of all operands and the result: also of experts that no token takes."""
        if self.gemm == "wgrad":
            return self.bytes
        weights = max(self.experts, 1) * self.depth * self.columns * self.item
        return self.bytes - self.weight_bytes + weights

    @property
    def bytes(self) -> int:
        """Fewest bytes through memory: operands once, a bf16 result (float32 of wgrad) once."""
        first = self.multiplied * self.depth
        scales = 4 * first // K_BLOCK if self.kind == "fp8" else 0
        out = 2 * self.multiplied * self.columns
        if self.gemm == "wgrad":
            out = 4 * max(self.experts, 1) * self.columns
            out *= self.depth if self.experts else self.rows
        return first * self.item + self.weight_bytes + scales + out

    @property
    def calls(self) -> tuple[int, int]:
        """(calls in a program, programs in flight)."""
        seconds = max(self.bytes / _BYTES_PER_S, self.flops / _FLOPS_PER_S[self.kind])
        wide = 2 if self.kind == "fp8" else 1  # the bf16 counterpart's operands are twice as large
        fit = max(2, int(_MEMORY / (wide * self.held_bytes)))
        wanted = max(2, math.ceil(IN_FLIGHT / 2 / seconds), math.ceil(ROTATED / self.bytes))
        count = min(wanted, fit, _MOST_CALLS)
        return count, max(1, math.ceil(IN_FLIGHT / (count * seconds)))

    @property
    def versions(self) -> list[str]:
        """What is timed: 'ours', 'bf16' and 'fp8' (XLA's), 'dense' (ours, of experts)."""
        if self.kind == "fp8" and self.experts:
            return ["ours", "bf16", "dense"]
        scaled = self.kind == "fp8" and self.gemm == "fprop"
        return ["ours", "bf16", "fp8"] if scaled else ["ours", "bf16"]

    def __str__(self) -> str:
        experts = f", {self.experts} experts, top {self.top_k}" if self.experts else ""
        shape = f"{self.rows} x {self.depth} x {self.columns}{experts}"
        return f"{self.name} {self.gemm} {self.kind} {shape}"


@dataclasses.dataclass(frozen=True)
class Attention:
    """One call of attention.

    Attributes:
      use: 'decode', one query a sequence over pages, or 'prefill', all of a sequence's queries.
      kind: 'fp8' or 'bf16', of keys and values; queries are bf16.
      batch, length: sequences, and keys of each.
    """

    use: str
    kind: str
    batch: int
    length: int

    def __str__(self) -> str:
        return f"attention {self.use} {self.kind} KV {self.batch} x {self.length}"

    @property
    def queries(self) -> int:
        return 1 if self.use == "decode" else self.length

    @property
    def pages(self) -> int:
        return self.batch * self.length // KV_CHUNK

    @property
    def decides(self) -> bool:
        """Whether a target is set for this call."""
        return self.use == "decode" and self.batch >= 32 and self.length == 8192

    @property
    def cache_bytes(self) -> int:
        """Of keys, values and their scales."""
        vector = 2 * WIDTH if self.kind == "bf16" else WIDTH + 4
        return 2 * self.batch * self.length * KV_HEADS * vector

    @property
    def bytes(self) -> int:
        """Fewest bytes through memory: the cache, bf16 queries, float32 results."""
        return self.cache_bytes + self.batch * self.queries * HEADS * WIDTH * (2 + 4)

    @property
    def flops(self) -> float:
        """Of both products, over the keys that a query sees: causal, half of the square."""
        seen = self.length if self.use == "decode" else self.length * (self.length + 1) // 2
        return 4.0 * self.batch * HEADS * WIDTH * seen

    @property
    def calls(self) -> tuple[int, int]:
        """(calls in a program, programs in flight)."""
        count = max(2, math.ceil(ROTATED / self.bytes)) if self.use == "decode" else 2
        if count * self.cache_bytes > 4 * ROTATED:  # far more than the L2 by itself
            count = 1
        seconds = max(self.bytes / _BYTES_PER_S, self.flops / _FLOPS_PER_S["attention"])
        return count, max(1, math.ceil(IN_FLIGHT / (count * seconds)))

    @property
    def versions(self) -> list[str]:
        """What is timed: 'ours', and of decode the 'other' of the kernel's two forms."""
        return ["ours", "other"] if self.use == "decode" else ["ours"]


def attention_cases(quick: bool = False) -> list[Attention]:
    """What is timed, the cases of the targets first; with `quick`, those and the short prefill."""
    shapes = [(batch, length) for length in _LENGTHS for batch in _BATCHES]
    decode = [Attention("decode", kind, *shape) for shape in shapes for kind in ("fp8", "bf16")]
    decode.sort(key=lambda case: not case.decides)
    tokens = _TOKENS[:1] if quick else _TOKENS
    found = [case for case in decode if case.decides or not quick]
    return found + [Attention("prefill", kind, 1, n) for n in tokens for kind in ("fp8", "bf16")]


def matrices(model: str) -> dict[Matrix, list[str]]:
    """{matrix: its layers} of a published model, without duplicates.

    Raises:
      UserError: no such model.
    """
    config = preset(model)
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    found: dict[Matrix, list[str]] = {}

    def add(matrix: Matrix, name: str) -> None:
        names = found.setdefault(matrix, [])
        if name not in names:
            names.append(name)

    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        names = [entry.key for entry in path]
        depth, columns = leaf.shape[-2:] if leaf.ndim > 1 else (0, 0)
        if names == ["lm_head"] or (names == ["embed_tokens"] and config.tie_word_embeddings):
            head = (config.hidden_size, config.vocab_size)
            add(Matrix("bf16", *head), "lm_head")
        elif names[-1] != "kernel":
            continue
        elif "experts" in names:
            experts = config.num_experts, config.num_experts_per_tok
            add(Matrix("fp8", depth, columns, *experts), f"experts.{names[-2]}")
        elif leaf.ndim == 3:
            add(Matrix("float32" if "router" in names else "fp8", depth, columns), names[-2])
    return found


def _short(layers: list[str]) -> str:
    """'experts gate/up' of ['experts.gate_proj', 'experts.up_proj']."""
    names = "/".join(layer.split(".")[-1].removesuffix("_proj") for layer in layers)
    return f"experts {names}" if layers[0].startswith("experts.") else names


def _trained(case: Product) -> list[Product]:
    """The three products of a layer in a train step."""
    rows, depth, columns = case.rows, case.depth, case.columns
    turned = dataclasses.replace(case, gemm="dgrad", depth=columns, columns=depth)
    wgrad = dataclasses.replace(case, gemm="wgrad")
    if not case.experts:
        wgrad = dataclasses.replace(wgrad, rows=depth, depth=rows)
    return [case, turned, wgrad]


def target_cases() -> list[Product]:
    """The shapes that the project's targets name."""
    squares = [
        Product(f"square {n}", "fprop", kind, n, n, n) for n in _SQUARES for kind in ("fp8", "bf16")
    ]
    return [*squares, Product("128 experts, 8k tokens", "fprop", "fp8", 8192, 2048, 768, 128, 8)]


def cases(
    models: Sequence[str] = MODELS, rows: Sequence[int] = ROWS, quick: bool = False
) -> list[Product]:
    """The products to run, the most telling first, none twice.

    Every matrix is run at 64 rows, a model's two largest at other numbers (at one row the output
    head too), three times (fprop, dgrad, wgrad) from 4,096 rows on; above 4,096 the largest alone.
    With `quick`, the largest of every model at 1, 64 and 4,096 rows.

    Raises:
      UserError: no such model.
    """
    wanted = [n for n in rows if not quick or n in (1, _ALL_LAYERS_AT, TRAINING)]
    # What decides a target comes first, for a run that must stop early.
    wanted.sort(key=lambda n: (n != _ALL_LAYERS_AT, n != 1, n != TRAINING, n))
    layers = {model: matrices(model) for model in models}
    found = target_cases()
    for count in wanted:
        for model, stacks in layers.items():
            largest = sorted(stacks, key=lambda m: -m.size)
            heavy = [m for m in largest if m.kind == "fp8"]
            heads = [m for m in largest if m.kind == "bf16"]
            if quick or count > TRAINING:
                chosen = heavy[:1]
            elif count == _ALL_LAYERS_AT:
                chosen = largest
            else:
                chosen = heavy[:2] + (heads if count == 1 else [])
            for matrix in chosen:
                name = f"{model} {_short(stacks[matrix])}"
                shape = matrix.depth, matrix.columns, matrix.experts, matrix.top_k
                case = Product(name, "fprop", matrix.kind, count, *shape)
                found += _trained(case) if count >= TRAINING else [case]
    seen: dict[tuple, Product] = {}
    for case in found:
        # fprop and dgrad are one kernel: equal shapes are one product, whatever they are called.
        gemm = "wgrad" if case.gemm == "wgrad" else "product"
        key = (gemm, *dataclasses.astuple(case)[2:])
        seen.setdefault(key, case)
    return list(seen.values())


class Groups(NamedTuple):
    """Rows of experts in tiles: (tiles,) int32 experts as `make_tiles` has them, rows of a tile."""

    experts: np.ndarray
    rows: int


def groups(case: Product, seed: int) -> Groups:
    """The tiles of a sparse layer whose tokens choose their experts at random."""
    draws = np.random.default_rng(seed).random((case.rows, case.experts), np.float32)
    chosen = np.argpartition(draws, case.top_k - 1, axis=1)[:, : case.top_k].astype(np.int32)
    rows = tile_rows(chosen.size, case.experts)
    return Groups(np.asarray(make_tiles(chosen, case.experts, rows).experts), rows)
