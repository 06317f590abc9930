"""Measures what a train step costs when responses are shorter than the longest: CPU seconds of
whole steps, with the optimiser, over those of full lengths, in padded rows and in rows of several
sequences. Lengths are drawn from an exponential distribution. Cases take turns.

    JAX_PLATFORMS=cpu python docs/scripts/lengths.py fp8
"""

from __future__ import annotations

import platform
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fp8rl_jax import learner, models
from fp8rl_jax.batch import Batch, make_batch, pack

_ROWS, _PROMPT, _RESPONSE, _TIMES = 16, 64, 448, 5
_MODEL = models.ModelConfig(259, 256, 768, 2, 4, 2, 64)


def _batch(rng: np.random.Generator, lengths: np.ndarray) -> Batch:
    tokens = rng.integers(0, 250, (_ROWS, _PROMPT + _RESPONSE)).astype(np.int32)
    prompts = rng.integers(16, _PROMPT + 1, _ROWS).astype(np.int32)
    mask = np.arange(_RESPONSE) < lengths[:, None]
    index = prompts[:, None] + np.arange(_RESPONSE)
    targets = np.where(mask, np.take_along_axis(tokens, index, axis=1), 0)
    advantages = rng.standard_normal(_ROWS).astype(np.float32)
    return make_batch(tokens, prompts, targets, mask, np.ones(_ROWS, np.float32), advantages)


def main() -> None:
    recipe = sys.argv[1] if len(sys.argv) > 1 else "fp8"
    rng = np.random.default_rng(0)
    longest = _PROMPT + _RESPONSE
    full = _batch(rng, np.full(_ROWS, _RESPONSE))
    drawn = np.clip(rng.exponential(_RESPONSE / 4, _ROWS).astype(int), 1, _RESPONSE)
    short = _batch(rng, drawn)
    cases = {"full lengths, padded rows": full, "a quarter, padded rows": short}
    computed = dict.fromkeys(cases, _ROWS * longest)
    for capacity in (512, 1024, 2048):
        name = f"a quarter, rows of {capacity} tokens"
        cases[name], slots = pack(short, longest, capacity, 1)
        computed[name] = slots.micro_batches * capacity
    real = {name: int((full if "full" in name else short).lengths.sum()) for name in cases}
    optimizer = optax.adam(1e-3)
    step = learner.make_train_step(_MODEL, recipe, optimizer, learner.LossConfig(), donate=False)
    params = models.init_params(_MODEL, jax.random.key(0, impl="threefry2x32"))
    state = learner.new_state(params, optimizer, np.zeros(2, np.uint32), recipe)
    rope = tuple(jnp.asarray(table) for table in models.rope_tables(_MODEL, longest))
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(1 + _TIMES):
        for name, batch in cases.items():
            start = time.process_time()
            jax.block_until_ready(step(state, batch, rope))
            times[name].append(time.process_time() - start)
    whole = np.array(times["full lengths, padded rows"][1:])
    print(f"{recipe}, {platform.processor() or platform.machine()}")
    print(
        "| batch | tokens computed over real ones | CPU seconds over full lengths |\n|---|---|---|"
    )
    for name in cases:
        ratio = np.median(np.array(times[name][1:]) / whole)
        print(f"| {name} | {computed[name] / real[name]:.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
