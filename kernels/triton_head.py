"""The Triton kernels of the fused output head: logits to log-probabilities, tile by tile.

For each row and each 128 columns of the vocabulary (a tile, part of the numeric contract) a kernel
keeps three numbers of the scaled logits x: the maximum m, the sum of exp(x - m), and the sum of
exp(x - m) * (x - m). `combine_kernel` makes the row's log-probability and entropy of them. The
logits come out of the tensor core (`head_statistics_kernel`) or out of memory
(`logits_statistics_kernel`), and the three numbers have the same bits both ways:

* The product is `matmul_kernel`'s without scales: the same instruction, K ascending.
* A maximum is exact in any order. A sum of floats is not: `tl.sum` adds in the order in which the
  tile lies in registers, which differs between an accumulator and a load. So terms become integers
  first (`_steps`); those have no order.
* A row of `combine_kernel` is one program, the same one whatever the number of rows.

A logit of -inf is a probability of 0. NaN and +inf make their row NaN: maxima pass NaN on, because
a sum of integers would not.

Not done: a vocabulary split over devices (its parts' three numbers could be gathered and combined,
were the parts multiples of 128 columns). A tile's arithmetic runs beside the product of another
program on the multiprocessor, if there is one, not beside its own program's next.
"""

import triton
import triton.language as tl

from fp8rl_jax.kernels.triton_matmul import tile_of

_LOWEST = tl.constexpr(-3.4e38)


