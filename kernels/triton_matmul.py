"""The Triton matmul kernels: blockwise-scaled FP8, bf16 and float32, dense and grouped.

Both operands are read along K ("K-major"): rows of x and rows of the transposed weight, which is
the only order that Hopper's FP8 tensor cores take. With scales, each 128 of K gives a float32
partial sum that leaves the tensor core, is multiplied by its scales and added in float32 (DeepSeek-
V3, arXiv:2412.19437, section 3.3.2: the tensor core itself adds with about 14 bits). Without, sums
stay in the tensor core, K ascending.

A program computes one tile of the result. Rows and columns past the end are computed on copies of
row and column 0 and not stored: they cost no memory traffic, and poison nothing.
"""

import triton
import triton.language as tl


@triton.jit
def tile_of(program, ROW_TILES: tl.constexpr, COLUMN_TILES: tl.constexpr, BAND: tl.constexpr):
    """Row tile and column tile of a program.

    Programs that run at the same time take few row tiles and few column tiles: both stay in L2.
    """
    first = (program // (BAND * COLUMN_TILES)) * BAND
    height = tl.minimum(ROW_TILES - first, BAND)
    within = program % (BAND * COLUMN_TILES)
    return first + within % height, within // height


@triton.jit
def matmul_kernel(
    x,  # (TOTAL, K)
    w,  # (E, N, K)
    x_scale,  # (KB, TOTAL) float32
    w_scale,  # (E, ceil(N / 128), KB) float32, or (E, KB, N) with COLUMN_SCALES
    experts,  # (TOTAL / GROUP,) int32: which w a group of rows takes; E or more for none: zeros
    out,  # (TOTAL, N)
    TOTAL: tl.constexpr,
    GROUP: tl.constexpr,  # rows that share a weight; TOTAL for a dense product
    N: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    GROUPED: tl.constexpr,
    SCALED: tl.constexpr,
    COLUMN_SCALES: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BAND: tl.constexpr,
):
    TILES_IN_GROUP: tl.constexpr = (GROUP + BM - 1) // BM
    ROW_TILES: tl.constexpr = (TOTAL // GROUP) * TILES_IN_GROUP
    COLUMN_TILES: tl.constexpr = (N + BN - 1) // BN
    STEPS: tl.constexpr = (K + BK - 1) // BK

    row_tile, column_tile = tile_of(tl.program_id(0), ROW_TILES, COLUMN_TILES, BAND)
    group = row_tile // TILES_IN_GROUP
    local = (row_tile % TILES_IN_GROUP) * BM + tl.arange(0, BM)
    row_ok = local < GROUP
    row = group * GROUP + tl.where(row_ok, local, 0)
    column = column_tile * BN + tl.arange(0, BN)
    column_ok = column < N
    safe_column = tl.where(column_ok, column, 0)

    steps = STEPS
    expert = 0
    if GROUPED:
        expert = tl.load(experts + group)
        steps = tl.where(expert < E, STEPS, 0)
        expert = tl.minimum(expert, E - 1)
    expert = tl.cast(expert, tl.int64)

    depth = tl.arange(0, BK)
    x_at = x + tl.cast(row, tl.int64)[:, None] * K + depth[None, :]
    w_at = w + (expert * N + safe_column)[:, None] * K + depth[None, :]
    x_scale_at = x_scale + row
    if COLUMN_SCALES:
        w_scale_at = w_scale + expert * STEPS * N + safe_column
    else:
        w_scale_at = w_scale + (expert * ((N + 127) // 128) + column_tile * BN // 128) * STEPS

    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(steps):
        if K % BK == 0:
            x_part = tl.load(x_at)
            w_part = tl.load(w_at)
        else:
            inside = (depth < K - k * BK)[None, :]
            x_part = tl.load(x_at, mask=inside, other=0.0)
            w_part = tl.load(w_at, mask=inside, other=0.0)
        if SCALED:
            partial = tl.dot(x_part, w_part.T)
            if COLUMN_SCALES:
                partial *= tl.load(x_scale_at)[:, None]
                scale = tl.load(w_scale_at)[None, :]
                w_scale_at += N
            else:
                scale = (tl.load(x_scale_at) * tl.load(w_scale_at))[:, None]
                w_scale_at += 1
            acc = tl.fma(partial, tl.broadcast_to(scale, (BM, BN)), acc)
            x_scale_at += TOTAL
        else:
            acc = tl.dot(x_part, w_part.T, acc, input_precision=PRECISION)
        x_at += BK
        w_at += BK

    out_at = out + tl.cast(row, tl.int64)[:, None] * N + column[None, :]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=row_ok[:, None] & column_ok[None, :])


@triton.jit
def grouped_wgrad_kernel(
    x,  # (K, TOTAL): the layer's input along tokens
    dy,  # (N, TOTAL): the gradient of its output along tokens
    x_scale,  # (TOTAL / 128, K) float32
    dy_scale,  # (TOTAL / 128, N) float32
    starts,  # (E + 1,) int32: blocks of 128 tokens of expert e are starts[e] .. starts[e + 1] - 1
    out,  # (E, K, N)
    TOTAL: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BAND: tl.constexpr,
):
    ROW_TILES: tl.constexpr = (K + BM - 1) // BM
    COLUMN_TILES: tl.constexpr = (N + BN - 1) // BN
    LOADS: tl.constexpr = 128 // BK

    expert = tl.program_id(1)
    row_tile, column_tile = tile_of(tl.program_id(0), ROW_TILES, COLUMN_TILES, BAND)
    row = row_tile * BM + tl.arange(0, BM)
    row_ok = row < K
    safe_row = tl.where(row_ok, row, 0)
    column = column_tile * BN + tl.arange(0, BN)
    column_ok = column < N
    safe_column = tl.where(column_ok, column, 0)

    first = tl.load(starts + expert)
    last = tl.load(starts + expert + 1)
    token = first * 128 + tl.arange(0, BK)
    x_at = x + tl.cast(safe_row, tl.int64)[:, None] * TOTAL + token[None, :]
    dy_at = dy + tl.cast(safe_column, tl.int64)[:, None] * TOTAL + token[None, :]
    x_scale_at = x_scale + tl.cast(first, tl.int64) * K + safe_row
    dy_scale_at = dy_scale + tl.cast(first, tl.int64) * N + safe_column

    acc = tl.zeros((BM, BN), tl.float32)
    for _ in range((last - first) * LOADS):
        x_part = tl.load(x_at)
        dy_part = tl.load(dy_at)
        if SCALED:
            partial = tl.dot(x_part, dy_part.T)
            partial *= tl.load(x_scale_at)[:, None]
            scale = tl.load(dy_scale_at)[None, :]
            acc = tl.fma(partial, tl.broadcast_to(scale, (BM, BN)), acc)
            x_scale_at += K
            dy_scale_at += N
        else:
            acc = tl.dot(x_part, dy_part.T, acc, input_precision=PRECISION)
        x_at += BK
        dy_at += BK

    out_at = out + (tl.cast(expert, tl.int64) * K + row)[:, None] * N + column[None, :]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=row_ok[:, None] & column_ok[None, :])
