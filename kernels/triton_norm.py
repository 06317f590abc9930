"""The Triton kernels around a matmul: RMSNorm, gated activation, and FP8 quantisation of blocks.

Purpose: what a layer does between two products in one pass over memory, with a fixed order of
summation. A reduction left to XLA is ordered by the shape of the whole array, so the norm of a row
could have other bits in a decode step than in a train step.

Invariants:
  * a row's result depends on the row alone: its width and dtypes decide in which order it is
    summed, and rows that share a program do not meet;
  * a fused kernel writes the bits of the unfused norm (or activation) followed by `quantize_rows`:
    both are built from the same functions below, and what is quantised is the value rounded to
    the dtype that the unfused kernel stores;
  * the quantiser is that of fp8rl_jax/quant/qarray.py: amax on the integer bits (exact in any
    order, NaN above inf above every number), true quotients, rounding to nearest even.

No clipping stands before the cast: |x| <= amax and s <= fl(max / amax), so |x * s| exceeds the
largest FP8 value by at most one float32 ulp and rounds to it. exp and rsqrt are the hardware's
approximations (ex2.approx, rsqrt.approx: relative errors around 2**-22), the same bits for the same
value wherever it stands, but not a CPU's. Multiply-adds are not fused (see triton_call.py).

Not done: gradients; the residual addition in front of a norm; rows too wide for the registers of
one program.
"""

import triton
import triton.language as tl

BLOCK = tl.constexpr(128)  # elements that share a scale
# Neighbours that a thread holds: 16 bytes of bf16. As a hint on every address it also fixes which
# thread holds what, hence the order of a sum: Triton would take 16 wherever FP8 is stored.
_VECTOR = tl.constexpr(8)
_INF_BITS = tl.constexpr(0x7F800000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_EXPONENT = tl.constexpr(-0x800000)  # sign and exponent, as int32
_LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _magnitude_bits(x):
    """|x| of a float32 tensor as int32, ordered like the numbers: inf, then NaN, on top."""
    return x.to(tl.int32, bitcast=True) & _MAGNITUDE


@triton.jit
def _scales(amax_bits, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """The multiplier of a block and the scale to store, from the bits of its amax."""
    zero = amax_bits == 0
    s = tl.div_rn(FP8_MAX, tl.where(zero, 1.0, amax_bits.to(tl.float32, bitcast=True)))
    s = tl.where(zero, 1.0, tl.minimum(s, _LARGEST))
    if POWER_OF_TWO:
        s = (s.to(tl.int32, bitcast=True) & _EXPONENT).to(tl.float32, bitcast=True)
    s = tl.where(amax_bits < _INF_BITS, s, float("nan"))
    return s, tl.div_rn(1.0, s)


@triton.jit
def _normalised(x_at, weight_at, inside, weight_inside, D: tl.constexpr, EPS: tl.constexpr):
    """(ROWS, BLOCKS, 128) of ``x / sqrt(mean(x^2) + eps) * weight`` in float32."""
    x = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_at, mask=weight_inside, other=0.0).to(tl.float32)
    mean = tl.sum(tl.sum(x * x, axis=2), axis=1) * (1.0 / D)
    inverse = tl.rsqrt(mean + EPS)
    return x * inverse[:, None, None] * weight


@triton.jit
def rms_norm_kernel(
    x,  # (M, D)
    weight,  # (D,)
    y,  # (M, D), or one element that is not written
    q,  # (M, D) FP8, likewise
    scale,  # (ceil(D / 128), M) float32, likewise
    M: tl.constexpr,
    D: tl.constexpr,
    EPS: tl.constexpr,
    KEEP: tl.constexpr,  # store y
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

    value = _normalised(x + at, weight + column[None], inside, column_ok[None], D, EPS)
    rounded = value.to(y.dtype.element_ty)
    if KEEP:
        tl.store(y + at, rounded, mask=inside)
    if QUANTIZE:
        value = rounded.to(tl.float32)
        s, stored = _scales(tl.max(_magnitude_bits(value), axis=2), FP8_MAX, POWER_OF_TWO)
        tl.store(q + at, (value * s[:, :, None]).to(q.dtype.element_ty), mask=inside)
        scale_at = scale + tl.cast(block, tl.int64)[None, :] * M + row[:, None]
        tl.store(scale_at, stored, mask=(row < M)[:, None] & (block * BLOCK < D)[None, :])


@triton.jit
def _tile(M: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr):
    """Rows, offsets and mask of a program's (ROWS, 128) tile; axis 1 of the grid counts blocks."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.cast(row, tl.int64)[:, None] * D + column[None, :]
    at = tl.max_contiguous(at, (1, _VECTOR))
    return row, at, (row < M)[:, None] & (column < D)[None, :]


@triton.jit
def _store_quantized(
    value,  # (ROWS, 128) float32
    q,
    scale,
    row,
    at,
    inside,
    M: tl.constexpr,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    s, stored = _scales(tl.max(_magnitude_bits(value), axis=1), FP8_MAX, POWER_OF_TWO)
    tl.store(q + at, (value * s[:, None]).to(q.dtype.element_ty), mask=inside)
    tl.store(scale + tl.cast(tl.program_id(1), tl.int64) * M + row, stored, mask=row < M)


@triton.jit
def gated_silu_kernel(
    gate,  # (M, D)
    up,  # (M, D)
    y,  # (M, D), or one element that is not written
    q,  # (M, D) FP8, likewise
    scale,  # (ceil(D / 128), M) float32, likewise
    M: tl.constexpr,
    D: tl.constexpr,
    KEEP: tl.constexpr,
    QUANTIZE: tl.constexpr,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROWS: tl.constexpr,
):
    row, at, inside = _tile(M, D, ROWS)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    rounded = (tl.div_rn(g, 1.0 + tl.exp(-g)) * u).to(y.dtype.element_ty)
    if KEEP:
        tl.store(y + at, rounded, mask=inside)
    if QUANTIZE:
        value = rounded.to(tl.float32)
        _store_quantized(value, q, scale, row, at, inside, M, FP8_MAX, POWER_OF_TWO)


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
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
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
    s, stored = _scales(tl.max(_magnitude_bits(value), axis=0), FP8_MAX, POWER_OF_TWO)
    turned = (value * s[None, :]).to(q.dtype.element_ty).T
    q_at = q + tl.cast(column, tl.int64)[:, None] * T + token[None, :]
    tl.store(q_at, turned, mask=(column < D)[:, None] & (token < T)[None, :])
    scale_at = scale + tl.cast(tl.program_id(0), tl.int64) * D + column
    tl.store(scale_at, stored, mask=column < D)
