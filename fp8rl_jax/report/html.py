"""Pages from the templates beside this file; every text that they are given is shown as it is."""

from __future__ import annotations

import json
import pathlib

import jinja2
from markupsafe import Markup

from fp8rl_jax.base.errors import visible
from fp8rl_jax.base.whole_file import write_whole

_LONGEST = 100_000  # characters of a cell or of the configuration


def _shown(value: object) -> str:
    """What a template writes for a value, before HTML's own characters are escaped: text or JSON,
    control characters and marks of direction made visible, its middle left out where it is longer
    than a page can show. Markup is of a template, and stays."""
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
    """What one of the templates makes of the values."""
    return Markup(_TEMPLATES.get_template(template).render(values))


def write_page(path: pathlib.Path, title: str, body: Markup) -> pathlib.Path:
    """Writes a page, whole or not at all, and returns its path; `title` is its heading too."""
    write_whole(path, render("page.html", title=title, body=body))
    return path
