"""Markdown of what does not go together: needs of fields, and pairs of features."""

from __future__ import annotations

import re

from fields import plain, row

from fp8rl_jax.config import all_fields
from fp8rl_jax.config.combinations import PAIRS


def table(_: str = "") -> str:
    """A row for each pair of features."""
    lines = [row("feature", "with", "why not", "write instead"), row(*["---"] * 4)]
    for pair in PAIRS:
        problem = re.sub(r"\{.*?\}", "...", pair.problem)
        lines.append(row(*map(plain, (pair.one, pair.other, problem, pair.remedy))))
    return "\n".join(lines) + "\n"


def needs(_: str = "") -> str:
    """A row for each need of a field."""
    lines = [row("field", "needs", "because"), row(*["---"] * 3)]
    for path, field in all_fields().items():
        for need, reason in field.needs.items():
            lines.append(row(f"`{path}`", f"`{need}`".replace(" or ", "` or `"), plain(reason)))
    return "\n".join(lines) + "\n"
