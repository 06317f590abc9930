"""Markdown of the table of metrics (fp8rl_jax/report/metrics.py), file by file."""

from __future__ import annotations

from fields import row

from fp8rl_jax.report.metrics import FILES, SECTIONS

_HEADINGS = {
    "metrics": "metrics.jsonl: RL steps",
    "sft": "sft.jsonl: supervised fine-tuning",
    "eval": "eval.jsonl: evaluations",
    "samples": "samples.jsonl: transcripts",
    "rewards": "rewards.jsonl: rewards of an RL step",
    "digests": "digests.jsonl: what an RL step computed",
}


def table(_: str = "") -> str:
    """A section with a table for each file of a run."""
    lines = []
    headings = {metric: name for name, (_, section) in SECTIONS.items() for metric in section}
    for file, metrics in FILES.items():
        lines += [f"## {_HEADINGS[file]}", "", row("key", "unit", "meaning"), row(*["---"] * 3)]
        for metric in metrics:
            notes = [f"only with {metric.when}"] * bool(metric.when)
            if metric.panel:
                notes.append(f"plotted under “{headings[metric]}”")
            meaning = metric.meaning + "<br>" * bool(notes) + "; ".join(notes)
            lines.append(row(f"`{metric.name}`", metric.unit, meaning))
        lines.append("")
    return "\n".join(lines)
