"""Makes the samplers that the bench compares when there are more sequences than slots (static and
continuous batches), and draws response lengths.

Each entry of `WAYS` takes (model, recipe, cell) and returns a sampler with the arguments of
`make_sampler`'s result. The bench's ratios refer to the first entry.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from fp8rl_jax.models import ModelConfig, pages_of
from fp8rl_jax.quant import Recipe
from fp8rl_jax.rollout import (
    Batching,
    ContinuousSampler,
    HalvedSampler,
    Requests,
    Rollout,
    SamplerConfig,
)

Sample = Callable[..., Rollout]

# Rate of the exponential distribution on [0, 1] whose mean is a quarter: 1/r - 1/(e^r - 1) = 1/4.
_RATE = 3.59351


@dataclasses.dataclass(frozen=True)
class Cell:
    """One workload: `batch` sequences at once, `group` per prompt, of `prompt` + `new` tokens."""

    batch: int
    prompt: int
    new: int
    group: int

    @property
    def settings(self) -> SamplerConfig:
        """Settings of the sampler; no token ends a response."""
        return SamplerConfig(self.new, self.group, eos_ids=(), pad_id=0)

    def __str__(self) -> str:
        return f"batch {self.batch}, {self.prompt}+{self.new}, group {self.group}"


def long_tail(count: int, most: int) -> np.ndarray:
    """Draws response lengths (count,) int32 from 1 to `most`, with a mean of about `most` / 4.

    They have an exponential distribution, cut off at `most` and rounded up: few are long, and a
    batch waits for the longest.
    """
    uniform = np.random.default_rng(0).random(count)
    share = -np.log1p(-uniform * -np.expm1(-_RATE)) / _RATE
    return np.clip(np.ceil(most * share), 1, most).astype(np.int32)


def make_static(model: ModelConfig, recipe: Recipe, cell: Cell) -> Sample:
    """Returns a sampler of batches of `cell.batch` sequences, each until its last one has ended.

    It calls one compiled program several times; `cell.batch` must divide the number of samples.
    """
    program = HalvedSampler(model, recipe, cell.settings)

    def sample(weights, prompts, requests: Requests) -> Rollout:
        count = len(requests.sample_ids)
        assert count % cell.batch == 0
        batches = []
        for start in range(0, count, cell.batch):
            rows = slice(start, start + cell.batch)
            asked = slice(start // cell.group, (start + cell.batch) // cell.group)
            part = dataclasses.replace(
                requests,
                lengths=requests.lengths[asked],
                sample_ids=requests.sample_ids[rows],
                temperature=requests.temperature[rows],
                limits=requests.limits[rows],
            )
            batches.append(jax.device_get(program(weights, prompts[asked], part)))
        return jax.tree.map(lambda *xs: np.concatenate(xs), *batches)

    return sample


def make_continuous(model: ModelConfig, recipe: Recipe, cell: Cell) -> Sample:
    """Returns a sampler with continuous batching: `cell.batch` slots, and pages to fill all."""
    pages = cell.batch * (pages_of(cell.prompt + cell.new) + 1)
    return ContinuousSampler(model, recipe, cell.settings, Batching(cell.batch, pages))


WAYS: dict[str, Callable[[ModelConfig, Recipe, Cell], Sample]] = {
    "static": make_static,
    "continuous": make_continuous,
}
