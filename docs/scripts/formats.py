"""Draws docs/concepts/formats.png: the bits of the number formats, and the blocks of `fp8`."""

from __future__ import annotations

import pathlib

from idea import BLUE, GREY, ORANGE
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

# Name -> exponent bits, mantissa bits, what a row says.
_FORMATS = {
    "float32": (8, 23, "largest 3.4e38"),
    "bf16": (8, 7, "largest 3.4e38"),
    "E4M3": (4, 3, "largest 448"),
    "E5M2": (5, 2, "largest 57,344"),
}


def _bits(axes) -> None:
    for row, (name, (exponent, mantissa, text)) in enumerate(_FORMATS.items()):
        y = -row * 1.4
        axes.text(-1, y + 0.5, name, ha="right", va="center", weight="bold", fontsize=11)
        for bit in range(1 + exponent + mantissa):
            colour = GREY if bit == 0 else ORANGE if bit <= exponent else BLUE
            axes.add_patch(Rectangle((bit, y), 1, 1, fc=colour, ec="white", lw=0.8))
        axes.text(1 + exponent + mantissa + 0.4, y + 0.5, text, va="center", fontsize=10)
    for x, colour, text in ((0, GREY, "sign"), (5, ORANGE, "exponent"), (13, BLUE, "mantissa")):
        axes.add_patch(Rectangle((x, -5.7), 0.85, 0.6, color=colour))
        axes.text(x + 1.2, -5.4, text, va="center", fontsize=10)
    axes.set_xlim(-7, 42)
    axes.set_ylim(-6, 1.6)
    axes.set_title("bits of a number", fontsize=12)


def _matrix(axes, x, y, rows, columns, cuts, title, lines) -> None:
    """A matrix cut into blocks; `cuts`: (rows, columns) of a block in the drawing's units."""
    height, width = cuts
    for i in range(round(rows / height)):
        for j in range(round(columns / width)):
            colour = BLUE if (i + j) % 2 else "#9ecae1"
            place = (x + j * width, y + rows - (i + 1) * height)
            axes.add_patch(Rectangle(place, width, height, fc=colour, ec="white", lw=0.8))
    axes.text(x + columns / 2, y + rows + 0.55, title, ha="center", weight="bold", fontsize=11)
    for row, text in enumerate(lines):
        axes.text(x + columns / 2, y - 0.6 - 0.6 * row, text, ha="center", fontsize=9.5)


def draw(target: pathlib.Path) -> None:
    """Writes the picture as a PNG file."""
    figure = Figure(figsize=(10, 3.4), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    left.axis("off")
    right.axis("off")
    _bits(left)
    lines = ("a row for each token;", "blocks of 1 x 128 features")
    _matrix(right, 0, 0, 3, 4, (0.375, 2), "activations", lines)
    lines = ("inputs x outputs;", "blocks of 128 x 128")
    _matrix(right, 6, 0, 4, 4, (2, 2), "weights", lines)
    right.set_xlim(-0.5, 10.5)
    right.set_ylim(-1.6, 5.2)
    right.set_title("recipe fp8: one scale for each block", fontsize=12)
    FigureCanvasAgg(figure)
    figure.savefig(target, dpi=150)


if __name__ == "__main__":
    draw(pathlib.Path(__file__).parents[1] / "concepts" / "formats.png")
