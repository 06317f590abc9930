"""Writes an analysis as files, and prints it as tables."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fp8rl_jax.base.whole_file import write_whole
from fp8rl_jax.report import write_drift_page, write_report
from fp8rl_jax.report.drift import exact, headline
from fp8rl_jax.report.verdicts import NAME, step_verdicts

_SHOWN = 8


def write_json(result: dict, directory: pathlib.Path) -> pathlib.Path:
    """Writes directory/drift.json atomically and returns its path. Verdicts of the old file on
    other steps of the run are kept under 'earlier'."""
    step = result.get("step")
    earlier = [found for found in step_verdicts(directory) if found["step"] != step]
    write_whole(directory / NAME, json.dumps(result | {"earlier": earlier}, indent=1) + "\n")
    return directory / NAME


def write_analysis(result: dict, directory: pathlib.Path) -> list[pathlib.Path]:
    """Writes drift.json, drift.html and, for a run, a new report.html; returns their paths.

    Raises:
      OSError: the directory cannot be written.
    """
    paths = [write_json(result, directory), write_drift_page(directory)]
    if (directory / "config.json").is_file():
        paths.append(write_report(directory))
    return paths


def print_analysis(result: dict) -> None:
    """Prints headline, verdict, and the operations, layers and tokens with the largest drift."""
    console = Console(highlight=False)
    verdict = result["verdict"]
    figures = headline(result["headline"], result["logits"])
    _print_table(console, "Drift, learner against rollout", ("figure", "value"), figures)
    console.print(f"\n[bold]{verdict['culprit']}[/]", end=": ")
    console.print(verdict["sentence"], markup=False, soft_wrap=True)
    console.print(f"What to do: {verdict['advice']}.", markup=False, soft_wrap=True)
    console.print(f"Products: {result['products']['sentence']}.", markup=False, soft_wrap=True)
    if result["tapped_programs"] > 1:
        hidden = ", ".join(result["unobservable"]) or "none"
        console.print(
            f"Tapping everything at once changed the bits, so values were tapped in "
            f"{result['tapped_programs']} programs; not observable: {hidden}.",
            markup=False,
            soft_wrap=True,
        )
    operations = result.get("by_operation", [])
    more = len(operations) - _SHOWN
    _print_table(
        console,
        "Operations that give other results from equal inputs",
        ("operation", "layers", "relative difference", "adds to mean |dlogp|"),
        [
            *(
                (row["op"], _span(row["layers"]), f"{row['local']:.2g}", f"{row['adds']:.3g}")
                for row in operations[:_SHOWN]
            ),
            *([(f"and {more} more",)] if more > 0 else []),
        ],
    )
    whole = result.get("drift_without_swaps", 0.0)
    layers = sorted(result.get("by_layer", []), key=lambda row: row["left"])
    _print_table(
        console,
        f"Of mean |dlogp| {whole:.3g}, what is left with the rollout's values in one layer",
        ("layer", "left"),
        [(str(row["layer"]), exact(row["left"])) for row in layers[:_SHOWN]],
    )
    _print_table(
        console,
        "Worst tokens",
        ("after", "token", "row", "slot", "logp of rollout", "dlogp"),
        [
            (
                escape(repr(row["before"])),
                escape(repr(row["token"])),
                str(row["row"]),
                str(row["slot"]),
                f"{row['rollout_logp']:.3f}",
                f"{row['difference']:+.3g}",
            )
            for row in result["worst"][:_SHOWN]
        ],
    )


def _print_table(
    console: Console, title: str, columns: Sequence[str], rows: Sequence[tuple[str, ...]]
) -> None:
    """Prints a table, unless it is empty."""
    if not rows:
        return
    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(f"\n[bold]{title}[/]")
    console.print(table)


def _span(layers: list[int]) -> str:
    return f"{layers[0]}" if len(layers) == 1 else f"{layers[0]}..{layers[-1]} ({len(layers)})"
