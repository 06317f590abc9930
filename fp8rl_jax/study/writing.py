"""The files of a study: study.json, a figure and a Markdown page."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8rl_jax.base.whole_file import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")


def figure(found: Sequence[float], digits: int = 3) -> str:
    """An estimate (value, low, high) in a table."""
    value, low, high = (f"{x:.{digits}g}" for x in found)
    return value if low == value == high else f"{value} [{low}, {high}]"


def each(values: Sequence[float]) -> str:
    """The figures of several seeds in a table."""
    return ", ".join(f"{value:.3g}" for value in values)


def curves(axes: Axes, runs: Sequence[dict[str, Any]], metric: str, color: str, label: str) -> None:
    """A metric over the RL steps: a thin line for each run (`numbers` of a cell of runs.py), and
    their mean, which has the label; running means of a sixteenth of the steps. Nothing without
    runs."""
    if not runs:
        return
    lines = np.array([_running_mean(run["series"][metric]) for run in runs])
    steps = range(1, 1 + lines.shape[1])
    for line in lines if len(lines) > 1 else ():
        axes.plot(steps, line, lw=0.7, alpha=0.3, color=color)
    axes.plot(steps, lines.mean(axis=0), lw=1.5, color=color, label=label)


def _running_mean(values: Sequence[float]) -> np.ndarray:
    """Of the last sixteenth of all values, at each of them; of fewer at the first ones."""
    total = np.cumsum(np.append(0.0, values))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - max(len(values) // 16, 1), 0)
    return (total[ends] - total[starts]) / (ends - starts)


def plain(axes: Axes, x: str, y: str) -> None:
    """Labels and a quiet grid."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(color="#e6e6e6", lw=0.7)
    axes.set_axisbelow(True)


def origins(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Commits, CPUs and versions under which cells were measured, each once."""
    found = {}
    for cell in cells:
        origin = {name: cell[name] for name in ("commit", "cpu", "versions")}
        found[json.dumps(origin, sort_keys=True)] = origin
    return [found[text] for text in sorted(found)]


def markdown_table(*rows: Sequence[str]) -> str:
    """A Markdown table; the first row is its heading."""
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def write(out: pathlib.Path, study: dict[str, Any], figure: Figure, table: str) -> list[str]:
    """Writes study.json, study.png and study.md into `out`; returns their paths.

    study.md has a sentence for each of ``study["hypotheses"]``, the table, and a line for each of
    ``study["origins"]``.
    """
    sentences = "".join(f"* {found['sentence']}\n" for found in study["hypotheses"])
    measured = "".join(
        f"* commit {found['commit']}, {found['cpu']}, jax {found['versions']['jax']}\n"
        for found in study["origins"]
    )
    write_whole(out / "study.json", json.dumps(study, indent=1, sort_keys=True) + "\n")
    write_whole(
        out / "study.md",
        f"# fp8rl study {study['study']}\n\n{sentences}\n{table}\nMeasured at:\n\n{measured}",
    )
    figure.savefig(out / "study.png")
    return [str(out / name) for name in ("study.json", "study.md", "study.png")]
