"""Times of the matmul kernels on a GPU, beside XLA's products of the same shapes.

One program makes many independent calls, each on operands of its own that together exceed the L2
several times, so that no call finds its operands there (and so that XLA has nothing to share
between its dots). Programs are launched one after another without waiting, until a few milliseconds
are in flight; the wall clock around the last `block_until_ready`, over the number of calls, is the
time. It includes the gaps between launches, as a decode step has them: a kernel of a microsecond or
two is not measured better than that. Every version is timed twice; the difference is the spread.

All operands are K-major, the layout in which a rollout keeps its weights: transposes that a train
step makes for dgrad and wgrad are not in these times, nor is quantisation. A sparse layer has no
counterpart in XLA at this speed, so it stands beside a dense product of as many rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8rl_jax.bench.kernel_data import Source
from fp8rl_jax.bench.kernel_shapes import Case, groups
from fp8rl_jax.deviceless import products
from fp8rl_jax.kernels import K_BLOCK
from fp8rl_jax.kernels.gpu.matmul import grouped_matmul, grouped_wgrad, matmul

L2 = 60e6  # bytes, of an H100 or H200
ROTATED = 4 * L2
_MEMORY = 16e9  # bytes that the operands and results of one program may take
IN_FLIGHT = 4e-3  # seconds that a sample lasts at least, by the estimate
_MOST_CALLS = 192  # in a program; more would be spent on its arguments
_REPEATS = 7
_COPIED = 2**30  # bytes of the copy that gives the ceiling
MATRIX = 8192
# XLA's counterparts are cuBLAS's, not XLA's own kernels (which still take products of one row).
_CUBLAS = {"xla_gpu_enable_triton_gemm": False}
# Estimates that choose the number of calls; what is reported is measured.
_BYTES_PER_S, _FLOPS_PER_S = 4e12, {"fp8": 1.2e15, "bf16": 7e14, "float32": 4e13}

E4M3 = jnp.float8_e4m3fn
Operands = tuple[Any, ...]


def _blocks(count: int) -> int:
    return -(-count // K_BLOCK)


def calls(case: Case) -> tuple[int, int]:
    """(calls in a program, programs in flight) for a case."""
    seconds = max(case.bytes / _BYTES_PER_S, case.flops / _FLOPS_PER_S[case.kind])
    wide = 2 if case.kind == "fp8" else 1  # the bf16 counterpart's operands are twice as large
    fit = max(2, int(_MEMORY / (wide * case.held_bytes)))
    wanted = max(2, math.ceil(IN_FLIGHT / 2 / seconds), math.ceil(ROTATED / case.bytes))
    count = min(wanted, fit, _MOST_CALLS)
    return count, max(1, math.ceil(IN_FLIGHT / (count * seconds)))


def seconds_per_call(
    product: Callable, operands: list[Operands], programs: int, options: dict | None = None
) -> tuple[float, float, dict[str, int]]:
    """(median seconds of a call, spread of two medians over the smaller, {who computes: calls}).

    Args:
      product: takes the entries of `operands` one by one.
      operands: a tuple per call of the program.
      programs: that are in flight together.
      options: for the compiler.
    """
    program = jax.jit(lambda all_: [product(*one) for one in all_], compiler_options=options)
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
    """What this device does at best: {'copy_gbps': read and written, 'bf16_tflops'}."""
    data = [(source.take(jnp.bfloat16, _COPIED // 2),) for _ in range(2)]
    # A pass that computes next to nothing: XLA would hand an unchanged argument through.
    seconds, *_ = seconds_per_call(lambda x: -x, data, 4)
    square = Case("ceiling", "fprop", "bf16", MATRIX, MATRIX, MATRIX)
    pairs = _unscaled(square, source, jnp.bfloat16, 2)
    best, *_ = seconds_per_call(_xla, pairs, 2, _CUBLAS)
    return {"copy_gbps": 2 * _COPIED / seconds / 1e9, "bf16_tflops": square.flops / best / 1e12}


def _xla(x: jax.Array, w: jax.Array) -> jax.Array:
    """XLA's bf16 product of (M, K) and (N, K)."""
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)


def _xla_fp8(x: jax.Array, w: jax.Array, x_scale: jax.Array, w_scale: jax.Array) -> jax.Array:
    """XLA's FP8 product with a scale per tensor: dequantised in the form that it hands to cuBLAS.

    Scaling the result instead would cost a second pass over it.
    """
    return _xla(x.astype(jnp.bfloat16) * x_scale, w.astype(jnp.bfloat16) * w_scale)


def _unscaled(case: Case, source: Source, dtype, count: int) -> list[Operands]:
    rows, depth, columns = case.products, case.depth, case.columns
    return [
        (source.take(dtype, rows, depth), source.take(dtype, columns, depth)) for _ in range(count)
    ]


