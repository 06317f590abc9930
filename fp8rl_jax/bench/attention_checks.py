"""Correctness of attention over a cache in pages: against float64 numpy, on all of the result.

The oracle gathers each sequence's pages by the table and takes the softmax as it is written, over
the keys that a query sees. What nobody may read holds NaN: pages of no sequence and slots behind
each sequence's end. The error is in units of the weighted sum of the values' magnitudes.

Bounds. The kernel rounds weights to bf16 for the product with values: up to 2^-8 of each term.
Elsewhere, and in float32, only float32 roundings remain, of scores above all. A page of another
sequence changes a result by the page's share of the weights, 1/18 for the longest case here.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from fp8rl_jax.bench.kernel_checks import DTYPES, Outcome, guarded, judge
from fp8rl_jax.bench.kernel_data import Source, in_one_piece, pages
from fp8rl_jax.exact_jit import exact_jit
from fp8rl_jax.kernels.gpu import attention as strict_attention
from fp8rl_jax.kernels.reference import attention as reference

_BOUND_OF_BF16_WEIGHTS = 2.0**-8
_BOUND = 4e-6
Operands = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Attention:
    """Attention of each sequence's last queries.

    Attributes:
      kind: of keys and values: 'fp8', 'bf16' or 'float32'; queries are bf16, or float32 too.
      queries: of a sequence; 1 is a decode step.
      lengths: keys of each sequence, as many as queries or more.
      heads, kv_heads, width: of the heads.
      rope: further features of queries and keys; then values are the keys without them (latents).
    """

    kind: str
    queries: int
    lengths: tuple[int, ...]
    heads: int = 32
    kv_heads: int = 8
    width: int = 128
    rope: int = 0

    def __str__(self) -> str:
        width = f"{self.width} + {self.rope}" if self.rope else f"{self.width}"
        return (
            f"attention over pages, {self.kind}, {self.queries} queries of {len(self.lengths)} "
            f"sequences, {max(self.lengths)} keys, {self.heads} x {self.kv_heads} heads of {width}"
        )

    @property
    def scale(self) -> float:
        return (self.width + self.rope) ** -0.5

    def operands(self, source: Source) -> Operands:
        """Arguments of attention by name, without `scale`."""
        layout, dtype = pages(self.lengths), DTYPES[self.kind]
        other = jnp.float32 if self.kind == "float32" else jnp.bfloat16
        slots = (*layout.used.shape, self.kv_heads)
        rows = (len(self.lengths), self.queries, self.heads)
        k = layout.fill(source.take(dtype, *slots, self.width))
        v = k if self.rope else layout.fill(source.take(dtype, *slots, self.width))
        starts = np.asarray(self.lengths)[:, None] - self.queries
        found = {
            "q": source.take(other, *rows, self.width), "k": k, "v": v,
            "positions": jnp.asarray(starts + np.arange(self.queries), jnp.int32),
            "table": jnp.asarray(layout.table),
        }  # fmt: skip
        if self.kind == "fp8":
            found |= {n: layout.fill(source.scales(*slots)) for n in ("k_scale", "v_scale")}
        if self.rope:
            found["q_rope"] = source.take(other, *rows, self.rope)
            found["k_rope"] = layout.fill(source.take(other, *slots, self.rope))
        return found


_LENGTHS = (1, 64, 65, 200, 513, 1100)
CASES = (
    Attention("fp8", 1, _LENGTHS),
    Attention("bf16", 1, _LENGTHS),
    Attention("fp8", 40, (40, 97, 300)),
    Attention("float32", 3, (3, 65, 130), 4, 2, 64),
    Attention("fp8", 1, (65, 600), 128, 1, 512, 64),
)


def bound(case: Attention, implementation: str) -> float:
    """Largest error allowed, over the weighted sum of magnitudes."""
    rounded = implementation != "reference" and case.kind != "float32"
    return _BOUND_OF_BF16_WEIGHTS if rounded else _BOUND


def float64(case: Attention, operands: Operands) -> tuple[np.ndarray, np.ndarray]:
    """The result in float64, and the sums of its terms' magnitudes, (B, T, H, Dv) both."""
    wide = {n: np.asarray(x).astype(np.float64) for n, x in operands.items() if n != "table"}
    table, group = np.asarray(operands["table"]), case.heads // case.kv_heads
    results = []
    for sequence, length in enumerate(case.lengths):
        mine = table[sequence, : -(-length // wide["k"].shape[1])]

        def cached(name: str, scale: str = "", mine=mine, length=length) -> np.ndarray:
            """(keys, H, features) of this sequence, dequantised."""
            x = np.concatenate(wide[name][mine])[:length]
            if scale in wide:
                x = x * np.concatenate(wide[scale][mine])[:length, :, None]
            return np.repeat(x, group, 1)

        score = np.einsum("thd,shd->ths", wide["q"][sequence], cached("k", "k_scale"))
        if case.rope:
            score += np.einsum("thd,shd->ths", wide["q_rope"][sequence], cached("k_rope"))
        seen = np.arange(length) <= wide["positions"][sequence][:, None, None]
        score = np.where(seen, score * case.scale, -np.inf)
        weight = np.exp(score - score.max(-1, keepdims=True))
        weight /= weight.sum(-1, keepdims=True)
        v = cached("v", "v_scale")
        results.append([np.einsum("ths,shd->thd", weight, x) for x in (v, np.abs(v))])
    want, size = zip(*results, strict=True)
    return np.stack(want), np.stack(size)


def _in_one_piece(operands: Operands) -> Operands:
    """Operands without a table; numbers for NaN, which the reference's masked slots must hold."""
    cached = ("k", "v", "k_scale", "v_scale", "k_rope")
    return {
        n: jnp.nan_to_num(in_one_piece(x, operands["table"])) if n in cached else x
        for n, x in operands.items()
        if n != "table"
    }


def check_attention(case: Attention, source: Source, implementation: str) -> Outcome:
    """Attention over pages against float64; of the reference, over the same cache in one piece."""

    def compute(operands: Operands):
        if implementation == "reference":
            out = reference.attention(**_in_one_piece(operands), scale=case.scale)
        else:
            out = strict_attention.attention(**operands, scale=case.scale)
        return out, jnp.isfinite(out).all()

    def run() -> Outcome:
        operands = case.operands(source)
        got, finite = exact_jit(compute)(operands)
        limit = bound(case, implementation)
        return judge(str(case), got, *float64(case, operands), limit, finite)

    return guarded("float64", str(case), run)
