"""Matmuls by the Triton kernels: from logical operands to kernel calls.

Operands come as in `reference.block_matmul`, (M, K) and (K, N). The kernels read the second one as
(N, K): where its buffer lies column by column the transpose costs nothing, and a rollout's weights
are laid out so once per refit; elsewhere XLA copies it.

Kernels have no rule for `vmap` of their own: a batched product runs as a loop.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from fp8rl_jax.kernels.reference import K_BLOCK
from fp8rl_jax.kernels.tiles import Tile, matmul_tile
from fp8rl_jax.kernels.triton_call import align, triton_call


def kind_of(lhs: jax.Array, rhs: jax.Array, scaled: bool) -> str:
    """'fp8', 'bf16' or 'float32': the product that the operands' dtypes ask for.

    Raises:
      ValueError: scales with operands that are not FP8 (E4M3 and E5M2 may be mixed).
    """
    if scaled:
        if lhs.dtype.itemsize != 1 or rhs.dtype.itemsize != 1:
            raise ValueError(
                f"scales belong to FP8 operands, got {lhs.dtype} and {rhs.dtype}; multiply other "
                "types by their scales first"
            )
        return "fp8"
    return "bf16" if lhs.dtype == rhs.dtype == jnp.bfloat16 else "float32"


def _operands(lhs: jax.Array, rhs: jax.Array, kind: str) -> tuple[jax.Array, jax.Array]:
    """Both in a type that the kernel multiplies, every row of K at a multiple of 16 bytes."""
    if kind == "float32":
        lhs, rhs = lhs.astype(jnp.float32), rhs.astype(jnp.float32)
    return align(lhs), align(rhs)


def _tiles(tile: Tile, rows: int, columns: int) -> int:
    return -(-rows // tile.rows) * -(-columns // tile.columns)


def _unused(dtype) -> jax.Array:
    return jnp.zeros((1,), dtype)


def _rows_times(x, w, x_scale, w_scale, experts, group: int, dtype, tile: Tile | None):
    """(TOTAL, K) by (E, N, K) with scales (KB, TOTAL) and (E, KB, ...) -> (TOTAL, N)."""
    from fp8rl_jax.kernels.triton_matmul import matmul_kernel

    kind = kind_of(x, w, x_scale is not None)
    x, w = _operands(x, w, kind)
    (total, depth), (count, columns) = x.shape, w.shape[:2]
    by_column = x_scale is not None and w_scale.shape[2] != -(-columns // K_BLOCK)
    tile = tile or matmul_tile("wgrad" if by_column else kind, group, columns)
    if x_scale is None:
        x_scale = w_scale = _unused(jnp.float32)
    elif not by_column:
        w_scale = w_scale.swapaxes(1, 2)
    return triton_call(
        matmul_kernel, x, w, x_scale, w_scale,
        _unused(jnp.int32) if experts is None else experts,
        out=jax.ShapeDtypeStruct((total, columns), dtype),
        grid=(total // group * _tiles(tile, group, columns),),
        warps=tile.warps, stages=tile.stages,
        TOTAL=total, GROUP=group, N=columns, K=depth, E=count,
        GROUPED=experts is not None, COLUMN_SCALES=by_column, SCALED=kind == "fp8",
        **tile.constants(kind),
    )  # fmt: skip


def matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_scale: jax.Array | None = None,
    rhs_scale: jax.Array | None = None,
    dtype=jnp.float32,
    tile: Tile | None = None,
) -> jax.Array:
    """`reference.block_matmul` by the Triton kernel: FP8 with scales, bf16 or float32 without.

    Args:
      lhs, rhs, lhs_scale, rhs_scale: as for the reference.
      dtype: of the result, float32 or bf16 (rounded to nearest even).
      tile: instead of the table's.

    Returns:
      (M, N) in `dtype`.
    """

    @sequential_vmap
    def run(lhs, rhs, lhs_scale, rhs_scale):
        scales = (None, None) if lhs_scale is None else (lhs_scale.T, rhs_scale[None])
        return _rows_times(lhs, rhs.T[None], *scales, None, lhs.shape[0], dtype, tile)

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
    """Every group of rows times the matrix of its expert.

    Args:
      x: (groups, R, K); rows sorted by expert, each group filled up with zeros.
      w: (E, K, N).
      experts: (groups,) int32; E or more where a group has no rows: zeros, at no cost.
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
    y = _rows_times(
        x.reshape(total, depth), w.swapaxes(1, 2), x_scale, w_scale, experts, rows, dtype, tile
    )
    return y.reshape(groups, rows, -1)


def grouped_wgrad(
    x: jax.Array,
    dy: jax.Array,
    experts: jax.Array,
    count: int,
    x_scale: jax.Array | None = None,
    dy_scale: jax.Array | None = None,
    tile: Tile | None = None,
) -> jax.Array:
    """``x^T dy`` of every expert, over its groups of rows in ascending order.

    Args:
      x: (groups, R, K) and dy: (groups, R, N), R a multiple of 128, sorted by expert.
      experts: (groups,) int32, ascending; `count` or more where a group has no rows.
      count: number of experts.
      x_scale: (groups, R / 128, K) float32, one per 128 rows and column, or None.
      dy_scale: (groups, R / 128, N) likewise.
      tile: instead of the table's.

    Returns:
      (count, K, N) float32; zeros for experts without rows.
    """
    from fp8rl_jax.kernels.triton_matmul import grouped_wgrad_kernel

    kind = kind_of(x, dy, x_scale is not None)
    if kind == "float32":
        x, dy = x.astype(jnp.float32), dy.astype(jnp.float32)
    groups, rows, depth = x.shape
    columns, total = dy.shape[2], groups * rows
    blocks = rows // K_BLOCK
    tile = tile or matmul_tile("wgrad" if kind == "fp8" else kind, depth, columns)
    ids = jnp.arange(count + 1, dtype=experts.dtype)
    starts = jnp.searchsorted(experts, ids, method="compare_all") * blocks  # one fusion, no loop
    if x_scale is None or dy_scale is None:
        x_scale = dy_scale = _unused(jnp.float32)
    else:
        x_scale, dy_scale = x_scale.reshape(-1, depth), dy_scale.reshape(-1, columns)
    return triton_call(
        grouped_wgrad_kernel, x.reshape(total, depth).T, dy.reshape(total, columns).T,
        x_scale, dy_scale, starts.astype(jnp.int32),
        out=jax.ShapeDtypeStruct((count, depth, columns), jnp.float32),
        grid=(_tiles(tile, depth, columns), count),
        warps=tile.warps, stages=tile.stages,
        TOTAL=total, N=columns, K=depth, SCALED=kind == "fp8", **tile.constants(kind),
    )  # fmt: skip
