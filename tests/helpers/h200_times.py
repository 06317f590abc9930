"""What one H200 took at commit 9241ab6 (docs/gpu_results), and what the plan predicts for it."""

from __future__ import annotations

import dataclasses
from unittest import mock

from planned import mesh_of, resolved_as

from fp8rl_jax.models.presets import preset
from fp8rl_jax.plan import times
from fp8rl_jax.plan.gpus import DECODE_MEMORY, GPUS
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

# FP8 products of 64 rows by Triton on that day (docs/kernels.md): microseconds of a step of 128 of
# K by the columns of a program's tile, and of a launch besides. 64 x 4096 x 4096 took 10.1 us and
# 64 x 12288 x 4096 25.0, in tiles of 32; 64 x 4096 x 6144 12.8, in tiles of 64; and what these
# leave of a layer's 104 us is two of 64 x 4096 x 12288, in tiles of 128.
BESIDES = 2.65
STEP = {32: (25.0 - 10.1) / 64, 64: (12.8 - BESIDES) / 32, 128: 0.52}
# A warp's instructions of a step, of that day's kernels and today's, both by Triton 3.9
# (docs/scripts/product_counts.py). A scheduler has one warp of a program, which waits for itself:
# time goes with instructions.
INSTRUCTIONS = {32: (121, 83), 64: (141, 100), 128: (181, 181)}
# Bytes/s of operands that a multiprocessor got on that day at most: bf16, 64 x 4096 x 4096 in tiles
# of 32 columns, 12.2 us. Mosaic's products wait for nothing else.
INGESTED = (64 + 32) * 128 * 2 / ((12.2 - BESIDES) / 32 * 1e-6)
# Programs of attention over keys in bytes that a multiprocessor ran at a time on that day, and runs
# with 168 registers a thread (kernels/gpu/attention_operands.py). A warp waits for itself there, so
# speed goes with them, up to the memory's. Programs for splits without keys are gone: they cost
# what the plan leaves out of the step with 1,900 keys, which it predicts too short.
PROGRAMS = (4, 5)
# Products of a layer of Qwen3-8B in a decode step: columns and K; columns of a tile by Triton and
# by Mosaic, of which no multiprocessor gets two unless the product waits for the memory anyway.
PRODUCTS = ((6144, 4096, 64, 64), (4096, 4096, 32, 32), (24_576, 4096, 128, 192))
PRODUCTS += ((4096, 12_288, 32, 32),)


def product_rate(way: str) -> float:
    """Bytes/s at which a layer's FP8 products of 64 rows are predicted to read their weights.

    A launch takes BESIDES, and then its steps or the time of its bytes at DECODE_MEMORY of the
    memory's bandwidth.

    Args:
      way: 'triton', today's default, or 'mosaic'.
    """
    total = 0.0
    for columns, depth, by_triton, by_mosaic in PRODUCTS:
        before, now = INSTRUCTIONS[by_triton]
        step = STEP[by_triton] * 1e-6 * now / before
        if way == "mosaic":
            step = ((64 + by_mosaic) * 128 + 4 * 64) / INGESTED
        reading = columns * depth / (DECODE_MEMORY * GPUS["h200"].hbm)
        total += BESIDES * 1e-6 + max(depth / 128 * step, reading)
    return sum(columns * depth for columns, depth, *_ in PRODUCTS) / total


def decode_ms(name: str, recipe: str, keys: int, products: str = "") -> float:
    """Milliseconds predicted for a decode step of 64 sequences.

    `products`: a way of `product_rate`, for today's kernels; else FP8 products and attention as
    measured, which is what a plan says.
    """
    h200 = GPUS["h200"]
    rates = {}
    if products:
        before, now = PROGRAMS
        attention = times.DECODE_RATES["attention in 8 bits"] * now / before
        rates = {"FP8 products": product_rate(products), "attention in 8 bits": attention}
    with mock.patch.dict(times.DECODE_RATES, rates):
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
