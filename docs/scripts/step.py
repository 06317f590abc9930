"""Draws docs/concepts/step.png: the parts of one RL step, in their order."""

from __future__ import annotations

import pathlib

from idea import BLUE, ORANGE, arrow, box
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_WIDTH, _HEIGHT = 2.5, 1.15
_PARTS = {  # (x, y) of the lower left corner -> colour and lines
    (0.2, 2.6): (ORANGE, "1  rollout", "a group of responses", "per question, with log p"),
    (3.4, 2.6): (ORANGE, "2  rewards", "one number", "per response"),
    (6.6, 2.6): (BLUE, "3  advantages", "reward minus the mean", "of its group, scaled"),
    (6.6, 0.45): (BLUE, "4  update", "loss, gradient, AdamW;", "log p of each token"),
    (3.4, 0.45): (BLUE, "5  compare", "log p of update and rollout:", "drift, in metrics.jsonl"),
    (0.2, 0.45): (ORANGE, "6  refit", "parameters quantised", "for the sampler"),
}
_ARROWS = (
    ((2.75, 3.175), (3.35, 3.175)),
    ((5.95, 3.175), (6.55, 3.175)),
    ((7.85, 2.53), (7.85, 1.68)),
    ((6.55, 1.025), (5.95, 1.025)),
    ((3.35, 1.025), (2.75, 1.025)),
    ((1.45, 1.68), (1.45, 2.53)),
)


def draw(target: pathlib.Path) -> None:
    """Writes the picture as a PNG file."""
    figure = Figure(figsize=(9, 4), layout="constrained", facecolor="white")
    axes = figure.subplots()
    axes.set_xlim(0, 9.3)
    axes.set_ylim(0.2, 4.0)
    axes.axis("off")
    for (x, y), (colour, *lines) in _PARTS.items():
        box(axes, x, y, _WIDTH, _HEIGHT, colour, *lines)
    for start, end in _ARROWS:
        arrow(axes, start, end, "", start)
    axes.text(1.6, 2.1, "next step", va="center", fontsize=9.5)
    FigureCanvasAgg(figure)
    figure.savefig(target, dpi=150)


if __name__ == "__main__":
    draw(pathlib.Path(__file__).parents[1] / "concepts" / "step.png")
