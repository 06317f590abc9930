"""Prints the bias of the policy gradient under top-p, as a table.

With a reward of 1 for every response, and neither baseline nor scale, the gradient is the mean of
the score, d log p(token), whose expectation is 0 for the distribution that was drawn from: its norm
falls with the root of the number of responses. What does not fall is bias.

python docs/scripts/truncated.py RUN_DIR --top-p 0.8
"""

from __future__ import annotations

import argparse

import numpy as np

import fp8rl_jax

_PROMPTS = [f"{a} + {b} + {c} =" for a, b, c in np.random.default_rng(0).integers(1, 10, (16, 3))]
_GROUPS = (4, 16, 64, 256)  # responses of each prompt


def norms(run: str, top_p: float, how: str) -> list[float]:
    """The gradient's norm of so many responses, under `algo.truncated_sampling`."""
    policy = fp8rl_jax.load(
        run, top_p=top_p, truncated_sampling=how, baseline="none", scale="none", loss="reinforce"
    )
    found = []
    for group in _GROUPS:
        samples = fp8rl_jax.sample(policy, _PROMPTS, group_size=group, max_tokens=4)
        _, metrics = fp8rl_jax.train_step(policy, samples, np.ones(len(samples.texts)))
        found.append(metrics["grad_norm"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("--top-p", type=float, default=0.8)
    arguments = parser.parse_args()
    sizes = [f"{group * len(_PROMPTS)} responses" for group in _GROUPS]
    print("| log-probabilities | " + " | ".join(sizes) + " |")
    print("|---" * (len(sizes) + 1) + "|")
    for how in ("renormalised", "whole"):
        values = norms(arguments.run, arguments.top_p, how)
        print(f"| {how} | " + " | ".join(f"{value:.4f}" for value in values) + " |", flush=True)


if __name__ == "__main__":
    main()
