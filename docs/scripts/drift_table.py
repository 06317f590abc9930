"""The README's table of drift: `python docs/scripts/drift_table.py RUN_DIR ...`, a row for a run.

Differences of log-probabilities between rollout and learner over all RL steps of a run, weighted by
the tokens of each step.
"""

from __future__ import annotations

import pathlib
import sys

import numpy as np

from fp8rl_jax.report.summary import load_run

_PREFIX = "train_rollout_logprob_abs_diff"


def row(directory: str) -> str:
    """A line of the table: recipes, tokens, mean and largest difference, share of equal bits."""
    run = load_run(directory)
    tokens = np.array([int(record["drift_tokens"]) for record in run.metrics])
    mean, equal = (
        float(np.average([record[name] for record in run.metrics], weights=tokens))
        for name in (_PREFIX, "logprob_equal_frac")
    )
    largest = max(record[_PREFIX + "_max"] for record in run.metrics)
    shown = [f"{x:.2g}" if x else "0 exactly" for x in (mean, largest)]
    recipes = [str(run.field("precision", side)) for side in ("rollout", "learner")]
    return "| " + " | ".join([*recipes, f"{tokens.sum():,}", *shown, f"{equal:.1%}"]) + " |"


def main() -> None:
    head = ("rollout", "learner", "tokens", "mean", "largest", "equal log-probabilities")
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for directory in sys.argv[1:]:
        print(row(str(pathlib.Path(directory))))


if __name__ == "__main__":
    main()
