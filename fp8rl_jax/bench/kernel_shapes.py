"""Lists the calls that `fp8rl bench kernels` times: products of published models, and attention.

A decode step multiplies a few rows by every matrix of a layer; a train step multiplies thousands,
three times: fprop, dgrad (contracts over the outputs) and wgrad (over the rows). A `Product` is one
such call of a kernel: rows x depth by depth x columns. `Attention` has the heads of Qwen3-8B:
decode over the pages of 8 to 256 sequences, and prefill of one sequence.

Not here: latent attention, whose absorbed matrices have no kernel yet.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from fp8rl_jax.kernels import K_BLOCK, KV_CHUNK
from fp8rl_jax.models.arrays import EXPERTS, LINEAR, ROUTER, array_of, leaf_shapes
from fp8rl_jax.models.moe import make_tiles, tile_rows
from fp8rl_jax.models.presets import preset

MODELS = ("qwen3_8b", "qwen3_30b_a3b", "llama3p1_8b")
ROWS = (1, 8, 64, 128, 256, 4096, 16_384, 65_536)
TRAINING = 4096  # from this many rows on a product is a train step's: dgrad and wgrad too
_ALL_MATRICES_AT = 64  # rows; with other numbers of rows a model's two largest matrices are run
_QUICK_ROWS = (1, 64, 4096)
HEADS = 32
KV_HEADS = 8
WIDTH = 128

ROTATED = 240e6  # least bytes of operands that one program reads: four times an H200's L2
IN_FLIGHT = 4e-3  # least estimated seconds of a sample
MOST_CALLS = 128  # most calls in a program: more would time the passing of its arguments
# Estimates that choose the number of calls; what is reported is measured.
_BYTES_PER_S = 4e12
_FLOPS_PER_S = {"fp8": 1.2e15, "int8": 1.2e15, "bf16": 7e14, "float32": 4e13}
_ITEM = {"fp8": 1, "bf16": 2, "float32": 4}  # bytes


@dataclasses.dataclass(frozen=True)
class Product:
    """One matrix product.

    Attributes:
      name: model and layers, such as 'qwen3_8b gate/up'.
      gemm: 'fprop', 'dgrad' or 'wgrad'.
      kind: dtype of the operands: 'fp8', 'bf16' or 'float32'.
      rows, depth, columns: shape, rows x depth by depth x columns; with experts `rows` are tokens.
      experts, top_k: number of matrices, and of those that a token uses; 0 for a dense product.
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
        """Rows that are multiplied, without padding: with experts, `top_k` per token."""
        return self.rows * max(self.top_k, 1)

    @property
    def flops(self) -> float:
        return 2.0 * self.multiplied * self.depth * self.columns

    @property
    def weight_bytes(self) -> int:
        """Bytes of the second operand, without scales; only of experts that random choices hit."""
        if self.experts and self.gemm == "wgrad":
            return self.multiplied * self.columns * _ITEM[self.kind]
        used = 1.0
        if self.experts:
            used = self.experts * (1 - (1 - self.top_k / self.experts) ** self.rows)
        return round(used * self.depth * self.columns * _ITEM[self.kind])

    @property
    def bytes(self) -> int:
        """Fewest bytes through memory: operands once, and a bf16 (wgrad: float32) result once."""
        first = self.multiplied * self.depth
        scales = 4 * first // K_BLOCK if self.kind == "fp8" else 0
        out = 2 * self.multiplied * self.columns
        if self.gemm == "wgrad":
            out = 4 * self.columns * (self.experts * self.depth if self.experts else self.rows)
        return first * _ITEM[self.kind] + self.weight_bytes + scales + out

    def __str__(self) -> str:
        experts = f", {self.experts} experts, top {self.top_k}" if self.experts else ""
        return (
            f"{self.name} {self.gemm} {self.kind} {self.rows} x {self.depth} x "
            f"{self.columns}{experts}"
        )


