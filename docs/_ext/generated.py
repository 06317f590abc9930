"""Changes pages as they are read.

A line `<!-- generated: NAME ARGUMENT -->` becomes what is generated from the code. A link whose
text is the name of a page, `[data.md](data.md)`, gets that page's title as text. Links to
README.md, CONTRIBUTING.md and CHANGELOG.md lead to their pages.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import api
import combinations
import commands
import fields
import metrics
import results

# NAME -> function of ARGUMENT (possibly empty) that returns Markdown.
GENERATORS: dict[str, Callable[[str], str]] = {
    "api": api.package_page,
    "combinations": combinations.table,
    "needs": combinations.needs,
    "commands": commands.all_commands,
    "fields": fields.all_sections,
    "metrics": metrics.table,
    "names": fields.other_names,
    "results": results.table,
}
MARK = re.compile(r"^<!-- generated: (\w+) ?([\w.]*) -->$", re.M)

_ROOT_FILE = re.compile(r"\]\((?:\.\./)+(README|CONTRIBUTING|CHANGELOG)\.md(?:#[\w-]+)?\)")
_ROOT_PAGES = {"README": "index", "CONTRIBUTING": "contributing", "CHANGELOG": "changelog"}
_NAMED = re.compile(r"\[[\w/]+\.md\]\(([\w/.]+\.md(?:#[\w-]+)?)\)")


def generate(text: str) -> str:
    """The page's Markdown with generated parts, and links as the site needs them."""
    text = MARK.sub(lambda mark: GENERATORS[mark[1]](mark[2]), text)
    text = _ROOT_FILE.sub(lambda link: f"](/{_ROOT_PAGES[link[1]]}.md)", text)
    return _NAMED.sub(r"[](\1)", text)


def _read(app, name: str, source: list[str]) -> None:
    source[0] = generate(source[0])


def setup(app) -> dict:
    """Called by Sphinx."""
    app.connect("source-read", _read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
