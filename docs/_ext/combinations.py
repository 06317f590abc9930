"""Markdown of the table of features that do not work together (config/combinations.py)."""

from __future__ import annotations

from fields import plain, row

from fp8rl_jax.config.combinations import PAIRS


def table(_: str = "") -> str:
    """A row for each pair."""
    lines = [row("feature", "with", "why not", "write instead"), row(*["---"] * 4)]
    for pair in PAIRS:
        reason = pair.reason.format(one=pair.one)
        lines.append(row(*map(plain, (pair.one, pair.other, reason, pair.remedy))))
    return "\n".join(lines) + "\n"
