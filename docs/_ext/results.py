"""Markdown of the list of measurements (docs/results.toml)."""

from __future__ import annotations

import pathlib
import tomllib

from fields import row

FILE = pathlib.Path(__file__).parents[1] / "results.toml"
FIELDS = ("name", "page", "command", "measures", "commit", "cpu", "jax", "date")


def results() -> list[dict]:
    """The entries of docs/results.toml, with `FIELDS` each."""
    return tomllib.loads(FILE.read_text())["result"]


def table(_: str = "") -> str:
    """A row for each result, newest first; its command below its name."""
    lines = [row("result and command", "made on"), row("---", "---")]
    for result in sorted(results(), key=_date, reverse=True):
        name, page, command = (result[key] for key in ("name", "page", "command"))
        link = name if page.startswith("..") else f"[{name}](../{page})"
        commit, cpu, jax, date = (result[key] for key in ("commit", "cpu", "jax", "date"))
        made_on = f"{date}, commit {commit}<br>CPU {cpu}<br>jax {jax}"
        lines.append(row(f"{link}<br>`{command}`", made_on))
    return "\n".join(lines)


def _date(result: dict) -> str:
    """What sorts results by date; those without one come last in reverse order."""
    return result["date"] if result["date"][0].isdigit() else ""
