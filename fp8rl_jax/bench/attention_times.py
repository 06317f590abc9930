"""Speed of attention on a GPU: decode over a cache in pages, and prefill or a train step's forward.

Decode reads every key and value once, so its rate is bytes a second, beside the copy of the same
run. All calls of a program read one pool, as the layers of a model do, each by a table of its own:
no two calls share a page, pages are in random order, and together they exceed the L2 several times.
The share of FP8 over bf16 is that of their times; scales count as bytes read, so it is below 2. The
kernel has two forms, a program for each split of the keys or for all of them, and the library takes
one by shape; the other is timed too, since the bits do not depend on it.

Prefill and a train step's forward take each sequence's tokens at once. Their operations are those
that causal attention needs, half of the square; the kernel's tiles of 16 rows do little more.

The method is that of kernel_times.py. Heads are those of Qwen3-8B. Not here: latents; the backward
pass, which is jnp.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8rl_jax.bench.kernel_checks import DTYPES
from fp8rl_jax.bench.kernel_data import Source
from fp8rl_jax.bench.kernel_times import IN_FLIGHT, ROTATED, seconds_per_call
from fp8rl_jax.kernels import KV_CHUNK
from fp8rl_jax.kernels.gpu.attention import attention, takes_one_split

HEADS, KV_HEADS, WIDTH = 32, 8, 128
BATCHES, LENGTHS, TOKENS = (8, 32, 128, 256), (4096, 8192, 32_768), (4096, 16_384)
_PAGES_DRAWN = 1 << 12  # of random numbers; a larger pool repeats them
_OF_MEMORY = 0.6  # share of the device's that a case's cache may take
# Estimates that choose the number of calls; what is reported is measured.
_BYTES_PER_S, _FLOPS_PER_S = 3e12, 1e14


@dataclasses.dataclass(frozen=True)
class Case:
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
    def cache_bytes(self) -> int:
        """Of keys, values and their scales."""
        vector = 2 * WIDTH if self.kind == "bf16" else WIDTH + 4
        return 2 * self.batch * self.length * KV_HEADS * vector

    @property
    def one_split(self) -> bool:
        """The form that the library takes."""
        return takes_one_split(self.batch, self.queries, HEADS, KV_HEADS, self.length)

    @property
    def bytes(self) -> int:
        """Fewest bytes through memory: the cache, bf16 queries, float32 results."""
        return self.cache_bytes + self.batch * self.queries * HEADS * WIDTH * (2 + 4)

    @property
    def flops(self) -> float:
        """Of both products, over the keys that a query sees."""
        seen = self.length if self.use == "decode" else self.length * (self.length + 1) // 2
        return 4.0 * self.batch * HEADS * WIDTH * seen

    @property
    def calls(self) -> tuple[int, int]:
        """(calls in a program, programs in flight)."""
        count = max(2, math.ceil(ROTATED / self.bytes)) if self.use == "decode" else 2
        if count * self.cache_bytes > 4 * ROTATED:  # far more than the L2 by itself
            count = 1
        seconds = max(self.bytes / _BYTES_PER_S, self.flops / _FLOPS_PER_S)
        return count, max(1, math.ceil(IN_FLIGHT / (count * seconds)))


def cases(quick: bool = False) -> list[Case]:
    """What is timed, the cases of the targets first; with `quick`, those and the short prefill."""
    shapes = [(batch, length) for length in LENGTHS for batch in BATCHES]
    shapes.sort(key=lambda shape: not decides(*shape))
    if quick:
        shapes = [shape for shape in shapes if decides(*shape)]
    tokens = TOKENS[:1] if quick else TOKENS
    found = [Case("decode", kind, *shape) for shape in shapes for kind in ("fp8", "bf16")]
    return found + [Case("prefill", kind, 1, n) for n in tokens for kind in ("fp8", "bf16")]


def decides(batch: int, length: int) -> bool:
    """Whether a target is set for decode at this shape."""
    return batch >= 32 and length == 8192


def _pool(make: Callable, pages: int, *rest: int) -> jax.Array:
    """(pages, 64, KV heads, ...), of `_PAGES_DRAWN` drawn ones or fewer, repeated."""
    drawn = math.gcd(pages, _PAGES_DRAWN)
    repeat = jax.jit(lambda x: jnp.tile(x, (pages // drawn,) + (1,) * (x.ndim - 1)))
    return repeat(make(drawn, KV_CHUNK, KV_HEADS, *rest))


def largest_operand() -> int:
    """Elements of the largest operand that is drawn."""
    return max(_PAGES_DRAWN * KV_CHUNK * KV_HEADS * WIDTH, max(TOKENS) * HEADS * WIDTH)


def prepared(case: Case, source: Source) -> tuple[Callable, list[tuple]]:
    """What computes a case, its last argument the form, and operands for each call of a program."""
    count, _ = case.calls
    dtype = DTYPES[case.kind]

    def numbers(*shape: int) -> jax.Array:
        return source.take(dtype, *shape)

    def cache(make: Callable, *rest: int) -> jax.Array:
        if case.use == "decode":
            return _pool(make, count * case.pages, *rest)
        return make(case.batch, case.length, KV_HEADS, *rest)

    cached = {"k": cache(numbers, WIDTH), "v": cache(numbers, WIDTH)}
    if case.kind == "fp8":
        cached |= {name: cache(source.scales) for name in ("k_scale", "v_scale")}
    rows = case.batch, case.queries
    last = case.length - case.queries + np.arange(case.queries, dtype=np.int32)
    positions = jnp.asarray(np.broadcast_to(last, rows))
    queries = [source.take(jnp.bfloat16, *rows, HEADS, WIDTH) for _ in range(count)]
    tables: list = [None] * count
    if case.use == "decode":
        order = np.random.default_rng(0).permutation(count * case.pages).astype(np.int32)
        tables = list(jnp.asarray(order.reshape(count, case.batch, -1)))

    def run(q, table, positions, cached, one_split=case.one_split):
        return attention(
            q, positions=positions, scale=WIDTH**-0.5, table=table, one_split=one_split, **cached
        )

    return run, [(q, t, positions, cached) for q, t in zip(queries, tables, strict=True)]


def memory_budget() -> float:
    """Bytes that the caches of a case may take on this device."""
    return _OF_MEMORY * jax.devices()[0].memory_stats()["bytes_limit"]


def time_case(case: Case, source: Source, budget: float) -> dict[str, Any]:
    """{'us', 'spread', 'calls', 'programs'}, or {'error': text}, or {'skipped': why}.

    Of decode also 'other_us', the time of the form that the library does not take.
    """
    count, programs = case.calls
    if (held := count * case.cache_bytes) > budget:
        why = f"{held / 1e9:.0f} GB of keys and values, {budget / 1e9:.0f} GB may be taken"
        return {"skipped": why}
    try:
        run, operands = prepared(case, source)
        seconds, spread, _ = seconds_per_call(run, operands, programs)
        found = {"us": seconds * 1e6, "spread": spread, "calls": count, "programs": programs}
        if case.use == "decode":
            other = functools.partial(run, one_split=not case.one_split)
            found["other_us"] = seconds_per_call(other, operands, programs)[0] * 1e6
    except Exception as error:  # one that a device refuses does not end the others
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
    return found


def row(case: Case, measured: dict[str, Any], ceilings: dict[str, float]) -> dict[str, Any]:
    """A case with its time and what follows from it."""
    found: dict[str, Any] = {"case": str(case), **dataclasses.asdict(case), **measured}
    if "us" in measured:
        seconds = measured["us"] / 1e6
        found["gbps"], found["tflops"] = case.bytes / seconds / 1e9, case.flops / seconds / 1e12
        found["of_copy"] = found["gbps"] / ceilings["copy_gbps"]
        found["of_bf16"] = found["tflops"] / ceilings["bf16_tflops"]
        if "other_us" in measured:
            found["over_other"] = measured["other_us"] / measured["us"]
    return found


def compare(rows: list[dict[str, Any]]) -> None:
    """Adds 'over_bf16' to FP8 rows: the time of bf16 keys and values over theirs."""
    times = {(r["use"], r["batch"], r["length"], r["kind"]): r.get("us") for r in rows}
    for found in rows:
        other = times.get((found["use"], found["batch"], found["length"], "bf16"))
        if found["kind"] == "fp8" and "us" in found and other:
            found["over_bf16"] = other / found["us"]


def time_all(
    wanted: list[Case], source: Source, ceilings: dict[str, float], seconds: float
) -> Iterator[dict[str, Any]]:
    """The rows of the cases; after so many seconds, none is begun and each is skipped."""
    start, budget = time.monotonic(), memory_budget()
    for case in wanted:
        late = time.monotonic() - start > seconds
        measured = {"skipped": "the time was up"} if late else time_case(case, source, budget)
        yield row(case, measured, ceilings)


_HEAD = ("us", "spread", "GB/s", "of copy", "TFLOPS", "of bf16", "/ bf16", "/ other", "launches")
_NAME = 44
_LEGEND = """\
of copy, of bf16: share of this run's ceilings. / bf16: time of bf16 keys and values over that of
FP8; / other: of the form of decode that is not taken over the one that is. GB/s is what bounds a
decode step, TFLOPS (causal, half of the square) a prefill."""


def line(found: dict[str, Any]) -> str:
    """A row of the table."""
    name = f"{found['case']:<{_NAME}}"
    if "us" not in found:
        return f"{name} " + (found.get("error") or f"skipped: {found['skipped']}")
    cells = [
        f"{found['us']:.1f}", f"{found['spread']:.1%}", f"{found['gbps']:.0f}",
        f"{found['of_copy']:.0%}", f"{found['tflops']:.0f}", f"{found['of_bf16']:.0%}",
        *(f"{found[k]:.2f}" if k in found else "-" for k in ("over_bf16", "over_other")),
        f"{found['programs']} x {found['calls']}",
    ]  # fmt: skip
    return name + "".join(f"{cell:>9}" for cell in cells)


def format_table(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of the table, with its head and legend."""
    heads = f"32 heads by 8 of {WIDTH}; decode over pages of {KV_CHUNK}"
    lines = [heads, f"{'':<{_NAME}}" + "".join(f"{cell:>9}" for cell in _HEAD)]
    return [*lines, *map(line, rows), _LEGEND]
