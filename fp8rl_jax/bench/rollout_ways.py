"""Ways to sample more sequences than there are slots, and how long their responses are.

A way is made from what a sampler is made from and the number of slots; what it returns is called
as `make_sampler`'s result is, with any number of prompts. `WAYS` lists those that the bench times;
the first is the one that ratios refer to.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from fp8rl_jax.models import ModelConfig, pages_of
from fp8rl_jax.quant import Recipe
from fp8rl_jax.rollout import Batching, ContinuousSampler, HalvedSampler, Rollout, SamplerConfig

Sample = Callable[..., Rollout]

# Rate of the exponential distribution on [0, 1] whose mean is a quarter: 1/r - 1/(e^r - 1) = 1/4.
_RATE = 3.59351


def long_tail(count: int, most: int, seed: int = 0) -> np.ndarray:
    """Response lengths (count,) int32 from 1 to `most`, mean about a quarter of it.

    Drawn from an exponential distribution cut off at `most` and rounded up: few are long, and a
    batch waits for the longest.
    """
    uniform = np.random.default_rng(seed).random(count)
    share = -np.log1p(-uniform * -np.expm1(-_RATE)) / _RATE
    return np.clip(np.ceil(most * share), 1, most).astype(np.int32)


def make_static(model: ModelConfig, recipe: Recipe, settings: SamplerConfig, slots: int) -> Sample:
    """Batches of `slots` sequences, one after the other, each until its last one has ended.

    One compiled program, called several times. It takes no taps, and numbers of samples that
    `slots` divides.
    """
    assert slots % settings.group_size == 0 and not settings.taps
    program, prompts_each = HalvedSampler(model, recipe, settings), slots // settings.group_size

    def sample(weights, prompts, lengths, key, sample_ids, temperature, limits, rope) -> Rollout:
        count = len(sample_ids)
        assert count % slots == 0
        parts = []
        for batch in range(count // slots):
            rows = slice(batch * slots, (batch + 1) * slots)
            whose = slice(batch * prompts_each, (batch + 1) * prompts_each)
            out = program(
                weights, prompts[whose], lengths[whose], key, sample_ids[rows], temperature[rows],
                limits[rows], rope,
            )  # fmt: skip
            parts.append(jax.device_get(out))
        return jax.tree.map(lambda *xs: np.concatenate(xs), *parts)

    return sample


def make_continuous(
    model: ModelConfig, recipe: Recipe, settings: SamplerConfig, slots: int
) -> Sample:
    """Continuous batching through `slots` slots, with pages for whole sequences in all of them.

    The sampler is made for the first prompts' slots and then kept.
    """
    made: dict[int, ContinuousSampler] = {}

    def sample(weights, prompts, *others) -> Rollout:
        width = prompts.shape[1]
        if width not in made:
            pages = slots * pages_of(width + settings.max_new_tokens) + slots
            made[width] = ContinuousSampler(model, recipe, settings, Batching(slots, pages))
        return made[width](weights, prompts, *others)

    return sample


WAYS: dict[str, Callable[[ModelConfig, Recipe, SamplerConfig, int], Sample]] = {
    "static": make_static,
    "continuous": make_continuous,
}
