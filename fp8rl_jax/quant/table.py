"""Formats a recipe as text of fixed width: a table, its legend, and facts in two columns.

The text has no colours, so it reads the same in a terminal, a pipe, a notebook and a file. Text too
long for its column continues on the next line; nothing is cut.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 110
_POLICY, _GAP = 25, 3  # characters: the widest policy cell, and the gap between two cells
_LEGEND = (
    "fprop: y = x w; dgrad: dx = dy w^T; wgrad: dw = x^T dy",
    "blocks: rows x columns of the operand: x (tokens, in), w (in, out), dy (tokens, out)",
)


def text_of(title: str, rows: Sequence[dict[str, str]], facts: dict[str, str]) -> str:
    """Returns lines of at most `WIDTH` characters: the rows of `gemm_table` below their column
    names, then the facts, {property: its value}."""
    cells = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    widths[-2] = min(widths[-2], _POLICY)
    widths[-1] = WIDTH - sum(widths[:-1]) - _GAP * len(widths)
    lines = [line for row in cells for line in _wrapped(row, widths, _GAP)]
    label = max(map(len, facts))
    below = [
        line for fact in facts.items() for line in _wrapped(fact, (label, WIDTH - label - 2), 2)
    ]
    parts = [title, "", lines[0], "-" * WIDTH, *lines[1:], "", *_LEGEND, "", *below]
    return "\n".join(line.rstrip() for line in parts)


def _wrapped(cells, widths, gap: int) -> list[str]:
    """Returns the lines of a row of cells, each wrapped in its column."""
    wrapped = [textwrap.wrap(cell, width) for cell, width in zip(cells, widths, strict=True)]
    height = max(map(len, wrapped))
    columns = [[*lines, *[""] * (height - len(lines))] for lines in wrapped]
    return [
        (" " * gap).join(f"{line:<{width}}" for line, width in zip(row, widths, strict=True))
        for row in zip(*columns, strict=True)
    ]
