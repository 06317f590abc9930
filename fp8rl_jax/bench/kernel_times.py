"""Times products and attention on a GPU, and XLA's products of the same shapes.

One program makes many independent calls, each on different operands, which together exceed the L2
several times, so that no call finds its operands there (and so that XLA has nothing to share
between its dots). Programs are launched one after another without waiting, until a few milliseconds
are in flight; the wall time until the last result is ready, over the number of calls, is the time
of a call. It includes the gaps between launches, as in a decode step: a kernel of a microsecond or
two is not measured better than that. Every version is timed twice; the difference is the spread.

Operands of products are K-major, the layout in which a rollout keeps its weights: transposes that a
train step makes for dgrad and wgrad are not in these times, nor is quantisation. A sparse layer has
no counterpart in XLA at this speed, so it is compared with a dense product of as many rows.

Decode attention reads one pool of pages in all calls of a program, as the layers of a model do,
each through a different page table: no two calls share a page, and pages are in random order. Its
kernel has two forms, with a program for each split of the keys or one for all of them. The library
chooses one by shape; the other is timed too, since the bits do not depend on the form.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8rl_jax.bench.kernel_shapes import HEADS, KV_HEADS, WIDTH, Attention, Product, calls, groups
from fp8rl_jax.kernels import K_BLOCK, KV_CHUNK, block_matmul
from fp8rl_jax.kernels.gpu.attention import attention
from fp8rl_jax.kernels.gpu.attention_operands import takes_one_split
from fp8rl_jax.kernels.gpu.matmul import grouped_matmul, grouped_wgrad, matmul

_REPEATS = 7
_COPIED = 2**30  # bytes of the copy that gives the ceiling
_PAGES_DRAWN = 1 << 12  # most pages of random numbers; a larger pool of pages repeats them
# XLA's products go to cuBLAS, not to XLA's own kernels (which still take products of one row).
_CUBLAS = {"xla_gpu_enable_triton_gemm": False}

E4M3 = jnp.float8_e4m3fn
DTYPES = {"fp8": E4M3, "int8": jnp.int8, "bf16": jnp.bfloat16, "float32": jnp.float32}
Operands = tuple[Any, ...]
# The function of a version, and a function that makes the operands of a call.
Version = tuple[Callable, Callable[[], Operands]]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype) -> jax.Array:
    x = jax.random.normal(key, shape)
    if dtype == jnp.int8:
        x = jnp.clip(jnp.round(32 * x), -127, 127)
    return x.astype(dtype)


class Source:
    """Draws random operands; Sources that get the same calls in the same order return equal arrays.

    Operands are never zeros: these would hide results that were not written, and they run faster.
    """

    def __init__(self) -> None:
        key = jax.random.key(0, impl="rbg")  # compiles and runs faster than the default
        self._keys = (jax.random.fold_in(key, i) for i in itertools.count())

    def take(self, dtype, *shape: int) -> jax.Array:
        """Draws normal numbers, rounded to `dtype`; for INT8, 32 times as large."""
        return _normal(next(self._keys), shape, jnp.dtype(dtype))

    def scales(self, *shape: int) -> jax.Array:
        """Draws float32 scales between 0.5 and 1.5, so that neighbours differ."""
        return 0.5 + jnp.minimum(jnp.abs(self.take(jnp.float32, *shape)), 1.0)


def blocks(count: int) -> int:
    return -(-count // K_BLOCK)


def seconds_per_call(
    function: Callable, operands: list[Operands], programs: int, options: dict | None = None
) -> tuple[float, float]:
    """Returns the smaller of two medians of a call's seconds, and their difference over it.

    Args:
      function: called once for each entry of `operands`.
      operands: a tuple of arguments per call of the program.
      programs: number of programs in flight together.
      options: options of the compiler.
    """
    program = jax.jit(lambda all_: [function(*one) for one in all_], compiler_options=options)
    for _ in range(2):
        jax.block_until_ready(program(operands))

    def median() -> float:
        samples = []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            for _ in range(programs):
                out = program(operands)
            jax.block_until_ready(out)
            samples.append((time.perf_counter() - start) / (programs * len(operands)))
        return float(np.median(samples))

    smaller, larger = sorted((median(), median()))
    return smaller, (larger - smaller) / smaller


def ceilings(source: Source) -> dict[str, float]:
    """Measures the device's best {'copy_gbps': bytes read and written, 'bf16_tflops' at 8192^3}."""
    data = [(source.take(jnp.bfloat16, _COPIED // 2),) for _ in range(2)]
    # A pass that computes next to nothing: XLA would hand an unchanged argument through.
    copy, _ = seconds_per_call(lambda x: -x, data, 4)
    square = Product("ceiling", "fprop", "bf16", 8192, 8192, 8192)
    pairs = [_pair(square, source, jnp.bfloat16) for _ in range(2)]
    best, _ = seconds_per_call(_xla, pairs, 2, _CUBLAS)
    return {"copy_gbps": 2 * _COPIED / copy / 1e9, "bf16_tflops": square.flops / best / 1e12}


def _xla(x: jax.Array, w: jax.Array) -> jax.Array:
    """Computes XLA's bf16 product of (M, K) and (N, K)."""
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)


def _xla_fp8(x: jax.Array, w: jax.Array, scales: jax.Array) -> jax.Array:
    """Computes XLA's FP8 product with scales per tensor, in the form that XLA hands to cuBLAS.

    Scaling the result instead would cost a second pass over it.
    """
    return _xla(x.astype(jnp.bfloat16) * scales[0], w.astype(jnp.bfloat16) * scales[1])


def _pair(case: Product, source: Source, dtype) -> Operands:
    return source.take(dtype, case.rows, case.depth), source.take(dtype, case.columns, case.depth)


def versions(case: Product | Attention, source: Source) -> dict[str, Version]:
    """Returns {name: version} to time: 'ours'; for products XLA's 'bf16' and 'fp8'; for experts our
    'dense' kernel; for decode attention the 'other' form of ours."""
    if isinstance(case, Attention):
        return _attention(case, source)
    dense = case
    if case.experts:
        dense = dataclasses.replace(case, rows=case.multiplied, experts=0, top_k=0)
        if case.gemm == "wgrad":  # the tokens of all experts are what one product contracts over
            dense = dataclasses.replace(dense, rows=case.depth, depth=case.multiplied)
    make = (_experts_wgrad if case.gemm == "wgrad" else _experts) if case.experts else _dense
    timed = {"ours": make(case, source)}
    timed["bf16"] = _xla, lambda: _pair(dense, source, jnp.bfloat16)
    if case.experts:
        timed["dense"] = _dense(dense, source)
    elif case.kind == "fp8" and case.gemm == "fprop":
        scales = lambda: source.scales(2).astype(jnp.bfloat16)
        timed["fp8"] = _xla_fp8, lambda: (*_pair(case, source, E4M3), scales())
    return timed


def _dense(case: Product, source: Source) -> Version:
    by_column = case.gemm == "wgrad"
    out = jnp.float32 if by_column or case.kind == "float32" else jnp.bfloat16
    if case.kind != "fp8":
        return (
            lambda x, w: matmul(x, w.T, dtype=out),
            lambda: _pair(case, source, DTYPES[case.kind]),
        )
    deep = blocks(case.depth)
    # Scales have the kernel's layout, so that only the kernel is timed.
    w_rows, w_columns = (deep, case.columns) if by_column else (blocks(case.columns), deep)

    def operands() -> Operands:
        return (
            *_pair(case, source, E4M3),
            source.scales(deep, case.rows),
            source.scales(w_rows, w_columns),
        )

    def product(x, w, x_scale, w_scale):
        return block_matmul(
            x, w.T, x_scale.T, w_scale if by_column else w_scale.T, implementation="gpu", dtype=out
        )

    return product, operands


def _experts(case: Product, source: Source) -> Version:
    experts, rows = groups(case)
    ids = jnp.asarray(experts)
    tiles = len(experts)
    deep = blocks(case.depth)

    def operands() -> Operands:
        return (
            source.take(E4M3, tiles, rows, case.depth),
            source.take(E4M3, case.experts, case.columns, case.depth),
            source.scales(deep, tiles * rows),
            source.scales(case.experts, blocks(case.columns), deep),
        )

    def product(x, w, x_scale, w_scale):
        return grouped_matmul(
            x,
            w.swapaxes(1, 2),
            ids,
            x_scale.T.reshape(tiles, rows, -1),
            w_scale.swapaxes(1, 2),
            dtype=jnp.bfloat16,
        )

    return product, operands


def _experts_wgrad(case: Product, source: Source) -> Version:
    experts, rows = groups(case)
    ids = jnp.asarray(experts)
    tiles = len(experts)
    deep = tiles * rows

    def operands() -> Operands:
        return (
            source.take(E4M3, case.depth, deep),
            source.take(E4M3, case.columns, deep),
            source.scales(deep // K_BLOCK, case.depth),
            source.scales(deep // K_BLOCK, case.columns),
        )

    def wgrad(x, dy, x_scale, dy_scale):
        return grouped_wgrad(
            x.T.reshape(tiles, rows, -1),
            dy.T.reshape(tiles, rows, -1),
            ids,
            case.experts,
            x_scale.reshape(tiles, -1, case.depth),
            dy_scale.reshape(tiles, -1, case.columns),
        )

    return wgrad, operands


def _pool(make: Callable, pages: int) -> jax.Array:
    """Makes pages (pages, 64, KV heads, ...) by repeating at most `_PAGES_DRAWN` random ones."""
    drawn = math.gcd(pages, _PAGES_DRAWN)
    repeat = jax.jit(lambda x: jnp.tile(x, (pages // drawn,) + (1,) * (x.ndim - 1)))
    return repeat(make(drawn, KV_CHUNK, KV_HEADS))


def _attention(case: Attention, source: Source) -> dict[str, Version]:
    """Returns the form that the library takes ('ours') and, for decode, the other; on one cache."""
    count, _ = calls(case)

    def vectors(rows: int, length: int, heads: int) -> jax.Array:
        return source.take(DTYPES[case.kind], rows, length, heads, WIDTH)

    def cache(make: Callable) -> jax.Array:
        if case.use == "decode":
            return _pool(make, count * case.pages)
        return make(case.batch, case.length, KV_HEADS)

    @functools.cache
    def cached() -> dict[str, jax.Array]:
        arrays = {name: cache(vectors) for name in ("k", "v")}
        if case.kind != "bf16":
            arrays |= {name: cache(source.scales) for name in ("k_scale", "v_scale")}
        return arrays

    last = case.length - case.queries + np.arange(case.queries, dtype=np.int32)
    positions = jnp.asarray(np.broadcast_to(last, (case.batch, case.queries)))
    pages = np.random.default_rng(0).permutation(count * case.pages).astype(np.int32)
    tables = itertools.cycle(pages.reshape(count, case.batch, -1))

    def operands() -> Operands:
        table = jnp.asarray(next(tables)) if case.use == "decode" else None
        q = source.take(jnp.bfloat16, case.batch, case.queries, HEADS, WIDTH)
        return q, table, positions, cached()

    def run(one_split, q, table, positions, cached):
        return attention(
            q, positions=positions, table=table, scale=WIDTH**-0.5, one_split=one_split, **cached
        )

    taken = takes_one_split(case.batch, case.queries, HEADS, KV_HEADS, case.length)
    forms = {"ours": taken, "other": not taken} if case.use == "decode" else {"ours": taken}
    return {name: (functools.partial(run, form), operands) for name, form in forms.items()}


def time_case(case: Product | Attention, source: Source) -> dict[str, Any]:
    """Times a case: {version: {'us', 'spread'} or {'error': text}}."""
    times: dict[str, Any] = {}
    count, programs = calls(case)
    for version, (function, make) in versions(case, source).items():
        options = _CUBLAS if function in (_xla, _xla_fp8) else None
        operands: list[Operands] = []  # without the last version's, which may fill the memory
        try:
            operands += [make() for _ in range(count)]
            seconds, spread = seconds_per_call(function, operands, programs, options)
            times[version] = {"us": seconds * 1e6, "spread": spread}
        except Exception as error:  # one version that a device refuses does not end the others
            text = " ".join(f"{type(error).__name__}: {error}".split())
            times[version] = {"error": text[:300]}
    return times
