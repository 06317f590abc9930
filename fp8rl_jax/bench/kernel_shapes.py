"""Which products `fp8rl bench kernels` runs: the matrices of published models, by rows.

A decode step multiplies a few rows by every matrix of a layer; a train step multiplies thousands,
three times: fprop, dgrad (contracts over the outputs) and wgrad (over the rows). A `Case` is one of
those products in the terms of the kernel: rows x depth by depth x columns.

Not here: attention (attention_times.py), and the absorbed matrices of latent attention, which have
no kernel yet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from fp8rl_jax.kernels import K_BLOCK
from fp8rl_jax.models import init_params
from fp8rl_jax.models.moe import make_tiles, tile_rows
from fp8rl_jax.models.presets import preset

MODELS = ("qwen3_8b", "qwen3_30b_a3b", "llama3p1_8b")
ROWS = (1, 8, 64, 128, 256, 4096, 16_384, 65_536)
TRAINING = 4096  # from so many rows on a product is a train step's: dgrad and wgrad too
_ALL_LAYERS_AT = 64  # rows at which every matrix is run; elsewhere a model's largest
_SQUARES = (4096, 8192)


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
class Case:
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
    def products(self) -> int:
        """Rows that are multiplied: of experts, `top_k` a token, padding not counted."""
        return self.rows * max(self.top_k, 1)

    @property
    def flops(self) -> float:
        return 2.0 * self.products * self.depth * self.columns

    @property
    def item(self) -> int:
        """Bytes of an operand's element."""
        return {"fp8": 1, "bf16": 2, "float32": 4}[self.kind]

    @property
    def weight_bytes(self) -> int:
        """Of the second operand, without scales; of experts, as many as random choices hit."""
        if self.experts and self.gemm == "wgrad":
            return self.products * self.columns * self.item
        used = 1.0
        if self.experts:
            used = self.experts * (1 - (1 - self.top_k / self.experts) ** self.rows)
        return round(used * self.depth * self.columns * self.item)

    @property
    def held_bytes(self) -> int:
        """Of all operands and the result: also of experts that no token takes."""
        if not self.experts or self.gemm == "wgrad":
            return self.bytes
        return self.bytes - self.weight_bytes + self.experts * self.depth * self.columns * self.item

    @property
    def bytes(self) -> int:
        """Fewest bytes through memory: operands once, a bf16 result (float32 of wgrad) once."""
        first = self.products * self.depth
        scales = 4 * first // K_BLOCK if self.kind == "fp8" else 0
        out = 2 * self.products * self.columns
        if self.gemm == "wgrad":
            out = 4 * max(self.experts, 1) * self.columns
            out *= self.depth if self.experts else self.rows
        return first * self.item + self.weight_bytes + scales + out

    def __str__(self) -> str:
        experts = f", {self.experts} experts, top {self.top_k}" if self.experts else ""
        shape = f"{self.rows} x {self.depth} x {self.columns}{experts}"
        return f"{self.name} {self.gemm} {self.kind} {shape}"


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


def _trained(case: Case) -> list[Case]:
    """The three products of a layer in a train step."""
    rows, depth, columns = case.rows, case.depth, case.columns
    turned = dataclasses.replace(case, gemm="dgrad", depth=columns, columns=depth)
    wgrad = dataclasses.replace(case, gemm="wgrad")
    if not case.experts:
        wgrad = dataclasses.replace(wgrad, rows=depth, depth=rows)
    return [case, turned, wgrad]


def target_cases() -> list[Case]:
    """The shapes that the project's targets name."""
    squares = [
        Case(f"square {n}", "fprop", kind, n, n, n) for n in _SQUARES for kind in ("fp8", "bf16")
    ]
    return [*squares, Case("128 experts, 8k tokens", "fprop", "fp8", 8192, 2048, 768, 128, 8)]


def cases(
    models: Sequence[str] = MODELS, rows: Sequence[int] = ROWS, quick: bool = False
) -> list[Case]:
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
                case = Case(name, "fprop", matrix.kind, count, *shape)
                found += _trained(case) if count >= TRAINING else [case]
    seen: dict[tuple, Case] = {}
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


def groups(case: Case, seed: int) -> Groups:
    """The tiles of a sparse layer whose tokens choose their experts at random."""
    draws = np.random.default_rng(seed).random((case.rows, case.experts), np.float32)
    chosen = np.argpartition(draws, case.top_k - 1, axis=1)[:, : case.top_k].astype(np.int32)
    rows = tile_rows(chosen.size, case.experts)
    return Groups(np.asarray(make_tiles(chosen, case.experts, rows).experts), rows)
