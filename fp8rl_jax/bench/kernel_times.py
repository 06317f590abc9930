"""Times of products and attention on a GPU, beside XLA's products of their shapes.

One program makes many independent calls, each on operands of its own that together exceed the L2
several times, so that no call finds its operands there (and so that XLA has nothing to share
between its dots). Programs are launched one after another without waiting, until a few milliseconds
are in flight; the wall clock around the last `block_until_ready`, over the number of calls, is the
time. It includes the gaps between launches, as a decode step has them: a kernel of a microsecond or
two is not measured better than that. Every version is timed twice; the difference is the spread.

Operands of products are K-major, the layout in which a rollout keeps its weights: transposes that a
train step makes for dgrad and wgrad are not in these times, nor is quantisation. A sparse layer has
no counterpart in XLA at this speed, so it stands beside a dense product of as many rows.

Decode attention reads one pool of pages in all calls of a program, as the layers of a model do,
each by a table of its own: no two calls share a page, and pages are in random order. Its kernel has
two forms, a program for each split of the keys or for all of them, and the library takes one by
shape; the other is timed too, since the bits do not depend on it.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8rl_jax.bench.kernel_shapes import HEADS, KV_HEADS, WIDTH, Attention, Product, groups
from fp8rl_jax.deviceless import products
from fp8rl_jax.kernels import K_BLOCK, KV_CHUNK
from fp8rl_jax.kernels.gpu.attention import attention, takes_one_split
from fp8rl_jax.kernels.gpu.matmul import grouped_matmul, grouped_wgrad, matmul

_REPEATS = 7
_COPIED = 2**30  # bytes of the copy that gives the ceiling
_MARGIN = 1 << 20  # places of a pool to start from, whatever the size of an operand
_DRAWN = 1 << 21  # numbers of a pool, or a multiple: few sizes are few programs
_PAGES_DRAWN = 1 << 12  # of random numbers; a larger pool of pages repeats them
_OF_MEMORY = 0.6  # share of the device's that a program's caches may take
# XLA's counterparts are cuBLAS's, not XLA's own kernels (which still take products of one row).
_CUBLAS = {"xla_gpu_enable_triton_gemm": False}

E4M3 = jnp.float8_e4m3fn
DTYPES = {"fp8": E4M3, "bf16": jnp.bfloat16, "float32": jnp.float32}
Operands = tuple[Any, ...]
Prepared = tuple[Callable, list[Operands], dict | None]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, size: int, dtype) -> jax.Array:
    return jax.random.normal(key, (size,)).astype(dtype)


@functools.partial(jax.jit, static_argnums=2)
def _cut(pool: jax.Array, start: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.dynamic_slice(pool, (start,), (math.prod(shape),)).reshape(shape)


class Source:
    """Random operands, cut at random places out of a pool of normal numbers of their dtype.

    Drawing each anew would take longer than what is measured. Never zeros: they hide what was not
    written, and they run faster. Equal seeds and equal calls give equal operands.
    """

    def __init__(self, seed: int = 0):
        self._key = jax.random.key(seed)
        self._places = np.random.default_rng(seed)
        self._pools: dict[str, jax.Array] = {}

    def take(self, dtype, *shape: int) -> jax.Array:
        """Normal numbers, rounded to `dtype`."""
        name, size = jnp.dtype(dtype).name, math.prod(shape)
        if name not in self._pools or self._pools[name].size < size + _MARGIN:
            drawn = -(-(size + _MARGIN) // _DRAWN) * _DRAWN
            self._pools[name] = _normal(self._key, drawn, jnp.dtype(dtype))
        pool = self._pools[name]
        return _cut(pool, jnp.int32(self._places.integers(pool.size - size + 1)), shape)

    def scales(self, *shape: int) -> jax.Array:
        """Float32 between 0.5 and 1.5, no two neighbours alike."""
        return 0.5 + jnp.minimum(jnp.abs(self.take(jnp.float32, *shape)), 1.0)


def blocks(count: int) -> int:
    return -(-count // K_BLOCK)


def seconds_per_call(
    function: Callable, operands: list[Operands], programs: int, options: dict | None = None
) -> tuple[float, float, dict[str, int]]:
    """(median seconds of a call, spread of two medians over the smaller, {who computes: calls}).

    Args:
      function: takes the entries of `operands` one by one.
      operands: a tuple per call of the program.
      programs: that are in flight together.
      options: for the compiler.
    """
    program = jax.jit(lambda all_: [function(*one) for one in all_], compiler_options=options)
    compiled = program.lower(operands).compile()
    for _ in range(2):
        jax.block_until_ready(compiled(operands))

    def median() -> float:
        samples = []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            for _ in range(programs):
                out = compiled(operands)
            jax.block_until_ready(out)
            samples.append((time.perf_counter() - start) / (programs * len(operands)))
        return float(np.median(samples))

    first, second = median(), median()
    by = {kind: len(names) for kind, names in products(compiled.as_text()).items()}
    return min(first, second), abs(first - second) / min(first, second), by


def ceilings(source: Source) -> dict[str, float]:
    """What this device does at best: {'copy_gbps': read and written, 'bf16_tflops' at 8192^3}."""
    data = [(source.take(jnp.bfloat16, _COPIED // 2),) for _ in range(2)]
    # A pass that computes next to nothing: XLA would hand an unchanged argument through.
    seconds, *_ = seconds_per_call(lambda x: -x, data, 4)
    square = Product("ceiling", "fprop", "bf16", 8192, 8192, 8192)
    best, *_ = seconds_per_call(_xla, _pairs(square, source, jnp.bfloat16, 2), 2, _CUBLAS)
    return {"copy_gbps": 2 * _COPIED / seconds / 1e9, "bf16_tflops": square.flops / best / 1e12}


def _xla(x: jax.Array, w: jax.Array) -> jax.Array:
    """XLA's bf16 product of (M, K) and (N, K)."""
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)


