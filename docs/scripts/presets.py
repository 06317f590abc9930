"""Every preset of `algo.preset` on the main job: the table and the plot of docs/algorithms.md.

python docs/scripts/presets.py runs/presets      runs what is not there yet, then prints
python docs/scripts/presets.py runs/presets --steps=5 --seeds 0      a trial

40 RL steps for seeds 0, 1 and 2, evaluated on 1,024 held-out questions with four samples each.
"""

from __future__ import annotations

import argparse
import pathlib

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fp8rl_jax import cli
from fp8rl_jax.rl import PRESETS
from fp8rl_jax.training.logs import read_jsonl


def run(root: pathlib.Path, preset: str, seed: int, steps: int) -> pathlib.Path:
    """The directory of a finished run."""
    directory = root / f"{preset}-{seed}"
    if not (directory / "report.html").exists():
        fields = {
            "run.dir": directory,
            "run.seed": seed,
            "run.steps": steps,
            "eval.every": 10,
            "eval.samples": 4,
            "algo.preset": preset,
            "run.keep_checkpoints": 1,
        }
        arguments = [f"--config.{name}={value}" for name, value in fields.items()]
        resume = ["--resume"] if directory.exists() else []
        if cli.run(["train", "--config", "configs/tiny_arithmetic.py", *arguments, *resume]):
            raise SystemExit(f"{directory}: failed")
    return directory


def row(preset: str, runs: list[pathlib.Path]) -> str:
    """A line of the table: means over the seeds; the standard error is that of the mean."""
    evaluations = [read_jsonl(r / "eval.jsonl") for r in runs]
    metrics = [read_jsonl(r / "metrics.jsonl") for r in runs]
    before = [[e for e in found if e["phase"] == "sft"][-1] for found in evaluations]
    after = [found[-1] for found in evaluations]
    gain = np.array([a["pass@1"] - b["pass@1"] for a, b in zip(after, before, strict=True)])
    drift = max(r["train_rollout_logprob_abs_diff_max"] for found in metrics for r in found)
    seconds = np.median([r["time_step"] for found in metrics for r in found[2:]])
    mean = lambda records, name: np.mean([r[name] for r in records])
    error = np.sqrt(np.sum([a["pass@1_se"] ** 2 for a in after])) / len(after)
    return (
        f"| `{preset}` | {mean(before, 'pass@1'):.3f} | "
        f"{mean(after, 'pass@1'):.3f} ± {error:.3f} | "
        f"{gain.mean():+.3f} ({gain.min():+.3f} to {gain.max():+.3f}) | "
        f"{mean(after, 'pass@4'):.3f} | {'0 exactly' if drift == 0 else f'{drift:.1e}'} | "
        f"{seconds:.2f} |"
    )


def draw(found: dict[str, list[pathlib.Path]], target: pathlib.Path) -> None:
    """pass@1 over the RL steps, mean of the seeds, a line for each preset."""
    figure = Figure(figsize=(9, 5), layout="constrained", facecolor="white")
    axes = figure.subplots()
    for index, (preset, runs) in enumerate(found.items()):
        curves = []
        for directory in runs:
            records = read_jsonl(directory / "eval.jsonl")
            first = [r for r in records if r["phase"] == "sft"][-1]
            later = [r for r in records if r["phase"] == "rl"]
            curves.append([first["pass@1"], *(r["pass@1"] for r in later)])
            steps = [0, *(r["step"] for r in later)]
        style = ("-", "--", ":")[index // 4]
        axes.plot(steps, np.mean(curves, axis=0), style, lw=1.5, label=preset)
    axes.set_xlabel("RL step")
    axes.set_ylabel("held-out pass@1, mean of the seeds")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e6e6e6", lw=0.7)
    axes.legend(frameon=False, ncols=2, fontsize=9)
    FigureCanvasAgg(figure).print_png(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("root", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    values = parser.parse_args()
    found = {
        preset: [run(values.root, preset, seed, values.steps) for seed in values.seeds]
        for preset in PRESETS
    }
    print(
        "| preset | pass@1 before | after | gain (least to most of the seeds) | pass@4 | "
        "max drift | median s a step |\n|---|---|---|---|---|---|---|"
    )
    for preset, runs in found.items():
        print(row(preset, runs))
    draw(found, pathlib.Path(__file__).parents[1] / "presets.png")


if __name__ == "__main__":
    main()
