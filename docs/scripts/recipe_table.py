"""Prints the table of docs/recipes.md from finished runs, a row each.

for r in fp8_blockwise fp8_delayed mxfp8 fake bf16; do
  fp8rl train --config configs/tiny_arithmetic.py --config.run.dir=runs/$r \
    --config.precision.rollout=$r --config.precision.learner=$r
done
python docs/scripts/recipe_table.py runs/fp8_blockwise runs/fp8_delayed ...
"""

from __future__ import annotations

import pathlib
import sys

import numpy as np

from fp8rl_jax.report.summary import summarise
from fp8rl_jax.training.logs import read_jsonl

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
    """One run's cells: accuracies at SFT end and RL end, drift, what quantisation lost."""
    s, metrics = summarise(run), read_jsonl(run / "metrics.jsonl")
    accuracies = (
        f"{s[kind]['sft_end']:.3f} → {s[kind]['last']:.3f}" for kind in ("sampled", "greedy")
    )
    drift = "0 exactly" if s["drift_exactly_zero"] else f"{s['drift_max']:.2g}"
    return (
        run.name,
        *accuracies,
        drift,
        f"{s['logprob_equal_frac']:.1%}",
        _shares(metrics, "fp8_saturated_frac"),
        _shares(metrics, "fp8_underflow_frac"),
    )


def main() -> None:
    """Prints the table as Markdown."""
    for cells in (_HEAD, ("---",) * len(_HEAD), *map(row, map(pathlib.Path, sys.argv[1:]))):
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
