"""The blockwise-scaled FP8 matmul for many rows, in Pallas Mosaic GPU, for Hopper.

    y[m, n] = sum_b (sum_{k in b} x[m, k] w[n, k]) * (x_scale[b, m] * w_scale[n // 128, b])

b runs over blocks of 128 of K, ascending. The inner sum leaves the tensor core in float32, is
multiplied by its scales and added in float32 by one multiply-add (DeepSeek-V3, arXiv:2412.19437,
section 3.3.2: the tensor core itself adds with about 14 bits). That is the order of the Triton
kernel, with instructions of the same depth (m64nNk32), and nothing splits K.

A program has three or four warpgroups. The last one, the producer, only starts copies from global
to shared memory (TMA), some steps ahead. Each of the others, the consumers, owns 64 rows of the
tile: while one scales and adds, another keeps the tensor core busy. Programs compute one tile after
another, so that loading the next tile overlaps storing the last. The copy engine clips rows past M.

With a scale w_scale[b, n] for every column, as weights' gradients have, a partial sum is multiplied
by its row's scale and then, with the addition, by its column's. A consumer's thread holds 32 of
these, so only two consumers have registers for it.

Not done: K or N that is no multiple of 128, E5M2, groups of rows, few rows.
`supports` refuses them, and the Triton kernels take them. A tile of 256 rows was tried and dropped:
two totals and a partial sum are 192 of 232 registers, and ptxas spills.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fp8rl_jax.kernels.arrays import K_BLOCK, pad_to, varying_as
from fp8rl_jax.kernels.gpu.tiles import BAND, MULTIPROCESSORS

FEWEST_ROWS = 256  # at least one full tile of any height; the break-even point is not measured yet

_ROWS = 64  # rows of a consumer: one tensor core instruction
_COLUMNS = K_BLOCK  # columns of a tile: one scale of w per step
GROUP = 8  # rows of a swizzle's unit; x and the result in global memory are multiples of it
_LINE = (
    128  # most bytes of shared memory that a swizzle permutes: a row of an operand, or of a store
)
_STORES = 2  # pieces of the result that a consumer stores at a time
E4M3 = jnp.dtype(jnp.float8_e4m3fn)
RESULTS = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))


@dataclasses.dataclass(frozen=True)
class Tile:
    """Height of a tile and how a program divides its registers and shared memory.

    Register counts are per thread, multiples of 8; the producer's plus `consumers` times a
    consumer's is at most 512. Stages are limited by 227 KiB of shared memory.
    """

    consumers: int
    stages: int
    producer_registers: int
    consumer_registers: int

    @property
    def rows(self) -> int:
        return self.consumers * _ROWS


TILES = (Tile(2, 5, 40, 232), Tile(3, 4, 32, 160))


def supports(rows: int, depth: int, columns: int, dtypes: tuple) -> bool:
    """Returns whether `matmul` takes a (rows, depth) by (depth, columns) product.

    Args:
      rows, depth, columns: M, K and N.
      dtypes: dtypes of lhs, rhs and the result.
    """
    left, right, result = map(jnp.dtype, dtypes)
    return (
        rows >= FEWEST_ROWS
        and columns % _COLUMNS == 0
        and depth % K_BLOCK == 0
        and min(columns, depth) > 0
        and left == right == E4M3
        and result in RESULTS
    )


def tile_for(rows: int, columns: int, by_column: bool = False) -> Tile:
    """Returns the tile that finishes first if all rows take equally long; the taller one if equal.
    With a scale per column it is the shorter one.

    It depends on the shape alone and decides speed, not bits: every consumer runs the same
    instructions in the same order.
    """

    def time(tile: Tile) -> int:
        tiles = -(-rows // tile.rows) * (columns // _COLUMNS)
        return -(-tiles // MULTIPROCESSORS) * tile.rows

    return TILES[0] if by_column else min(reversed(TILES), key=time)


def load_scales(scales) -> jax.Array:
    """Loads a vector of scales without optimised (wide) loads, for which it is too short."""
    index: tuple = ((),) if jax.__version_info__ < (0, 11) else ()  # deprecated in 0.11
    return plgpu.load(scales, *index, optimized=False)


def swizzled(*shape: int, dtype):
    """Returns a buffer in shared memory, as the copy engine and the tensor core share it."""
    line = min(_LINE, shape[-1] * jnp.dtype(dtype).itemsize)
    tiling = plgpu.TilingTransform((GROUP, line // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(line)))


def wait_until_free(step, stage, stages: int, empty) -> None:
    """Waits, in the producer, until consumers have read what lies in the stage of a step of K."""

    @pl.when(step >= stages)
    def _():
        plgpu.barrier_wait(empty.at[stage])


def wait_for_last(first, steps, stages: int, empty) -> None:
    """Waits, in the producer, until the steps of K from `first` on, those of the last stages, have
    been read: every arrival at a barrier must be waited for before the program ends."""

    @pl.loop(first, steps)
    def _drain(step):
        plgpu.barrier_wait(empty.at[lax.rem(step, stages)])


def launch(kernel, consumers: int, programs: int, out, scratch: list):
    """Returns the function of arrays that runs `programs` programs of a producer and consumers."""
    return plgpu.kernel(
        kernel,
        out_type=out,
        scratch_types=scratch,
        grid=(programs,),
        grid_names=("program",),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        # Required: the default backend differs between JAX 0.10 and 0.11.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )


def _multiply(x, w, x_scale, w_scale, dtype, tile: Tile) -> jax.Array:
    """Multiplies (M, K) by (N, K) with scales (KB, M padded to full tiles) and (N / 128, KB), or
    (KB, N)."""
    (rows, depth), columns = x.shape, w.shape[0]
    by_column = w_scale.shape == (depth // K_BLOCK, columns)
    row_tiles, column_tiles = -(-rows // tile.rows), columns // _COLUMNS
    programs = min(MULTIPROCESSORS, row_tiles * column_tiles)
    steps, stages = depth // K_BLOCK, tile.stages
    piece = _LINE // jnp.dtype(dtype).itemsize  # columns of one store

    def of_every_tile(body) -> jax.Array:
        """Runs body(row tile, column tile, steps before) over a program's tiles; returns steps."""

        # Programs that run at the same time read few rows of x and columns of w, which stay in L2.
        @plgpu.nd_loop(
            (row_tiles * column_tiles,), collective_axes="program", init_carry=jnp.int32(0)
        )
        def done(info, carry):
            shape = (row_tiles, column_tiles)
            row_tile, column_tile = plgpu.planar_snake(info.index[0], shape, 0, BAND)
            body(row_tile, column_tile, carry)
            return carry + steps

        return done

    def kernel(x, w, x_scale, w_scale, out, x_in, w_in, result, full, empty):
        warpgroup = lax.axis_index("warpgroup")

        def produce():
            plgpu.set_max_registers(tile.producer_registers, action="decrease")

            def load(row_tile, column_tile, before):
                row = pl.ds(row_tile * tile.rows, tile.rows)
                column = pl.ds(column_tile * _COLUMNS, _COLUMNS)

                @pl.loop(0, steps)
                def _step(step):
                    stage = lax.rem(before + step, stages)
                    wait_until_free(before + step, stage, stages, empty)
                    k = pl.ds(step * K_BLOCK, K_BLOCK)
                    for source, target in ((x.at[row, k], x_in), (w.at[column, k], w_in)):
                        plgpu.copy_gmem_to_smem(source, target.at[stage], full.at[stage])

            done = of_every_tile(load)
            wait_for_last(lax.max(done - stages, 0), done, stages, empty)

        def consume():
            plgpu.set_max_registers(tile.consumer_registers, action="increase")
            own = pl.ds(warpgroup * _ROWS, _ROWS)

            def compute(row_tile, column_tile, before):
                row = row_tile * tile.rows + warpgroup * _ROWS

                def add_block(step, total):
                    stage = lax.rem(before + step, stages)
                    plgpu.barrier_wait(full.at[stage])

                    def product(accumulator):
                        plgpu.wgmma(accumulator, x_in.at[stage, own], w_in.at[stage].T)
                        # Between start and end of the product, which hides the loads' latency.
                        row_scale = load_scales(x_scale.at[step, pl.ds(row, _ROWS)])
                        if by_column:
                            column = pl.ds(column_tile * _COLUMNS, _COLUMNS)
                            column_scale = load_scales(w_scale.at[step, column])
                            return accumulator[...], row_scale, column_scale
                        scale = row_scale * w_scale[column_tile, step]
                        return accumulator[...], scale, None

                    found = pl.run_scoped(product, plgpu.ACC((_ROWS, _COLUMNS)))
                    partial, scale, column_scale = found
                    plgpu.barrier_arrive(empty.at[stage])
                    scale = lax.broadcast_in_dim(scale, total.shape, (0,))
                    if by_column:
                        partial *= scale
                        scale = lax.broadcast_in_dim(column_scale, total.shape, (1,))
                    return total + partial * scale

                zeros = jnp.zeros((_ROWS, _COLUMNS), jnp.float32)
                total = lax.fori_loop(0, steps, add_block, zeros)
                for slot, start in enumerate(range(0, _COLUMNS, piece)):
                    place = result.at[warpgroup, slot % _STORES]
                    plgpu.wait_smem_to_gmem(_STORES - 1, wait_read_only=True)
                    place[...] = total[:, start : start + piece].astype(dtype)
                    plgpu.commit_smem()
                    column = column_tile * _COLUMNS + start
                    target = out.at[pl.ds(row, _ROWS), pl.ds(column, piece)]
                    plgpu.copy_smem_to_gmem(place, target)

            of_every_tile(compute)
            plgpu.wait_smem_to_gmem(0)

        lax.cond(warpgroup == tile.consumers, produce, consume)

    scratch = [
        swizzled(stages, tile.rows, K_BLOCK, dtype=E4M3),
        swizzled(stages, _COLUMNS, K_BLOCK, dtype=E4M3),
        swizzled(tile.consumers, _STORES, _ROWS, piece, dtype=dtype),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # one copy of x, one of w
        plgpu.Barrier(num_arrivals=tile.consumers, num_barriers=stages),
    ]
    out = jax.ShapeDtypeStruct((rows, columns), dtype)
    return launch(kernel, tile.consumers, programs, out, scratch)(x, w, x_scale, w_scale)


def matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_scale: jax.Array,
    rhs_scale: jax.Array,
    dtype=jnp.float32,
    tile: Tile | None = None,
) -> jax.Array:
    """Computes `reference.matmul.block_matmul` of scaled E4M3 operands that `supports` allows.

    The kernel reads rhs as (N, K): if rhs is stored column by column the transpose costs nothing,
    otherwise XLA copies it. An M that is no multiple of 8 costs a copy of lhs and one of the
    result. A batch under `vmap` runs as a loop.

    Args:
      lhs: (M, K) E4M3.
      rhs: (K, N) E4M3.
      lhs_scale: (M, K / 128) float32.
      rhs_scale: (K / 128, N / 128) float32, or (K / 128, N).
      dtype: dtype of the result, float32 or bf16 (rounded to nearest even).
      tile: tile to use; None for `tile_for`'s choice.

    Returns:
      (M, N) in `dtype`.
    """
    (rows, depth), columns = lhs.shape, rhs.shape[1]
    assert supports(rows, depth, columns, (lhs.dtype, rhs.dtype, dtype))
    assert lhs_scale.shape == (rows, depth // K_BLOCK) and lhs_scale.dtype == jnp.float32
    by_column = rhs_scale.shape[1] == columns
    wide = columns if by_column else columns // _COLUMNS
    assert rhs_scale.shape == (depth // K_BLOCK, wide), rhs_scale.shape
    assert rhs_scale.dtype == jnp.float32
    chosen = tile or tile_for(rows, columns, by_column)

    @sequential_vmap
    def run(lhs, rhs, lhs_scale, rhs_scale):
        # Scales are padded to full tiles: the copy engine takes rows of multiples of 16 bytes.
        x_scale = pad_to(lhs_scale.T, 1, chosen.rows)
        x = pad_to(lhs, 0, GROUP)
        w_scale = rhs_scale if by_column else rhs_scale.T
        y = _multiply(x, rhs.T, x_scale, w_scale, dtype, chosen)[:rows]
        return varying_as(y, lhs, rhs)  # inside a shard_map Pallas types it as equal everywhere

    return run(lhs, rhs, lhs_scale, rhs_scale)
