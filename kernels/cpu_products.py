"""How XLA multiplies on a CPU, with which options, and the law that its sums then follow.

Zero drift on a CPU needs products whose bits depend on nothing but a row, a column and the length
of the contraction. Two of XLA's libraries give them, each within limits:

* **bf16 operands, by YNNPACK**: ``acc = fma(x[k + 1], w[k + 1], acc)``, then the same with ``k``,
  for k = 0, 2, 4 ...: the order of the instruction VDPBF16PS, which all YNNPACK kernels of this
  type follow under YNN_FLAG_CONSISTENT_ARITHMETIC ("numerically consistent with all other kernels
  of the same type": XNNPACK, ynnpack/kernels/dot/dot.h). No float32 copies are made, and CPUs with
  that instruction multiply twice as fast. E4M3 and E5M2 are bf16 numbers, so FP8 goes this way.
* **float32 operands, by Eigen or YNNPACK**: ``acc = fma(x[k], w[k], acc)`` with k ascending, for a
  contraction of at most 128 and, by YNNPACK, a right operand of at most 2**15 numbers. YNNPACK cuts
  larger ones into parts by the number of rows. `product` keeps float32 away from it; attention's
  are small enough.

Longer contractions are sums of such blocks (reference.py). XLA documents none of this, so
`multiplies_bf16` computes a few products on the machine at hand, once a process, and compares them
with the law; where it does not hold, YNNPACK is switched off and everything is multiplied in
float32 by Eigen. `fp8rl_jax.exact_jit` compiles with the options that belong to the answer.

Not done: Intel's AMX. Left to choose its kernels, YNNPACK multiplies bf16 with it in the order of
the instruction TDPBF16PS: per 32 of K one chain of even and one of odd k, each from 0, their sum
added to the total. It keeps to this for rows in multiples of 16; of others it may give one to
another kernel. float32 then follows no law of its own where a right operand has few columns,
attention's included, and would have to be kept away from it altogether.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BF16_DEPTH = 512  # most of K in one product of bf16 operands: YNNPACK does not cut it into parts
FLOAT32_SIZE = 2**15  # most numbers of a right operand in float32, likewise
_YNN = "xla_cpu_experimental_ynn_fusion_type"
# Lone dots go to YNNPACK, and of its kernels those that agree with each other.
_BF16: dict[str, bool | str] = {
    _YNN: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
    "xla_cpu_enable_platform_dependent_math": False,
}
_BF16_HOLDS = tuple(map(jnp.dtype, (jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2)))
_FLOAT32: dict[str, bool | str] = {_YNN: ""}


def _knows(options: Mapping[str, bool | str]) -> bool:
    """Whether jaxlib knows them: a trivial program with an unknown one does not compile."""
    try:
        jax.jit(lambda x: x + 1, compiler_options=dict(options)).lower(0).compile()
    except Exception as error:  # jaxlib raises different types for an unknown option
        if not any(name in str(error) for name in options):
            raise
        return False
    return True


def _one_by_one(x: np.ndarray, w: np.ndarray, order: np.ndarray) -> np.ndarray:
    """(..., M, K) times (..., K, N) in float32, a fused multiply-add for each k of `order`.

    In float64, where products and their sum with a float32 are exact or rounded once more.
    """
    total = np.zeros((*x.shape[:-1], w.shape[-1]), np.float32)
    for k in order:
        products = np.float64(x[..., k, None]) * np.float64(w[..., k, None, :])
        total = (np.float64(total) + products).astype(np.float32)
    return total


def bf16_law(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """(M, K) times (K, N), K even, in float32, each sum in the order of bf16's law above."""
    return _one_by_one(x, w, np.arange(x.shape[-1]).reshape(-1, 2)[:, ::-1].ravel())


def float32_law(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """(..., M, K) times (..., K, N) in float32, each sum in the order of float32's law above."""
    return _one_by_one(x, w, np.arange(x.shape[-1]))


def _follows_law() -> bool:
    """Whether the largest products of bf16, of transposed operands too, and of float32 are those of
    the law, with few and with many rows."""
    rng = np.random.default_rng(0)

    def operands(depth: int, columns: int, dtype) -> list[np.ndarray]:
        shapes = (200, depth), (depth, columns)
        return [rng.standard_normal(shape).astype(dtype) for shape in shapes]

    def turned(x, w):
        return _bf16_product(x.T, w.T)

    x, w = operands(BF16_DEPTH, 96, jnp.bfloat16)
    law = bf16_law(x.astype(np.float32), w.astype(np.float32))
    cases = [
        (_bf16_product, lambda rows: (x[:rows], w), law),
        (turned, lambda rows: (x[:rows].T, w.T), law),
    ]
    for depth in (64, 128):
        left, right = operands(depth, FLOAT32_SIZE // depth, np.float32)
        law = float32_law(left, right)
        cases.append((jnp.matmul, lambda rows, x=left, w=right: (x[:rows], w), law))
    for (multiply, given, law), rows in itertools.product(cases, (8, 200)):
        # Compiled ahead of time: this may run while something else is being traced.
        program = jax.jit(multiply, compiler_options=_BF16).lower(*given(rows)).compile()
        # One sum in 100,000 may round twice in float64; another order changes every fourth.
        if (np.asarray(program(*given(rows))) != law[:rows]).mean() > 1e-3:
            return False
    return True


@functools.cache
def multiplies_bf16() -> bool:
    """Whether products of bf16 are made as such on this machine, in the order of the law."""
    return jax.default_backend() == "cpu" and _knows(_BF16) and _follows_law()


@functools.cache
def compiler_options() -> dict[str, bool | str]:
    """Options of XLA:CPU that the law needs; none on other platforms, or where jaxlib knows none.

    The names belong to jaxlib 0.10 and 0.11.
    """
    if jax.default_backend() != "cpu":
        return {}
    if multiplies_bf16():
        return dict(_BF16)
    return dict(_FLOAT32) if _knows(_FLOAT32) else {}


def _as_it_lies(x: jax.Array) -> jax.Array:
    """`x`, row by row in memory where a product reads it.

    XLA decides by the layout of an operand, before it has optimised anything, whether a product of
    bf16 goes to YNNPACK or is made of float32 copies, and it would fold a transpose into the
    product. The barrier keeps the transpose outside, and what a selection returns lies row by row.
    Both vanish later.
    """
    bits = lax.optimization_barrier(lax.bitcast_convert_type(x, jnp.uint16))
    bits = jnp.where(jnp.ones((), bool), bits, jnp.uint16(0))
    return lax.bitcast_convert_type(bits, x.dtype)


def _bf16_product(x: jax.Array, w: jax.Array) -> jax.Array:
    return _dot(_as_it_lies(x), _as_it_lies(w), 1)


def _dot(x: jax.Array, w: jax.Array, axis: int) -> jax.Array:
    return lax.dot_general(x, w, (((axis,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def in_bf16(*dtypes) -> bool:
    """Whether operands of these types are multiplied as bf16."""
    return multiplies_bf16() and all(jnp.dtype(dtype) in _BF16_HOLDS for dtype in dtypes)


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """(M, K) times (K, N) in float32, in the order of the law.

    Args:
      x, w: FP8, bf16 or float32. K at most `BF16_DEPTH` where `in_bf16`, else 128; M at least 8.
    """
    if in_bf16(x.dtype, w.dtype):
        return _bf16_product(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16))
    x, w = x.astype(jnp.float32), w.astype(jnp.float32)
    if multiplies_bf16():  # YNNPACK takes no left operand that lies column by column
        return _dot(lax.optimization_barrier(x.T), w, 0)
    return _dot(x, w, 1)
