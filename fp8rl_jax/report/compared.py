"""Shows a comparison of policies (`fp8rl compare`) as text and as a page with a plot."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Any

from fp8rl_jax.report.html import render, write_page
from fp8rl_jax.report.plots import COLOURS, draw_panel, label_text, mark

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_KINDS = ("greedy", "sampled")
_HEAD = ("setting", "greedy", "sampled", "less the first", "95% interval", "seeds to see it")


def comparison_table(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Returns the cells of what `policy.compare` has found, the head first: of each setting a row,
    of its differences two more."""
    cells: list[tuple[str, ...]] = [_HEAD]
    for number, row in enumerate(rows, 1):
        accuracy = (f"{row['accuracy'][kind]:.4f}" for kind in _KINDS)
        cells.append((f"{number}: {', '.join(row['runs'])}", *accuracy, "", "", ""))
        for kind, found in row.get("difference", {}).items():
            interval = f"{found['low']:+.4f} to {found['high']:+.4f}"
            seeds = str(found["seeds"] or "not known")
            cells.append((f"   {kind}", "", "", f"{found['value']:+.4f}", interval, seeds))
    return cells


def comparison_meaning(rows: list[dict[str, Any]]) -> str:
    """Returns a sentence on what was compared and what the interval covers."""
    first = rows[0]
    seeds = len(first["runs"])
    over = f"{seeds} seeds and of the questions"
    if seeds == 1:
        over = "the questions, and other seeds may differ by more"
    return (
        f"{first['questions']} questions, {first['samples']} sampled answers to each, the same "
        f"random numbers for all; the interval is over draws of {over}"
    )


def write_comparison(directory: pathlib.Path, rows: list[dict[str, Any]]) -> pathlib.Path:
    """Writes directory/compare.html, and returns its path."""

    def draw(ax: Axes) -> None:
        for number, row in enumerate(rows[1:]):
            for kind, colour, shift in zip(_KINDS, COLOURS, (0.12, -0.12), strict=False):
                found = row["difference"][kind]
                ax.plot([found["low"], found["high"]], [number + shift] * 2, color=colour)
                ax.plot(found["value"], number + shift, "o", color=colour, ms=4)
        ax.axvline(0, color="#888888", lw=0.8)
        names = [label_text(", ".join(row["runs"])) for row in rows[1:]]
        ax.set_yticks(range(len(names)), names)
        ax.invert_yaxis()
        ax.set_xlabel("accuracy less that of the first")

    legend = [mark(index, kind) for index, kind in enumerate(_KINDS)]
    panel = draw_panel("Differences with intervals of 95%", draw, legend, 1.2 + 0.5 * len(rows))
    body = render(
        "compare.html", table=comparison_table(rows), panel=panel, meaning=comparison_meaning(rows)
    )
    return write_page(directory / "compare.html", "Comparison of policies", body)
