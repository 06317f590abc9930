"""A table of the matmul kernels' tiles by shape, so that equal shapes give equal bits.

Nothing is tuned at run time. A tile's rows, columns, warps and pipeline stages decide speed only;
the bits follow from common properties of all tiles: the contraction runs in ascending steps of the
same tensor core instruction (depth 32 for FP8, 16 for bf16), FP8 partial sums leave the tensor core
every 128 of K, and nothing splits K over programs. `launch/gpu_check.sh` compares the bits of all
tiles with each other.

FP8 tiles have at least 64 rows and 4 warps: below that Triton takes the f16 instruction, which
rounds differently. tests/kernels/gpu/test_sass.py checks registers and shared memory of every tile.
"""

from __future__ import annotations

import dataclasses
import math

MULTIPROCESSORS = 132  # of an H100 or H200 (SXM)
# Programs with which a product is about as fast as with one on every multiprocessor: larger tiles
# read the rows less often (measured on an H200: 64 x 4096 x 6144 takes 12.8 us with 96 programs of
# 64 columns, 15.0 us with 192 of 32).
_ENOUGH = 96
BAND = 8  # row tiles that run side by side over the same columns, for reuse in the L2


@dataclasses.dataclass(frozen=True)
class Tile:
    """Rows and columns of a program's tile of the result, K per load, warps and pipeline stages.

    A stage is a turn of the loop over K, of `turn` loads. Each turn waits for its loads once, and
    adds its products in the order of K, as turns of one would.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    turn: int = 1

    def dividing(self, loads: int) -> Tile:
        """Returns the tile for `loads` of K, with turns that divide them and equal memory."""
        turn = math.gcd(self.turn, loads)
        return dataclasses.replace(self, turn=turn, stages=self.stages * self.turn // turn)

    def programs(self, rows: int, columns: int) -> int:
        """Returns the number of tiles of a (rows, columns) result."""
        return -(-rows // self.rows) * -(-columns // self.columns)

    def constants(self, kind: str) -> dict[str, int | str]:
        """Returns the constants of a product's kernel for this tile; `kind` as in `matmul_tile`."""
        return {
            "PRECISION": "ieee" if kind == "float32" else "tf32",  # only float32 reads it
            "BM": self.rows,
            "BN": self.columns,
            "BK": self.depth,
            "BAND": BAND,
        }


# Narrow tiles for few rows, where reading the weight takes the time. FP8 has no tile of 128 rows:
# two programs of 64 side by side, of which one scales while the other multiplies, are 10% faster.
# Their turns and stages leave room for two programs (of 32 columns: three) on a multiprocessor.
FP8 = (Tile(64, 32, 128, 4, 3, 2), Tile(64, 64, 128, 4, 3, 2), Tile(64, 128, 128, 4, 4))
# The same tiles if no multiprocessor gets two programs: longer turns, in all of its memory.
FP8_ALONE = (Tile(64, 32, 128, 4, 3, 4), Tile(64, 64, 128, 4, 3, 4), Tile(64, 128, 128, 4, 3, 2))
BF16 = (
    Tile(64, 32, 128, 4, 6),
    Tile(64, 64, 64, 4, 5),
    Tile(64, 128, 64, 4, 4),
    Tile(128, 256, 64, 8, 3),
)
WGRAD = (Tile(64, 128, 128, 4, 4),)  # a scale per row and per column: twice the registers
FLOAT32 = (Tile(32, 64, 32, 4, 2),)
# The output head: a tile's columns are part of a log-probability's definition, and 128 is the most
# that head.py can sum in 32 bits.
HEAD_COLUMNS = 128
HEAD = (Tile(64, HEAD_COLUMNS, 64, 4, 4), Tile(128, HEAD_COLUMNS, 64, 8, 4))
HEAD_FLOAT32 = Tile(32, HEAD_COLUMNS, 32, 4, 3)


def matmul_tile(kind: str, rows: int, columns: int, groups: int = 1) -> Tile:
    """Returns the tile for `groups` products of (rows, K) by (K, columns).

    Args:
      kind: 'fp8', 'bf16' or 'float32' by the operands; 'wgrad' for FP8 with a scale per column.
      rows, columns: of each result.
      groups: number of products that run together, each with a weight of its own.
    """
    fewest, *larger = {"fp8": FP8, "bf16": BF16, "float32": FLOAT32, "wgrad": WGRAD}[kind]
    chosen = fewest
    # The largest tile that gives enough programs and is not mostly padding; the smallest if none.
    for tile in reversed(larger):
        enough = groups * tile.programs(rows, columns) >= _ENOUGH
        if enough and tile.rows <= max(rows, fewest.rows):
            chosen = tile
            break
    if kind == "fp8" and groups * chosen.programs(rows, columns) <= MULTIPROCESSORS:
        return FP8_ALONE[FP8.index(chosen)]
    return chosen


def head_tile(kind: str, rows: int) -> Tile:
    """Returns the tile of the fused output head for `rows` rows; `kind`: 'bf16' or 'float32'."""
    if kind == "float32":
        return HEAD_FLOAT32
    return HEAD[0] if rows <= HEAD[0].rows else HEAD[1]
