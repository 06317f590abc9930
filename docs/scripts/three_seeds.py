"""Draws docs/three_seeds.png and prints the README's table from finished runs.

for s in 0 1 2; do
  fp8rl train --config configs/tiny_arithmetic.py --config.run.seed=$s --config.run.dir=runs/seed$s
done
python docs/scripts/three_seeds.py runs/seed0 runs/seed1 runs/seed2
"""

from __future__ import annotations

import json
import pathlib
import sys

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fp8rl_jax.report.summary import summarise
from fp8rl_jax.training.logs import read_jsonl

COLOURS = {"accuracy_greedy": "#0072b2", "accuracy_sampled": "#d55e00"}


def draw(runs: list[pathlib.Path], target: pathlib.Path) -> None:
    """Accuracy, reward and drift of every run in three panels."""
    figure = Figure(figsize=(12, 3.6), layout="constrained", facecolor="white")
    accuracy, reward, drift = figure.subplots(1, 3)
    for run in runs:
        evaluations, metrics = read_jsonl(run / "eval.jsonl"), read_jsonl(run / "metrics.jsonl")
        sft = max(r["step"] for r in evaluations if r["phase"] == "sft")
        steps = [r["step"] - sft * (r["phase"] == "sft") for r in evaluations]
        for name, colour in COLOURS.items():
            accuracy.plot(steps, [r[name] for r in evaluations], color=colour, lw=1, marker=".")
        values = np.array([r["reward_mean"] for r in metrics])
        smooth = np.convolve(values, np.ones(20) / 20, mode="valid")
        reward.plot(np.arange(20, len(values) + 1), smooth, lw=1.2)
        largest = [r["train_rollout_logprob_abs_diff_max"] for r in metrics]
        drift.plot([r["step"] for r in metrics], largest, lw=1.2)
    accuracy.axvline(0, color="black", lw=0.8)
    accuracy.set_title("Held-out accuracy: greedy (blue), sampled (red)", fontsize=10)
    accuracy.set_xlabel("SFT update - end   |   RL step")
    reward.set_title("Reward, mean of 20 steps", fontsize=10)
    reward.set_xlabel("RL step")
    drift.set_title("Largest |logp learner - logp rollout| of a step", fontsize=10)
    drift.set_yscale("symlog", linthresh=1e-7)
    drift.set_ylim(-1e-8, 1e-1)
    drift.set_xlabel("RL step")
    for axes in (accuracy, reward, drift):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e6e6e6", lw=0.7)
    FigureCanvasAgg(figure).print_png(target)


def table(runs: list[pathlib.Path]) -> str:
    """One Markdown row a run, and the mean."""
    head = (
        "| seed | sampled: SFT end → RL end | greedy: SFT end → RL end | best of "
        "SFT (sampled, greedy) | tokens compared | max drift |"
    )
    rows, numbers = [head, "|---|---|---|---|---|---|"], []
    for run in runs:
        s = summarise(run)
        both = (s["sampled"], s["greedy"])
        ends = [(x["sft_end"], x["last"], x["sft_best"]) for x in both]
        numbers.append([value for triple in ends for value in triple])
        drift = "0 exactly" if s["drift_exactly_zero"] else f"{s['drift_max']:.2g}"
        seed = json.loads((run / "config.json").read_text())["run"]["seed"]
        rows.append(_row(str(seed), numbers[-1], f"{s['drift_tokens']:,}", drift))
    rows.append(_row("mean", np.mean(numbers, axis=0), "", ""))
    return "\n".join(rows)


def _row(name: str, n, tokens: str, drift: str) -> str:
    return (
        f"| {name} | {n[0]:.3f} → {n[1]:.3f} | {n[3]:.3f} → {n[4]:.3f} | {n[2]:.3f}, {n[5]:.3f} | "
        f"{tokens} | {drift} |"
    )


if __name__ == "__main__":
    directories = [pathlib.Path(name) for name in sys.argv[1:]]
    draw(directories, pathlib.Path(__file__).parents[1] / "three_seeds.png")
    print(table(directories))
