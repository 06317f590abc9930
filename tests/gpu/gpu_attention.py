"""Attention's cases: caches in pages or in one piece, and the result in float64 numpy.

The oracle dequantises, and takes the softmax and its derivative as they are written, over the keys
that a query sees. What nobody may read holds NaN, in INT8 a number: pages of no sequence and slots
behind each sequence's end.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from fp8rl_jax.bench.kernel_times import DTYPES, Source
from fp8rl_jax.kernels import KV_CHUNK

CACHED = ("k", "v", "k_scale", "v_scale", "k_rope")


@dataclasses.dataclass(frozen=True)
class Attention:
    """Attention of each sequence's last queries.

    Attributes:
      kind: of keys and values: 'fp8', 'int8', 'bf16' or 'float32'; queries are bf16, or float32.
      queries: of a sequence; 1 is a decode step.
      lengths: keys of each sequence, as many as queries or more.
      heads, kv_heads, width: of the heads.
      rope: further features of queries and keys; then values are the keys without them (latents).
      paged: whether the cache lies in pages; otherwise all lengths are equal.
    """

    kind: str
    queries: int
    lengths: tuple[int, ...]
    heads: int = 32
    kv_heads: int = 8
    width: int = 128
    rope: int = 0
    paged: bool = True

    def __str__(self) -> str:
        queries = f"{len(self.lengths)} x {self.queries} queries of {max(self.lengths)} keys"
        heads = f"{self.heads} x {self.kv_heads} heads of {self.width + self.rope}"
        return f"{self.kind}, {queries}, {heads}"

    scale = property(lambda self: (self.width + self.rope) ** -0.5)

    def operands(self, source: Source) -> dict[str, jax.Array]:
        """Arguments of attention by name, without `scale`."""
        dtype, rows = DTYPES[self.kind], (len(self.lengths), self.queries, self.heads)
        other = jnp.float32 if self.kind == "float32" else jnp.bfloat16
        table, used = pages(self.lengths)
        slots = used.shape if self.paged else (len(self.lengths), self.lengths[0])

        def cache(make, *rest: int) -> jax.Array:
            x = make(*slots, self.kv_heads, *rest)
            if not self.paged:
                return x
            mine = used.reshape(*slots, *[1] * (x.ndim - 2))
            nobodys = 77 if x.dtype == jnp.int8 else jnp.nan
            return jnp.where(mine, x, jnp.asarray(nobodys, x.dtype))

        starts = np.asarray(self.lengths)[:, None] - self.queries
        k, v = (cache(lambda *shape: source.take(dtype, *shape), self.width) for _ in "kv")
        found = {
            "q": source.take(other, *rows, self.width),
            "k": k,
            "v": k if self.rope else v,
            "positions": jnp.asarray(starts + np.arange(self.queries), jnp.int32),
        }
        if self.paged:
            found["table"] = jnp.asarray(table)
        if self.kind in ("fp8", "int8"):
            unit = 1 / 32 if self.kind == "int8" else 1
            for name in ("k_scale", "v_scale"):
                found[name] = cache(lambda *shape: unit * source.scales(*shape))
        if self.rope:
            found["q_rope"] = source.take(other, *rows, self.rope)
            found["k_rope"] = cache(lambda *shape: source.take(other, *shape), self.rope)
        return found


def pages(lengths: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Pages in random order: a table (B, N) of each sequence's pages, behind its last no page's
    number, and the slots (P, 64) of the pool that a sequence has filled; some pages have none."""
    counts = [-(-length // KV_CHUNK) for length in lengths]
    free = iter(np.random.default_rng(0).permutation(sum(counts) + 3))
    table = np.full((len(lengths), max(counts)), 10**9, np.int32)
    used = np.zeros((sum(counts) + 3, KV_CHUNK), bool)
    for row, length in zip(table, lengths, strict=True):
        for place, start in enumerate(range(0, length, KV_CHUNK)):
            row[place] = next(free)
            used[row[place], : length - start] = True
    return table, used


def in_one_piece(operands: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The same caches in one piece, (B, N * 64, ...) for pages (P, 64, ...)."""
    if "table" not in operands:
        return operands
    table = operands["table"]

    def cache(pool: jax.Array) -> jax.Array:
        found = jnp.take(pool, table, axis=0, mode="clip")
        return found.reshape(table.shape[0], -1, *pool.shape[2:])

    return {n: cache(x) if n in CACHED else x for n, x in operands.items() if n != "table"}


def float64(case: Attention, operands: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """'out', 'size' (the sums of its terms' magnitudes); with a 'cotangent' 'dq', 'dk' and 'dv'."""
    wide = {n: np.asarray(x).astype(np.float64) for n, x in in_one_piece(operands).items()}
    for name in ("k", "v"):
        wide[name] = wide[name] * wide.get(f"{name}_scale", np.ones(1))[..., None]
    q, group = wide["q"], case.heads // case.kv_heads
    if case.rope:
        q = np.concatenate([q, wide["q_rope"]], -1)
        wide["k"] = np.concatenate([wide["k"], wide["k_rope"]], -1)
    k, v = (np.repeat(np.nan_to_num(wide[name]), group, 2) for name in "kv")
    score = np.einsum("bthd,bshd->bhts", q, k) * case.scale
    seen = np.arange(k.shape[1]) <= wide["positions"][:, None, :, None]
    score = np.where(seen, score, -np.inf)
    weight = np.exp(score - score.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    found = {
        "out": np.einsum("bhts,bshd->bthd", weight, v),
        "size": np.einsum("bhts,bshd->bthd", weight, np.abs(v)),
    }
    if "cotangent" not in wide:
        return found
    of_weight = np.einsum("bthd,bshd->bhts", wide["cotangent"], v)
    of_score = weight * (of_weight - (weight * of_weight).sum(-1, keepdims=True)) * case.scale

    def of_keys(x: np.ndarray) -> np.ndarray:
        return x.reshape(*x.shape[:2], case.kv_heads, group, case.width).sum(3)

    return found | {
        "dq": np.einsum("bhts,bshd->bthd", of_score, k),
        "dk": of_keys(np.einsum("bhts,bthd->bshd", of_score, q)),
        "dv": of_keys(np.einsum("bhts,bthd->bshd", weight, wide["cotangent"])),
    }
