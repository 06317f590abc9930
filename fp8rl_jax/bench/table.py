"""How the tables of the benches are written."""

from __future__ import annotations

from collections.abc import Sequence

EMULATED = "FP8 is emulated on a CPU: its speed here says nothing about a GPU"


def text_table(*rows: Sequence[str]) -> list[str]:
    """A line for each row: columns as wide as their widest cell, the first to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
