"""Turns the device's counters into metrics: quantisation losses by operand class, with the worst
layer; ages of scales; and how evenly the routers use their experts.

Losses are counted per site and layer (and expert) by the train step's probes (activations and
gradients, in the pass that trains), by the refit (weights) and by the KV cache's quantiser.
Padding tokens count as activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fp8rl_jax.models import ModelConfig
from fp8rl_jax.models.stacks import layer_groups, layer_stacks
from fp8rl_jax.quant import Recipe
from fp8rl_jax.quant.kv import of_sites, scales_in
from fp8rl_jax.quant.operands import COUNTS, OPERAND_CLASSES

Counts = dict[str, dict[str, np.ndarray]]  # {site: {count: (L,), of experts (L, E)}}


def first_layers(model: ModelConfig, recipe: Recipe) -> dict[str, int]:
    """Maps each stack (a run of consecutive layers that `recipe` treats alike), by name, to the
    number of its first layer."""
    runs = layer_groups(layer_stacks(model), recipe)
    return {run.name: run.layers.start for run in runs}


def loss_metrics(health: dict[str, Counts], first: dict[str, int]) -> dict[str, float | str]:
    """Returns the metrics of quantisation losses.

    ``fp8_saturated_frac/CLASS`` and ``fp8_underflow_frac/CLASS`` are shares of the elements,
    ``fp8_nonfinite_blocks/CLASS`` is a number of blocks, and ``fp8_worst_layer/CLASS`` names the
    layer (and the expert, or the head of a latent's matrices) with the largest loss (a non-finite
    block outweighs any share); it is left out if nothing was lost.

    Args:
      health: counts {operand class: {site: {count: (L,), of experts (L, E)}}}.
      first: result of `first_layers`; layers of the KV cache are numbered over the whole model.
    """
    record: dict[str, float | str] = {}
    for name, sites in health.items():
        total = dict.fromkeys(COUNTS, 0.0)
        worst = 0.0
        worst_at = ""
        for site, counts in sites.items():
            lost = np.asarray(counts["saturated"]) + np.asarray(counts["underflowed"])
            share = np.float64(lost) / np.maximum(counts["elements"], 1)
            share = share + 1e6 * np.float64(counts["nonfinite_blocks"])
            layer, *expert = (int(i) for i in np.unravel_index(np.argmax(share), share.shape))
            if share.max() > worst:
                run, _, module = site.partition(".")
                number = layer + (0 if name == "kv" else first[run])
                part = "expert" if "experts." in module else "head"
                worst = float(share.max())
                worst_at = f"layer {number} {module}" + "".join(f", {part} {i}" for i in expert)
            for key in total:
                total[key] += float(np.sum(counts[key]))
        if not total["elements"]:
            continue
        record[f"fp8_saturated_frac/{name}"] = total["saturated"] / total["elements"]
        record[f"fp8_underflow_frac/{name}"] = total["underflowed"] / total["elements"]
        record[f"fp8_nonfinite_blocks/{name}"] = total["nonfinite_blocks"]
        if worst_at:
            record[f"fp8_worst_layer/{name}"] = worst_at
    return record


def age_metrics(scaling_state: Mapping[str, Any], step: int) -> dict[str, int]:
    """Returns ``scale_age/CLASS``: most optimiser steps since any scale of the class saw an amax.

    For the KV cache: RL steps since its calibration. Dynamic scales have no age.
    """
    ages: dict[str, int] = {}
    for site in of_sites(scaling_state).values():
        for operand, name in OPERAND_CLASSES.items():
            state = getattr(site, operand)
            if state is not None:
                ages[name] = max(ages.get(name, 0), int(np.max(state.age)))
    scales = scales_in(scaling_state)
    if scales is not None:
        ages["kv"] = step - int(scales.step)
    return {f"scale_age/{name}": age for name, age in ages.items()}


def load_metrics(expert_tokens: np.ndarray, first_layer: int) -> dict[str, float | str]:
    """Returns the metrics of a step's tokens per expert.

    A layer's peak is the largest load of an expert over the layer's mean load. ``expert_load_max``
    is the largest peak, ``expert_load_worst`` names its layer and expert; ``expert_load_max_mean``
    is the mean peak; ``expert_load_entropy`` the mean over layers of the loads' entropy over ln(E),
    1 when balanced; ``experts_unused_frac`` the share of experts without a token.

    Args:
      expert_tokens: (S, E) tokens of each expert in the S layers that have experts.
      first_layer: number of the first of these layers.
    """
    tokens = np.asarray(expert_tokens, np.float64)
    share = tokens / np.maximum(tokens.sum(1, keepdims=True), 1)
    largest = share.max(1) * tokens.shape[1]
    entropy = -(share * np.log(np.where(share > 0, share, 1))).sum(1) / np.log(tokens.shape[1])
    layer = int(np.argmax(largest))
    return {
        "expert_load_max": float(largest[layer]),
        "expert_load_max_mean": float(largest.mean()),
        "expert_load_entropy": float(entropy.mean()),
        "expert_load_worst": f"layer {first_layer + layer} expert {int(np.argmax(share[layer]))}",
        "experts_unused_frac": float((tokens == 0).mean()),
    }