def _xla_fp8(x: jax.Array, w: jax.Array, x_scale: jax.Array, w_scale: jax.Array) -> jax.Array:
    """XLA's FP8 product with a scale per tensor: dequantised in the form that it hands to cuBLAS.

    Scaling the result instead would cost a second pass over it.
    """
    return _xla(x.astype(jnp.bfloat16) * x_scale, w.astype(jnp.bfloat16) * w_scale)


def _pairs(case: Product, source: Source, dtype, count: int) -> list[Operands]:
    shapes = (case.multiplied, case.depth), (case.columns, case.depth)
    return [tuple(source.take(dtype, *shape) for shape in shapes) for _ in range(count)]


def _product(case: Product, version: str, source: Source, count: int) -> Prepared:
    dense = case
    if case.experts:
        rows, depth = case.multiplied, case.depth
        if case.gemm == "wgrad":  # the tokens of all experts are what one product contracts over
            rows, depth = depth, rows
        dense = Product(case.name, case.gemm, case.kind, rows, depth, case.columns)
    if version == "bf16":
        return _xla, _pairs(dense, source, jnp.bfloat16, count), _CUBLAS
    if version == "fp8":
        pairs = _pairs(dense, source, E4M3, count)
        return _xla_fp8, [(*p, *source.scales(2).astype(jnp.bfloat16)) for p in pairs], _CUBLAS
    if case.experts and version == "ours":
        return (_experts_wgrad if case.gemm == "wgrad" else _experts)(case, source, count)
    return _dense(dense, source, count)


def _dense(case: Product, source: Source, count: int) -> Prepared:
    pairs = _pairs(case, source, DTYPES[case.kind], count)
    by_column = case.gemm == "wgrad"
    out = jnp.float32 if by_column or case.kind == "float32" else jnp.bfloat16
    if case.kind != "fp8":
        return lambda x, w: matmul(x, w.T, dtype=out), pairs, None
    deep = blocks(case.depth)
    # Scales lie as the kernel reads them, so that only the kernel is timed.
    wide = (deep, case.columns) if by_column else (blocks(case.columns), deep)
    operands = [(*p, source.scales(deep, case.rows), source.scales(*wide)) for p in pairs]

    def product(x, w, x_scale, w_scale):
        return matmul(x, w.T, x_scale.T, w_scale if by_column else w_scale.T, dtype=out)

    return product, operands, None


