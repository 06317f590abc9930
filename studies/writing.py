"""Text, tables and panels that several studies use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from studies.runs import series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
_Row = TypeVar("_Row")


def figure(found: Sequence[float], digits: int = 3) -> str:
    """Formats an estimate (value, low, high) for a table."""
    value, low, high = (f"{x:.{digits}g}" for x in found)
    return value if low == value == high else f"{value} [{low}, {high}]"


def each(values: Sequence[float | None] | np.ndarray) -> str:
    """Formats the figures of several seeds for a table; '-' for None."""
    return ", ".join("-" if value is None else f"{value:.3g}" for value in values)


# Columns of a table whose rows are `Pair.summary`s.
PAIR_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "mean abs D": lambda pair: figure(pair["mean_abs"]),
    "max": lambda pair: f"{pair['max_abs']:.3g}",
    "token_mult_prob_error": lambda pair: figure(pair["token_mult_prob_error"], 6),
    "exact KL": lambda pair: figure(pair["kl"]),
    "RMS of logits": lambda pair: figure(pair["rms_logits"]),
}


def table(
    first: str, rows: Iterable[tuple[str, _Row]], columns: Mapping[str, Callable[[_Row], str]]
) -> str:
    """Returns a Markdown table.

    Args:
      first: heading of the first column, which has the rows' names.
      rows: (name, row) for each line.
      columns: {heading: function of a row that returns the cell's text}.
    """
    body = [[name, *(text(row) for text in columns.values())] for name, row in rows]
    lines = [[first, *columns], ["---"] * (1 + len(columns)), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def panels(count: int, width: float, height: float, **options: Any) -> tuple[Figure, list[Axes]]:
    """Makes a figure, sizes in inches, of panels in a row; `options` as for `Figure.subplots`."""
    from matplotlib.figure import Figure  # not at the top: other commands start without it

    made = Figure(figsize=(width, height), layout="constrained", dpi=110)
    return made, list(made.subplots(1, count, squeeze=False, **options)[0])


def curves(axes: Axes, runs: Sequence[dict[str, Any]], metric: str, color: str, label: str) -> None:
    """Draws a metric over the RL steps, as running means of a sixteenth of the steps: a thin line
    for each run (numbers of `arm_cells`), and the labelled mean of the runs."""
    if not runs:
        return
    lines = np.array([_running_mean(run) for run in series(runs, metric)])
    steps = range(1, 1 + lines.shape[1])
    for line in lines if len(lines) > 1 else ():
        axes.plot(steps, line, lw=0.7, alpha=0.3, color=color)
    axes.plot(steps, lines.mean(axis=0), lw=1.5, color=color, label=label)


def rewards(axes: Axes, arms: dict[str, Sequence[dict[str, Any]]]) -> None:
    """Draws the reward over the RL steps of each arm: {label: its runs}."""
    for colour, (label, runs) in zip(COLOURS, arms.items(), strict=False):
        curves(axes, runs, "reward_mean", colour, label)
    plain(axes, "RL step", "reward")
    axes.legend(frameon=False, fontsize=8)


def _running_mean(values: np.ndarray) -> np.ndarray:
    """Returns running means over a sixteenth of all values; over fewer at the first values."""
    total = np.cumsum(np.append(0.0, values))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - max(len(values) // 16, 1), 0)
    return (total[ends] - total[starts]) / (ends - starts)


def plain(axes: Axes, x: str, y: str) -> None:
    """Labels the axes, and draws a light grid below the data."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(color="#e6e6e6", lw=0.7)
    axes.set_axisbelow(True)
