"""Prints the table of docs/kernels.md: programs of a real model compiled for H200s without one.

    JAX_PLATFORMS=cpu python docs/scripts/aot_h200.py qwen3_8b 1 8

compiles a decode step (64 sequences, 4,096 slots, FP8 weights and KV) and a train step (gradients,
Adam, full rematerialisation, 32 sequences of 4,096 tokens in micro-batches) for so many devices,
with the parameters over `fsdp`; for one device also the loop of continuous batching (64 slots, as
many tokens, prefill included). Memory is per device, as XLA planned it.
"""

from __future__ import annotations

import sys
import time

import jax
import jax.numpy as jnp

from fp8rl_jax import sharding
from fp8rl_jax.config import default_config
from fp8rl_jax.config.resolve import resolve_config
from fp8rl_jax.models import pages_of
from fp8rl_jax.plan.h200 import collectives, h200_mesh, products
from fp8rl_jax.rollout import Batching, ContinuousSampler
from fp8rl_jax.rollout.sampler import SamplerConfig
from fp8rl_jax.training.aot import (
    described_runtime,
    request_shapes,
    trace_decode_step,
    trace_train_step,
)
from fp8rl_jax.training.runtime import Runtime

GIB = 2**30
SLOTS, PROMPT, SEQUENCES = 4096, 512, {"decode": 64, "train": 32}


class Programs:
    """Lowered programs of a model on a mesh of H200s."""

    def __init__(self, name: str, mesh, layers: int | None = None, kernels: str = "auto"):
        self._name, self._mesh, self._layers, self._kernels = name, mesh, layers, kernels

    def runtime(self, sequences: int, micro_batches: int = 1) -> Runtime:
        """A run with so many sequences, two of a prompt."""
        config = default_config()
        config.model.name = self._name
        config.precision.kernels = self._kernels
        config.rollout.update(
            prompts_per_step=sequences // 2,
            group_size=2,
            max_prompt_tokens=PROMPT,
            max_new_tokens=SLOTS - PROMPT,
        )
        config.learner.update(gradient_accumulation_steps=micro_batches, remat="full")
        return described_runtime(resolve_config(config), self._mesh, self._layers)

    def decode(self):
        """One token of every sequence: weights, caches and rows as a rollout holds them."""
        return trace_decode_step(self.runtime(SEQUENCES["decode"])).lower()

    def continuous(self):
        """The loop of continuous batching on one device: four samples of each prompt, eight
        requests a slot, and pages for all slots at full length."""
        slots, group = SEQUENCES["decode"], 4
        samples, prompts = 8 * slots, 2 * slots
        runtime = self.runtime(samples)
        settings = SamplerConfig(SLOTS - PROMPT, group, (0,), 0)
        batching = Batching(slots, slots * pages_of(SLOTS) + 1)
        sampler = ContinuousSampler(
            runtime.resolved.model, runtime.resolved.rollout_recipe, settings, batching
        )
        requests = request_shapes(runtime, prompts, samples)
        state = jax.eval_shape(
            sampler._begin, jax.ShapeDtypeStruct((prompts, PROMPT), jnp.int32), requests
        )
        iterations, whole = jax.ShapeDtypeStruct((), jnp.int32), sharding.replicated(runtime.mesh)
        requests, iterations, state = sharding.laid_out((requests, iterations, state), whole)
        weights = sharding.laid_out(runtime.layout.weight_shapes, runtime.layout.weight_shardings)
        return sampler._advance.lower(weights, requests, iterations, state)

    def train(self, micro_batches: int):
        """Gradients and the optimiser's update for one batch."""
        return trace_train_step(self.runtime(SEQUENCES["train"], micro_batches)).lower()


def row(title: str, lowered) -> str:
    """Compiles and describes a program: a line of the table."""
    start = time.time()
    compiled = lowered.compile()
    seconds = time.time() - start
    memory, text = compiled.memory_analysis(), compiled.as_text()
    arguments, temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    ours = products(text)
    kernels = len(ours.pop("ours", []))
    others = ", ".join(f"{len(names)} {kind}" for kind, names in sorted(ours.items()))
    sent = ", ".join(f"{n} {kind}" for kind, n in collectives(text).items())
    cells = (
        title,
        f"{arguments / GIB:.1f}",
        f"{temporary / GIB:.1f}",
        kernels,
        others or "none",
        sent or "none",
        f"{seconds:.0f}",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    name, *counts = sys.argv[1:]
    print(
        "| program | arguments, GiB | temporary, GiB | our kernels | other products | collectives "
        "| compiled in s |\n|---|---|---|---|---|---|---|"
    )
    for count in map(int, counts):
        programs = Programs(name, h200_mesh({"fsdp": count}))
        print(row(f"decode, {count} H200", programs.decode()), flush=True)
        if count == 1:
            print(row("continuous decode, 1 H200", programs.continuous()), flush=True)
        micro_batches = SEQUENCES["train"] // count
        print(row(f"train, {count} H200", programs.train(micro_batches)), flush=True)


if __name__ == "__main__":
    main()
