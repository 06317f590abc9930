"""Measures a train step of adapters (LoRA) beside one of all parameters: CPU seconds of whole
steps, with the optimiser, in turns, and the memory that XLA plans for each.

    JAX_PLATFORMS=cpu python docs/scripts/lora_step.py qwen3_29m smollm2_135m
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
from fp8rl_jax.batch import make_batch
from fp8rl_jax.bench.rollout import SMALL
from fp8rl_jax.models import masters
from fp8rl_jax.models.presets import preset
from fp8rl_jax.quant import get_recipe

_TIMES, _ROWS, _PROMPT, _RESPONSE = 4, 8, 32, 96
_RANK = 16
_GIB = 2**30


def _batch(model: models.ModelConfig):
    rng = np.random.default_rng(0)
    length = _PROMPT + _RESPONSE
    tokens = rng.integers(0, model.vocab_size, (_ROWS, length)).astype(np.int32)
    prompts, ones = np.full(_ROWS, _PROMPT, np.int32), np.ones(_ROWS, np.float32)
    targets, mask = tokens[:, _PROMPT:], np.ones((_ROWS, _RESPONSE), bool)
    return make_batch(tokens, prompts, targets, mask, ones, rng.standard_normal(_ROWS))


def _cases(model: models.ModelConfig):
    """{name: (train step, state)} of all parameters, and of adapters on bases of three types."""
    key = jax.random.key(0, impl="threefry2x32")
    params = models.init_params(model, key)
    optimizer = optax.adam(1e-4)
    for base in ("", "f32", "bf16", "fp8"):
        own = params
        if base:
            own = masters.adapted(params, _RANK, 2.0 * _RANK, ("*",), base, key)
        state = learner.new_state(own, optimizer, np.zeros(2, np.uint32), "fp8")
        gradients = learner.GradientProgram(learner.ForwardPass(model, get_recipe("fp8")))
        step = learner.make_train_step(gradients, optimizer, donate=False)
        yield (f"adapters on a base in {base}" if base else "all parameters"), step, state


def _bytes(compiled) -> int:
    found = compiled.memory_analysis()
    return found.argument_size_in_bytes + found.temp_size_in_bytes


def _table(name: str) -> None:
    """Prints time and memory over those of all parameters."""
    model = SMALL[name] if name in SMALL else preset(name)
    batch = _batch(model)
    rope = tuple(map(jnp.asarray, models.rope_tables(model, _PROMPT + _RESPONSE)))
    cases = {name: own for name, *own in _cases(model)}
    memory = {n: _bytes(step.lower(s, batch, rope).compile()) for n, (step, s) in cases.items()}
    times: dict[str, list[float]] = {case: [] for case in cases}
    for _ in range(1 + _TIMES):
        for case, (step, state) in cases.items():
            start = time.process_time()
            jax.block_until_ready(step(state, batch, rope))
            times[case].append(time.process_time() - start)
    whole, most = np.array(times["all parameters"][1:]), memory["all parameters"]
    print(f"\n{name}, rank {_RANK}, {_ROWS} x {_PROMPT + _RESPONSE} tokens\n")
    print("| trained | CPU seconds | over all | memory, GiB | over all |\n|---|---|---|---|---|")
    for case in cases:
        own = np.array(times[case][1:])
        seconds, ratio = np.median(own), np.median(own / whole)
        size = memory[case]
        print(f"| {case} | {seconds:.2f} | {ratio:.2f} | {size / _GIB:.2f} | {size / most:.2f} |")


if __name__ == "__main__":
    print(f"fp8, {platform.processor() or platform.machine()}")
    for model_name in sys.argv[1:] or ["qwen3_29m"]:
        _table(model_name)
