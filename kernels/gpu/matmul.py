"""Matmuls by Triton: blockwise-scaled FP8, bf16 and float32, dense and grouped.

Operands come as in `reference.matmul.block_matmul`, (M, K) and (K, N). The kernels read both along
K ("K-major"): rows of x and rows of the transposed weight, which is the only order that Hopper's
FP8 tensor cores take. If the second operand is stored column by column the transpose costs nothing;
a refit lays out the rollout's weights this way. Otherwise XLA copies the operand.

With scales, each 128 of K gives a float32 partial sum that leaves the tensor core, is multiplied by
its scales and added in float32 (DeepSeek-V3, arXiv:2412.19437, section 3.3.2: the tensor core
itself adds with about 14 bits). Without scales, sums stay in the tensor core, K ascending.

A program computes one tile of the result. Rows and columns past the end are computed on copies of
row and column 0 and not stored: they cost no memory traffic and cannot introduce NaN.

Kernels have no `vmap` rule: a batched product runs as a loop.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax.custom_batching import sequential_vmap

from fp8rl_jax.kernels.arrays import K_BLOCK
from fp8rl_jax.kernels.gpu.tiles import Tile, matmul_tile
from fp8rl_jax.kernels.gpu.triton_call import align, triton_call


@triton.jit
def tile_of(program, ROW_TILES: tl.constexpr, COLUMN_TILES: tl.constexpr, BAND: tl.constexpr):
    """Returns the row tile and column tile of a program.

    Programs that run at the same time read few row tiles and few column tiles, which stay in L2.
    """
    first = (program // (BAND * COLUMN_TILES)) * BAND
    height = tl.minimum(ROW_TILES - first, BAND)
    within = program % (BAND * COLUMN_TILES)
    return first + within % height, within // height


@triton.jit
def places(tile, COUNT: tl.constexpr, size):
    """Returns the numbers of a tile's rows or columns, of `size` in all; whether they exist; and
    the numbers with 0 for those that do not."""
    place = tile * COUNT + tl.arange(0, COUNT)
    exists = place < size
    return place, exists, tl.where(exists, place, 0)


@triton.jit
def load_step(x_at, w_at, left, K: tl.constexpr, BK: tl.constexpr):
    """Loads BK of K of both operands; zeros for those after the `left` ones that are left."""
    if K % BK == 0:
        x_part = tl.load(x_at)
        w_part = tl.load(w_at)
    else:
        inside = (tl.arange(0, BK) < left)[None, :]
        x_part = tl.load(x_at, mask=inside, other=0.0)
        w_part = tl.load(w_at, mask=inside, other=0.0)
    return x_part, w_part


@triton.jit
def _add_scaled(acc, x_part, w_part, x_scale_at, w_scale_at, BY_COLUMN: tl.constexpr):
    """Adds the product of 128 of K, times its scales, to `acc`."""
    partial = tl.dot(x_part, w_part.T)
    if BY_COLUMN:
        partial *= tl.load(x_scale_at)[:, None]
        scale = tl.load(w_scale_at)[None, :]
    else:
        scale = (tl.load(x_scale_at) * tl.load(w_scale_at))[:, None]
    return tl.fma(partial, tl.broadcast_to(scale, acc.shape), acc)


@triton.jit
def matmul_kernel(
    x,  # (TOTAL, K)
    w,  # (E, N, K)
    w1,  # (E, N1, K), another weight; unused if N1 is 0
    w2,  # (E, N2, K), as w1
    x_scale,  # (KB, TOTAL) float32
    w_scale,  # (E, ceil(N / 128), KB) float32, or (E, KB, N) with COLUMN_SCALES
    w1_scale,
    w2_scale,
    experts,  # (TOTAL / GROUP,) int32: index into w of each group of rows; E or more gives zeros
    residual,  # (TOTAL, N), added to the rounded product; unused without RESIDUAL
    out,  # (TOTAL, N)
    out1,  # (TOTAL, N1)
    out2,  # (TOTAL, N2)
    TOTAL: tl.constexpr,
    GROUP: tl.constexpr,  # rows that share a weight; TOTAL for a dense product
    N: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    RESIDUAL: tl.constexpr,
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
    TURN: tl.constexpr,  # blocks of K in a turn of the loop; divides their number
    STAGES: tl.constexpr,
):
    TILES_IN_GROUP: tl.constexpr = (GROUP + BM - 1) // BM
    ROW_TILES: tl.constexpr = (TOTAL // GROUP) * TILES_IN_GROUP
    COLUMN_TILES: tl.constexpr = (N + BN - 1) // BN
    SECOND: tl.constexpr = COLUMN_TILES + (N1 + BN - 1) // BN  # the first tile of w2
    ALL_TILES: tl.constexpr = SECOND + (N2 + BN - 1) // BN
    STEPS: tl.constexpr = (K + BK - 1) // BK

    row_tile, column_tile = tile_of(tl.program_id(0), ROW_TILES, ALL_TILES, BAND)
    columns = N
    if N1 > 0:
        if column_tile >= SECOND:
            w, w_scale, out, columns = w2, w2_scale, out2, N2
            column_tile -= SECOND
        elif column_tile >= COLUMN_TILES:
            w, w_scale, out, columns = w1, w1_scale, out1, N1
            column_tile -= COLUMN_TILES
        if N % 16 == 0 and N1 % 16 == 0 and N2 % 16 == 0:
            columns = tl.multiple_of(columns, 16)
    group = row_tile // TILES_IN_GROUP
    _, row_ok, local = places(row_tile % TILES_IN_GROUP, BM, GROUP)
    row = group * GROUP + local
    column, column_ok, safe_column = places(column_tile, BN, columns)

    steps = STEPS
    expert = 0
    if GROUPED:
        expert = tl.load(experts + group)
        steps = tl.where(expert < E, STEPS, 0)
        expert = tl.minimum(expert, E - 1)
    expert = tl.cast(expert, tl.int64)

    depth = tl.arange(0, BK)
    x_at = x + tl.cast(row, tl.int64)[:, None] * K + depth[None, :]
    w_at = w + (expert * columns + safe_column)[:, None] * K + depth[None, :]
    x_scale_at = x_scale + row
    if COLUMN_SCALES:
        w_scale_at = w_scale + expert * STEPS * columns + safe_column
    else:
        # One number, read by every row: a vector's loads are copies that the pipeline starts early.
        w_scale_at = w_scale + (expert * ((columns + 127) // 128) + column_tile * BN // 128) * STEPS
        w_scale_at += tl.zeros((BM,), tl.int32)

    acc = tl.zeros((BM, BN), tl.float32)
    for turn in tl.range(0, steps // TURN, num_stages=STAGES):
        for block in tl.static_range(TURN):
            left = K - (turn * TURN + block) * BK
            x_part, w_part = load_step(x_at, w_at, left, K, BK)
            if SCALED:
                acc = _add_scaled(acc, x_part, w_part, x_scale_at, w_scale_at, COLUMN_SCALES)
                x_scale_at += TOTAL
                w_scale_at += columns if COLUMN_SCALES else 1
            else:
                acc = tl.dot(x_part, w_part.T, acc, input_precision=PRECISION)
            x_at += BK
            w_at += BK

    at = tl.cast(row, tl.int64)[:, None] * columns + column[None, :]
    inside = row_ok[:, None] & column_ok[None, :]
    result = acc.to(out.dtype.element_ty)
    if RESIDUAL:
        before = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        result = (before + result.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + at, result, mask=inside)


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
    STAGES: tl.constexpr,
):
    ROW_TILES: tl.constexpr = (K + BM - 1) // BM
    COLUMN_TILES: tl.constexpr = (N + BN - 1) // BN
    LOADS: tl.constexpr = 128 // BK

    expert = tl.program_id(1)
    row_tile, column_tile = tile_of(tl.program_id(0), ROW_TILES, COLUMN_TILES, BAND)
    row, row_ok, safe_row = places(row_tile, BM, K)
    column, column_ok, safe_column = places(column_tile, BN, N)

    first = tl.load(starts + expert)
    last = tl.load(starts + expert + 1)
    token = first * 128 + tl.arange(0, BK)
    x_at = x + tl.cast(safe_row, tl.int64)[:, None] * TOTAL + token[None, :]
    dy_at = dy + tl.cast(safe_column, tl.int64)[:, None] * TOTAL + token[None, :]
    x_scale_at = x_scale + tl.cast(first, tl.int64) * K + safe_row
    dy_scale_at = dy_scale + tl.cast(first, tl.int64) * N + safe_column

    acc = tl.zeros((BM, BN), tl.float32)
    for _ in tl.range(0, (last - first) * LOADS, num_stages=STAGES):
        x_part = tl.load(x_at)
        dy_part = tl.load(dy_at)
        if SCALED:
            acc = _add_scaled(acc, x_part, dy_part, x_scale_at, dy_scale_at, True)
            x_scale_at += K
            dy_scale_at += N
        else:
            acc = tl.dot(x_part, dy_part.T, acc, input_precision=PRECISION)
        x_at += BK
        dy_at += BK

    out_at = out + (tl.cast(expert, tl.int64) * K + row)[:, None] * N + column[None, :]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=row_ok[:, None] & column_ok[None, :])


def kind_of(lhs: jax.Array, rhs: jax.Array, scaled: bool) -> str:
    """Returns the kind of product for the operands' dtypes: 'fp8', 'bf16' or 'float32'.

    Raises:
      ValueError: `scaled`, and an operand is not FP8 (E4M3 and E5M2 may be mixed).
    """
    if scaled:
        if lhs.dtype.itemsize != 1 or rhs.dtype.itemsize != 1:
            raise ValueError(
                f"scales belong to FP8 operands, got {lhs.dtype} and {rhs.dtype}; multiply other "
                "types by their scales first"
            )
        return "fp8"
    return "bf16" if lhs.dtype == rhs.dtype == jnp.bfloat16 else "float32"


def _rows_times(
    x, weights, x_scale, w_scales, experts, group: int, dtype, tile: Tile | None, residual=None
) -> list[jax.Array]:
    """Multiplies (TOTAL, K) by up to three (E, N, K), with scales (KB, TOTAL) and (E, KB, ...), to
    (TOTAL, N) each. `residual` is added to the result of a single weight."""
    kind = kind_of(x, weights[0], x_scale is not None)
    if kind == "float32":
        x, weights = x.astype(jnp.float32), [w.astype(jnp.float32) for w in weights]
    x, weights = align(x), [align(w) for w in weights]
    (total, depth), count = x.shape, weights[0].shape[0]
    columns = [w.shape[1] for w in weights]
    by_column = x_scale is not None and w_scales[0].shape[2] != -(-columns[0] // K_BLOCK)
    tile = tile or matmul_tile("wgrad" if by_column else kind, group, sum(columns), total // group)
    tile = tile.dividing(-(-depth // tile.depth))
    if x_scale is None:
        w_scales = [None] * len(weights)
    elif not by_column:
        w_scales = [scale.swapaxes(1, 2) for scale in w_scales]
    # A kernel of two weights has a branch for the third, which needs its types.
    missing = 3 - len(weights)
    results = [(total, n) for n in columns] + [(1,)] * missing
    found = triton_call(
        matmul_kernel,
        x,
        *weights,
        *[jnp.zeros((1,), weights[0].dtype)] * missing,
        x_scale,
        *w_scales,
        *[None] * missing,
        experts,
        residual,
        out=tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in results),
        grid=(total // group * sum(tile.programs(group, n) for n in columns),),
        warps=tile.warps,
        stages=tile.stages,
        TOTAL=total,
        GROUP=group,
        N=columns[0],
        N1=columns[1] if len(columns) > 1 else 0,
        N2=columns[2] if len(columns) > 2 else 0,
        RESIDUAL=residual is not None,
        K=depth,
        E=count,
        GROUPED=experts is not None,
        COLUMN_SCALES=by_column,
        SCALED=kind == "fp8",
        TURN=tile.turn,
        STAGES=tile.stages,
        **tile.constants(kind),
    )
    return list(found[: len(weights)])


def matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_scale: jax.Array | None = None,
    rhs_scale: jax.Array | None = None,
    dtype=jnp.float32,
    tile: Tile | None = None,
) -> jax.Array:
    """Computes `reference.matmul.block_matmul` by Triton: FP8 with scales, bf16 or float32 without.

    Args:
      lhs, rhs, lhs_scale, rhs_scale: as for the reference.
      dtype: dtype of the result, float32 or bf16 (rounded to nearest even).
      tile: tile to use; None for `matmul_tile`'s choice.

    Returns:
      (M, N) in `dtype`.
    """

    @sequential_vmap
    def run(lhs, rhs, lhs_scale, rhs_scale):
        x_scale, w_scale = (None, None) if lhs_scale is None else (lhs_scale.T, rhs_scale[None])
        weight, rows = rhs.T[None], lhs.shape[0]
        return _rows_times(lhs, [weight], x_scale, [w_scale], None, rows, dtype, tile)[0]

    return run(lhs, rhs, lhs_scale, rhs_scale)


def grouped_matmul(
    x: jax.Array,
    w: jax.Array,
    experts: jax.Array,
    x_scale: jax.Array | None = None,
    w_scale: jax.Array | None = None,
    dtype=jnp.float32,
    tile: Tile | None = None,
) -> jax.Array:
    """Multiplies every tile of R rows (a "group" of the kernel) by the matrix of its expert.

    Args:
      x: (groups, R, K); rows sorted by expert, each tile padded with zeros.
      w: (E, K, N).
      experts: (groups,) int32, expert of each tile; E or more gives zeros at no cost.
      x_scale: (groups, R, KB) float32 with KB = ceil(K / 128), or None for bf16 and float32.
      w_scale: (E, KB, ceil(N / 128)) or (E, KB, N) float32, or None.
      dtype, tile: as for `matmul`.

    Returns:
      (groups, R, N) in `dtype`.
    """
    groups, rows, depth = x.shape
    total = groups * rows
    if x_scale is not None:
        x_scale = x_scale.reshape(total, -1).T
    x, w = x.reshape(total, depth), w.swapaxes(1, 2)
    (y,) = _rows_times(x, [w], x_scale, [w_scale], experts, rows, dtype, tile)
    return y.reshape(groups, rows, -1)


def layer_matmuls(
    x: jax.Array,
    stacks: list[jax.Array],
    layer: jax.Array,
    x_scale: jax.Array | None = None,
    scales: list[jax.Array] | None = None,
    dtype=jnp.float32,
    residual: jax.Array | None = None,
) -> list[jax.Array]:
    """Multiplies rows by one layer of up to three stacks of weights, in one launch.

    Args:
      x: (M, K).
      stacks: (L, K, N) each; N may differ.
      layer: () int32, below L.
      x_scale, scales: as for `matmul` and, of each stack, for `grouped_matmul`.
      dtype: dtype of the results.
      residual: (M, N) in `dtype`, added to the rounded product of a single stack in float32; the
        sum is rounded again. Or None.

    Returns:
      (M, N) of each stack, with the bits of `matmul`.
    """
    stacks = [w.swapaxes(1, 2) for w in stacks]
    x_scale = None if x_scale is None else x_scale.T
    return _rows_times(
        x, stacks, x_scale, scales, layer.reshape(1), x.shape[0], dtype, None, residual
    )


def grouped_wgrad(
    x: jax.Array,
    dy: jax.Array,
    experts: jax.Array,
    count: int,
    x_scale: jax.Array | None = None,
    dy_scale: jax.Array | None = None,
    tile: Tile | None = None,
) -> jax.Array:
    """Computes ``x^T dy`` of every expert, over its tiles of R rows in ascending order.

    Args:
      x: (groups, R, K), tiles sorted by expert, R a multiple of 128.
      dy: (groups, R, N), in the same order.
      experts: (groups,) int32, expert of each tile, ascending; `count` or more for unused tiles.
      count: number of experts.
      x_scale: (groups, R / 128, K) float32, one per 128 rows and column, or None.
      dy_scale: (groups, R / 128, N) float32, one per 128 rows and column, or None.
      tile: tile to use; None for `matmul_tile`'s choice.

    Returns:
      (count, K, N) float32; zeros for experts without rows.
    """
    kind = kind_of(x, dy, x_scale is not None)
    if kind == "float32":
        x, dy = x.astype(jnp.float32), dy.astype(jnp.float32)
    groups, rows, depth = x.shape
    columns, total = dy.shape[2], groups * rows
    blocks = rows // K_BLOCK
    tile = tile or matmul_tile("wgrad" if kind == "fp8" else kind, depth, columns)
    ids = jnp.arange(count + 1, dtype=experts.dtype)
    starts = jnp.searchsorted(experts, ids, method="compare_all") * blocks  # one fusion, no loop
    if x_scale is not None and dy_scale is not None:
        x_scale, dy_scale = x_scale.reshape(-1, depth), dy_scale.reshape(-1, columns)
    (dw,) = triton_call(
        grouped_wgrad_kernel,
        x.reshape(total, depth).T,
        dy.reshape(total, columns).T,
        x_scale,
        dy_scale,
        starts.astype(jnp.int32),
        out=(jax.ShapeDtypeStruct((count, depth, columns), jnp.float32),),
        grid=(tile.programs(depth, columns), count),
        warps=tile.warps,
        stages=tile.stages,
        TOTAL=total,
        N=columns,
        K=depth,
        SCALED=kind == "fp8",
        STAGES=tile.stages,
        **tile.constants(kind),
    )
    return dw
