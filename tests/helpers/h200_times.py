"""What one H200 took at commit 9241ab6 (docs/gpu_results), and what the plan predicts for it."""

from __future__ import annotations

import dataclasses
from unittest import mock

from planned import mesh_of, resolved_as

from fp8rl_jax.models.presets import preset
from fp8rl_jax.plan import times
from fp8rl_jax.plan.gpus import GPUS
from fp8rl_jax.plan.learner import Workload, plan_learner
from fp8rl_jax.plan.planned import Planned
from fp8rl_jax.quant import get_recipe

# Milliseconds of decode steps of Qwen3-8B, 64 sequences of so many keys; and of a layer's train
# step of 4,096 tokens: forward, recomputed, and backward, without the optimiser.
DECODE = {("fp8", 1900): 9.39, ("fp8", 3950): 11.54, ("bf16", 1900): 11.36, ("bf16", 3950): 15.83}
LAYER = {"fp8": 12.68, "bf16": 14.94}
# Kernels of a layer of a decode step of that day; those of them that are products and attention.
KERNELS = {"fp8": (34, 9), "bf16": (27, 9)}
OTHERS = 40  # outside the layers


def decode_ms(name: str, recipe: str, keys: int) -> float:
    """Milliseconds predicted for a decode step of 64 sequences, by today's kernels."""
    h200 = GPUS["h200"]
    parts = times.decode_seconds(preset(name), get_recipe(recipe), mesh_of(), 64, keys, h200)
    return 1e3 * sum(parts.values())


def decode_ms_of_that_day(recipe: str, keys: int) -> float:
    """The same of Qwen3-8B, by the kernels of commit 9241ab6."""
    known = {"dense": KERNELS[recipe]}
    with mock.patch.multiple(times, DECODE_LAUNCHES=known, STEP_LAUNCHES=OTHERS):
        return decode_ms("qwen3_8b", recipe, keys)


def layer_ms(name: str, recipe: str) -> float:
    """Milliseconds predicted for a layer's train step of 4,096 tokens."""
    work = Workload(rows=1, prompt=2048, response=2048, micro_batches=1, remat="full")
    model = dataclasses.replace(preset(name), num_hidden_layers=1)
    resolved, mesh = resolved_as(model, get_recipe(recipe)), mesh_of()
    plan = plan_learner(resolved, mesh, work)
    cost = times.step_cost(Planned(resolved, mesh, GPUS["h200"], hosts=1, memory=0), plan)
    left_out = ("output head", "weights and state in memory")
    return 1e3 * sum(s for part, s in cost.seconds.items() if part not in left_out)


def predicted_of_measured() -> dict[str, list[float]]:
    """{figure: [predicted, measured]} of all six."""
    found = {
        f"decode {recipe}, {keys} keys": [decode_ms_of_that_day(recipe, keys), measured]
        for (recipe, keys), measured in DECODE.items()
    }
    layers = {f"layer {recipe}": [layer_ms("qwen3_8b", recipe), m] for recipe, m in LAYER.items()}
    return found | layers
