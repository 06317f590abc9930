"""Blockwise-scaled FP8 products of few rows, as in a decode step, in Pallas Mosaic GPU, for Hopper.

    y[m, n] = sum_b (sum_{k in b} x[m, k] w[n, k]) * (x_scale[b, m] * w_scale[n // 128, b])

Order and instructions are those of matmul.py and mosaic_matmul.py: b ascending, one multiply-add an
element and block, nothing splits K. Machine code shows this chain; no GPU has compared bits yet.

Reading the weight takes the time, if nothing else waits. A program computes 64 rows by a tile of
columns. Its last warpgroup, the producer, only starts copies (TMA) of rows, weight and scales into
shared memory, as many blocks ahead as fit. Each of the others, the consumers, owns columns of the
tile. It goes through K in turns of four blocks: while the tensor core multiplies a block, the
product before is scaled and added.

Up to three weights share a launch: a program's tile lies in one of them. Weights are stacks of all
layers, of which one is read in place. The copy engine clips rows past M.

Not done: K or N that is no multiple of 128, E5M2, a scale per column, groups of rows, bf16, K above
32,768, as many rows as mosaic_matmul.py takes. `supports` refuses them.

The residual is added in bf16, which gives the bits of the sum in float32, rounded: float32 has more
than twice bf16's bits and two more (Figueroa, "When is double rounding innocuous?", 1995).

Tried and left out: consumers that take blocks of K in turn and hand the running total on in shared
memory. For 32 columns the total is 8 KiB, read and written for each block of 12 KiB of operands,
behind three barriers and a fence, one consumer after another.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fp8rl_jax.kernels.arrays import K_BLOCK, pad_to, varying_as
from fp8rl_jax.kernels.gpu.mosaic_matmul import (
    E4M3,
    FEWEST_ROWS,
    GROUP,
    RESULTS,
    launch,
    load_scales,
    swizzled,
    wait_for_last,
    wait_until_free,
)
from fp8rl_jax.kernels.gpu.tiles import MULTIPROCESSORS

_ROWS = 64  # rows of a tile: one tensor core instruction
_TURN = 4  # blocks of K of which products and sums overlap
_MOST_STAGES = 16
_MEMORY = 231_424  # bytes of shared memory: the most of a program, without 1 KiB for barriers
_SCALES = 4  # scales of a weight in 16 bytes, of which the copy engine takes multiples
_MOST_BLOCKS = 256  # scales of a weight that one copy takes
_PRODUCER_REGISTERS = 40


@dataclasses.dataclass(frozen=True)
class Tile:
    """Consumers of a program, and columns of each."""

    consumers: int
    width: int

    @property
    def columns(self) -> int:
        return self.consumers * self.width

    @property
    def consumer_registers(self) -> int:
        """Registers of a consumer's thread: a multiple of 8, with the others' at most 512."""
        return min(232, (512 - _PRODUCER_REGISTERS) // self.consumers // 8 * 8)

    def stages(self, blocks: int, dtype) -> int:
        """Returns how many blocks of K fit into shared memory beside the result and the scales."""
        result = _ROWS * self.columns * jnp.dtype(dtype).itemsize
        scales = 4 * (self.consumers * (blocks + _SCALES) + blocks * _ROWS)
        block = (_ROWS + self.columns) * K_BLOCK
        fitting = min(_MOST_STAGES, (_MEMORY - result - scales) // block)
        # A number of stages that turns divide takes fewer instructions to count.
        return fitting - fitting % _TURN if fitting >= 2 * _TURN else fitting


TILES = (Tile(1, 32), Tile(2, 32), Tile(2, 64), Tile(3, 64))


def supports(rows: int, depth: int, columns: Sequence[int], dtypes: tuple) -> bool:
    """Returns whether `layer_matmuls` takes products of (rows, depth) by (depth, N) each.

    Args:
      rows, depth, columns: M, K, and each N.
      dtypes: dtypes of rows, weights and results.
    """
    left, right, result = map(jnp.dtype, dtypes)
    return (
        0 < rows < FEWEST_ROWS
        and all(n > 0 and n % K_BLOCK == 0 for n in columns)
        and 0 < depth <= _MOST_BLOCKS * K_BLOCK
        and depth % K_BLOCK == 0
        and left == right == E4M3
        and result in RESULTS
    )


def tile_for(rows: int, columns: Sequence[int]) -> Tile:
    """Returns the tile with which all multiprocessors together finish first; the widest if equal.

    It depends on the shapes alone and decides speed, not bits.
    """

    def time(tile: Tile) -> int:
        tiles = -(-rows // _ROWS) * sum(n // tile.columns for n in columns)
        # In columns; a program begins and ends in about the time of 32.
        return -(-tiles // MULTIPROCESSORS) * (tile.columns + 32)

    fitting = [tile for tile in TILES if all(n % tile.columns == 0 for n in columns)]
    return min(reversed(fitting), key=time)


def _multiply(x, weights, x_scale, w_scales, layer, residual, dtype, tile: Tile) -> list[jax.Array]:
    """Multiplies (M, K) by layers of (L, N, K) with scales (KB, M) and (L, N / 128, KB padded)."""
    (rows, depth), columns = x.shape, [w.shape[1] for w in weights]
    count, row_tiles = len(weights), -(-rows // _ROWS)
    counts = [n // tile.columns for n in columns]
    steps, width = depth // K_BLOCK, tile.width
    turn, stages = min(_TURN, steps), tile.stages(steps, dtype)

    def kernel(layer, x, x_scale, *others):
        weights, w_scales, others = others[:count], others[count : 2 * count], others[2 * count :]
        before, outs = others[:adds], others[adds : adds + count]
        x_in, w_in, x_scale_in, w_scale_in, result, full, empty, once = others[adds + count :]
        warpgroup = lax.axis_index("warpgroup")
        program = lax.axis_index("program")
        number = layer[0]
        row = pl.ds((program % row_tiles) * _ROWS, _ROWS)
        column_tile = program // row_tiles

        def of_weight(body) -> None:
            """Runs body(weight, the tile's number in it) for the weight of this program."""
            first = 0
            for index, own in enumerate(counts):
                inside = (column_tile >= first) & (column_tile < first + own)
                pl.when(inside)(functools.partial(body, index, column_tile - first))
                first += own

        def produce():
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")

            def load(index, place):
                start = place * tile.columns
                column = pl.ds(start, tile.columns)
                for part in range(tile.consumers):
                    block = (start + part * width) // K_BLOCK
                    source = w_scales[index].at[number, block]
                    plgpu.copy_gmem_to_smem(source, w_scale_in.at[part], once)
                    own = pl.ds(start + part * width, width)
                    for residual in before:
                        plgpu.copy_gmem_to_smem(residual.at[row, own], result.at[part], once)

                @pl.loop(0, steps)
                def _step(step):
                    stage = lax.rem(step, stages)
                    wait_until_free(step, stage, stages, empty)
                    k = pl.ds(step * K_BLOCK, K_BLOCK)
                    for source, target in (
                        (weights[index].at[number, column, k], w_in.at[stage]),
                        (x.at[row, k], x_in.at[stage]),
                        (x_scale.at[step, row], x_scale_in.at[step]),
                    ):
                        plgpu.copy_gmem_to_smem(source, target, full.at[stage])

            of_weight(load)
            wait_for_last(max(steps - stages, 0), steps, stages, empty)

        def consume():
            plgpu.set_max_registers(tile.consumer_registers, action="increase")
            own = pl.ds(warpgroup * width, width)
            plgpu.barrier_wait(once)

            def add_blocks(first, total, *accumulators):
                """Adds blocks of K from `first` on, one for each accumulator."""
                last = len(accumulators) - 1
                scales: list[jax.Array] = []

                def add(block, total):
                    # The product of the next block, if there is one, keeps running.
                    running = min(1, last - block)
                    partial = plgpu.wgmma_accumulator_load(accumulators[block], wait_n=running)
                    plgpu.barrier_arrive(empty.at[lax.rem(first + block, stages)])
                    scale = lax.broadcast_in_dim(scales[block], total.shape, (0,))
                    return total + partial * scale

                for block, accumulator in enumerate(accumulators):
                    stage = lax.rem(first + block, stages)
                    plgpu.barrier_wait(full.at[stage])
                    plgpu.wgmma(accumulator, x_in.at[stage], w_in.at[stage, own].T)
                    row_scale = load_scales(x_scale_in.at[first + block])
                    scales.append(row_scale * w_scale_in[warpgroup, first + block])
                    if block:
                        total = add(block - 1, total)
                return add(last, total)

            def take(first, blocks, total):
                body = functools.partial(add_blocks, first, total)
                return pl.run_scoped(body, *[plgpu.ACC((_ROWS, width))] * blocks)

            total = jnp.zeros((_ROWS, width), jnp.float32)
            turns = steps // turn
            total = lax.fori_loop(0, turns, lambda i, total: take(i * turn, turn, total), total)
            if steps % turn:
                total = take(turns * turn, steps % turn, total)
            rounded = total.astype(dtype)
            place = result.at[warpgroup]
            if adds:
                added = place[...].astype(jnp.float32) + rounded.astype(jnp.float32)
                rounded = added.astype(dtype)
            place[...] = rounded
            plgpu.commit_smem()

            def store(index, tile_number):
                column = pl.ds(tile_number * tile.columns + warpgroup * width, width)
                plgpu.copy_smem_to_gmem(place, outs[index].at[row, column])

            of_weight(store)
            plgpu.wait_smem_to_gmem(0)

        lax.cond(warpgroup == tile.consumers, produce, consume)

    adds = residual is not None
    consumers = tile.consumers
    scratch = [
        swizzled(stages, _ROWS, K_BLOCK, dtype=E4M3),
        swizzled(stages, tile.columns, K_BLOCK, dtype=E4M3),
        # Filled once: a fence would have to stand between reading scales and copying others.
        plgpu.SMEM((steps, _ROWS), jnp.float32),
        plgpu.SMEM((consumers, w_scales[0].shape[2]), jnp.float32),
        swizzled(consumers, _ROWS, width, dtype=dtype),
        plgpu.Barrier(num_arrivals=3, num_barriers=stages),  # copies of w, x and its scales
        plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
        plgpu.Barrier(num_arrivals=consumers * (1 + adds)),
    ]
    out = [jax.ShapeDtypeStruct((rows, n), dtype) for n in columns]
    run = launch(kernel, consumers, row_tiles * sum(counts), out, scratch)
    return run(layer, x, x_scale, *weights, *w_scales, *([residual] if adds else []))


def layer_matmuls(
    x: jax.Array,
    stacks: Sequence[jax.Array],
    layer: jax.Array,
    x_scale: jax.Array,
    scales: Sequence[jax.Array],
    dtype=jnp.float32,
    residual: jax.Array | None = None,
    tile: Tile | None = None,
) -> list[jax.Array]:
    """Computes `matmul.layer_matmuls` of scaled E4M3 operands that `supports` allows.

    The kernel reads a stack as (L, N, K): if it is stored so the transpose costs nothing, otherwise
    XLA copies it. An M that is no multiple of 8 costs copies of the rows and of the results.

    Args:
      x: (M, K) E4M3.
      stacks: (L, K, N) E4M3 each, three at most; N may differ.
      layer: () int32, below L.
      x_scale: (M, K / 128) float32.
      scales: (L, K / 128, N / 128) float32, of each stack.
      dtype: dtype of the results, float32 or bf16 (rounded to nearest even).
      residual: (M, N) in `dtype`, added to the rounded product of a single stack in float32; the
        sum is rounded again. Or None.
      tile: tile to use; None for `tile_for`'s choice.

    Returns:
      (M, N) of each stack.
    """
    rows, depth = x.shape
    columns = [w.shape[2] for w in stacks]
    assert supports(rows, depth, columns, (x.dtype, stacks[0].dtype, dtype))
    assert x_scale.shape == (rows, depth // K_BLOCK) and x_scale.dtype == jnp.float32
    assert residual is None or (len(stacks) == 1 and residual.dtype == dtype)
    for scale, n in zip(scales, columns, strict=True):
        assert scale.shape[1:] == (depth // K_BLOCK, n // K_BLOCK), scale.shape
        assert scale.dtype == jnp.float32
    found = _multiply(
        pad_to(x, 0, GROUP),
        [w.swapaxes(1, 2) for w in stacks],
        pad_to(x_scale.T, 1, GROUP),
        [pad_to(scale.swapaxes(1, 2), 2, _SCALES) for scale in scales],
        layer.reshape(1),
        None if residual is None else pad_to(residual, 0, GROUP),
        jnp.dtype(dtype),
        tile or tile_for(rows, columns),
    )
    # Inside a shard_map Pallas types results as equal everywhere.
    return [varying_as(y[:rows], x, stacks) for y in found]


def matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_scale: jax.Array,
    rhs_scale: jax.Array,
    dtype=jnp.float32,
    tile: Tile | None = None,
) -> jax.Array:
    """Computes `mosaic_matmul.matmul` of few rows, with the same arguments."""

    @sequential_vmap
    def run(lhs, rhs, lhs_scale, rhs_scale):
        first, scales = jnp.int32(0), [rhs_scale[None]]
        return layer_matmuls(lhs, [rhs[None]], first, lhs_scale, scales, dtype, None, tile)[0]

    return run(lhs, rhs, lhs_scale, rhs_scale)
