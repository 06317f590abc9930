"""Markdown of the table of metrics (fp8rl_jax/report/metrics.py), file by file."""

from __future__ import annotations

from fields import row

from fp8rl_jax.report.metrics import FILES

_HEADINGS = {
    "metrics": "metrics.jsonl: RL steps",
    "sft": "sft.jsonl: supervised fine-tuning",
    "eval": "eval.jsonl: evaluations",
    "samples": "samples.jsonl: transcripts",
}


def table(_: str = "") -> str:
    """A section with a table for each file of a run."""
    lines = []
    for file, metrics in FILES.items():
        lines += [f"## {_HEADINGS[file]}", ""]
        lines += [row("key", "unit", "meaning", "written if", "plotted under"), row(*["---"] * 5)]
        for metric in metrics:
            when = metric.when or "always"
            lines.append(row(f"`{metric.name}`", metric.unit, metric.meaning, when, metric.panel))
        lines.append("")
    return "\n".join(lines)