@triton.jit
def _logits_tile(
    x, w, row, column,
    K: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """(BM, BN) float32 of x (., K) by w (., K) transposed, at rows and columns that exist."""
    depth = tl.arange(0, BK)
    x_at = x + tl.cast(row, tl.int64)[:, None] * K + depth[None, :]
    w_at = w + tl.cast(column, tl.int64)[:, None] * K + depth[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range((K + BK - 1) // BK):
        if K % BK == 0:
            x_part = tl.load(x_at)
            w_part = tl.load(w_at)
        else:
            inside = (depth < K - k * BK)[None, :]
            x_part = tl.load(x_at, mask=inside, other=0.0)
            w_part = tl.load(w_at, mask=inside, other=0.0)
        acc = tl.dot(x_part, w_part.T, acc, input_precision=PRECISION)
        x_at += BK
        w_at += BK
    return acc


@triton.jit
def _larger(a, b):
    """The larger one; NaN if either is NaN (`tl.max` would drop it)."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _steps(x, ONE: tl.constexpr, BITS: tl.constexpr):
    """x as an integer, in the steps in which float32 counts from ONE, whose bits are BITS.

    The addition rounds x to such a step, and neighbouring floats have neighbouring bits. Two
    instructions at full rate, which a conversion to int64 does not have.
    """
    return (x + ONE).to(tl.int32, bitcast=True) - BITS


@triton.jit
def _sum_coarse(x):
    """Sum along axis 1 of up to 128 values from 0 to 1, in steps of 2**-23; as int32."""
    tl.static_assert(x.shape[1] <= 128)
    return tl.sum(_steps(x, 1.0, 0x3F800000), 1)


@triton.jit
def _sum_fine(x):
    """The same sum as float32, in steps of 2**-46.

    In coarse steps alone a tile that one column dominates could lose 127 others of 2**-24 each:
    7.6e-6 of a log-probability.
    """
    rest = x - ((x + 1.0) - 1.0)  # what rounding to coarse steps left: exact, up to 2**-24
    rest = tl.sum(_steps(rest, 1.5 * 2.0**-23, 0x34400000), 1)
    return _sum_coarse(x).to(tl.float32) * 2.0**-23 + rest.to(tl.float32) * 2.0**-46


@triton.jit
def _store_statistics(
    scaled, row, row_ok, column, column_ok, tile, targets, top, total, moment, chosen,
    TILES: tl.constexpr,
):  # fmt: skip
    """Writes a tile's three numbers per row, and the target's logit if it lies in the tile."""
    target = tl.load(targets + row)
    here = (column[None, :] == target[:, None]) & (row_ok[:, None] & column_ok[None, :])
    tl.store(tl.broadcast_to((chosen + row)[:, None], scaled.shape), scaled, mask=here)
    scaled = tl.where(column_ok[None, :], scaled, float("-inf"))
    # A tile of nothing but -inf: a finite number to subtract.
    maximum = _larger(tl.reduce(scaled, 1, _larger), _LOWEST)
    below = scaled - maximum[:, None]
    weight = tl.exp(below)
    at = tl.cast(row, tl.int64) * TILES + tile
    tl.store(top + at, maximum, mask=row_ok)
    tl.store(total + at, _sum_fine(weight), mask=row_ok)
    # Terms lie between -1/e and 0; 0 * -inf is no contribution, not NaN. The entropy is a metric:
    # coarse steps will do.
    terms = tl.where(weight > 0, -weight * below, 0.0)
    tl.store(moment + at, _sum_coarse(terms).to(tl.float32) * -(2.0**-23), mask=row_ok)


@triton.jit
def head_statistics_kernel(
    x,  # (M, K)
    w,  # (N, K)
    targets,  # (M,) int32
    inverse_temperature,  # (M,) float32
    top,  # (M, TILES) float32: maximum of a tile's scaled logits
    total,  # (M, TILES) float32: sum of exp(scaled - top)
    moment,  # (M, TILES) float32: sum of exp(scaled - top) * (scaled - top)
    chosen,  # (M,) float32: the target's scaled logit
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BAND: tl.constexpr,
):
    TILES: tl.constexpr = (N + BN - 1) // BN
    row_tile, tile = tile_of(tl.program_id(0), (M + BM - 1) // BM, TILES, BAND)
    row = row_tile * BM + tl.arange(0, BM)
    row_ok = row < M
    row = tl.where(row_ok, row, 0)
    column = tile * BN + tl.arange(0, BN)
    column_ok = column < N
    acc = _logits_tile(x, w, row, tl.where(column_ok, column, 0), K, PRECISION, BM, BN, BK)
    scaled = acc * tl.load(inverse_temperature + row)[:, None]
    _store_statistics(
        scaled, row, row_ok, column, column_ok, tile, targets, top, total, moment, chosen, TILES
    )


@triton.jit
def logits_statistics_kernel(
    logits,  # (M, N) float32
    targets,  # the rest as for head_statistics_kernel
    inverse_temperature,
    top,
    total,
    moment,
    chosen,
    M: tl.constexpr,
    N: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    TILES: tl.constexpr = (N + BN - 1) // BN
    tile = tl.program_id(0)
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    row_ok = row < M
    row = tl.where(row_ok, row, 0)
    column = tile * BN + tl.arange(0, BN)
    column_ok = column < N
    at = logits + tl.cast(row, tl.int64)[:, None] * N + column[None, :]
    values = tl.load(at, mask=row_ok[:, None] & column_ok[None, :], other=0.0)
    scaled = values * tl.load(inverse_temperature + row)[:, None]
    _store_statistics(
        scaled, row, row_ok, column, column_ok, tile, targets, top, total, moment, chosen, TILES
    )


@triton.jit
def combine_kernel(
    top,  # (M, TILES), as is
    total,
    moment,
    chosen,  # (M,)
    targets,  # (M,) int32
    logp,  # (M,) float32
    entropy,  # (M,) float32, in nats
    logsumexp,  # (M,) float32, of the scaled logits
    N: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,  # TILES or more, a power of two
):
    row = tl.program_id(0)
    tile = tl.arange(0, WIDTH)
    at = tl.cast(row, tl.int64) * TILES + tile
    tops = tl.load(top + at, mask=tile < TILES, other=_LOWEST)
    totals = tl.load(total + at, mask=tile < TILES, other=0.0)
    moments = tl.load(moment + at, mask=tile < TILES, other=0.0)
    maximum = tl.reduce(tops, 0, _larger)
    below = tops - maximum
    weight = tl.exp(below)
    count = tl.sum(totals * weight, 0)
    shifted = (moments + totals * below) * weight  # around the row's maximum
    mean = tl.sum(tl.where(weight > 0, shifted, 0.0), 0) / count
    log_count = tl.log(count)

    target = tl.load(targets + row)
    exists = (target >= 0) & (target < N)
    value = tl.load(chosen + row, mask=exists, other=float("nan"))
    tl.store(logp + row, (value - maximum) - log_count)
    tl.store(entropy + row, log_count - mean)
    tl.store(logsumexp + row, maximum + log_count)


@triton.jit
def head_gradient_kernel(
    x,  # (M, K)
    w,  # (N, K)
    targets,  # (M,) int32
    inverse_temperature,  # (M,) float32
    logsumexp,  # (M,) float32, as combine_kernel wrote it
    dlogp,  # (M,) float32
    dlogits,  # (M, WIDTH): gradient with respect to the unscaled logits; zeros from column N on
    dlogits_t,  # (WIDTH, M): the same, transposed
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,  # N or more
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BAND: tl.constexpr,
):
    row_tile, tile = tile_of(tl.program_id(0), (M + BM - 1) // BM, (WIDTH + BN - 1) // BN, BAND)
    row = row_tile * BM + tl.arange(0, BM)
    row_ok = row < M
    safe_row = tl.where(row_ok, row, 0)
    column = tile * BN + tl.arange(0, BN)
    column_ok = column < N
    acc = _logits_tile(x, w, safe_row, tl.where(column_ok, column, 0), K, PRECISION, BM, BN, BK)
    inverse = tl.load(inverse_temperature + safe_row)
    scale = (tl.load(dlogp + safe_row) * inverse)[:, None]
    probability = tl.exp(acc * inverse[:, None] - tl.load(logsumexp + safe_row)[:, None])
    hit = column[None, :] == tl.load(targets + safe_row)[:, None]
    gradient = scale * (tl.where(hit, 1.0, 0.0) - probability)
    gradient = tl.where(column_ok[None, :], gradient, 0.0).to(dlogits.dtype.element_ty)

    mask = row_ok[:, None] & (column < WIDTH)[None, :]
    wide, tall = tl.cast(row, tl.int64), tl.cast(column, tl.int64)
    tl.store(dlogits + wide[:, None] * WIDTH + column[None, :], gradient, mask=mask)
    tl.store(dlogits_t + tall[None, :] * M + row[:, None], gradient, mask=mask)
