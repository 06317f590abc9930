"""Prints the table of docs/recipes.md from finished runs, a row each.

for r in fp8_blockwise fp8_delayed mxfp8 fake bf16; do
  fp8rl train --config configs/tiny_arithmetic.py --config.run.dir=runs/$r \
    --config.precision.rollout=$r --config.precision.learner=$r
done
python docs/recipe_table.py runs/fp8_blockwise runs/fp8_delayed ...
"""

from __future__ import annotations

import pathlib
import sys

import numpy as np

from fp8rl_jax.metrics import read_jsonl
from fp8rl_jax.summary import summarise

_CLASSES = ("weights", "activations", "gradients", "kv")
_HEAD = ("run", "sampled", "greedy", "max drift", "equal", "saturated", "underflowed")


def _shares(metrics: list[dict], name: str) -> str:
    """Mean share over the steps for each operand class that has one, in parts per million."""
    parts = []
    for operand in _CLASSES:
        values = [m[f"{name}/{operand}"] for m in metrics if f"{name}/{operand}" in m]
        if values:
            parts.append(f"{operand[0]} {1e6 * np.mean(values):.0f}")
    return ", ".join(parts) or "-"


def row(run: pathlib.Path) -> tuple[str, ...]:
    """One run's cells: accuracies at warm-up end and RL end, drift, what quantisation lost."""
    summary = summarise(run)
    metrics, evaluations = read_jsonl(run / "metrics.jsonl"), read_jsonl(run / "eval.jsonl")
    before = [e for e in evaluations if e["phase"] == "warmup"][-1]
    after = [e for e in evaluations if e["phase"] == "rl"][-1]
    accuracies = (
        f"{before[f'accuracy_{kind}']:.3f} → {after[f'accuracy_{kind}']:.3f}"
        for kind in ("sampled", "greedy")
    )
    drift = max(m["train_rollout_logprob_abs_diff_max"] for m in metrics)
    tokens = sum(m["drift_tokens"] for m in metrics)
    equal = sum(m["logprob_equal_frac"] * m["drift_tokens"] for m in metrics) / tokens
    assert summary["sentence"], "the run is complete"
    return (
        run.name, *accuracies, f"{drift:.2g}" if drift else "0 exactly", f"{equal:.1%}",
        _shares(metrics, "fp8_saturated_frac"), _shares(metrics, "fp8_underflow_frac"),
    )  # fmt: skip


def main() -> None:
    """Prints the table as Markdown."""
    for cells in (_HEAD, ("---",) * len(_HEAD), *map(row, map(pathlib.Path, sys.argv[1:]))):
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
