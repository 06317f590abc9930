"""Prints the table of docs/kernels.md: programs of a real model compiled for H200s without one.

    JAX_PLATFORMS=cpu python docs/scripts/aot_h200.py qwen3_8b 1 8

compiles a decode step (64 sequences, 4,096 slots, FP8 weights and KV) and a train step (gradients,
Adam, full rematerialisation, 32 sequences of 4,096 tokens in micro-batches) for so many devices,
with the parameters over `fsdp`; for one device also the loop of continuous batching (64 slots, as
many tokens, prefill included). Memory is per device, as XLA planned it.
"""

from __future__ import annotations

import dataclasses
import sys
import time

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from fp8rl_jax import deviceless, sharding
from fp8rl_jax.learner import Batch, LossConfig, make_train_step, new_state
from fp8rl_jax.models import (
    init_params,
    kernel_formats,
    pages_of,
    quantize_params,
    rope_tables,
    weight_specs,
)
from fp8rl_jax.models.presets import preset
from fp8rl_jax.quant import get_recipe
from fp8rl_jax.rollout import Batching, ContinuousSampler
from fp8rl_jax.rollout.sampler import Loop, Requests, SamplerConfig
from fp8rl_jax.training.optimizer import make_optimizer

GIB = 2**30
SLOTS, PROMPT, SEQUENCES = 4096, 512, {"decode": 64, "train": 32}


def _shapes(function, *arguments):
    return jax.eval_shape(function, *arguments)


