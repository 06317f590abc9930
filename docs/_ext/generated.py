"""Replaces a line `<!-- generated: NAME ARGUMENT -->` of a page by what is generated from the code."""

from __future__ import annotations

import re
from collections.abc import Callable

import api
import commands
import fields
import metrics
import results

# NAME -> function of ARGUMENT (possibly empty) that returns Markdown.
GENERATORS: dict[str, Callable[[str], str]] = {
    "api": api.package_page,
    "commands": commands.all_commands,
    "fields": fields.all_sections,
    "metrics": metrics.table,
    "results": results.table,
}
MARK = re.compile(r"^<!-- generated: (\w+) ?([\w.]*) -->$", re.M)


def generate(text: str) -> str:
    """The page's Markdown with every mark replaced."""
    return MARK.sub(lambda mark: GENERATORS[mark[1]](mark[2]), text)


def _read(app, name: str, source: list[str]) -> None:
    source[0] = generate(source[0])


def setup(app) -> dict:
    """Called by Sphinx."""
    app.connect("source-read", _read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
