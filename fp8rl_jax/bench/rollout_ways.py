"""Ways to sample more sequences than there are slots, and how long their responses are.

A way is made from a model, a recipe and a cell; what it returns is called as `make_sampler`'s
result is, with any number of prompts. `WAYS` lists those that the bench times; the first is the one
that ratios refer to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from fp8rl_jax.models import ModelConfig, pages_of
from fp8rl_jax.quant import Recipe
from fp8rl_jax.rollout import Batching, ContinuousSampler, HalvedSampler, Rollout, SamplerConfig

Sample = Callable[..., Rollout]

# Rate of the exponential distribution on [0, 1] whose mean is a quarter: 1/r - 1/(e^r - 1) = 1/4.
_RATE = 3.59351


@dataclasses.dataclass(frozen=True)
class Cell:
    """One workload: `batch` sequences at once, `group` of them of a prompt."""

    batch: int
    prompt: int
    new: int
    group: int

    @property
    def settings(self) -> SamplerConfig:
        """Of the sampler; no token ends a response."""
        return SamplerConfig(self.new, self.group, eos_ids=(), pad_id=0)

    def __str__(self) -> str:
        return f"batch {self.batch}, {self.prompt}+{self.new}, group {self.group}"


def long_tail(count: int, most: int) -> np.ndarray:
    """Response lengths (count,) int32 from 1 to `most`, mean about a quarter of it.

    Drawn from an exponential distribution cut off at `most` and rounded up: few are long, and a
    batch waits for the longest.
    """
    uniform = np.random.default_rng(0).random(count)
    share = -np.log1p(-uniform * -np.expm1(-_RATE)) / _RATE
    return np.clip(np.ceil(most * share), 1, most).astype(np.int32)


def make_static(model: ModelConfig, recipe: Recipe, cell: Cell) -> Sample:
    """Batches of `cell.batch` sequences, one after the other, each until its last one has ended.

    One compiled program, called several times. It takes numbers of samples that the batch divides.
    """
    program, prompts_each = HalvedSampler(model, recipe, cell.settings), cell.batch // cell.group

    def sample(weights, prompts, lengths, key, sample_ids, temperature, limits, rope) -> Rollout:
        assert len(sample_ids) % cell.batch == 0
        batches = []
        for start in range(0, len(sample_ids), cell.batch):
            rows = slice(start, start + cell.batch)
            mine = slice(start // cell.group, start // cell.group + prompts_each)
            own = sample_ids[rows], temperature[rows], limits[rows]
            out = program(weights, prompts[mine], lengths[mine], key, *own, rope)
            batches.append(jax.device_get(out))
        return jax.tree.map(lambda *xs: np.concatenate(xs), *batches)

    return sample


def make_continuous(model: ModelConfig, recipe: Recipe, cell: Cell) -> Sample:
    """Continuous batching through `cell.batch` slots, with pages for whole sequences in all."""
    pages = cell.batch * (pages_of(cell.prompt + cell.new) + 1)
    return ContinuousSampler(model, recipe, cell.settings, Batching(cell.batch, pages))


WAYS: dict[str, Callable[[ModelConfig, Recipe, Cell], Sample]] = {
    "static": make_static,
    "continuous": make_continuous,
}
