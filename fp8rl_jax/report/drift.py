"""Renders a drift analysis (drift.json of `fp8rl drift` or of the run) as a section of a page."""

from __future__ import annotations

import os
import pathlib
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.json_file import read_json
from fp8rl_jax.report.html import render, write_page
from fp8rl_jax.report.metrics import DRIFT_MAX, DRIFT_MEAN
from fp8rl_jax.report.plots import COLOURS, Panel, draw_panel, label_text, lines_panel, whole_ticks
from fp8rl_jax.report.summary import number, share
from fp8rl_jax.report.verdicts import LONGEST, NAME

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_OPERATIONS = 500
_MOST_LAYERS = 10_000


def drift_section(directory: pathlib.Path) -> Markup:
    """Returns the section for `directory`/drift.json; empty if there is no such file.

    Raises:
      UserError: the file is damaged.
    """
    if not os.path.isfile(directory / NAME):
        return Markup()
    try:
        return _section(read_json(directory / NAME, LONGEST))
    except OSError as error:
        raise UserError(f"{str(directory / NAME)!r} cannot be read ({error.strerror})") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{str(directory / NAME)!r} is damaged ({error}); remove it") from error


def write_drift_page(directory: pathlib.Path) -> pathlib.Path:
    """Writes directory/drift.html from its drift.json, atomically, and returns the path."""
    return write_page(
        directory / "drift.html", f"Drift of {directory.resolve().name}", drift_section(directory)
    )


def _section(result: dict) -> Markup:
    verdict = result["verdict"]
    plotted = [(_of_tokens(result), "Each length is the shortest of its group.")]
    if result.get("by_operation"):
        caption = (
            "First: operations that give other results from equal inputs, and what each adds. "
            "Second: what is left of the drift with the rollout's values in one layer; dashed: "
            "without them."
        )
        plotted.append((_of_causes(result), caption))
    if any(row["differ"] for row in result["operations"]):
        caption = "Relative difference of every value, from the first layer to the last."
        plotted.append(([_of_values(result["operations"])], caption))
    return render(
        "drift.html",
        earlier=[(_of_step(step), step["sentence"]) for step in result.get("earlier", [])],
        of_step=_of_step(result),
        sentence=verdict["sentence"],
        advice=verdict["advice"],
        figures=headline(result["headline"], result["logits"]),
        plotted=plotted,
        worst=[
            [
                *(row[name] for name in ("before", "token", "row", "slot")),
                f"{row['rollout_logp']:.3f}",
                f"{row['difference']:+.3g}",
            ]
            for row in result["worst"]
        ],
    )


def _of_step(result: dict) -> str:
    """Returns a sentence that says which step or questions were analysed."""
    if "step" in result:
        return f"RL step {result['step']}, run again from its own weights and questions:"
    source = result.get("source", "a sample of its own")
    return f"An analysis of {source}, which says nothing of the steps above:"


def headline(head: dict, logits: dict | None) -> list[tuple[str, str]]:
    """Returns (figure, value) of an analysis' headline and its comparison of logits, as text."""
    rows = [
        ("Tokens compared", number(head["drift_tokens"])),
        ("Max |Δlogp|", exact(head[DRIFT_MAX])),
        ("Mean |Δlogp|", exact(head[DRIFT_MEAN])),
        ("Bit-equal log-probs", share(head["logprob_equal_frac"])),
        ("token_mult_prob_error", f"{head['token_mult_prob_error']:.7g}"),
        ("mismatch_kl", exact(head["mismatch_kl"])),
        ("tis_clipfrac", exact(head["tis_clipfrac"])),
    ]
    if logits is not None:
        rows.append(("Max difference of a logit, full vocabulary", exact(logits["max"])))
    return rows


def exact(value: float) -> str:
    """Formats a number so that 0 differs from values that round to 0."""
    return "0 exactly" if value == 0 else f"{value:.3g}"


def _of_tokens(result: dict) -> list[Panel]:
    panels = (
        ("by_slot", "slot", "slot of the response"),
        ("by_length", "from", "length of the sequence"),
        ("by_row", "row", "row of the batch"),
    )
    drawn = []
    for key, x, label in panels:
        places = np.array([row[x] for row in result[key]])
        lines = [
            (statistic, places, np.array([row[statistic] for row in result[key]]))
            for statistic in ("max", "mean")
        ]
        drawn.append(lines_panel(f"|Δlogp|, nats, by {label}", lines, label))
    return [panel for panel in drawn if panel]


def _of_causes(result: dict) -> list[Panel]:
    operations = result["by_operation"][:12][::-1]
    layers = result["by_layer"]

    def adds(ax: Axes) -> None:
        names = [label_text(row["op"]) for row in operations]
        ax.barh(names, [row["adds"] for row in operations], color=COLOURS[0])
        ax.grid(False, axis="y")
        ax.set_xlabel("adds to mean |Δlogp|")

    def left(ax: Axes) -> None:
        heights = [row["left"] for row in layers]
        ax.bar([row["layer"] for row in layers], heights, color=COLOURS[1])
        ax.axhline(result["drift_without_swaps"], color="#444444", lw=1.1, ls="--")
        whole_ticks(ax)
        ax.set_xlabel("layer")

    return [
        draw_panel("What an operation adds", adds),
        draw_panel("Mean |Δlogp| that is left", left),
    ]


def _of_values(operations: list[dict]) -> Panel:
    """Draws a map: operations from top to bottom, layers from left to right; blank is bit-equal."""
    rows = [row for row in operations if row["layer"] is not None]
    names = list(dict.fromkeys(row["op"] for row in rows))
    layers = max(row["layer"] for row in rows) + 1
    if len(names) > _MOST_OPERATIONS or not 0 < layers <= _MOST_LAYERS:
        raise ValueError(f"{len(names)} operations in {layers} layers")
    grid = np.full((len(names), layers), np.nan)
    for row in rows:
        if row["differ"]:
            grid[names.index(row["op"]), row["layer"]] = row["relative"] or np.nan
    ends = np.nanmin(grid, initial=1.0), np.nanmax(grid, initial=1e-9)

    def draw(ax: Axes) -> None:
        from matplotlib.colors import LogNorm

        image = ax.imshow(
            grid,
            aspect="auto",
            cmap="viridis_r",
            norm=LogNorm(min(ends), max(ends)),
            interpolation="none",
        )
        ax.set_yticks(range(len(names)), map(label_text, names))
        whole_ticks(ax)
        ax.set_xlabel("layer")
        ax.grid(False)
        ax.figure.colorbar(image, ax=ax)

    return draw_panel(
        "Relative difference (blank: equal bits)", draw, height=0.17 * len(names) + 0.8
    )
