"""What the steps of learning runs took: `python docs/scripts/step_table.py RUN_DIR ...`.

For each run a line for an RL step (of a long run for some of them): tokens that were drawn; seconds
of rollout, learner and refit, which in the first step contain compiling; most memory in use so far;
drift; reward. Then a row for each run: medians without the first step, tokens per second of the
rollout and of the whole step; and what it had reached when the quickest run ended, in seconds
without compiling: steps, mean reward of the last ten of them, held-out accuracy. `--json=FILE`
keeps these figures, and all metrics of every step.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

import numpy as np

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.bench.table import text_table
from fp8rl_jax.report.metrics import DRIFT_MAX
from fp8rl_jax.report.summary import RunFiles, load_run, typical

_LINES = 12  # most steps of a run that are shown
_MEAN_OF = 10  # steps
_STEP = ("step", "tokens", "rollout s", "tokens/s", "learner s", "refit s", "GiB", "drift")
_RUN = ("run", "steps", "step s", "rollout tokens/s", "step's tokens/s", "GiB", "drift")
_REACHED = ("steps", "reward", "held out")


def tokens(step: dict) -> int:
    """Returns how many tokens a step's responses have."""
    return round(step["tokens_per_s_rollout"] * step["time_rollout"])


def shown(value: Any) -> str:
    """Returns a cell of the table."""
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return "-" if value is None else str(value)


def step_row(step: dict) -> list[str]:
    names = ("time_rollout", "tokens_per_s_rollout", "time_learner", "time_refit", "memory_peak")
    names += (DRIFT_MAX, "reward_mean")
    return [str(step["step"]), str(tokens(step)), *(shown(step.get(name)) for name in names)]


def clock(run: RunFiles) -> np.ndarray:
    """Returns the seconds at the end of each RL step, (steps,), without those of compiling."""
    return np.cumsum([step["time_step"] - step["time_compile"] for step in run.metrics])


def summarise(run: RunFiles, seconds: float) -> dict[str, Any]:
    """Returns the figures of a run; rewards as they were after so many seconds."""
    steps = run.metrics
    rates = [{"rate": tokens(step) / step["time_step"]} for step in steps]
    passed = [step for step, end in zip(steps, clock(run), strict=True) if end <= seconds]
    evaluated = [row for row in run.phase("rl") if passed and row["step"] <= passed[-1]["step"]]
    peaks = [step["memory_peak"] for step in steps if "memory_peak" in step]
    return {
        "run": run.label,
        "steps": len(steps),
        "step_s": typical(steps, "time_step"),
        "tokens_per_s_rollout": typical(steps, "tokens_per_s_rollout"),
        "tokens_per_s_step": typical(rates, "rate"),
        "memory_peak": max(peaks, default=None),
        "drift_max": max((step[DRIFT_MAX] for step in run.compared), default=None),
        "seconds": seconds,
        "steps_then": len(passed),
        "reward_then": float(np.mean([s["reward_mean"] for s in passed[-_MEAN_OF:] or steps[:1]])),
        "held_out_then": evaluated[-1].get("accuracy_sampled") if evaluated else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("directories", nargs="+", metavar="RUN_DIR")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    values = parser.parse_args()
    runs = []
    for directory in values.directories:
        try:
            runs.append(load_run(directory))
        except UserError as error:
            print(error)
    runs = [run for run in runs if run.metrics]
    if not runs:
        raise SystemExit("no run has a step")
    for run in runs:
        every = -(-len(run.metrics) // _LINES)
        print(f"{run.path.name}: {run.label}")
        print(
            "\n".join(text_table([(*_STEP, "reward"), *map(step_row, run.metrics[::every])])),
            end="\n\n",
        )
    seconds = float(min(clock(run)[-1] for run in runs))
    found = [summarise(run, seconds) for run in runs]
    rows = ([shown(v) for name, v in f.items() if name != "seconds"] for f in found)
    print(
        f"steps, reward and held out in the last columns: after {seconds:.1f} s without compiling"
    )
    print("\n".join(text_table([(*_RUN, *_REACHED), *rows])))
    if values.json:
        for figures, run in zip(found, runs, strict=True):
            figures |= {"metrics": run.metrics, "eval": run.eval}
        values.json.write_text(json.dumps(found, indent=1) + "\n")
    if len(runs) < len(values.directories):
        raise SystemExit(f"{len(values.directories) - len(runs)} of the runs have no step")


if __name__ == "__main__":
    main()
