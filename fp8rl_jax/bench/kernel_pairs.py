"""Kernels that must give each other's bits: fused and plain, from memory and from the product.

Each check is an `Outcome` of kind 'pairs':

* a norm, and a gate, that quantises its result, against itself followed by the quantiser;
* rows of a norm, of a gate and of log-probabilities, few at a time, against all at once;
* log-probabilities without logits in memory against those of the logits in memory;
* attention of one query over a longer cache against the same query among all of a sequence;
* attention over pages of a pool against attention over the same caches in one piece.

Two are only reported, since nothing relies on them: the quantiser against the library's own in jnp,
and the Mosaic matmul against the Triton one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from fp8rl_jax.bench.kernel_checks import E4M3, Outcome, blocks, difference, guarded
from fp8rl_jax.bench.kernel_data import Source, in_one_piece, pages
from fp8rl_jax.exact_jit import exact_jit
from fp8rl_jax.kernels.gpu import attention as strict_attention
from fp8rl_jax.kernels.gpu import head as head_logprobs
from fp8rl_jax.kernels.gpu import norm
from fp8rl_jax.kernels.gpu.matmul import matmul
from fp8rl_jax.quant import quantize

_EPS = 1e-6
FEW = (1, 7, 64)  # rows at a time
ROWS, WIDTHS = 333, (128, 1000, 4096)
LENGTHS = (1, 64, 96, 97, 128, 129, 513, 1025, 4097)  # keys that a query sees
HEAD = (200, 1024, 5000)  # rows, width, vocabulary
MOSAIC = ((300, 1024, 1152), (4096, 4096, 4096))  # rows, K, columns


def _equal(case: str, one: Callable, other: Callable, *operands) -> Outcome:
    """Whether two functions of the same operands give the same bits."""

    def run() -> Outcome:
        results = (jax.tree.leaves(exact_jit(f)(*operands)) for f in (one, other))
        found = [difference(a, b) for a, b in zip(*results, strict=True)]
        detail = "; ".join(text for text in found if text)
        return Outcome("pairs", case, not detail, detail=detail)

    return guarded("pairs", case, run)


def _part(function: Callable, start: int, count: int) -> Callable:
    """`function` of some rows of its operands; the last operand is whole if it is not by row."""

    def run(*operands):
        rows = operands[0].shape[0]
        return function(*(x[start : start + count] if x.shape[0] == rows else x for x in operands))

    return run


def _rows_of(function: Callable, start: int, count: int) -> Callable:
    """The same rows of the result for all rows."""

    def run(*operands):
        return jax.tree.map(lambda x: x[start : start + count], function(*operands))

    return run


def check_fused(source: Source, widths=WIDTHS, rows: int = ROWS) -> Iterator[Outcome]:
    """Norm, gate and quantiser."""
    for width in widths:
        x, up = (source.take(jnp.bfloat16, rows, width) for _ in range(2))
        weight = source.scales(width)
        plain = {
            "rms_norm": (lambda x, w: norm.rms_norm(x, w, _EPS), (x, weight)),
            "gated_silu": (norm.gated_silu, (x, up)),
        }
        fused = {
            "rms_norm": lambda x, w: norm.rms_norm(x, w, _EPS, quantisation=norm.Quantisation()),
            "gated_silu": lambda x, u: norm.gated_silu(x, u, quantisation=norm.Quantisation()),
        }
        for name, (function, operands) in plain.items():

            def in_two(*operands, function=function):
                y = function(*operands)
                return y, *norm.quantize_rows(y)

            case = f"{name} {rows} x {width}"
            yield _equal(f"{case}: quantised at once, or after", fused[name], in_two, *operands)
            for few in FEW:
                start = rows // 3
                yield _equal(
                    f"{case}: {few} rows alone", _part(function, start, few),
                    _rows_of(function, start, few), *operands,
                )  # fmt: skip


def check_quantiser(source: Source, widths=WIDTHS, rows: int = ROWS) -> Iterator[Outcome]:
    """The quantiser against the library's own, whose divisions are XLA's."""

    def library(x):
        q = quantize(x, (1, 128))
        return q.qvalue, q.scale.T

    for width in widths:
        x = source.take(jnp.bfloat16, rows, width)
        yield _equal(f"quantise {rows} x {width}: kernel or jnp", norm.quantize_rows, library, x)


def check_head(source: Source, shape: tuple[int, int, int] = HEAD) -> Iterator[Outcome]:
    """Log-probabilities from hidden states, from logits, and of few rows."""
    rows, width, columns = shape
    hidden, head = source.take(jnp.bfloat16, rows, width), source.take(jnp.bfloat16, columns, width)
    targets = jnp.arange(rows, dtype=jnp.int32) * 7 % columns
    inverse = source.scales(rows)

    def fused(hidden, targets, inverse, head):
        return head_logprobs.head_logprobs(hidden, head.T, targets, inverse)

    def from_memory(hidden, targets, inverse, head):
        return head_logprobs.logprobs_of_logits(matmul(hidden, head.T), targets, inverse)

    name, operands = f"log-probabilities {rows} x {width} x {columns}", (hidden, targets, inverse)
    yield _equal(f"{name}: of logits, or without", fused, from_memory, *operands, head)
    for few in FEW:
        yield _equal(
            f"{name}: {few} rows alone, of logits", _part(from_memory, rows // 2, few),
            _rows_of(fused, rows // 2, few), *operands, head,
        )  # fmt: skip


def check_attention(
    source: Source, lengths=LENGTHS, heads=(8, 2), width: int = 128
) -> Iterator[Outcome]:
    """The last query of a sequence, alone as in a decode step, and among all as in a learner's.

    Yields an Outcome for every length and type of the cache. The decode step's cache is longer and
    holds numbers behind the sequence's end.
    """

    def among_all(q, k, v, k_scale, v_scale):
        length = q.shape[1]
        k, v, k_scale, v_scale = (x[:, :length] for x in (k, v, k_scale, v_scale))
        return run(q, k, v, k_scale, v_scale, jnp.arange(length, dtype=jnp.int32)[None])[:, -1:]

    def alone(q, k, v, k_scale, v_scale):
        last = jnp.full((1, 1), q.shape[1] - 1, jnp.int32)
        return run(q[:, -1:], k, v, k_scale, v_scale, last)

    def run(q, k, v, k_scale, v_scale, positions):
        scales = {"k_scale": k_scale, "v_scale": v_scale} if k.dtype == E4M3 else {}
        return strict_attention.attention(q, k, v, positions, scale=width**-0.5, **scales)

    for dtype in (E4M3, jnp.bfloat16):
        for length in lengths:
            q = source.take(jnp.bfloat16, 1, length, heads[0], width)
            slots = (1, length + 70, heads[1])
            keys, values = (source.take(dtype, *slots, width) for _ in range(2))
            scales = [source.scales(*slots) for _ in range(2)]
            name = f"attention over {length} keys in {jnp.dtype(dtype).name}: alone or among all"
            yield _equal(name, alone, among_all, q, keys, values, *scales)


def check_pages(
    source: Source, lengths=LENGTHS, heads=(8, 2), width: int = 128, queries: int = 40
) -> Iterator[Outcome]:
    """Sequences' caches in shuffled pages, and in one piece.

    Yields an Outcome for a decode step in both of its forms and for `queries` of a sequence at a
    time, each for every type of the cache. NaN lies in what nobody may read.
    """
    lengths = tuple(max(length, queries) for length in lengths)
    layout = pages(lengths)
    slots, table = (*layout.used.shape, heads[1]), jnp.asarray(layout.table)

    def run(q, table, *cached, one_split=None):
        last = jnp.asarray(lengths, jnp.int32)[:, None] - q.shape[1]
        positions = last + jnp.arange(q.shape[1], dtype=jnp.int32)
        named = dict(zip(("k", "v", "k_scale", "v_scale"), cached, strict=False))
        return strict_attention.attention(
            q, positions=positions, scale=width**-0.5, table=table, one_split=one_split, **named
        )

    uses = {"decode in splits": (1, True), "decode in one program": (1, False)}
    uses[f"{queries} queries"] = (queries, None)
    for dtype in (E4M3, jnp.bfloat16):
        cached = [layout.fill(source.take(dtype, *slots, width)) for _ in range(2)]
        if dtype == E4M3:
            cached += [layout.fill(source.scales(*slots)) for _ in range(2)]
        for use, (count, one_split) in uses.items():
            q = source.take(jnp.bfloat16, len(lengths), count, heads[0], width)

            def paged(q, *cached, one_split=one_split):
                return run(q, table, *cached, one_split=one_split)

            def whole(q, *cached, one_split=one_split):
                caches = (in_one_piece(x, table) for x in cached)
                return run(q, None, *caches, one_split=one_split)

            name = f"attention, {use}, {jnp.dtype(dtype).name}: pages or one piece"
            yield _equal(name, paged, whole, q, *cached)


def check_mosaic(source: Source, shapes=MOSAIC) -> Iterator[Outcome]:
    """The Mosaic matmul against the Triton one."""
    from fp8rl_jax.kernels.gpu.mosaic_matmul import fp8_matmul

    for rows, depth, columns in shapes:
        lhs, rhs = source.take(E4M3, rows, depth), source.take(E4M3, columns, depth)
        scales = source.scales(rows, blocks(depth)), source.scales(blocks(depth), blocks(columns))
        yield _equal(
            f"Mosaic or Triton, fp8 {rows} x {depth} x {columns}",
            lambda x, w, *s: fp8_matmul(x, w.T, *s), lambda x, w, *s: matmul(x, w.T, *s),
            lhs, rhs, *scales,
        )  # fmt: skip
