"""A drift analysis (`drift.json`, of `fp8rl drift` or of the run itself) as a section of a page."""

from __future__ import annotations

import os
import pathlib

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.json_file import read_json
from fp8rl_jax.report.html import (
    COLOURS,
    draw_line,
    figure_html,
    label_text,
    panels_of,
    table_html,
    text_html,
    write_page,
)
from fp8rl_jax.report.summary import number, share
from fp8rl_jax.report.verdicts import LONGEST, NAME

_MOST_OPERATIONS, _MOST_LAYERS = 500, 10_000


def drift_section(directory: pathlib.Path) -> str:
    """The section for `directory`/drift.json; empty where there is none.

    Raises:
      UserError: the file is damaged.
    """
    if not os.path.isfile(directory / NAME):
        return ""
    try:
        return _section(read_json(directory / NAME, LONGEST))
    except OSError as error:
        raise UserError(f"{str(directory / NAME)!r} cannot be read ({error.strerror})") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{str(directory / NAME)!r} is damaged ({error}); remove it") from error


def write_drift_page(directory: pathlib.Path) -> pathlib.Path:
    """Writes directory/drift.html from its drift.json, atomically, and returns the path."""
    title = f"Drift of {directory.resolve().name}"
    return write_page(directory / "drift.html", title, drift_section(directory))


def _section(result: dict) -> str:
    verdict, head = result["verdict"], result["headline"]
    parts = [
        f"<p>{text_html(_of_step(found))}</p><p>{text_html(found['sentence'])}</p>"
        for found in result.get("earlier", [])
    ]
    advice = f"What to do: {verdict['advice']}."
    parts += [
        f"<p>{text_html(_of_step(result))}</p>"
        f'<p class="lead">{text_html(verdict["sentence"])}</p><p>{text_html(advice)}</p>',
        table_html(("Figure", "Value"), headline(head, result["logits"])),
        figure_html(_plot_tokens(result), "Drift by place in the response, by length, and by row."),
    ]
    if result.get("by_operation"):
        caption = (
            "Left: operations that give other results from equal inputs, and what each adds. "
            "Right: what is left of the drift with the rollout's values in one layer."
        )
        parts.append(figure_html(_plot_causes(result), caption))
    if any(row["differ"] for row in result["operations"]):
        caption = "Relative difference of every value, from the first layer to the last."
        parts.append(figure_html(_plot_values(result["operations"]), caption))
    if result["worst"]:
        rows = [
            (w["before"], w["token"], w["row"], w["slot"], f"{w['rollout_logp']:.3f}",
             f"{w['difference']:+.3g}")
            for w in result["worst"]
        ]  # fmt: skip
        titles = ("After", "Token", "Row", "Slot", "Log-prob of the rollout", "Difference")
        parts.append(table_html(titles, rows, "", "<pre>{}</pre>"))
    return "".join(parts)


def _of_step(result: dict) -> str:
    """What an analysis is of."""
    if "step" in result:
        return f"RL step {result['step']}, run again from its own weights and questions:"
    source = result.get("source", "a sample of its own")
    return f"An analysis of {source}, which says nothing of the steps above:"


def headline(head: dict, logits: dict | None) -> list[tuple[str, str]]:
    """(figure, value) of an analysis' headline and its comparison of logits, as text."""
    rows = [
        ("Tokens compared", number(head["drift_tokens"])),
        ("Max |Δlogp|", exact(head["train_rollout_logprob_abs_diff_max"])),
        ("Mean |Δlogp|", exact(head["train_rollout_logprob_abs_diff"])),
        ("Bit-equal log-probs", share(head["logprob_equal_frac"])),
        ("token_mult_prob_error", f"{head['token_mult_prob_error']:.7g}"),
        ("mismatch_kl", exact(head["mismatch_kl"])),
        ("tis_clipfrac", exact(head["tis_clipfrac"])),
    ]
    if logits is not None:
        rows.append(("Max difference of a logit, full vocabulary", exact(logits["max"])))
    return rows


def exact(value: float) -> str:
    """A number as text that tells 0 from what rounds to it."""
    return "0 exactly" if value == 0 else f"{value:.3g}"


def _plot_tokens(result: dict) -> Figure:
    figure, axes = panels_of(3, 3.0)
    panels = (
        ("by_slot", "slot", "Response slot"),
        ("by_length", "from", "Length of the sequence, from"),
        ("by_row", "row", "Row of the batch"),
    )
    for ax, (key, x, label) in zip(axes, panels, strict=True):
        rows = result[key]
        for index, statistic in enumerate(("max", "mean")):
            values = np.array([row[statistic] for row in rows])
            steps = np.array([row[x] for row in rows])
            draw_line(ax, steps, values, index, label=statistic)
        ax.set_xlabel(label)
        ax.set_title("|Δlogp|, nats", loc="left", fontsize=10.5)
        ax.legend(framealpha=0.8, edgecolor="none", fontsize=8)
    return figure


def _plot_causes(result: dict) -> Figure:
    figure, (left, right) = panels_of(2, 4.2)
    found = result["by_operation"][:12][::-1]
    left.barh(
        [label_text(row["op"]) for row in found], [row["adds"] for row in found], color=COLOURS[0]
    )
    left.tick_params(labelsize=8)
    left.set_xlabel("adds to mean |Δlogp|")
    layers = result["by_layer"]
    right.bar([row["layer"] for row in layers], [row["left"] for row in layers], color=COLOURS[1])
    right.axhline(result["drift_without_swaps"], color="#444444", lw=1.1, ls="--")
    right.set_xlabel("layer")
    right.set_title("mean |Δlogp| left; dashed: no swap", loc="left", fontsize=10.5)
    return figure


def _plot_values(operations: list[dict]) -> Figure:
    """A map: operations from top to bottom, layers from left to right; white is bit-equal."""
    rows = [row for row in operations if row["layer"] is not None]
    names = list(dict.fromkeys(row["op"] for row in rows))
    layers = max(row["layer"] for row in rows) + 1
    if len(names) > _MOST_OPERATIONS or not 0 < layers <= _MOST_LAYERS:
        raise ValueError(f"{len(names)} operations in {layers} layers")
    grid = np.full((len(names), layers), np.nan)
    for row in rows:
        if row["differ"]:
            grid[names.index(row["op"]), row["layer"]] = row["relative"] or np.nan
    figure, (ax,) = panels_of(1, 0.24 * len(names) + 1.2)
    low, high = np.nanmin(grid, initial=1.0), np.nanmax(grid, initial=1e-9)
    norm = LogNorm(min(low, high), max(low, high))
    image = ax.imshow(grid, aspect="auto", cmap="viridis", norm=norm, interpolation="none")
    ax.set_yticks(range(len(names)), map(label_text, names), fontsize=8)
    ax.set_xlabel("layer")
    ax.grid(False)
    figure.colorbar(image, ax=ax, label="relative difference (white: equal bits)")
    return figure