def _ours(case: Case, source: Source, count: int) -> tuple[Callable, list[Operands]]:
    """Our kernel and its operands for a case."""
    if case.experts:
        return _grouped(case, source, count)
    dtype = {"fp8": E4M3, "bf16": jnp.bfloat16, "float32": jnp.float32}[case.kind]
    pairs = _unscaled(case, source, dtype, count)
    out = jnp.float32 if case.gemm == "wgrad" or case.kind == "float32" else jnp.bfloat16
    if case.kind != "fp8":
        return lambda x, w: matmul(x, w.T, dtype=out), pairs
    deep, by_column = _blocks(case.depth), case.gemm == "wgrad"
    # Scales lie as the kernel reads them, so that only the kernel is timed.
    wide = (deep, case.columns) if by_column else (_blocks(case.columns), deep)
    operands = [(*p, source.scales(deep, case.rows), source.scales(*wide)) for p in pairs]

    def product(x, w, x_scale, w_scale):
        return matmul(x, w.T, x_scale.T, w_scale if by_column else w_scale.T, dtype=out)

    return product, operands


def _grouped(case: Case, source: Source, count: int) -> tuple[Callable, list[Operands]]:
    tiles = groups(case, seed=0)
    ids, total = jnp.asarray(tiles.experts), len(tiles.experts) * tiles.rows
    shape = (len(tiles.experts), tiles.rows)
    depth, columns, experts = case.depth, case.columns, case.experts
    if case.gemm == "wgrad":
        high = total // K_BLOCK
        operands = [
            (
                source.take(E4M3, depth, total), source.take(E4M3, columns, total),
                source.scales(*(high, depth)), source.scales(*(high, columns)),
            )
            for _ in range(count)
        ]  # fmt: skip

        def wgrad(x, dy, x_scale, dy_scale):
            turned = [v.T.reshape(*shape, -1) for v in (x, dy)]
            scales = [s.reshape(shape[0], -1, s.shape[1]) for s in (x_scale, dy_scale)]
            return grouped_wgrad(*turned, ids, experts, *scales)

        return wgrad, operands
    deep = _blocks(depth)
    operands = [
        (
            source.take(E4M3, *shape, depth), source.take(E4M3, experts, columns, depth),
            source.scales(deep, total), source.scales(experts, _blocks(columns), deep),
        )
        for _ in range(count)
    ]  # fmt: skip

    def product(x, w, x_scale, w_scale):
        scale = x_scale.T.reshape(*shape, -1)
        turned = w.swapaxes(1, 2), ids, scale, w_scale.swapaxes(1, 2)
        return grouped_matmul(x, *turned, dtype=jnp.bfloat16)

    return product, operands


def largest_operand(cases: list[Case]) -> int:
    """Elements of the largest operand that timing the cases takes."""
    sizes = [_COPIED // 2, MATRIX**2]
    for case in cases:
        padded = case.products + case.experts * K_BLOCK
        sizes.append(padded * max(case.depth, case.columns))
        sizes.append(max(case.experts, 1) * case.depth * case.columns)
    return max(sizes)


def versions(case: Case) -> list[str]:
    """What is timed for a case: 'ours', 'bf16' (XLA), 'fp8' (XLA), 'dense' (ours, of experts)."""
    names = ["ours", "bf16"]
    if case.kind == "fp8" and case.experts:
        names.append("dense")
    elif case.kind == "fp8" and case.gemm == "fprop":
        names.append("fp8")
    return names


def prepared(
    case: Case, version: str, source: Source, count: int
) -> tuple[Callable, list[Operands], dict | None]:
    """What computes a version, operands for `count` calls, and options of the compiler."""
    dense = case
    if case.experts:
        rows, depth = case.products, case.depth
        if case.gemm == "wgrad":  # the tokens of all experts are what one product contracts over
            rows, depth = depth, rows
        dense = Case(case.name, case.gemm, case.kind, rows, depth, case.columns)
    if version in ("ours", "dense"):
        return *_ours(case if version == "ours" else dense, source, count), None
    if version == "bf16":
        return _xla, _unscaled(dense, source, jnp.bfloat16, count), _CUBLAS
    pairs = _unscaled(dense, source, E4M3, count)
    scales = [source.scales(2).astype(jnp.bfloat16) for _ in pairs]
    operands = [(*pair, *scale) for pair, scale in zip(pairs, scales, strict=True)]
    return _xla_fp8, operands, _CUBLAS


def time_case(case: Case, source: Source) -> dict[str, Any]:
    """{version: {'us', 'spread', 'by', 'calls', 'programs'}, or {'error': text}}."""
    count, programs = calls(case)
    found: dict[str, Any] = {}
    for version in versions(case):
        try:
            product, operands, options = prepared(case, version, source, count)
            seconds, spread, by = seconds_per_call(product, operands, programs, options)
        except Exception as error:  # one version that a device refuses does not end the others
            text = " ".join(f"{type(error).__name__}: {error}".split())
            found[version] = {"error": text[:300]}
            continue
        found[version] = {
            "us": seconds * 1e6, "spread": spread, "by": by, "calls": count, "programs": programs,
        }  # fmt: skip
        del operands  # before the next version's are made: they may fill much of the memory
    return found
