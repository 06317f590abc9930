"""RMSNorm, gated activation and FP8 quantisation of blocks by Triton.

The operations between two FP8 products of a layer, in one pass over memory and a fixed order of
summation: XLA would order a reduction by the shape of the array, which differs between decoding and
training.

Arrays are two-dimensional and row-major; values are rounded to nearest even. Scales of rows have
the layout that the matmul kernel reads, (ceil(D / 128), M) float32: pass ``scale.T`` to
`matmul.matmul`, where both transposes cancel.

Invariants:
  * a row's result depends on the row alone: its width and dtypes decide the order of its sum; rows
    that share a program do not mix, nor do blocks of 128 columns in quantisation;
  * a fused kernel writes the bits of the unfused norm (or activation) followed by `quantize_rows`;
  * the quantiser is that of fp8rl_jax/quant/qarray.py: amax on the integer bits (exact in any
    order, NaN above inf above every number), true quotients, rounding to nearest even. XLA:CPU
    flushes denormals and these kernels do not (qarray.py says where that begins), and the byte of
    a NaN need not have the same sign.

There is no clipping before the cast: |x| <= amax and s <= fl(max / amax), so |x * s| exceeds the
largest FP8 value by at most one float32 ulp and rounds to it. exp and rsqrt are the hardware's
approximations (ex2.approx, rsqrt.approx: relative errors around 2**-22): the same bits for the same
value in any element, but not a CPU's. Multiply-adds are not fused (see triton_call.py).

Not done: gradients; arrays without rows; a batching rule; rows of more than `MAX_WIDTH`.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from fp8rl_jax.kernels.arrays import (
    GELU_CUBE,
    GELU_FACTOR,
    K_BLOCK,
    SWIGLU_ALPHA,
    SWIGLU_LIMIT,
    fp8_max,
)
from fp8rl_jax.kernels.gpu.quantiser import E4M3, Quantisation, block_scales, magnitude_bits
from fp8rl_jax.kernels.gpu.triton_call import triton_call

BLOCK = tl.constexpr(K_BLOCK)  # elements that share a scale
FACTOR, CUBE = tl.constexpr(GELU_FACTOR), tl.constexpr(GELU_CUBE)
ALPHA, LIMIT = tl.constexpr(SWIGLU_ALPHA), tl.constexpr(SWIGLU_LIMIT)
# Neighbours that a thread holds: 16 bytes of bf16. As a hint on every address it also fixes the
# elements of each thread, hence the order of a sum: Triton would take 16 wherever FP8 is stored.
_VECTOR = tl.constexpr(8)


@triton.jit
def _normalised(x_at, weight_at, inside, weight_inside, D: tl.constexpr, EPS: tl.constexpr):
    """Computes ``x / sqrt(mean(x^2) + eps) * weight``, (ROWS, BLOCKS, 128) in float32."""
    x = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_at, mask=weight_inside, other=0.0).to(tl.float32)
    mean = tl.sum(tl.sum(x * x, axis=2), axis=1) * (1.0 / D)
    inverse = tl.rsqrt(mean + EPS)
    return x * inverse[:, None, None] * weight


@triton.jit
def rms_norm_kernel(
    x,  # (M, D)
    weight,  # (L, D)
    layer,  # (1,) int32, below L
    y,  # (M, D)
    q,  # (M, D) FP8; without QUANTIZE one element that is not written
    scale,  # (ceil(D / 128), M) float32; without QUANTIZE as q
    M: tl.constexpr,
    D: tl.constexpr,
    EPS: tl.constexpr,
    QUANTIZE: tl.constexpr,  # store q and scale
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,  # a power of two that covers the blocks of a row
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.arange(0, BLOCKS)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    column_ok = column < D
    inside = (row < M)[:, None, None] & column_ok[None]
    at = tl.cast(row, tl.int64)[:, None, None] * D + column[None]
    at = tl.max_contiguous(at, (1, 1, _VECTOR))

    weight += tl.load(layer) * D
    value = _normalised(x + at, weight + column[None], inside, column_ok[None], D, EPS)
    rounded = value.to(y.dtype.element_ty)
    tl.store(y + at, rounded, mask=inside)
    if QUANTIZE:
        value = rounded.to(tl.float32)
        s, stored = block_scales(tl.max(magnitude_bits(value), axis=2), FP8_MAX, POWER_OF_TWO)
        tl.store(q + at, (value * s[:, :, None]).to(q.dtype.element_ty), mask=inside)
        scale_at = scale + tl.cast(block, tl.int64)[None, :] * M + row[:, None]
        tl.store(scale_at, stored, mask=(row < M)[:, None] & (block * BLOCK < D)[None, :])


@triton.jit
def _tile(M: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr):
    """Returns rows, offsets and mask of a program's (ROWS, 128) tile; grid axis 1 counts blocks."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.cast(row, tl.int64)[:, None] * D + column[None, :]
    at = tl.max_contiguous(at, (1, _VECTOR))
    return row, at, (row < M)[:, None] & (column < D)[None, :]


