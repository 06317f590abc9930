"""Calibration of static KV scales: one per layer and tensor, on the step's own sequences.

After each update the new weights run once over that step's prompts and responses; the largest q, k
and v (after QK-norm and RoPE) of every layer give ``scale = amax * margin / 448``. NeMo RL's scheme
for an FP8 KV cache. The scales are part of the train state: the sampler and the learner's next step
use the same ones, and their checksum is part of the refit's.

The calibrating forward pass stores K and V with dynamic scales: it must not depend on the scales
that it replaces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from fp8rl_jax.exact_jit import exact_jit
from fp8rl_jax.models import ModelConfig, forward, quantize_params
from fp8rl_jax.quant import KVScales, Recipe, calibrated_scales, get_recipe
from fp8rl_jax.quant.formats import amax as largest


def make_calibrate(
    model: ModelConfig,
    recipe: Recipe | str,
    *,
    margin: float = 1.05,
    shardings: dict | None = None,
) -> Callable:
    """Returns ``calibrate(params, scaling_state, tokens, lengths, step, rope)``, jitted.

    Args:
      model, recipe: shapes and the rollout's numerics.
      margin: headroom, at least 1.
      shardings: keywords for jit on a mesh.

    The function takes float32 masters and their scaling states; tokens (B, T) int32, right-padded;
    lengths (B,) int32, padding does not count; step () int32, kept in the result. It returns
    `KVScales`.
    """
    recipe = dataclasses.replace(get_recipe(recipe), kv="dynamic", fp8_attention=False)

    def calibrate(params, scaling_state, tokens, lengths, step, rope):
        weights = quantize_params(params, recipe, scaling_state)
        out = forward(
            weights, tokens, model, recipe,
            lengths=lengths, rope=rope, output="hidden", collect=("kv_amax",),
        )  # fmt: skip
        amax = {name: largest(found, 1) for name, found in out.aux["kv_amax"].items()}
        return calibrated_scales(amax, margin, step)

    return exact_jit(calibrate, **(shardings or {}))


def is_fresh(scales: KVScales | None, step: int) -> bool:
    """Whether `scales` (if any) were calibrated on the weights of RL step `step`."""
    return scales is None or int(scales.step) == step


def require_fresh(scales: KVScales | None, step: int) -> None:
    """Raises ValueError unless `is_fresh`.

    Sampling with old scales would not fail: it would clip keys and values, unseen.
    """
    if is_fresh(scales, step):
        return
    assert scales is not None
    age = "never calibrated" if int(scales.step) < 0 else f"calibrated at RL step {scales.step}"
    raise ValueError(f"KV scales are {age}, and the weights are those of RL step {step}")
