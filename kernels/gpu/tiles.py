"""Which tile a matmul kernel uses for which shape: a table, so that equal shapes give equal bits.

Nothing is tuned at run time. A tile's rows, columns, warps and pipeline stages decide speed only;
the bits follow from what all tiles have in common: the contraction runs in ascending steps of the
same tensor core instruction (depth 32 for FP8, 16 for bf16), FP8 partial sums leave the tensor core
every 128 of K, and nothing splits K over programs. `launch/gpu_check.sh` compares the bits of every
tile with those of every other.

FP8 tiles have at least 64 rows and 4 warps: below that Triton takes the f16 instruction, which
rounds otherwise. tests/kernels/gpu/test_sass.py checks registers and shared memory of every entry.
"""

from __future__ import annotations

import dataclasses

MULTIPROCESSORS = 132  # of an H100 or H200 (SXM)
BAND = 8  # row tiles that run side by side over the same columns, for reuse in the L2


@dataclasses.dataclass(frozen=True)
class Tile:
    """Rows and columns of the result that a program computes, K that it loads at a time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    def programs(self, rows: int, columns: int) -> int:
        """Tiles of a (rows, columns) result."""
        return -(-rows // self.rows) * -(-columns // self.columns)

    def constants(self, kind: str) -> dict[str, int | str]:
        """The constants of a product's kernel for this tile; `kind` as for `matmul_tile`."""
        return {
            "PRECISION": "ieee" if kind == "float32" else "tf32",  # read for float32 operands alone
            "BM": self.rows,
            "BN": self.columns,
            "BK": self.depth,
            "BAND": BAND,
        }


# Few rows: the weight's bytes are the time, so narrow tiles put every multiprocessor to work.
FP8_FEW_ROWS = (Tile(64, 32, 128, 4, 6), Tile(64, 64, 128, 4, 5), Tile(64, 128, 128, 4, 4))
FP8_MANY_ROWS = (Tile(64, 128, 128, 4, 4), Tile(128, 128, 128, 8, 4))
BF16_FEW_ROWS = (Tile(64, 32, 64, 4, 6), Tile(64, 64, 64, 4, 5), Tile(64, 128, 64, 4, 4))
BF16_MANY_ROWS = (Tile(128, 128, 64, 8, 4), Tile(128, 256, 64, 8, 3))
WGRAD = (Tile(64, 128, 128, 4, 4),)  # a scale per row and per column: twice the registers
FLOAT32 = (Tile(32, 64, 32, 4, 2),)
# The output head: the columns of a tile are part of the definition of a log-probability here, and
# 128 is the most that head.py can add up in 32 bits.
HEAD_COLUMNS = 128
HEAD = (Tile(64, HEAD_COLUMNS, 64, 4, 4), Tile(128, HEAD_COLUMNS, 64, 8, 4))
HEAD_FLOAT32 = Tile(32, HEAD_COLUMNS, 32, 4, 3)


def matmul_tile(kind: str, rows: int, columns: int) -> Tile:
    """The tile for a (rows, K) by (K, columns) product.

    Args:
      kind: 'fp8', 'bf16' or 'float32', of the operands; 'wgrad' for FP8 with a scale per column.
      rows: of the result; for grouped products, those of one group.
      columns: of the result.
    """
    tiles = {
        "fp8": FP8_FEW_ROWS if rows <= FP8_FEW_ROWS[0].rows else FP8_MANY_ROWS,
        "bf16": BF16_FEW_ROWS if rows <= BF16_FEW_ROWS[0].rows else BF16_MANY_ROWS,
        "float32": FLOAT32,
        "wgrad": WGRAD,
    }[kind]
    # The largest that still gives every multiprocessor a program; the smallest if none does.
    for tile in reversed(tiles):
        if tile.programs(rows, columns) >= MULTIPROCESSORS:
            return tile
    return tiles[0]


def head_tile(kind: str, rows: int) -> Tile:
    """The tile of the fused output head over `rows` rows; `kind` 'bf16' or 'float32'."""
    if kind == "float32":
        return HEAD_FLOAT32
    return HEAD[0] if rows <= HEAD[0].rows else HEAD[1]
