"""Draws plots as SVG images, one for each panel of a page.

Letters in an image are shapes; titles and legends are text of the page. A page shows the image in
an <img>, where a browser runs no script of it.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from markupsafe import Markup

from fp8rl_jax.base.errors import visible
from fp8rl_jax.report.summary import steps_text

if TYPE_CHECKING:  # matplotlib is imported where it draws: a run starts without it
    from matplotlib.axes import Axes

# Okabe and Ito's palette: distinct to colour-blind readers.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#888888")
_DASHES = ("solid", "dashed", "dotted")
MOST_LINES = 21  # most lines of a panel: the number of pairs of colour and dash
_MOST_POINTS = 2000  # most points that are drawn of a line
_LONGEST_LABEL = 80  # most characters in a legend
_LONGEST_NAME = 40  # and next to an axis
_LARGEST = 1e30
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "svg.fonttype": "path",
    "svg.hashsalt": "fp8rl_jax",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.7,
}

Line = tuple[str, np.ndarray, np.ndarray]  # label, steps (N,), values (N,)


class Mark(NamedTuple):
    """A row of a legend; `dash` is a border's style in CSS."""

    colour: str
    dash: str
    label: str


class Panel(NamedTuple):
    """A plot: its title, its image in base64, and its legend."""

    title: str
    svg: Markup
    legend: Sequence[Mark]


def draw_panel(
    title: str, draw: Callable[[Axes], None], legend: Sequence[Mark] = (), height: float = 2.6
) -> Panel:
    """Returns a panel of 4.2 inches by `height`, drawn by `draw`."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(4.2, height), layout="constrained")
        draw(figure.add_subplot())
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    image = Markup(base64.b64encode(buffer.getvalue()).decode("ascii"))  # Markup is not shortened
    return Panel(title, image, legend)


def whole_ticks(ax: Axes, most: int = 10) -> None:
    """Puts at most `most` + 1 ticks along the horizontal axis, at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator(most, integer=True))


def mark(index: int, label: str = "") -> Mark:
    """Returns the legend's row for the `index`-th line."""
    return Mark(
        colour=COLOURS[index % len(COLOURS)],
        dash=_DASHES[index // len(COLOURS) % len(_DASHES)],
        label=label[:_LONGEST_LABEL],
    )


def lines_panel(
    title: str,
    lines: Sequence[Line],
    x: str = "step",
    symlog: bool = False,
    limits: tuple[float | None, float | None] = (None, None),
) -> Panel | None:
    """Draws the lines that have a finite value; returns None if no line has.

    The i-th line has the same colour and dash in every panel.

    Args:
      title: title of the panel.
      lines: label, steps and values of each line.
      x: label of the horizontal axis.
      symlog: whether the scale is linear near 0 and logarithmic above; the legend counts the zeros.
      limits: limits of the vertical axis; None follows the values.
    """
    every = [(mark(i, line[0]), line[1], drawable(line[2])) for i, line in enumerate(lines)]
    shown = [line for line in every if np.isfinite(line[2]).any()][:MOST_LINES]
    if not shown:
        return None
    drawn = [thinned(values) for _, _, values in shown]
    legend = [
        row._replace(label=row.label + _zeros(values) * symlog + left_out(values, kept))
        for (row, _, values), kept in zip(shown, drawn, strict=True)
    ]

    def draw(ax: Axes) -> None:
        for i, ((row, steps, values), kept) in enumerate(zip(shown, drawn, strict=True)):
            # Wider lines first, so that all show that coincide at 0; markers show single steps.
            ax.plot(
                steps[kept],
                values[kept],
                color=row.colour,
                ls=row.dash,
                lw=1.5 * (1 if values.any() else len(shown) - i),
                ms=3,
                marker="o" if len(steps) <= 40 else None,
            )
        ax.set_xlabel(x)
        whole_ticks(ax, 6)
        ax.set_ylim(limits[0], limits[1])
        if symlog:
            values = np.concatenate([line[2] for line in shown])
            positive = values[np.isfinite(values) & (values > 0)]
            low = 10 ** np.floor(np.log10(max(positive.min(), 1e-9))) if positive.size else 1e-6
            ax.set_yscale("symlog", linthresh=low)
            ax.set_ylim(-0.3 * low, 2 * max([low, *positive]))
        else:
            ax.yaxis.set_major_formatter("{x:.4g}")

    return draw_panel(title, draw, legend)


def thinned(values: np.ndarray) -> np.ndarray:
    """Returns the indices of values (N,) to draw: all, or minimum and maximum of every few."""
    if len(values) <= _MOST_POINTS:
        return np.arange(len(values))
    groups = np.array_split(np.arange(len(values)), _MOST_POINTS // 2)
    low, high = (np.where(np.isnan(values), x, values) for x in (np.inf, -np.inf))
    return np.unique([g[i] for g in groups for i in (low[g].argmin(), high[g].argmax())])


def left_out(values: np.ndarray, kept: np.ndarray) -> str:
    """Returns a note with the number of drawn values; '' if all are drawn."""
    few = f" ({len(kept):,} of {len(values):,} points drawn)"
    return few if len(kept) < len(values) else ""


def drawable(values: np.ndarray) -> np.ndarray:
    """Replaces values by NaN that are too large for the ticks of an axis."""
    return np.where(np.abs(values) < _LARGEST, values, np.nan)


def label_text(text: str) -> str:
    """Shortens a name next to an axis and escapes $, between which matplotlib would read TeX."""
    return visible(text)[:_LONGEST_NAME].replace("$", r"\$")


def _zeros(values: np.ndarray) -> str:
    zeros = int((values == 0).sum())
    if zeros == len(values):
        return f": exactly 0 at all {steps_text(zeros)}"
    return f" (0 at {zeros:,} of {steps_text(len(values))})" if zeros else ""
