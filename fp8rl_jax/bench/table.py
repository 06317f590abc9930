"""Formats the text tables of benches and plans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

EMULATED = "FP8 is emulated on a CPU: its speed here says nothing about a GPU"


def record_table(columns: Mapping[str, str], records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns the lines of a table with a row for each record.

    Args:
      columns: {heading: format of a cell}, such as {'seconds': '{train_s:.3f}'}.
      records: {name in the formats: value} for each row.
    """
    cells = ([form.format(**record) for form in columns.values()] for record in records)
    return text_table([list(columns), *cells])


def text_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a line for each row; columns fit their widest cell, and the first is left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
