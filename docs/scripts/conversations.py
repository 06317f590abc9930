"""Draws docs/guides/conversations.png and prints the guide's table from finished runs.

for s in 0 1 2; do
  fp8rl train tiny_guessing --config.run.seed=$s --config.run.dir=runs/guessing_$s
  fp8rl train tiny_calculator --config.run.seed=$s --config.run.dir=runs/calculator_$s
done
python docs/scripts/conversations.py runs
"""

from __future__ import annotations

import pathlib
import sys

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fp8rl_jax.training.logs import read_jsonl

TASKS = {"guessing": "#0072b2", "calculator": "#d55e00"}
_TARGET = pathlib.Path(__file__).parents[1] / "guides" / "conversations.png"


def _held_out(run: pathlib.Path) -> list[dict]:
    """Returns the evaluations of the RL phase, after that at its start."""
    found = read_jsonl(run / "eval.jsonl")
    *_, before = (record for record in found if record["phase"] == "sft")
    return [before | {"step": 0}, *(record for record in found if record["phase"] == "rl")]


def draw(directory: pathlib.Path) -> None:
    """Held-out reward, replies of a conversation and drift of every run, in three panels."""
    figure = Figure(figsize=(12, 3.6), layout="constrained", facecolor="white")
    right, turns, drift = figure.subplots(1, 3)
    for task, colour in TASKS.items():
        for index, run in enumerate(sorted(directory.glob(f"{task}_*"))):
            held_out, metrics = _held_out(run), read_jsonl(run / "metrics.jsonl")
            at, steps = ([record["step"] for record in part] for part in (held_out, metrics))
            label = None if index else task
            right.plot(at, [r["accuracy_sampled"] for r in held_out], ".-", c=colour, label=label)
            turns.plot(steps, [r["turns_mean"] for r in metrics], c=colour, lw=1)
            largest = [r["train_rollout_logprob_abs_diff_max"] for r in metrics]
            drift.plot(steps, largest, c=colour, lw=1)
    right.set_title("Right on held-out questions, sampled", fontsize=10)
    right.legend(frameon=False)
    turns.set_title("Replies of a conversation", fontsize=10)
    drift.set_title("Largest |logp learner - logp rollout| of a step", fontsize=10)
    drift.set_yscale("symlog", linthresh=1e-7)
    drift.set_ylim(-1e-8, 1e-1)
    for axes in (right, turns, drift):
        axes.set_xlabel("RL step")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e6e6e6", lw=0.7)
    FigureCanvasAgg(figure).print_png(_TARGET)


def _row(run: pathlib.Path) -> str:
    """Returns the end of a table's row: accuracies before and after, replies, tokens and drift."""
    first, *_, last = _held_out(run)
    metrics = read_jsonl(run / "metrics.jsonl")
    ends = (f"{r['accuracy_sampled']:.3f}; {r['accuracy_greedy']:.3f}" for r in (first, last))
    replies = [np.mean([r["turns_mean"] for r in part]) for part in (metrics[:5], metrics[-5:])]
    tokens = int(sum(r["drift_tokens"] for r in metrics))
    drift = max(r["train_rollout_logprob_abs_diff_max"] for r in metrics)
    cells = [*ends, f"{replies[0]:.2f} -> {replies[1]:.2f}", f"{tokens:,}", f"{drift:g}"]
    return " | ".join(cells)


def main(directory: str) -> None:
    """Draws the figure and prints the table."""
    draw(pathlib.Path(directory))
    print("| | seed | before | after | replies | tokens compared | largest drift |")
    print("|---|---|---|---|---|---|---|")
    for task in TASKS:
        for run in sorted(pathlib.Path(directory).glob(f"{task}_*")):
            print(f"| {task} | {run.name.rpartition('_')[2]} | {_row(run)} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