def _experts(case: Product, source: Source, count: int) -> Prepared:
    tiles = groups(case, seed=0)
    ids, shape = jnp.asarray(tiles.experts), (len(tiles.experts), tiles.rows)
    deep = blocks(case.depth)

    def operands() -> Operands:
        return (
            source.take(E4M3, *shape, case.depth),
            source.take(E4M3, case.experts, case.columns, case.depth),
            source.scales(deep, math.prod(shape)),
            source.scales(case.experts, blocks(case.columns), deep),
        )

    def product(x, w, x_scale, w_scale):
        scales = x_scale.T.reshape(*shape, -1), w_scale.swapaxes(1, 2)
        return grouped_matmul(x, w.swapaxes(1, 2), ids, *scales, dtype=jnp.bfloat16)

    return product, [operands() for _ in range(count)], None


def _experts_wgrad(case: Product, source: Source, count: int) -> Prepared:
    tiles = groups(case, seed=0)
    ids, shape = jnp.asarray(tiles.experts), (len(tiles.experts), tiles.rows)
    widths, total = (case.depth, case.columns), math.prod(shape)

    def operands() -> Operands:
        values = (source.take(E4M3, width, total) for width in widths)
        return *values, *(source.scales(total // K_BLOCK, width) for width in widths)

    def wgrad(x, dy, x_scale, dy_scale):
        turned = [v.T.reshape(*shape, -1) for v in (x, dy)]
        scales = [s.reshape(shape[0], -1, s.shape[1]) for s in (x_scale, dy_scale)]
        return grouped_wgrad(*turned, ids, case.experts, *scales)

    return wgrad, [operands() for _ in range(count)], None


def _pool(make: Callable, pages: int, *rest: int) -> jax.Array:
    """(pages, 64, KV heads, ...), of `_PAGES_DRAWN` drawn ones or fewer, repeated."""
    drawn = math.gcd(pages, _PAGES_DRAWN)
    repeat = jax.jit(lambda x: jnp.tile(x, (pages // drawn,) + (1,) * (x.ndim - 1)))
    return repeat(make(drawn, KV_CHUNK, KV_HEADS, *rest))


def _attention(case: Attention, version: str, source: Source, count: int) -> Prepared:
    def cache(make: Callable, *rest: int) -> jax.Array:
        if case.use == "decode":
            return _pool(make, count * case.pages, *rest)
        return make(case.batch, case.length, KV_HEADS, *rest)

    def numbers(*shape: int) -> jax.Array:
        return source.take(DTYPES[case.kind], *shape)

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
    one_split = takes_one_split(*rows, HEADS, KV_HEADS, case.length) == (version == "ours")
    settings = {"scale": WIDTH**-0.5, "one_split": one_split}

    def run(q, table, positions, cached):
        return attention(q, positions=positions, table=table, **cached, **settings)

    return run, [(q, t, positions, cached) for q, t in zip(queries, tables, strict=True)], None


def prepared(case: Product | Attention, version: str, source: Source) -> Prepared:
    """What computes a version, operands for each call of a program, options of the compiler."""
    make = _attention if isinstance(case, Attention) else _product
    return make(case, version, source, case.calls[0])


def time_case(case: Product | Attention, source: Source) -> dict[str, Any]:
    """{version: {'us', 'spread', 'by'}, {'error': text}, or {'skipped': why}}."""
    found: dict[str, Any] = {}
    if isinstance(case, Attention):
        held = case.calls[0] * case.cache_bytes
        if held > (budget := memory_budget()):
            why = f"{held / 1e9:.0f} GB of keys and values, {budget / 1e9:.0f} GB may be taken"
            return {"ours": {"skipped": why}}
    for version in case.versions:
        try:
            function, operands, options = prepared(case, version, source)
            seconds, spread, by = seconds_per_call(function, operands, case.calls[1], options)
        except Exception as error:  # one version that a device refuses does not end the others
            text = " ".join(f"{type(error).__name__}: {error}".split())
            found[version] = {"error": text[:300]}
            continue
        found[version] = {"us": seconds * 1e6, "spread": spread, "by": by}
        del operands  # before the next version's are made: they may fill much of the memory
    return found


def memory_budget() -> float:
    """Bytes that the caches of a program may take on this device."""
    return _OF_MEMORY * jax.devices()[0].memory_stats()["bytes_limit"]
