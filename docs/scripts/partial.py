"""Counts idle slots with and without partial rollouts, on long-tailed lengths: exponential, a
quarter of 512 tokens on average. A step has 64 questions of one response each.

    JAX_PLATFORMS=cpu python docs/scripts/partial.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fp8rl_jax import models, rollout

_MODEL = models.ModelConfig(61, 32, 32, 1, 2, 1, 16)
_PROMPT, _NEW, _ROWS, _STEPS = 64, 512, 64, 12


def _lengths() -> np.ndarray:
    """Lengths of the responses of all steps, and of those that would follow."""
    rng = np.random.default_rng(0)
    drawn = rng.exponential(_NEW / 4, (2 * _STEPS, _ROWS))
    return np.clip(drawn.astype(np.int32), 1, _NEW)


def _steps(slots: int, most: int) -> tuple[float, float, float, float]:
    """Returns the share of slots that drew a token, iterations of a step, tokens prefilled for each
    drawn, and versions of a response, over the steps after the first `most`."""
    rows, lengths = most * _ROWS, _lengths()
    settings = rollout.SamplerConfig(_NEW, 1, (), 0)
    sizes = rollout.Batching(slots, 1 + slots * models.pages_of(_PROMPT + _NEW))
    sample = rollout.ContinuousSampler(_MODEL, "f32", settings, sizes)
    params = models.init_params(_MODEL, jax.random.key(0, impl="threefry2x32"))
    weights, *_ = rollout.make_refit("f32")(params)
    prompts = np.random.default_rng(0).integers(1, 60, (rows, _PROMPT)).astype(np.int32)
    rope = tuple(map(jnp.asarray, models.rope_tables(_MODEL, _PROMPT + _NEW)))
    counts, seen = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    iterations, drawn, prefilled, versions = [], [], [], []
    for step in range(_STEPS):
        earlier = rollout.Earlier(
            tokens=np.ones((rows, _NEW), np.int32),
            logprobs=np.zeros((rows, _NEW), np.float32),
            counts=counts,
            finished=np.zeros(rows, bool),
            keys=np.zeros((rows, 2), np.uint32),
            needed=np.int32([_ROWS]),
        )
        out = sample(
            weights,
            prompts,
            rollout.Requests(
                np.full(rows, _PROMPT, np.int32),
                jax.random.key(1, impl="threefry2x32"),
                np.arange(rows, dtype=np.int32),
                np.ones(rows, np.float32),
                lengths[step : step + most].reshape(-1),
                rope,
            ),
            earlier=earlier,
        )
        after = np.asarray(out.mask).sum(1, dtype=np.int32)
        seen += after > counts
        if step >= most:
            progress = sample.progress
            iterations.append(int(progress.iterations[0]))
            drawn.append(int(progress.drawn[0]))
            prefilled.append(int(progress.prefilled[0]))
            versions.append(seen[:_ROWS].mean())
        new = np.zeros(_ROWS, np.int32)
        counts, seen = np.append(after[_ROWS:], new), np.append(seen[_ROWS:], new)
    used = sum(drawn) / (sum(iterations) * slots)
    return used, float(np.mean(iterations)), sum(prefilled) / sum(drawn), float(np.mean(versions))


def main() -> None:
    print(f"{_ROWS} responses a step, {_lengths().mean():.0f} tokens on average")
    print(
        "| slots | rollout.most_versions | slots used | iterations of a step | prefilled for each "
        "token drawn | versions of a response |"
    )
    print("|---|---|---|---|---|---|")
    for slots in (16, 32, 64):
        for most in (1, 2, 3, 4):
            used, iterations, *others = _steps(slots, most)
            prefilled, versions = (f"{value:.2f}" for value in others)
            print(
                f"| {slots} | {most} | {used:.2f} | {iterations:.0f} | {prefilled} | {versions} |"
            )


if __name__ == "__main__":
    main()
