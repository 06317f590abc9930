"""Prints what a decode step's FP8 products do for 128 of K on a Hopper GPU, without a GPU.

    JAX_PLATFORMS=cpu python docs/scripts/product_counts.py

Compiles the kernels of 64 rows for an H200 in three ways: by Triton with one block of 128 of K in a
turn of the loop, as the H200 of 2026-11-26 has run it; by Triton today; and by Mosaic, which
`precision.kernels=mosaic` chooses. The table is that of docs/kernels.md. Of a loop's turn, divided
by its blocks:

    instructions  of a warp: each of a multiprocessor's four schedulers has one warp of a program by
                  Triton, and one of each of a program's consumers by Mosaic
    barriers      at which the warps of a program wait for each other
    fences        between copies and the tensor core
    waits         for the tensor core to finish everything that was started, and for a part of it
    programs      of the product of Qwen3-8B that takes this tile
    KiB in flight at least, on their way to a program while it multiplies
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import sys

_ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT / folder) for folder in ("tests/kernels/gpu", "tests/helpers")]

import mosaic_machine  # noqa: E402
from kernel_variants import Variant, tiles  # noqa: E402

# Columns and K of a product of Qwen3-8B: o, and q, k and v; gate and up take the widest tiles.
_COLUMNS = {32: 4096, 64: 6144, 128: 24_576, 192: 24_576}
_STAGES_BEFORE = {32: 6, 64: 5, 128: 4}


def _row(way: str, columns: int, machine, blocks: int, flying: int) -> str:
    """A line of the table; `flying` is a number of blocks."""
    found = machine.of_loop
    waits = re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d);", machine.ptx)
    return (
        f"| {way} | 64 x {columns} | {machine.loop / blocks:.0f} | {found['BAR'] / blocks:g} | "
        f"{found['FENCE'] / blocks:g} | {waits.count('0') / blocks:g}, "
        f"{waits.count('1') / blocks:g} | {machine.registers} | {_COLUMNS[columns] // columns} | "
        f"{flying * (64 + columns) / 8:.0f} |"
    )


def main() -> None:
    rows = []
    for today in (*tiles.FP8_ALONE[:2], tiles.FP8[2]):
        columns = today.columns
        before = dataclasses.replace(today, turn=1, stages=_STAGES_BEFORE[columns])
        for way, tile in (("Triton, before", before), ("Triton", today)):
            machine = Variant("fp8", tile, "fp8", "fp8", "fp8", grouped=True).compile()
            flying = (tile.stages - 2) * tile.turn
            rows.append((columns, _row(way, columns, machine, tile.turn, flying)))
    for variant, machine in mosaic_machine.compile_all(mosaic_machine.DECODE[:4]).items():
        columns, stages = variant.tile.columns, variant.tile.stages(32, variant.dtype)
        rows.append((columns, _row("Mosaic", columns, machine, 4, stages - 2)))
    print("| by | tile | instructions | barriers | fences | waits | registers | programs | KiB |")
    print("|---|---|---|---|---|---|---|---|---|")
    print(*(line for _, line in sorted(rows, key=lambda row: row[0])), sep="\n")


if __name__ == "__main__":
    main()
