"""Makes reStructuredText of the library's docstrings, and links the types in them.

Docstrings are plain text in Google style with code in single backticks: bars and letters right
after a backtick mean themselves there.
"""

from __future__ import annotations

import re
from typing import Any

from sphinx.util.nodes import make_refnode

_CODE = re.compile(r"(``.+?``|`.+?`)", re.S)


def escaped(text: str) -> str:
    """A docstring in which reStructuredText finds no substitutions and no unfinished code."""
    parts = _CODE.split(text)  # outside, code, outside, ...
    for i, part in enumerate(parts):
        if i % 2:
            continue
        joined = i and part[:1].isalnum()
        parts[i] = "\\ " * bool(joined) + part.replace("|", r"\|")
    return "".join(parts)


def _process(app, what, name: str, value, options, lines: list[str]) -> None:
    if "::\n" in "\n".join(lines) or "===" in "\n".join(lines):
        return  # a literal block or a table, where nothing may be escaped
    lines[:] = escaped("\n".join(lines)).split("\n")


def _skip(app, what, name: str, value: Any, skip: bool, options) -> bool | None:
    """Leaves out fields of a NamedTuple, which the class's own text explains, and what a decorator
    of another library adds."""
    field = (getattr(value, "__doc__", None) or "").startswith("Alias for field number")
    return True if field or name == "replace" else None


def _link(app, env, node, contnode):
    """Links a class by its last name, wherever in the library it is defined or imported."""
    name = node["reftarget"].rpartition(".")[2]
    if node.get("refdomain") != "py":
        return None
    found = [
        (entry.docname, entry.node_id)
        for full, entry in env.domains.python_domain.objects.items()
        if full.rpartition(".")[2] == name
        and entry.objtype in ("class", "exception")
        and not entry.aliased
    ]
    if len(found) != 1:
        return None
    return make_refnode(app.builder, node["refdoc"], *found[0], contnode)


def setup(app) -> dict:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _process, priority=400)  # napoleon comes after it
    app.connect("autodoc-skip-member", _skip)
    app.connect("missing-reference", _link)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
