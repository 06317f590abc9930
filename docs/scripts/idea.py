"""Draws docs/idea.png: one forward function, its two callers, and the refit between them."""

from __future__ import annotations

import pathlib

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#444444"


def box(axes, x: float, y: float, width: float, height: float, colour: str, *lines: str) -> None:
    """A rounded box with its first line in bold."""
    style = "round,pad=0.02,rounding_size=0.12"
    box = FancyBboxPatch((x, y), width, height, boxstyle=style, lw=1.6, ec=colour, fc="white")
    axes.add_patch(box)
    first, *others = lines
    step = 0.3
    top = y + height / 2 + step * len(others) / 2
    axes.text(x + width / 2, top, first, ha="center", va="center", weight="bold", fontsize=12)
    for index, line in enumerate(others, 1):
        axes.text(x + width / 2, top - step * index, line, ha="center", va="center", fontsize=10)


def arrow(axes, start, end, text: str, place, colour: str = GREY) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "lw": 1.6, "color": colour})
    axes.text(*place, text, ha="center", va="center", fontsize=9.5, color=colour)


def draw(target: pathlib.Path) -> None:
    """Writes the picture as a PNG file."""
    figure = Figure(figsize=(9, 3.7), layout="constrained", facecolor="white")
    axes = figure.subplots()
    axes.set_xlim(0, 10)
    axes.set_ylim(0, 4.1)
    axes.axis("off")
    box(axes, 3.55, 2.75, 2.9, 1.15, BLUE, "forward", "one model function,", "one FP8 quantiser")
    box(
        axes,
        0.2,
        0.45,
        2.9,
        1.15,
        ORANGE,
        "sampler",
        "prefill and decode;",
        "records log p of each token",
    )
    box(
        axes,
        6.9,
        0.45,
        2.9,
        1.15,
        ORANGE,
        "learner",
        "GRPO train step;",
        "computes log p of each token",
    )
    arrow(axes, (2.2, 1.68), (3.7, 2.7), "calls", (2.6, 2.35))
    arrow(axes, (7.8, 1.68), (6.3, 2.7), "calls", (7.4, 2.35))
    arrow(axes, (3.15, 1.3), (6.85, 1.3), "responses, log p", (5.0, 1.47))
    arrow(axes, (6.85, 0.75), (3.15, 0.75), "refit: quantised weights", (5.0, 0.92))
    axes.text(
        5.0, 0.18, "difference of the two log p: exactly 0", ha="center", fontsize=11, weight="bold"
    )
    FigureCanvasAgg(figure)
    figure.savefig(target, dpi=150)


if __name__ == "__main__":
    draw(pathlib.Path(__file__).parents[1] / "idea.png")
