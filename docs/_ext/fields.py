"""Markdown of all fields of a configuration (fp8rl_jax/config/fields.py), section by section."""

from __future__ import annotations

import re

from fp8rl_jax.config import FIELDS
from fp8rl_jax.config.names import MEANT


def row(*cells: str) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def all_sections(_: str = "") -> str:
    """A section with a table for each section of the configuration."""
    lines = []
    for section, entries in FIELDS.items():
        lines += [f"## {section}", "", row("field", "default", "meaning"), row(*["---"] * 3)]
        for name, field in entries.items():
            default = "none" if field.is_free else f"`{field.default!r}`"
            meaning = plain(field.meaning)
            for option, text in field.options.items():
                meaning += f"<br>`{option}` {plain(text)}"
            if field.choices:
                meaning += "<br>One of " + ", ".join(f"`{choice!r}`" for choice in field.choices)
            if field.bounds:
                meaning += f"<br>{str(field.bounds).capitalize()}"
            if field.needs:
                meaning += "<br>Needs " + ", and ".join(f"`{need}`" for need in field.needs)
            lines.append(row(f"`{section}.{name}`", default, meaning))
        lines.append("")
    return "\n".join(lines)


def other_names(_: str = "") -> str:
    """A table of other libraries' names, and the fields that they stand for."""
    by_field: dict[str, list[str]] = {}
    for name, field in MEANT.items():
        by_field.setdefault(field, []).append(f"`{name}`")
    lines = [row("field", "other names"), row("---", "---")]
    lines += [row(f"`{field}`", ", ".join(by_field[field])) for field in sorted(by_field)]
    return "\n".join(lines) + "\n"


def plain(text: str) -> str:
    """Text in which Markdown finds no markup but code in backticks; options become code."""
    text = re.sub(r"(?<![`\w-])(--[\w.=-]*\w)(?!`)", r"`\1`", text)
    parts = re.split(r"(``.+?``|`.+?`)", text)  # outside, code, outside, ...
    parts[::2] = [re.sub(r"([\\`*_\[\]<>{}#])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)