@dataclasses.dataclass(frozen=True)
class Attention:
    """One call of attention.

    Attributes:
      use: 'decode', one query a sequence over pages, or 'prefill', all of a sequence's queries.
      kind: dtype of keys and values, 'int8', 'fp8' or 'bf16'; queries are bf16.
      batch, length: number of sequences, and of keys in each.
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
    def bytes(self) -> int:
        """Fewest bytes through memory: the cache, bf16 queries, float32 results."""
        vector = 2 * WIDTH if self.kind == "bf16" else WIDTH + 4  # with its scale
        cache = 2 * self.batch * self.length * KV_HEADS * vector
        return cache + self.batch * self.queries * HEADS * WIDTH * (2 + 4)

    @property
    def flops(self) -> float:
        """FLOPs of both products over the keys that a query sees: causal, half of the square."""
        seen = self.length if self.use == "decode" else self.length * (self.length + 1) // 2
        return 4.0 * self.batch * HEADS * WIDTH * seen


def calls(case: Product | Attention) -> tuple[int, int]:
    """Returns the number of calls in a program, and of programs in flight."""
    seconds = max(case.bytes / _BYTES_PER_S, case.flops / _FLOPS_PER_S[case.kind])
    count = min(MOST_CALLS, math.ceil(max(IN_FLIGHT / 2 / seconds, ROTATED / case.bytes)))
    return count, max(1, math.ceil(IN_FLIGHT / (count * seconds)))


def attention_cases(quick: bool = False) -> list[Attention]:
    """Lists the decode and prefill cases in INT8, FP8 and bf16; `quick` keeps those with a target
    and the prefill of 4096 tokens."""
    shapes = [("decode", b, n) for n in (4096, 8192, 32_768) for b in (8, 32, 128, 256)]
    shapes += [("prefill", 1, n) for n in (4096, 16_384)]
    cases = [
        Attention(use, kind, batch, length)
        for use, batch, length in shapes
        for kind in ("int8", "fp8", "bf16")
    ]
    return [c for c in cases if not quick or c.decides or (c.use, c.length) == ("prefill", 4096)]


def matrices(model: str) -> list[Product]:
    """Lists one row times each matrix of a published model, largest first, without duplicates.

    Raises:
      UserError: there is no such model.
    """
    config = preset(model)
    # {product without a name: names of its layers}
    layers = {Product("", "fprop", "bf16", 1, config.hidden_size, config.vocab_size): ["lm_head"]}
    for path, shape in leaf_shapes(config).items():
        array = array_of(path)
        if array.role not in (LINEAR, ROUTER):
            continue
        of_experts = array.axes == EXPERTS
        product = Product(
            name="",
            gemm="fprop",
            kind="float32" if array.role == ROUTER else "fp8",
            rows=1,
            depth=shape[-2],
            columns=shape[-1],
            experts=config.num_experts if of_experts else 0,
            top_k=config.num_experts_per_tok if of_experts else 0,
        )
        layers.setdefault(product, []).append(path[-2].removesuffix("_proj"))
    products = [
        dataclasses.replace(product, name=f"{model} {'/'.join(dict.fromkeys(names))}")
        for product, names in layers.items()
    ]
    return sorted(products, key=lambda p: -p.depth * p.columns * max(p.experts, 1))


def _train_step(case: Product) -> list[Product]:
    """Returns the three products of a layer in a train step."""
    dgrad = dataclasses.replace(case, gemm="dgrad", depth=case.columns, columns=case.depth)
    wgrad = dataclasses.replace(case, gemm="wgrad")
    if not case.experts:
        wgrad = dataclasses.replace(wgrad, rows=case.depth, depth=case.rows)
    return [case, dgrad, wgrad]


def target_cases() -> list[Product]:
    """Lists the products that the project's targets name."""
    squares = [(n, kind) for n in (4096, 8192) for kind in ("fp8", "bf16")]
    return [
        *(Product(f"square {n}", "fprop", kind, n, n, n) for n, kind in squares),
        Product("128 experts, 8k tokens", "fprop", "fp8", 8192, 2048, 768, 128, 8),
    ]


def cases(
    models: Sequence[str] = MODELS, rows: Sequence[int] | None = None, quick: bool = False
) -> list[Product]:
    """Lists the products to run, those of the targets first, without duplicates.

    Every matrix is run with 64 rows, a model's two largest with other numbers of rows too; from
    4,096 rows on three times (fprop, dgrad, wgrad). With `quick`, only the largest of every model,
    with fewer numbers of rows.

    Raises:
      UserError: there is no such model.
    """
    products = target_cases()
    for model in models:
        largest = matrices(model)
        heavy = [product for product in largest if product.kind == "fp8"][: 1 if quick else 2]
        for count in rows or (_QUICK_ROWS if quick else ROWS):
            for product in largest if count == _ALL_MATRICES_AT and not quick else heavy:
                case = dataclasses.replace(product, rows=count)
                products += _train_step(case) if count >= TRAINING else [case]
    seen: dict[tuple, Product] = {}
    for case in products:
        # fprop and dgrad are one kernel: equal shapes are one product, whatever they are called.
        seen.setdefault((case.gemm == "wgrad", *dataclasses.astuple(case)[2:]), case)
    return list(seen.values())


def groups(case: Product) -> tuple[np.ndarray, int]:
    """Returns the tiles of a sparse layer whose tokens choose their experts at random: the expert
    of each tile, (tiles,) int32, by `make_tiles`; and the rows of a tile."""
    draws = np.random.default_rng(0).random((case.rows, case.experts), np.float32)
    chosen = np.argpartition(draws, case.top_k - 1, axis=1)[:, : case.top_k].astype(np.int32)
    rows = tile_rows(chosen.size, case.experts)
    return np.asarray(make_tiles(jnp.asarray(chosen), case.experts, rows).experts), rows
