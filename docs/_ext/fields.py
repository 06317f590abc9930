"""Markdown of all fields of a configuration (fp8rl_jax/config/fields.py), section by section."""

from __future__ import annotations

from fp8rl_jax.config import FIELDS


def row(*cells: str) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def all_sections(_: str = "") -> str:
    """A section with a table for each section of the configuration."""
    lines = []
    for section, entries in FIELDS.items():
        lines += [f"## {section}", ""]
        lines += [row("field", "default", "meaning", "values"), row(*["---"] * 4)]
        for name, field in entries.items():
            default = "none" if field.is_free else f"`{field.default!r}`"
            values = ", ".join(f"`{choice!r}`" for choice in field.choices) or _kind(field)
            lines.append(row(f"`{section}.{name}`", default, plain(field.meaning), values))
        lines.append("")
    return "\n".join(lines)


def _kind(field) -> str:
    """What a field without a closed set of values holds."""
    if field.is_free:
        return "options by name"
    kinds = {bool: "boolean", int: "whole number", float: "number", str: "text"}
    return kinds[type(field.default)]


def plain(text: str) -> str:
    """Text in which Markdown finds no markup."""
    for character in "\\`*_[]<>{}#":
        text = text.replace(character, "\\" + character)
    return text
