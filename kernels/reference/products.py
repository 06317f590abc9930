"""CPU products with a known order of summation, and the XLA options that give it.

Zero drift on a CPU needs products whose bits depend on nothing but a row, a column and the length
of the contraction. Two of XLA's libraries give them, each within limits:

* **bf16 operands, by YNNPACK**, in the order of an instruction. No float32 copies are made. E4M3
  and E5M2 are bf16 numbers, so FP8 goes this way. There are two `DOT_MODES`, the first tried first:

  - **TDPBF16PS** of Intel's AMX, several times faster with many rows: per 32 of K one chain of even
    and one of odd k, each ``acc = fma(x[k], w[k], acc)`` from 0, and their sum added to the total.
    YNNPACK, left to choose its kernels, keeps to it for rows in multiples of 8 alone.
  - **VDPBF16PS**: ``acc = fma(x[k + 1], w[k + 1], acc)``, then the same with ``k``, for k = 0, 2,
    4 ..., which all YNNPACK kernels of this type follow under YNN_FLAG_CONSISTENT_ARITHMETIC
    ("numerically consistent with all other kernels of the same type": XNNPACK,
    ynnpack/kernels/dot/dot.h), on CPUs without that instruction, too.

* **float32 operands, by Eigen or YNNPACK**: ``acc = fma(x[k], w[k], acc)`` with k ascending, for a
  contraction of at most 128 and, by YNNPACK in the second mode, a right operand of at most 2**15
  numbers. YNNPACK cuts larger ones into parts by the number of rows, and keeps to no order of
  float32 in the first mode: `product` keeps float32 away from it, `small_product` in that mode.

Longer contractions are sums of such blocks (matmul.py). XLA documents none of this, so
`bf16_dot_mode` computes a few products on the machine at hand, once a process, and compares them
with the order of each mode; where neither holds, YNNPACK is switched off and everything is
multiplied in float32 by Eigen. So it is on a CPU without an instruction for bf16, where YNNPACK
would make float32 copies of every operand, at half of Eigen's speed (docs/cpu_speed.md).
`fp8rl_jax.exact_jit` compiles with the options that belong to the answer. The answer follows from
what the CPU is and never from a time, which may be another one when a run is resumed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8rl_jax.kernels.reference.e4m3 import widened

BF16_DEPTH = 512  # most of K in one product of bf16 operands: YNNPACK does not cut it into parts
FLOAT32_SIZE = 2**15  # most numbers of a right operand in float32, likewise
_YNN = "xla_cpu_experimental_ynn_fusion_type"
_BF16_HOLDS = tuple(map(jnp.dtype, (jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2)))
_FEW_ROWS = 8  # fewer take XLA to matrix-vector code, whose order of summation differs
_EIGEN: dict[str, bool | str] = {_YNN: ""}


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


def pairs_order(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """(M, K) times (K, N), K even, in float32, each sum in the order of VDPBF16PS, see above."""
    return _one_by_one(x, w, np.arange(x.shape[-1]).reshape(-1, 2)[:, ::-1].ravel())


def amx_order(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """(M, K) times (K, N) in float32, each sum in the order of TDPBF16PS, see above."""
    total = np.zeros((x.shape[0], w.shape[1]), np.float32)
    for start in range(0, x.shape[1], 32):
        even, odd = (
            _one_by_one(x, w, np.arange(first, min(start + 32, x.shape[1]), 2))
            for first in (start, start + 1)
        )
        total = total + (even + odd)
    return total


def float32_order(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """(..., M, K) times (..., K, N) in float32, each sum in the order of float32 above."""
    return _one_by_one(x, w, np.arange(x.shape[-1]))


@dataclasses.dataclass(frozen=True)
class DotMode:
    """One of YNNPACK's modes of multiplying bf16.

    Attributes:
      options: of XLA:CPU. Lone dots go to YNNPACK.
      order: (M, K) times (K, N) in float32, each sum in this mode's order.
      step: rows must come in multiples of it, and `_FEW_ROWS` at least, for this order to hold.
      float32: whether its products of float32 follow `float32_order`, too.
    """

    options: Mapping[str, bool | str]
    order: Callable[[np.ndarray, np.ndarray], np.ndarray]
    step: int
    float32: bool

    def padded(self, rows: int) -> int:
        """The least number of rows, from `rows` on, that it keeps to the order for."""
        return -(-max(rows, _FEW_ROWS) // self.step) * self.step


_LONE_DOTS = {_YNN: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
# Of YNNPACK's kernels those that agree with each other.
_CONSISTENT = {**_LONE_DOTS, "xla_cpu_enable_platform_dependent_math": False}
DOT_MODES = {
    "amx": DotMode(_LONE_DOTS, amx_order, step=8, float32=False),
    "pairs": DotMode(_CONSISTENT, pairs_order, step=1, float32=True),
}
_BF16_INSTRUCTIONS = {"amx_bf16", "avx512_bf16", "bf16"}  # the last one is ARM's


def _holds(mode: DotMode) -> bool:
    """Whether the deepest products of bf16, of transposed operands too, and of float32 are those of
    the order in some of their columns, with few and with many rows."""
    rng = np.random.default_rng(0)
    most, some = 208, slice(None, None, 17)

    def operands(depth: int, columns: int, dtype) -> list[np.ndarray]:
        shapes = (most, depth), (depth, columns)
        return [rng.standard_normal(shape).astype(dtype) for shape in shapes]

    bf16 = operands(BF16_DEPTH, 1500, jnp.bfloat16)
    float32 = [operands(depth, FLOAT32_SIZE // depth, np.float32) for depth in (64, 128)]
    wanted = [mode.order(bf16[0].astype(np.float32), bf16[1][:, some].astype(np.float32))] * 2
    wanted += [float32_order(x, w[:, some]) for x, w in float32]

    def multiply(x, w, x_turned, w_turned, float32):
        last_with_first = (((1,), (0,)), ((), ()))
        return [
            _bf16_product(x, w),
            _bf16_product(x_turned.T, w_turned.T),
            *(_small_product(mode, *each, last_with_first) for each in float32),
        ]

    for rows in (_FEW_ROWS, most):
        x, w = bf16[0][:rows], bf16[1]
        given = x, w, x.T, w.T, [(x[:rows], w) for x, w in float32]
        # Compiled ahead of time: this may run while something else is being traced.
        program = jax.jit(multiply, compiler_options=dict(mode.options)).lower(*given).compile()
        for found, want in zip(program(*given), wanted, strict=True):
            # One sum in 100,000 may round twice in float64; another order changes every fourth.
            if (np.asarray(found)[:, some] != want[:rows]).mean() > 1e-3:
                return False
    return True


@functools.cache
def cpu_features() -> str:
    """The instructions that the CPU knows, as the system lists them; '' where it does not."""
    try:
        with open("/proc/cpuinfo") as file:
            return next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        return ""


def _has_bf16_instructions() -> bool:
    """Whether the CPU multiplies bf16, as far as the system tells; True where it does not."""
    features = cpu_features().split()
    return not features or not _BF16_INSTRUCTIONS.isdisjoint(features)


@functools.cache
def bf16_dot_mode() -> DotMode | None:
    """How products of bf16 are made on this machine: the first mode whose order holds, if any."""
    if jax.default_backend() != "cpu" or not _has_bf16_instructions():
        return None
    modes = DOT_MODES.values()
    return next((mode for mode in modes if _knows(mode.options) and _holds(mode)), None)


@functools.cache
def compiler_options() -> dict[str, bool | str]:
    """Options of XLA:CPU that the order needs; none on other platforms, or where jaxlib knows none.

    The names belong to jaxlib 0.10 and 0.11.
    """
    if jax.default_backend() != "cpu":
        return {}
    if mode := bf16_dot_mode():
        return dict(mode.options)
    return dict(_EIGEN) if _knows(_EIGEN) else {}


def _as_it_lies(x: jax.Array) -> jax.Array:
    """`x`, row by row in memory where a product reads it.

    XLA decides by the layout of an operand, before it has optimised anything, whether a product of
    bf16 goes to YNNPACK or is made of float32 copies, and it would fold a transpose into the
    product. The barrier keeps the transpose outside, and what a selection returns is row by row.
    Both vanish later.
    """
    bits = lax.optimization_barrier(lax.bitcast_convert_type(x, jnp.uint16))
    bits = jnp.where(jnp.ones((), bool), bits, jnp.uint16(0))
    return lax.bitcast_convert_type(bits, x.dtype)


def _bf16_product(x: jax.Array, w: jax.Array) -> jax.Array:
    return _dot(_as_it_lies(x), _as_it_lies(w), 1)


def _dot(x: jax.Array, w: jax.Array, axis: int) -> jax.Array:
    return lax.dot_general(x, w, (((axis,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def _small_product(
    mode: DotMode | None, x: jax.Array, w: jax.Array, dimension_numbers
) -> jax.Array:
    if mode is not None and not mode.float32:
        # YNNPACK takes no left operand that is stored column by column.
        ((of_x,), of_w), (batch, batch_w) = dimension_numbers
        rows = (axis for axis in range(x.ndim) if axis not in (*batch, of_x))
        x = lax.optimization_barrier(x.transpose(*batch, of_x, *rows))
        dimension_numbers = ((len(batch),), of_w), (tuple(range(len(batch))), batch_w)
    return lax.dot_general(x, w, dimension_numbers, preferred_element_type=jnp.float32)


def small_product(x: jax.Array, w: jax.Array, dimension_numbers) -> jax.Array:
    """`lax.dot_general` of float32 operands in the order of `float32_order`.

    Args:
      x, w: float32; 2 rows at least, one axis of at most 128 contracted, and at most `FLOAT32_SIZE`
        numbers of `w` for each entry of the batch.
      dimension_numbers: as `lax.dot_general` takes them.
    """
    return _small_product(bf16_dot_mode(), x, w, dimension_numbers)


def multiplies_bf16() -> bool:
    """Whether products of bf16 are made as such on this machine, in a known order."""
    return bf16_dot_mode() is not None


def wide_type() -> jnp.dtype:
    """The type in which FP8 is multiplied on this machine."""
    return jnp.dtype(jnp.bfloat16 if multiplies_bf16() else jnp.float32)


def padded_rows(rows: int) -> int:
    """How many rows `product` must be given for `rows` to have their own bits."""
    mode = bf16_dot_mode()
    return mode.padded(rows) if mode else max(rows, _FEW_ROWS)


def in_bf16(*dtypes) -> bool:
    """Whether operands of these types are multiplied as bf16."""
    return multiplies_bf16() and all(jnp.dtype(dtype) in _BF16_HOLDS for dtype in dtypes)


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """(M, K) times (K, N) in float32, in the known order.

    Args:
      x, w: FP8, bf16 or float32. K at most `BF16_DEPTH` where `in_bf16`, else 128; M as
        `padded_rows` gives it.
    """
    if in_bf16(x.dtype, w.dtype):
        return _bf16_product(widened(x, jnp.bfloat16), widened(w, jnp.bfloat16))
    x, w = widened(x, jnp.float32), widened(w, jnp.float32)
    if multiplies_bf16():  # YNNPACK takes no left operand stored column by column
        return _dot(lax.optimization_barrier(x.T), w, 0)
    return _dot(x, w, 1)


def product_at_once(x: jax.Array, w: jax.Array) -> jax.Array:
    """(M, K) times (K, N) in float32, for any K and in no particular order."""
    if in_bf16(x.dtype, w.dtype):
        # XLA would fold a transpose of the result into the product, as one of its operands.
        return lax.optimization_barrier(product(x, w))
    return _dot(widened(x, jnp.float32), widened(w, jnp.float32), 1)