class Programs:
    """Lowered programs of a model on a mesh of H200s."""

    def __init__(self, name: str, mesh, layers: int | None = None):
        self.mesh = mesh
        self.model = preset(name)
        if layers:
            self.model = dataclasses.replace(self.model, num_hidden_layers=layers)
        self.recipe = dataclasses.replace(get_recipe("fp8"), kernels="triton")
        self.params = _shapes(lambda: init_params(self.model, jax.random.key(0)))
        self.whole = sharding.replicated(mesh)
        self.rows = sharding.batch_sharding(mesh)
        self.rope = sharding.laid_out(
            _shapes(lambda: tuple(map(jnp.asarray, rope_tables(self.model, SLOTS)))), self.whole
        )

    def _weights(self):
        """A rollout's, as its kernels read them."""
        weights = _shapes(lambda p: quantize_params(p, self.recipe), self.params)
        specs = weight_specs(weights, self.model, self.recipe, self.mesh)
        named = sharding.named(self.mesh, specs)
        return sharding.laid_out(weights, kernel_formats(weights, named))

    def _requests(self, prompts: int, samples: int) -> Requests:
        def requests(rope):
            ids, ones = jnp.zeros(samples, jnp.int32), jnp.ones(samples, jnp.int32)
            lengths = jnp.ones(prompts, jnp.int32)
            return Requests(lengths, jax.random.key(0), ids, jnp.ones(samples), ones, rope)

        return _shapes(requests, self.rope)

    def decode(self):
        """One token of every sequence: weights, caches and rows as a rollout holds them."""
        batch, new = SEQUENCES["decode"], 8
        loop = Loop(self.model, self.recipe, SamplerConfig(new, 1, (0,), 0, cache_slots=SLOTS))
        weights, wanted = self._weights(), self._requests(batch, batch)
        prompts = jax.ShapeDtypeStruct((batch, 64), jnp.int32)
        prepared = _shapes(loop.prepare, weights)
        state = _shapes(loop.prefill, prepared, prompts, wanted)
        rows = PartitionSpec(sharding.BATCH_AXES)

        def place(path, leaf):
            if "cache" in jax.tree_util.keystr(path):
                return NamedSharding(self.mesh, PartitionSpec(None, sharding.BATCH_AXES))
            fits = leaf.shape[:1] == (batch,)
            return NamedSharding(self.mesh, rows if fits else PartitionSpec())

        state = sharding.laid_out(state, jax.tree_util.tree_map_with_path(place, state))
        wanted = sharding.laid_out(wanted, jax.tree_util.tree_map_with_path(place, wanted))

        def step(weights, wanted, state):
            return loop.decode_step(loop.prepare(weights), wanted, state)

        with jax.set_mesh(self.mesh):
            return jax.jit(step, donate_argnums=2).lower(weights, wanted, state)

    def continuous(self):
        """The loop of continuous batching on one device: four samples of each prompt, eight
        requests a slot, and pages for all slots at full length."""
        slots, group = SEQUENCES["decode"], 4
        samples, prompts = 8 * slots, 2 * slots
        settings = SamplerConfig(SLOTS - PROMPT, group, (0,), 0)
        batching = Batching(slots, slots * pages_of(SLOTS) + 1)
        sampler = ContinuousSampler(self.model, self.recipe, settings, batching)
        requests = self._requests(prompts, samples)
        state = _shapes(
            sampler._begin, jax.ShapeDtypeStruct((prompts, PROMPT), jnp.int32), requests
        )
        turns = jax.ShapeDtypeStruct((), jnp.int32)
        requests, turns, state = sharding.laid_out((requests, turns, state), self.whole)
        with jax.set_mesh(self.mesh):
            return sampler._advance.lower(self._weights(), requests, turns, state)

    def train(self, micro_batches: int):
        """Gradients and the optimiser's update for one batch."""
        batch = SEQUENCES["train"]
        optimizer, _ = make_optimizer(1e-6, 10, 0.9, 0.95, 0.0, 1.0)
        rng = jax.ShapeDtypeStruct((2,), jnp.uint32)
        state = _shapes(lambda p, r: new_state(p, optimizer, r, self.recipe), self.params, rng)
        state = sharding.laid_out(state, sharding.param_shardings(self.mesh, state))
        slots = SLOTS - PROMPT
        field = {
            "tokens": ((batch, SLOTS), jnp.int32), "targets": ((batch, slots), jnp.int32),
            "prompt_lengths": ((batch,), jnp.int32), "temperature": ((batch,), jnp.float32),
        }  # fmt: skip
        arrays = {
            f.name: jax.ShapeDtypeStruct(*field.get(f.name, ((batch, slots), jnp.float32)))
            for f in dataclasses.fields(Batch)
            if f.name != "routing" and f.default is dataclasses.MISSING
        }
        arrays = sharding.laid_out(Batch(**arrays), self.rows)
        step = make_train_step(
            self.model, self.recipe, optimizer, LossConfig(), micro_batches=micro_batches,
            remat="full",
        )  # fmt: skip
        with jax.set_mesh(self.mesh):
            return step.lower(state, arrays, self.rope)


def row(title: str, lowered) -> str:
    """Compiles and describes a program: a line of the table."""
    start = time.time()
    compiled = lowered.compile()
    seconds = time.time() - start
    memory, text = compiled.memory_analysis(), compiled.as_text()
    arguments, temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    ours = deviceless.products(text)
    kernels = len(ours.pop("triton_kernel_call", []))
    others = ", ".join(f"{len(names)} {kind}" for kind, names in sorted(ours.items()))
    sent = ", ".join(f"{n} {kind}" for kind, n in deviceless.collectives(text).items())
    cells = (
        title, f"{arguments / GIB:.1f}", f"{temporary / GIB:.1f}", kernels, others or "none",
        sent or "none", f"{seconds:.0f}",
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    name, *counts = sys.argv[1:]
    print(
        "| program | arguments, GiB | temporary, GiB | our kernels | other products | collectives "
        "| compiled in s |\n|---|---|---|---|---|---|---|"
    )
    for count in map(int, counts):
        programs = Programs(name, deviceless.h200_mesh({"fsdp": count}))
        print(row(f"decode, {count} H200", programs.decode()), flush=True)
        if count == 1:
            print(row("continuous decode, 1 H200", programs.continuous()), flush=True)
        micro_batches = SEQUENCES["train"] // count
        print(row(f"train, {count} H200", programs.train(micro_batches)), flush=True)


if __name__ == "__main__":
    main()
