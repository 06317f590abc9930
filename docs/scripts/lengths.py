"""Measures what a train step costs when responses are shorter than the longest: CPU seconds of
whole steps, with the optimiser, over those of full lengths, in padded rows and in rows of several
sequences. Lengths are the quantiles of an exponential distribution. Then what it costs to compute a
prompt of four times its responses' length once for eight of them. Cases take turns. Last, how long
the static sampler takes with more room in its cache than the sequences need.

    JAX_PLATFORMS=cpu python docs/scripts/lengths.py fp8
"""

from __future__ import annotations

import dataclasses
import platform
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fp8rl_jax import learner, models, rollout
from fp8rl_jax.batch import Batch, make_batch, pack
from fp8rl_jax.quant import get_recipe

_TIMES = 5
_PROMPTS, _RESPONSES = 1024, 256  # of the second table
_MODEL = models.ModelConfig(259, 256, 768, 2, 4, 2, 64)


def _batch(rng: np.random.Generator, prompts: np.ndarray, width: int, lengths, most: int) -> Batch:
    """A batch of responses of `lengths`, at most `most`, to `prompts`, at most `width` tokens; one
    prompt for all if those are one number."""
    rows = len(lengths)
    tokens = rng.integers(0, 250, (rows, width + most)).astype(np.int32)
    if len(set(prompts)) == 1:
        tokens[:, : prompts[0]] = tokens[0, : prompts[0]]
    mask = np.arange(most) < lengths[:, None]
    index = prompts[:, None] + np.arange(most)
    targets = np.where(mask, np.take_along_axis(tokens, index, axis=1), 0)
    advantages = rng.standard_normal(rows).astype(np.float32)
    ones = np.ones(rows, np.float32)
    return make_batch(tokens, prompts.astype(np.int32), targets, mask, ones, advantages)


@dataclasses.dataclass
class Case:
    """A batch, the tokens of its sequences, and those that are computed."""

    batch: Batch
    tokens: int
    computed: int

    @classmethod
    def rows(cls, batch: Batch) -> Case:
        return cls(batch, int(batch.lengths.sum()), batch.tokens.size)

    @classmethod
    def packed(cls, batch: Batch, capacity: int, share: bool = False) -> Case:
        found, slots = pack(batch, batch.tokens.shape[1], capacity, 1, share)
        return cls(found, int(batch.lengths.sum()), slots.micro_batches * capacity)


def _table(recipe: str, cases: dict[str, Case], base: str, longest: int) -> None:
    """Prints the CPU seconds of cases, of at most `longest` tokens, over those of `base`."""
    optimizer = optax.adam(1e-3)
    gradients = learner.GradientProgram(learner.ForwardPass(_MODEL, get_recipe(recipe)))
    step = learner.make_train_step(gradients, optimizer, donate=False)
    params = models.init_params(_MODEL, jax.random.key(0, impl="threefry2x32"))
    state = learner.new_state(params, optimizer, np.zeros(2, np.uint32), recipe)
    rope = tuple(map(jnp.asarray, models.rope_tables(_MODEL, longest)))
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(1 + _TIMES):
        for name, case in cases.items():
            start = time.process_time()
            jax.block_until_ready(step(state, case.batch, rope))
            times[name].append(time.process_time() - start)
    whole = np.array(times[base][1:])
    print(f"| batch | tokens computed over real ones | CPU seconds over {base} |\n|---|---|---|")
    for name, case in cases.items():
        ratio = np.median(np.array(times[name][1:]) / whole)
        print(f"| {name} | {case.computed / case.tokens:.2f} | {ratio:.2f} |")


def _caches(recipe: str) -> None:
    """Prints the CPU seconds of a rollout by the slots of its cache, over the smallest."""
    rows, prompt, new = 8, 16, 496
    params = models.init_params(_MODEL, jax.random.key(0, impl="threefry2x32"))
    weights, *_ = rollout.make_refit(recipe)(params)
    key, full = jax.random.key(1, impl="threefry2x32"), np.full(rows, new, np.int32)
    prompts = np.ones((rows, prompt), np.int32)
    requests = rollout.Requests(
        lengths=np.full(rows, prompt, np.int32),
        key=key,
        sample_ids=np.arange(rows, dtype=np.int32),
        temperature=np.ones(rows, np.float32),
        limits=full,
        rope=tuple(map(jnp.asarray, models.rope_tables(_MODEL, prompt + new))),
    )
    times: dict[int, list[float]] = {512: [], 2048: [], 4096: []}
    samplers = {
        slots: rollout.make_sampler(
            _MODEL, recipe, rollout.SamplerConfig(new, 1, (), 0, cache_slots=slots)
        )
        for slots in times
    }
    for _ in range(1 + _TIMES):
        for slots, sample in samplers.items():
            start = time.process_time()
            jax.block_until_ready(sample(weights, prompts, requests))
            times[slots].append(time.process_time() - start)
    print("| slots of the cache | CPU seconds over 512 |\n|---|---|")
    for slots, found in times.items():
        print(f"| {slots} | {np.median(np.array(found[1:]) / np.array(times[512][1:])):.2f} |")


def main() -> None:
    recipe = sys.argv[1] if len(sys.argv) > 1 else "fp8"
    rng = np.random.default_rng(0)
    rows, prompt, response = 16, 64, 448
    prompts = rng.integers(16, prompt + 1, rows)
    quantiles = -np.log1p(-(np.arange(rows) + 0.5) / rows) * response / 4
    drawn = rng.permutation(np.clip(quantiles.astype(int), 1, response))
    full = _batch(rng, prompts, prompt, np.full(rows, response), response)
    short = _batch(rng, prompts, prompt, drawn, response)
    cases = {"full lengths": Case.rows(full), "a quarter, padded rows": Case.rows(short)}
    for capacity in (512, 1024, 2048):
        cases[f"a quarter, rows of {capacity} tokens"] = Case.packed(short, capacity)
    print(f"{recipe}, {platform.processor() or platform.machine()}")
    _table(recipe, cases, "full lengths", prompt + response)

    group = np.full(8, _PROMPTS), _PROMPTS, np.full(8, _RESPONSES), _RESPONSES
    batch, capacity = _batch(rng, *group), 3 * (_PROMPTS + _RESPONSES)
    cases = {
        "padded rows": Case.rows(batch),
        f"rows of {capacity} tokens": Case.packed(batch, capacity),
        "the same with shared prompts": Case.packed(batch, capacity, True),
    }
    _table(recipe, cases, "padded rows", _PROMPTS + _RESPONSES)
    _caches(recipe)


if __name__ == "__main__":
    main()
