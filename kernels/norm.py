"""RMSNorm, gated activation and FP8 quantisation by the Triton kernels of triton_norm.py.

Purpose: the passes over memory between two FP8 products. Each `*_quantized` function gives the bits
of the plain one followed by `quantize_rows`, in one pass.

All functions take two-dimensional row-major arrays. Rows, and blocks of 128 columns, are computed
alike whatever else is in the array; tiles follow from the width and nothing is tuned at run time.
Values are rounded to nearest even. Scales of rows come as the matmul kernel reads them,
(ceil(D / 128), M) float32: give ``scale.T`` to `matmul.matmul`, where both transposes cancel.

Differences from `fp8rl_jax.quant.quantize` on a CPU: XLA:CPU flushes denormals and these kernels do
not (quant/qarray.py says where that begins), and the byte of a NaN need not have the same sign.

Not done: gradients, arrays without rows, a batching rule.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fp8rl_jax.kernels.reference import K_BLOCK
from fp8rl_jax.kernels.triton_call import triton_call

E4M3 = jnp.float8_e4m3fn
MAX_WIDTH = 16384  # of a row that a norm keeps in the registers of one program
_FP8_MAX = {jnp.dtype(E4M3): 448.0, jnp.dtype(jnp.float8_e5m2): 57344.0}
_TILE = {"warps": 4, "stages": 1}
TILE_ROWS = 32  # of the (rows, 128) tiles of all kernels but the norm
TILE_COLUMNS = 64  # of the (128, columns) tiles of quantize_columns


def _blocks(size: int) -> int:
    return -(-size // K_BLOCK)


def _shapes(rows: int, width: int, y, q, keep: bool = True, quantize: bool = True):
    """Results (y, q, scale) of a kernel; one element for what it does not write."""
    whole, one = (rows, width), (1,)
    return (
        jax.ShapeDtypeStruct(whole if keep else one, y),
        jax.ShapeDtypeStruct(whole if quantize else one, q),
        jax.ShapeDtypeStruct((_blocks(width), rows) if quantize else one, jnp.float32),
    )


def _fp8_max(dtype) -> float:
    if jnp.dtype(dtype) not in _FP8_MAX:
        raise ValueError(f"{jnp.dtype(dtype)} is no FP8 format; use float8_e4m3fn or float8_e5m2")
    return _FP8_MAX[jnp.dtype(dtype)]


def norm_tile(width: int) -> dict[str, int]:
    """Rows and (padded) blocks of a norm's program, and its warps: 1024 elements a warp.

    Raises:
      ValueError: `width` is above MAX_WIDTH.
    """
    if width > MAX_WIDTH:
        raise ValueError(f"rows of {width} are too wide for the norm kernel: at most {MAX_WIDTH}")
    blocks = 1 << (_blocks(width) - 1).bit_length()
    return {"ROWS": max(1, 8 // blocks), "BLOCKS": blocks, "warps": max(1, blocks // 8)}


def _norm(x, weight, eps: float, dtype, q_dtype, power_of_two: bool, keep: bool, quantize: bool):
    from fp8rl_jax.kernels.triton_norm import rms_norm_kernel

    rows, width = x.shape
    tile = norm_tile(width)
    return triton_call(
        rms_norm_kernel, x, weight,
        out=_shapes(rows, width, dtype, q_dtype, keep, quantize),
        grid=(-(-rows // tile["ROWS"]),), stages=1,
        M=rows, D=width, EPS=float(eps), KEEP=keep, QUANTIZE=quantize,
        FP8_MAX=_fp8_max(q_dtype), POWER_OF_TWO=power_of_two, **tile,
    )  # fmt: skip


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, dtype=jnp.bfloat16) -> jax.Array:
    """``x / sqrt(mean(x^2) + eps) * weight``, in float32, rounded once.

    Args:
      x: (M, D), bf16 or float32; D up to MAX_WIDTH.
      weight: (D,).
      eps: a Python float.
      dtype: of the result.

    Returns:
      (M, D) in `dtype`. The order of summation follows from D and the dtypes alone.

    Raises:
      ValueError: D is too large.
    """
    return _norm(x, weight, eps, dtype, E4M3, False, True, False)[0]


def rms_norm_quantized(
    x: jax.Array,
    weight: jax.Array,
    eps: float,
    dtype=E4M3,
    power_of_two: bool = False,
    keep: bool = True,
    y_dtype=jnp.bfloat16,
) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """``y = rms_norm(x, weight, eps, y_dtype)`` and ``quantize_rows(y, dtype, power_of_two)``.

    Args:
      x, weight, eps: as for `rms_norm`.
      dtype, power_of_two: as for `quantize_rows`.
      keep: whether y is stored as well (a train step's wgrad reads it, a decode step does not).
      y_dtype: to which y is rounded before it is quantised.

    Returns:
      y (M, D) or None, q (M, D) FP8, scale (ceil(D / 128), M) float32.

    Raises:
      ValueError: D is too large, or `dtype` is no FP8 format.
    """
    y, q, scale = _norm(x, weight, eps, y_dtype, dtype, power_of_two, keep, True)
    return y if keep else None, q, scale


def _activation(gate, up, dtype, q_dtype, power_of_two: bool, keep: bool, quantize: bool):
    from fp8rl_jax.kernels.triton_norm import gated_silu_kernel

    rows, width = gate.shape
    return triton_call(
        gated_silu_kernel, gate, up,
        out=_shapes(rows, width, dtype, q_dtype, keep, quantize),
        grid=(-(-rows // TILE_ROWS), _blocks(width)),
        M=rows, D=width, KEEP=keep, QUANTIZE=quantize,
        FP8_MAX=_fp8_max(q_dtype), POWER_OF_TWO=power_of_two, ROWS=TILE_ROWS, **_TILE,
    )  # fmt: skip


def gated_silu(gate: jax.Array, up: jax.Array, dtype=jnp.bfloat16) -> jax.Array:
    """``gate / (1 + exp(-gate)) * up``, in float32, rounded once.

    Args:
      gate, up: (M, D), bf16 or float32.
      dtype: of the result.

    Returns:
      (M, D) in `dtype`.
    """
    return _activation(gate, up, dtype, E4M3, False, True, False)[0]


def gated_silu_quantized(
    gate: jax.Array,
    up: jax.Array,
    dtype=E4M3,
    power_of_two: bool = False,
    keep: bool = True,
    y_dtype=jnp.bfloat16,
) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """``y = gated_silu(gate, up, y_dtype)`` and ``quantize_rows(y, dtype, power_of_two)``.

    Args:
      gate, up: as for `gated_silu`.
      dtype, power_of_two, keep, y_dtype: as for `rms_norm_quantized`.

    Returns:
      y (M, D) or None, q (M, D) FP8, scale (ceil(D / 128), M) float32.

    Raises:
      ValueError: `dtype` is no FP8 format.
    """
    y, q, scale = _activation(gate, up, y_dtype, dtype, power_of_two, keep, True)
    return y if keep else None, q, scale


def quantize_rows(
    x: jax.Array, dtype=E4M3, power_of_two: bool = False
) -> tuple[jax.Array, jax.Array]:
    """`quant.quantize(x, (1, 128), dtype, power_of_two)`: one scale per row and 128 columns.

    Args:
      x: (M, D), bf16 or float32; taken as it is.
      dtype: `float8_e4m3fn` or `float8_e5m2`.
      power_of_two: round the multiplier down to a power of two before quantising.

    Returns:
      q (M, D), and scale (ceil(D / 128), M) float32: the transpose of a QArray's.

    Raises:
      ValueError: `dtype` is no FP8 format.
    """
    from fp8rl_jax.kernels.triton_norm import quantize_rows_kernel

    rows, width = x.shape
    return triton_call(
        quantize_rows_kernel, x,
        out=_shapes(rows, width, x.dtype, dtype)[1:],
        grid=(-(-rows // TILE_ROWS), _blocks(width)),
        M=rows, D=width, FP8_MAX=_fp8_max(dtype), POWER_OF_TWO=power_of_two, ROWS=TILE_ROWS,
        **_TILE,
    )  # fmt: skip


def quantize_columns(
    x: jax.Array, dtype=E4M3, power_of_two: bool = False
) -> tuple[jax.Array, jax.Array]:
    """`quant.quantize(x, (128, 1), dtype, power_of_two)`, with the bytes transposed.

    The operand of a weight gradient: its contraction runs along tokens, which therefore lie side
    by side in memory.

    Args:
      x: (T, D), bf16 or float32: T tokens, any number of them.
      dtype, power_of_two: as for `quantize_rows`.

    Returns:
      q (D, T) row-major, and scale (ceil(T / 128), D) float32, which is a QArray's own layout.

    Raises:
      ValueError: `dtype` is no FP8 format.
    """
    from fp8rl_jax.kernels.triton_norm import quantize_columns_kernel

    tokens, width = x.shape
    return triton_call(
        quantize_columns_kernel, x,
        out=_shapes(width, tokens, x.dtype, dtype)[1:],
        grid=(_blocks(tokens), -(-width // TILE_COLUMNS)),
        T=tokens, D=width, FP8_MAX=_fp8_max(dtype), POWER_OF_TWO=power_of_two,
        COLUMNS=TILE_COLUMNS, **_TILE,
    )  # fmt: skip
