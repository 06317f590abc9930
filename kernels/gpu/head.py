"""Log-probabilities from hidden states without logits in memory, by Triton.

``logp(t) = (x_t - max) - log sum_v exp(x_v - max)`` with ``x = (hidden @ head) / temperature``. The
learner scores full responses with `head_logprobs`; the sampler, which has the logits of its few
rows in memory, uses `logprobs_of_logits`. Both give a row the same bits, whatever the number of
rows and the row's index, provided that the logits are `matmul.matmul`'s.

For each row and each 128 columns of the vocabulary (a tile, part of the numeric contract) a kernel
stores three numbers of the scaled logits x: the maximum m, the sum of exp(x - m), and the sum of
exp(x - m) * (x - m). `combine_kernel` computes the row's log-probability and entropy from them. The
logits come from the tensor core (`head_statistics_kernel`) or from memory
(`logits_statistics_kernel`), and the three numbers have the same bits both ways:

* The product is `matmul_kernel`'s without scales: the same instruction, K ascending.
* A maximum is exact in any order. A sum of floats is not: `tl.sum` adds in the order of registers,
  which differs between an accumulator and a load. So terms become integers first (`_steps`).
* A row of `combine_kernel` is one program, the same one whatever the number of rows.

A logit of -inf is a probability of 0. NaN and +inf make their row NaN: maxima propagate NaN, since
a sum of integers would not.

Memory: the forward pass keeps 12 bytes per row and 128 columns. The backward pass writes the
gradient of the logits for `CHUNK` tokens at a time, twice (each of the next two products reads it
along another axis), in the operands' type: with bf16 and a vocabulary of 151,936 that is 2.5 GB.
Chunks without a row that counts are not computed, in either pass: the caller puts those rows last.
Gradients make no bitwise promise. The entropy is a metric and has no gradient.

Not done: rules for `vmap` and differentiation (the caller joins the two passes in a `custom_vjp`);
a vocabulary split over devices.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import lax

from fp8rl_jax.kernels.arrays import pad_to, varying_as
from fp8rl_jax.kernels.gpu.matmul import load_step, matmul, places, tile_of
from fp8rl_jax.kernels.gpu.tiles import HEAD_COLUMNS, head_tile
from fp8rl_jax.kernels.gpu.triton_call import align, per_load, triton_call

_LOWEST = tl.constexpr(-3.4e38)


@triton.jit
def _logits_tile(
    x,
    w,
    row,
    column,
    K: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Computes (BM, BN) float32: rows of x (M, K) times rows of w (N, K), all indices in range."""
    depth = tl.arange(0, BK)
    x_at = x + tl.cast(row, tl.int64)[:, None] * K + depth[None, :]
    w_at = w + tl.cast(column, tl.int64)[:, None] * K + depth[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range((K + BK - 1) // BK):
        x_part, w_part = load_step(x_at, w_at, K - k * BK, K, BK)
        acc = tl.dot(x_part, w_part.T, acc, input_precision=PRECISION)
        x_at += BK
        w_at += BK
    return acc


@triton.jit
def _larger(a, b):
    """Returns the larger one; NaN if either is NaN (`tl.max` would drop it)."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _steps(x, ONE: tl.constexpr, BITS: tl.constexpr):
    """Returns x as an integer multiple of the spacing of float32 at ONE, whose bits are BITS.

    The addition rounds x to a multiple of the spacing, and neighbouring floats have neighbouring
    bits. These are two instructions at full rate; a conversion to int64 is slower.
    """
    return (x + ONE).to(tl.int32, bitcast=True) - BITS


@triton.jit
def _sum_coarse(x):
    """Sums up to 128 values from 0 to 1 along axis 1, in units of 2**-23, as int32."""
    tl.static_assert(x.shape[1] <= 128)
    return tl.sum(_steps(x, 1.0, 0x3F800000), 1)


@triton.jit
def _sum_fine(x):
    """Sums like `_sum_coarse`, but in units of 2**-46, as float32.

    In coarse units a tile with one dominant column could lose the other 127, of 2**-24 each: 7.6e-6
    of a log-probability.
    """
    rest = x - ((x + 1.0) - 1.0)  # exact remainder of the coarse rounding, up to 2**-24
    rest = tl.sum(_steps(rest, 1.5 * 2.0**-23, 0x34400000), 1)
    return _sum_coarse(x).to(tl.float32) * 2.0**-23 + rest.to(tl.float32) * 2.0**-46


@triton.jit
def _store_statistics(
    logits,  # (BM, BN), of the rows `row` and the columns `column`
    row,
    row_ok,
    column,
    column_ok,
    tile,
    targets,
    inverse_temperature,
    top,
    total,
    moment,
    chosen,
    TILES: tl.constexpr,
):
    """Writes a tile's three numbers per row, and the target's logit if it is in the tile."""
    scaled = logits * tl.load(inverse_temperature + row)[:, None]
    target = tl.load(targets + row)
    here = (column[None, :] == target[:, None]) & (row_ok[:, None] & column_ok[None, :])
    tl.store(tl.broadcast_to((chosen + row)[:, None], scaled.shape), scaled, mask=here)
    scaled = tl.where(column_ok[None, :], scaled, float("-inf"))
    # If all logits of a tile are -inf, the finite _LOWEST is subtracted.
    maximum = _larger(tl.reduce(scaled, 1, _larger), _LOWEST)
    below = scaled - maximum[:, None]
    weight = tl.exp(below)
    at = tl.cast(row, tl.int64) * TILES + tile
    tl.store(top + at, maximum, mask=row_ok)
    tl.store(total + at, _sum_fine(weight), mask=row_ok)
    # Terms are between -1/e and 0; 0 * -inf counts as 0, not NaN. The entropy is a metric: coarse
    # units suffice.
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
    _, row_ok, row = places(row_tile, BM, M)
    column, column_ok, safe_column = places(tile, BN, N)
    logits = _logits_tile(x, w, row, safe_column, K, PRECISION, BM, BN, BK)
    _store_statistics(
        logits,
        row,
        row_ok,
        column,
        column_ok,
        tile,
        targets,
        inverse_temperature,
        top,
        total,
        moment,
        chosen,
        TILES,
    )


@triton.jit
def logits_statistics_kernel(
    logits,  # (M, N) float32
    targets,  # this and the rest as in `head_statistics_kernel`
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
    _, row_ok, row = places(tl.program_id(1), BM, M)
    column, column_ok, _ = places(tile, BN, N)
    at = logits + tl.cast(row, tl.int64)[:, None] * N + column[None, :]
    values = tl.load(at, mask=row_ok[:, None] & column_ok[None, :], other=0.0)
    _store_statistics(
        values,
        row,
        row_ok,
        column,
        column_ok,
        tile,
        targets,
        inverse_temperature,
        top,
        total,
        moment,
        chosen,
        TILES,
    )


@triton.jit
def combine_kernel(
    top,  # (M, TILES); this and the next three as `head_statistics_kernel` wrote them
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
    row, row_ok, safe_row = places(row_tile, BM, M)
    column, column_ok, safe_column = places(tile, BN, N)
    acc = _logits_tile(x, w, safe_row, safe_column, K, PRECISION, BM, BN, BK)
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


CHUNK = 4096  # tokens whose gradients of logits are in memory at once, or that are left out
_LOGITS_ROWS = 8  # rows of logits that a program reads


def _kind(hidden: jax.Array, head: jax.Array) -> str:
    for dtype, kind in ((jnp.bfloat16, "bf16"), (jnp.float32, "float32")):
        if hidden.dtype == head.dtype == dtype:
            return kind
    raise ValueError(
        f"hidden states and head must both be bf16 or both float32, got {hidden.dtype} and "
        f"{head.dtype}; convert one of them"
    )


def _tiles(columns: int) -> int:
    return -(-columns // HEAD_COLUMNS)


def _statistics_shapes(rows: int, columns: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the shapes of maximum, sum, moment (rows, tiles) and the target's logit (rows,)."""
    shapes = *[(rows, _tiles(columns))] * 3, (rows,)
    return tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)


def _combine(statistics, targets: jax.Array, columns: int):
    rows, tiles = statistics[0].shape
    return triton_call(
        combine_kernel,
        *statistics,
        targets,
        out=(jax.ShapeDtypeStruct((rows,), jnp.float32),) * 3,
        grid=(rows,),
        warps=4,
        stages=1,
        N=columns,
        TILES=tiles,
        WIDTH=1 << (tiles - 1).bit_length(),
    )


def _over_chunks(step: Callable, state, chunk: int, per_row: Sequence[jax.Array], count):
    """Returns the last state of ``state = step(state, i, rows)`` over the chunks of `per_row`: over
    those that hold the first `count` rows, or over all. Zeros fill the last one."""
    chunks = [pad_to(x, 0, chunk).reshape(-1, chunk, *x.shape[1:]) for x in per_row]
    number = len(chunks[0]) if count is None else (count + (chunk - 1)) // chunk
    return lax.fori_loop(0, number, lambda i, state: step(state, i, [x[i] for x in chunks]), state)


def head_logprobs(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    inverse_temperature: jax.Array,
    count: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the log-probability of each row's target, the row's entropy and its log-sum-exp.

    Args:
      hidden: (M, D) bf16 or float32.
      head: (D, V) of the same type. Read as (V, D): free for a transposed embedding.
      targets: (M,) int32; outside 0 .. V - 1 the log-probability is NaN.
      inverse_temperature: (M,) float32.
      count: () int32, the first rows, which count: whole chunks of `CHUNK` others get 0. None for
        all.

    Returns:
      logp (M,) float32; entropy (M,) float32 in nats; log of the sum of the exponentials of the
      scaled logits (M,) float32, for `head_logprobs_vjp`.

    Raises:
      ValueError: operands are not both bf16 or both float32.
    """
    kind = _kind(hidden, head)
    rows, columns = hidden.shape[0], head.shape[1]
    hidden, head = align(hidden), align(head.T)
    per_row = hidden, targets, inverse_temperature
    chunk = rows if count is None else min(CHUNK, rows)
    tile = head_tile(kind, chunk)

    def of(hidden: jax.Array, targets: jax.Array, inverse_temperature: jax.Array):
        statistics = triton_call(
            head_statistics_kernel,
            hidden,
            head,
            targets,
            inverse_temperature,
            out=_statistics_shapes(chunk, columns),
            grid=(-(-chunk // tile.rows) * _tiles(columns),),
            warps=tile.warps,
            stages=tile.stages,
            M=chunk,
            N=columns,
            K=hidden.shape[1],
            **tile.constants(kind),
        )
        return _combine(statistics, targets, columns)

    if chunk == rows:
        return of(hidden, targets, inverse_temperature)

    def step(found, i, rows_of_chunk):
        return tuple(x.at[i].set(y) for x, y in zip(found, of(*rows_of_chunk), strict=True))

    zeros = varying_as(jnp.zeros((-(-rows // chunk), chunk), jnp.float32), per_row, head)
    found = _over_chunks(step, (zeros,) * 3, chunk, per_row, count)
    return tuple(x.reshape(-1)[:rows] for x in found)


def logprobs_of_logits(
    logits: jax.Array, targets: jax.Array, inverse_temperature: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the results of `head_logprobs`, bit for bit, from (M, V) float32 logits before
    temperature. Raises ValueError for logits of another type."""
    if logits.dtype != jnp.float32:
        raise ValueError(f"logits must be float32, got {logits.dtype}; the head's product gives it")
    rows, columns = logits.shape
    statistics = triton_call(
        logits_statistics_kernel,
        logits,
        targets,
        inverse_temperature,
        out=_statistics_shapes(rows, columns),
        grid=(_tiles(columns), -(-rows // _LOGITS_ROWS)),
        warps=4,
        stages=1,
        M=rows,
        N=columns,
        BM=_LOGITS_ROWS,
        BN=HEAD_COLUMNS,
    )
    return _combine(statistics, targets, columns)


def head_logprobs_vjp(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    inverse_temperature: jax.Array,
    logsumexp: jax.Array,
    dlogp: jax.Array,
    count: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes gradients of ``sum(dlogp * logp)``, recomputing the logits.

    Args:
      hidden, head, targets, inverse_temperature, count: as for `head_logprobs`.
      logsumexp: (M,) float32, third result of `head_logprobs`.
      dlogp: (M,) float32. A row of 0 gets a gradient of 0 if its logits are finite.

    Returns:
      dhidden (M, D) and dhead (D, V), float32.
    """
    kind = _kind(hidden, head)
    (rows, depth), columns, dtype = hidden.shape, head.shape[1], hidden.dtype
    pack = per_load(dtype)
    chunk = min(CHUNK, rows + -rows % pack)
    width = columns + -columns % pack
    hidden, head = align(hidden), pad_to(head, 0, pack)
    head_t, head = head.T, align(head)
    tile = head_tile(kind, chunk)

    def gradients(rows_of_chunk: Sequence[jax.Array]):
        x = rows_of_chunk[0]
        dlogits, dlogits_t = triton_call(
            head_gradient_kernel,
            x,
            head_t,
            *rows_of_chunk[1:],
            out=tuple(jax.ShapeDtypeStruct(s, dtype) for s in ((chunk, width), (width, chunk))),
            grid=(-(-chunk // tile.rows) * _tiles(width),),
            warps=tile.warps,
            stages=tile.stages,
            M=chunk,
            N=columns,
            K=x.shape[1],
            WIDTH=width,
            **tile.constants(kind),
        )
        return matmul(x.T, dlogits_t.T), matmul(dlogits, head.T)

    def add(total, i, rows_of_chunk: Sequence[jax.Array]):
        dhead, dhidden = gradients(rows_of_chunk)
        return total[0] + dhead, total[1].at[i].set(dhidden)

    # Padded rows have dlogp = 0: they add nothing.
    per_row = (hidden, targets, inverse_temperature, logsumexp, dlogp)
    if rows <= chunk:
        dhead, dhidden = gradients([pad_to(x, 0, chunk) for x in per_row])
    else:
        shapes = (hidden.shape[1], width), (-(-rows // chunk), chunk, hidden.shape[1])
        zeros = (varying_as(jnp.zeros(s, jnp.float32), per_row, head) for s in shapes)
        dhead, dhidden = _over_chunks(add, tuple(zeros), chunk, per_row, count)
    return dhidden.reshape(-1, hidden.shape[1])[:rows, :depth], dhead[:depth, :columns]
