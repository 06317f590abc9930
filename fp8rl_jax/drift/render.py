"""An analysis as tables for a terminal, and as files."""

from __future__ import annotations

import json
import os
import pathlib

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fp8rl_jax.report import write_drift_page, write_report
from fp8rl_jax.report.drift import NAME, exact, headline

_SHOWN = 8


def write_json(result: dict, directory: pathlib.Path) -> pathlib.Path:
    """Writes directory/drift.json, whole or not at all, and returns its path."""
    temporary = directory / f".drift.json.{os.getpid()}.tmp"
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(temporary, directory / NAME)
    return directory / NAME


def write_analysis(result: dict, directory: pathlib.Path) -> list[pathlib.Path]:
    """Writes drift.json and drift.html, and the report again where the directory is a run's.

    Raises:
      OSError: the directory cannot be written.
    """
    paths = [write_json(result, directory), write_drift_page(directory)]
    if (directory / "config.json").is_file():
        paths.append(write_report(directory))
    return paths


def print_analysis(result: dict, console: Console | None = None) -> None:
    """Prints headline, verdict and, where something differs, what adds how much."""
    console = console or Console(highlight=False)
    verdict, head = result["verdict"], result["headline"]
    _print(console, "Drift, learner against rollout", _headline(head, result["logits"]))
    console.print(f"\n[bold]{verdict['culprit']}[/]", end=": ")
    console.print(verdict["sentence"], markup=False, soft_wrap=True)
    console.print(f"What to do: {verdict['advice']}.", markup=False, soft_wrap=True)
    if result["tapped_programs"] > 1:
        hidden = ", ".join(result["unobservable"]) or "none"
        console.print(
            f"Tapping everything at once changed the bits, so values were tapped in "
            f"{result['tapped_programs']} programs; not observable: {hidden}.",
            markup=False, soft_wrap=True,
        )  # fmt: skip
    _print(console, "Operations that give other results from equal inputs", _operations(result))
    whole = result.get("drift_without_swaps", 0.0)
    title = f"Of mean |dlogp| {whole:.3g}, what is left with the rollout's values in one layer"
    _print(console, title, _layers(result))
    _print(console, "Worst tokens", _worst(result))


def _print(console: Console, title: str, table: Table | None) -> None:
    if table is not None:
        console.print(f"\n[bold]{title}[/]")
        console.print(table)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _headline(head: dict, logits: dict | None) -> Table:
    table = _table("figure", "value")
    for row in headline(head, logits):
        table.add_row(*row)
    return table


def _operations(result: dict) -> Table | None:
    found = result.get("by_operation")
    if not found:
        return None
    table = _table("operation", "layers", "relative difference", "adds to mean |dlogp|")
    for row in found[:_SHOWN]:
        layers = row["layers"]
        span = f"{layers[0]}" if len(layers) == 1 else f"{layers[0]}..{layers[-1]} ({len(layers)})"
        table.add_row(row["op"], span, f"{row['local']:.2g}", f"{row['adds']:.3g}")
    if len(found) > _SHOWN:
        table.add_row(f"and {len(found) - _SHOWN} more")
    return table


def _layers(result: dict) -> Table | None:
    found = result.get("by_layer")
    if not found:
        return None
    table = _table("layer", "left")
    for row in sorted(found, key=lambda row: row["left"])[:_SHOWN]:
        table.add_row(str(row["layer"]), exact(row["left"]))
    return table


def _worst(result: dict) -> Table | None:
    if not result["worst"]:
        return None
    table = _table("after", "token", "row", "slot", "logp of rollout", "dlogp")
    for row in result["worst"][:_SHOWN]:
        table.add_row(
            *(escape(repr(row[key])) for key in ("before", "token")),
            *(str(row[key]) for key in ("row", "slot")),
            f"{row['rollout_logp']:.3f}", f"{row['difference']:+.3g}",
        )  # fmt: skip
    return table
