"""Writes pages from the templates in this folder. Every value is escaped, so it shows as text."""

from __future__ import annotations

import json
import pathlib

import jinja2
from markupsafe import Markup

from fp8rl_jax.base.errors import visible
from fp8rl_jax.base.whole_file import write_whole

_LONGEST = 100_000  # most characters of a value on a page


def _shown(value: object) -> str:
    """Returns the text of a value before HTML is escaped: the value or its JSON, with control
    characters and marks of direction made visible, and without its middle if it is too long. Markup
    (of a template) is unchanged."""
    if isinstance(value, Markup):
        return value
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) > _LONGEST:
        half = _LONGEST // 2
        left_out = f"\n[... {len(text) - 2 * half:,} characters left out ...]\n"
        text = text[:half] + left_out + text[-half:]
    return visible(text)


_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("fp8rl_jax.report"),
    autoescape=True,
    finalize=_shown,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render(template: str, **values) -> Markup:
    """Fills a template with the values."""
    return Markup(_TEMPLATES.get_template(template).render(values))


def write_page(path: pathlib.Path, title: str, body: Markup) -> pathlib.Path:
    """Writes a page atomically and returns its path; `title` is also its heading."""
    write_whole(path, render("page.html", title=title, body=body))
    return path
