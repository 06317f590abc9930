"""GRPO on all weights beside adapters (LoRA), from one supervised start for each seed.

    python docs/scripts/lora_curves.py runs/lora_curves 0 1 2

trains with configs/tiny_arithmetic.py and prints a table of held-out accuracy after the last step.
Arms that are already trained are not trained again.
"""

from __future__ import annotations

import pathlib
import sys

import numpy as np

from fp8rl_jax.cli.main import run
from fp8rl_jax.training.logs import read_jsonl

_CONFIG = str(pathlib.Path(__file__).parents[2] / "configs" / "tiny_arithmetic.py")
# Adapters learn at ten times the rate: Schulman et al., "LoRA Without Regret", 2025.
_ADAPTERS = ["--config.optimizer.learning_rate=3e-3", "--config.lora.alpha=32"]
_ARMS: dict[str, list[str]] = {
    "all weights": [],
    **{f"rank {rank}": [f"--config.lora.rank={rank}", *_ADAPTERS] for rank in (1, 8)},
}
_METRICS = ("accuracy_sampled", "accuracy_greedy")


def _do(*command: str) -> None:
    """Runs a command of fp8rl; ends the program if that fails."""
    if status := run(list(command)):
        sys.exit(status)


def _train(directory: pathlib.Path, *options: str) -> None:
    """Trains a run, or goes on with it."""
    resume = ["--resume"] if (directory / "config.json").is_file() else []
    _do("train", "--config", _CONFIG, f"--config.run.dir={directory}", *options, *resume)


def _arm(directory: pathlib.Path, seed: str, name: str) -> tuple[list[float], float]:
    """Returns the last evaluation of an arm and its largest drift."""
    start, weights = directory / f"start{seed}", directory / f"weights{seed}"
    if not weights.is_dir():
        _train(start, f"--config.run.seed={seed}", "--config.run.steps=0")
        _do("convert", str(start), str(weights), "--dtype=bf16")
    own = directory / f"{name.replace(' ', '_')}{seed}"
    fields = [f"--config.run.seed={seed}", "--config.sft.steps=0"]
    _train(own, *fields, f"--config.model.checkpoint={weights}", *_ARMS[name])
    last = read_jsonl(own / "eval.jsonl")[-1]
    drift = max(r["train_rollout_logprob_abs_diff_max"] for r in read_jsonl(own / "metrics.jsonl"))
    return [last[metric] for metric in _METRICS], drift


def main(directory: str, *seeds: str) -> None:
    """Trains all arms of all seeds and prints their ends."""
    found = {name: [_arm(pathlib.Path(directory), seed, name) for seed in seeds] for name in _ARMS}
    print("| trained | sampled | greedy | sampled, mean | greedy, mean | largest drift |")
    print("|---|---|---|---|---|---|")
    for name, ends in found.items():
        values = np.array([end for end, _ in ends])
        cells = [", ".join(f"{x:.3f}" for x in column) for column in values.T]
        means = [f"{x:.3f}" for x in values.mean(0)]
        print(f"| {name} | {' | '.join([*cells, *means])} | {max(d for _, d in ends):.2g} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
