"""CPU products with a known order of summation, and the XLA options that give it.

Zero drift on a CPU needs products whose bits depend on nothing but a row, a column and the length
of the contraction. XLA promises no such thing, so each way of multiplying (ways.py) is tried on the
machine at hand (probe.py) before it is relied on:

* **bf16 operands, by YNNPACK**, in the order of an instruction: TDPBF16PS of Intel's AMX, several
  times faster with many rows, or VDPBF16PS. No float32 copies are made. E4M3 and E5M2 are bf16
  numbers, so FP8 goes this way.
* **float32 operands**, ``acc = fma(x[k], w[k], acc)`` with k ascending, by YNNPACK under
  YNN_FLAG_CONSISTENT_ARITHMETIC. So everything is multiplied where the CPU has no instruction for
  bf16: YNNPACK would make float32 copies of every operand there.
* **exactly**, in float64 (exact.py), where nothing else holds or where it is asked for: any order
  gives the same bits.

A contraction has at most 128 (`BF16_DEPTH` of bf16); longer ones are sums of such blocks
(matmul.py). `fp8rl_jax.base.exact_jit` compiles with the options that belong to the way. The way
follows from what the CPU is and never from a time, which may be another one when a run is resumed.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fp8rl_jax.kernels.arrays import pad_to
from fp8rl_jax.kernels.reference.e4m3 import widened
from fp8rl_jax.kernels.reference.exact import exact_dot_general
from fp8rl_jax.kernels.reference.probe import cpu_way
from fp8rl_jax.kernels.reference.ways import (
    DEPTH_STEP,
    FLOAT32_SIZE,
    ORDERED,
    Steps,
    Way,
    bf16_dot,
    float32_dot,
    small_dot,
)

_BF16_HOLDS = tuple(map(jnp.dtype, (jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2)))
_ROWS_BY_COLUMNS = (((1,), (0,)), ((), ()))


def in_bf16(way: Way, *dtypes) -> bool:
    """Whether operands of these types are multiplied as bf16."""
    return way.bf16_order is not None and all(jnp.dtype(d) in _BF16_HOLDS for d in dtypes)


def steps_of(way: Way, *dtypes) -> Steps:
    """The rows and columns that `product` of such operands must have."""
    return way.bf16_steps if in_bf16(way, *dtypes) else way.float32_steps


def most_columns(way: Way, depth: int, *dtypes) -> int | None:
    """The most columns that `product` of such operands may have; None for any number."""
    if way.float32 != "pieces" or in_bf16(way, *dtypes):
        return None
    return FLOAT32_SIZE // depth


def wide_type(dtype) -> jnp.dtype:
    """The type in which FP8 of `dtype` is multiplied on this machine."""
    way = cpu_way()
    if way.exact:
        return jnp.dtype(dtype)
    return jnp.dtype(jnp.bfloat16 if way.bf16_order else jnp.float32)


def product(way: Way, x: jax.Array, w: jax.Array) -> jax.Array:
    """(M, K) times (K, N) in float32, in the order of the way.

    Args:
      x, w: FP8, bf16 or float32. K at most `BF16_DEPTH` where `in_bf16`, else 128; M and N as
        `steps_of` says, N at most `most_columns`.
    """
    if way.exact:
        return exact_dot_general(x, w, _ROWS_BY_COLUMNS)
    x, w = pad_to(x, 1, DEPTH_STEP), pad_to(w, 0, DEPTH_STEP)
    with jax.named_scope(ORDERED):
        if in_bf16(way, x.dtype, w.dtype):
            return bf16_dot(widened(x, jnp.bfloat16), widened(w, jnp.bfloat16))
        return float32_dot(way, widened(x, jnp.float32), widened(w, jnp.float32))


def small_product(way: Way, x: jax.Array, w: jax.Array, dimension_numbers) -> jax.Array:
    """`lax.dot_general` of float32 operands in the order of the way.

    Args:
      x, w: float32; rows as `Way.small_steps` says, columns in the last axis of `w`; one axis of
        at most 128 contracted, at most `FLOAT32_SIZE` numbers of `w` for each entry of the batch.
      dimension_numbers: as `lax.dot_general` takes them.
    """
    if way.exact:
        return exact_dot_general(x, w, dimension_numbers)
    columns = w.shape[-1]
    missing = way.small_steps.columns(columns) - columns
    w = jnp.pad(w, [(0, 0)] * (w.ndim - 1) + [(0, missing)]) if missing else w
    with jax.named_scope(ORDERED):
        return small_dot(way, x, w, dimension_numbers)[..., :columns]
