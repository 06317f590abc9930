"""Times RL steps whose rewards take 0.2 s each, with and without rollouts ahead of the learner, in
turns: the same job, on one CPU device, and with a second device for rollouts.

    JAX_PLATFORMS=cpu python docs/scripts/slow_rewards.py
"""

from __future__ import annotations

import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from processes import on_cpu_devices

from fp8rl_jax.training.logs import read_jsonl

_STEPS, _TURNS = 9, 2
_CASES = {
    "one device": {"rollout.ahead": 0},
    "one device, ahead": {"rollout.ahead": 1},
    "a device for rollouts, ahead": {"rollout.ahead": 1, "mesh.rollout": 1},
}
_JOB = {
    "run.steps": _STEPS,
    "run.check_every": 1000,
    "run.checkpoint_every": 1000,
    "sft.steps": 0,
    "eval.every": 1000,
    "eval.questions": 2,  # after the last step
    "eval.samples": 1,
    "env.reward": "slow_rewards:share_of_even_bytes",
    "rollout.prompts_per_step": 8,
    "rollout.group_size": 4,
    "rollout.max_new_tokens": 128,
}


def share_of_even_bytes(prompt: str, response: str, answer: str) -> float:
    """Returns a share that every response gets some of, after 0.2 s."""
    time.sleep(0.2)
    data = response.encode()
    return sum(byte % 2 == 0 for byte in data) / max(len(data), 1)


def _step_seconds(fields: dict, directory: pathlib.Path, cache: str) -> tuple[float, float]:
    """Returns the median seconds of a step and of its wait for a rollout, after three steps."""
    given = _JOB | fields | {"run.dir": directory, "run.cache_dir": cache}
    environment = on_cpu_devices(2 if "mesh.rollout" in fields else 1)
    environment["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    options = [f"--config.{name}={value}" for name, value in given.items()]
    command = [sys.executable, "-m", "fp8rl_jax.cli", "train", "--config", "tiny_arithmetic"]
    subprocess.run([*command, *options], check=True, env=environment, stdout=subprocess.DEVNULL)
    records = read_jsonl(directory / "metrics.jsonl")[3:-1]  # the last step has no rollout to begin
    times = [[r.get(f"time_{part}", 0.0) for r in records] for part in ("step", "wait")]
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in _CASES}
    with tempfile.TemporaryDirectory() as cache:
        for turn in range(_TURNS):
            for index, (name, fields) in enumerate(_CASES.items()):
                directory = pathlib.Path(cache) / f"{turn}_{index}"
                found[name].append(_step_seconds(fields, directory, cache))
    first = statistics.median(step for step, _ in found["one device"])
    print("| | a step, s | over one device | of it waiting for the rollout, s |")
    print("|---|---|---|---|")
    for name, times in found.items():
        step, wait = (statistics.median(values) for values in zip(*times, strict=True))
        print(f"| {name} | {step:.2f} | {step / first:.2f} | {wait:.2f} |")


if __name__ == "__main__":
    main()