@triton.jit
def _store_quantized(
    value,  # (ROWS, 128)
    q,
    scale,
    row,
    at,
    inside,
    M: tl.constexpr,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    value = value.to(tl.float32)
    s, stored = block_scales(tl.max(magnitude_bits(value), axis=1), FP8_MAX, POWER_OF_TWO)
    tl.store(q + at, (value * s[:, None]).to(q.dtype.element_ty), mask=inside)
    tl.store(scale + tl.cast(tl.program_id(1), tl.int64) * M + row, stored, mask=row < M)


@triton.jit
def gated_activation_kernel(
    gate,  # (M, D)
    up,  # (M, D)
    y,  # (M, D)
    q,  # (M, D) FP8; without QUANTIZE one element that is not written
    scale,  # (ceil(D / 128), M) float32; without QUANTIZE as q
    M: tl.constexpr,
    D: tl.constexpr,
    GELU: tl.constexpr,
    CLAMPED: tl.constexpr,  # gpt-oss's; with neither silu
    QUANTIZE: tl.constexpr,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROWS: tl.constexpr,
):
    row, at, inside = _tile(M, D, ROWS)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    exponent = g
    if CLAMPED:  # a NaN stays
        g = tl.where(g > LIMIT, LIMIT, g)
        u = tl.where(u > LIMIT, LIMIT, tl.where(u < -LIMIT, -LIMIT, u)) + 1.0
        exponent = g * ALPHA
    if GELU:
        exponent = g * FACTOR * (1.0 + g * g * CUBE)
    rounded = (tl.div_rn(g, 1.0 + tl.exp(-exponent)) * u).to(y.dtype.element_ty)
    tl.store(y + at, rounded, mask=inside)
    if QUANTIZE:
        _store_quantized(rounded, q, scale, row, at, inside, M, FP8_MAX, POWER_OF_TWO)


@triton.jit
def quantize_rows_kernel(
    x,  # (M, D)
    q,  # (M, D) FP8
    scale,  # (ceil(D / 128), M) float32
    M: tl.constexpr,
    D: tl.constexpr,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROWS: tl.constexpr,
):
    row, at, inside = _tile(M, D, ROWS)
    value = tl.load(x + at, mask=inside, other=0.0)
    _store_quantized(value, q, scale, row, at, inside, M, FP8_MAX, POWER_OF_TWO)


@triton.jit
def quantize_columns_kernel(
    x,  # (T, D)
    q,  # (D, T) FP8
    scale,  # (ceil(T / 128), D) float32
    T: tl.constexpr,
    D: tl.constexpr,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (token < T)[:, None] & (column < D)[None, :]
    at = tl.cast(token, tl.int64)[:, None] * D + column[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    s, stored = block_scales(tl.max(magnitude_bits(value), axis=0), FP8_MAX, POWER_OF_TWO)
    turned = (value * s[None, :]).to(q.dtype.element_ty).T
    q_at = q + tl.cast(column, tl.int64)[:, None] * T + token[None, :]
    tl.store(q_at, turned, mask=(column < D)[:, None] & (token < T)[None, :])
    scale_at = scale + tl.cast(tl.program_id(0), tl.int64) * D + column
    tl.store(scale_at, stored, mask=column < D)


MAX_WIDTH = 16384  # widest row that a norm keeps in the registers of one program
_TILE = {"warps": 4, "stages": 1}
TILE_ROWS = 32  # rows of the (rows, 128) tiles of gated_activation and quantize_rows
TILE_COLUMNS = 64  # columns of the (128, columns) tiles of quantize_columns


def _blocks(size: int) -> int:
    return -(-size // K_BLOCK)


def _quantised_shapes(rows: int, width: int, dtype):
    """Returns the shapes of a kernel's results q and scale."""
    return (
        jax.ShapeDtypeStruct((rows, width), dtype),
        jax.ShapeDtypeStruct((_blocks(width), rows), jnp.float32),
    )


def norm_tile(width: int) -> dict[str, int]:
    """Returns rows and (padded) blocks of a norm's program, and its warps: 1024 elements a warp.

    Raises:
      ValueError: `width` is above MAX_WIDTH.
    """
    if width > MAX_WIDTH:
        raise ValueError(f"rows of {width} are too wide for the norm kernel: at most {MAX_WIDTH}")
    blocks = 1 << (_blocks(width) - 1).bit_length()
    return {"ROWS": max(1, 8 // blocks), "BLOCKS": blocks, "warps": max(1, blocks // 8)}


def _call(kernel, x, *others, dtype, quantisation: Quantisation | None, **keywords):
    """Runs a kernel on several operands; returns y, or with a quantisation (y, q, scale)."""
    rows, width = x.shape
    given = quantisation or Quantisation()
    quantised = _quantised_shapes(rows, width, given.dtype) if quantisation else (None, None)
    found = triton_call(
        kernel,
        x,
        *others,
        out=(jax.ShapeDtypeStruct((rows, width), dtype), *quantised),
        M=rows,
        D=width,
        QUANTIZE=quantisation is not None,
        FP8_MAX=fp8_max(given.dtype),
        POWER_OF_TWO=given.power_of_two,
        **keywords,
    )
    return found if quantisation else found[0]


def rms_norm(
    x: jax.Array,
    weight: jax.Array,
    eps: float,
    dtype=jnp.bfloat16,
    quantisation: Quantisation | None = None,
    layer: jax.Array | None = None,
):
    """Computes ``x / sqrt(mean(x^2) + eps) * weight`` in float32, rounded once.

    Args:
      x: (M, D), bf16 or float32; D up to MAX_WIDTH.
      weight: (D,), or (L, D) with `layer`.
      eps: a Python float.
      dtype: dtype of the result.
      quantisation: how to also quantise the rounded result, as `quantize_rows` does; or None.
      layer: () int32, the row of `weight` to take, or None.

    Returns:
      (M, D) in `dtype`. The order of summation follows from D and the dtypes alone. With
      `quantisation` (this, q (M, D) FP8, scale (ceil(D / 128), M) float32).

    Raises:
      ValueError: D is too large, or `quantisation` has no FP8 format.
    """
    tile = norm_tile(x.shape[1])
    layer = jnp.zeros((1,), jnp.int32) if layer is None else layer.reshape(1)
    return _call(
        rms_norm_kernel,
        x,
        weight,
        layer,
        dtype=dtype,
        quantisation=quantisation,
        EPS=float(eps),
        grid=(-(-x.shape[0] // tile["ROWS"]),),
        stages=1,
        **tile,
    )


def gated_activation(
    gate: jax.Array,
    up: jax.Array,
    activation: str = "silu",
    dtype=jnp.bfloat16,
    quantisation: Quantisation | None = None,
):
    """Computes ``gate / (1 + exp(-s(gate))) * up`` in float32, rounded once; 'clamped_swiglu' with
    both factors clamped, and up plus 1.

    Args:
      gate, up: (M, D), bf16 or float32.
      activation: one of `models.activations.gated_activation`, which decides s.
      dtype, quantisation: as for `rms_norm`.

    Returns:
      As `rms_norm`.
    """
    grid = (-(-gate.shape[0] // TILE_ROWS), _blocks(gate.shape[1]))
    return _call(
        gated_activation_kernel,
        gate,
        up,
        dtype=dtype,
        quantisation=quantisation,
        grid=grid,
        GELU=activation == "gelu_pytorch_tanh",
        CLAMPED=activation == "clamped_swiglu",
        ROWS=TILE_ROWS,
        **_TILE,
    )


def quantize_rows(
    x: jax.Array, dtype=E4M3, power_of_two: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Computes `quant.quantize(x, (1, 128), dtype, power_of_two)`.

    Args:
      x: (M, D), bf16 or float32, not rounded.
      dtype, power_of_two: as for `quant.quantize`; ValueError if `dtype` is no FP8 format.

    Returns:
      q (M, D), and scale (ceil(D / 128), M) float32: the transpose of a QArray's.
    """
    rows, width = x.shape
    return triton_call(
        quantize_rows_kernel,
        x,
        out=_quantised_shapes(rows, width, dtype),
        grid=(-(-rows // TILE_ROWS), _blocks(width)),
        M=rows,
        D=width,
        FP8_MAX=fp8_max(dtype),
        POWER_OF_TWO=power_of_two,
        ROWS=TILE_ROWS,
        **_TILE,
    )


def quantize_columns(
    x: jax.Array, dtype=E4M3, power_of_two: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Computes `quant.quantize(x, (128, 1), dtype, power_of_two)`, with the bytes transposed.

    The result is an operand of a weight gradient, whose contraction runs along tokens.

    Args:
      x: (T, D), bf16 or float32; T is the number of tokens, which may be any.
      dtype, power_of_two: as for `quantize_rows`.

    Returns:
      q (D, T) row-major, and scale (ceil(T / 128), D) float32, which is a QArray's layout.
    """
    tokens, width = x.shape
    return triton_call(
        quantize_columns_kernel,
        x,
        out=_quantised_shapes(width, tokens, dtype),
        grid=(_blocks(tokens), -(-width // TILE_COLUMNS)),
        T=tokens,
        D=width,
        FP8_MAX=fp8_max(dtype),
        POWER_OF_TWO=power_of_two,
        COLUMNS=TILE_COLUMNS,
        **_TILE,
    )
