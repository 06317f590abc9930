"""Refit: converts learner parameters to rollout weights, in one jitted call per policy update; and
the calibration of static KV scales before it.

The refit calls `quantize_params`, as the learner's forward pass does, and adds a checksum of the
result. The train step reports the checksum of the bytes that its forward pass used; equality proves
that the sampler holds the trained weights (`refit_checksum_ok`).

Calibrated KV scales are one per layer and tensor. After each update the new weights run once over
that step's prompts and responses; the amaxes of q, k and v (after QK-norm and RoPE) of every layer
give ``scale = amax * margin / 448``, NeMo RL's scheme for an FP8 KV cache. The scales are part of
the train state: the sampler and the learner's next step use the same scales. The calibrating
forward pass stores K and V with dynamic scales: it must not depend on the scales that it replaces.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from fp8rl_jax.base.exact_jit import exact_jit, exact_when_called
from fp8rl_jax.batch import Batch
from fp8rl_jax.kernels import K_BLOCK
from fp8rl_jax.micro_batches import over_parts
from fp8rl_jax.models import (
    ONE_DEVICE,
    ModelConfig,
    Parallel,
    checksum,
    hidden_states,
    quantize_params,
    weight_health,
)
from fp8rl_jax.models.masters import merged
from fp8rl_jax.models.taps import Observe
from fp8rl_jax.quant import Recipe, calibrated_scales, get_recipe, is_weight
from fp8rl_jax.quant.scaling import find_amax


def make_refit(
    recipe: Recipe | str, *, health: bool = False, shardings: dict | None = None
) -> Callable:
    """Returns ``refit(params, scaling_state) -> (weights, checksum, health)``, jitted.

    `weights` is the tree that the sampler takes, with the frozen states of activation policies and
    calibrated KV scales; `checksum` is a uint32 over all its bytes. `health` is the result of
    `weight_health`, {} with health=False.
    """

    recipe = get_recipe(recipe)

    def refit(params, scaling_state=None):
        params = merged(params, recipe, keep_quantised=True)
        weights = quantize_params(params, recipe, scaling_state)
        lost = weight_health(params, weights, recipe) if health else {}
        return weights, checksum(weights), lost

    return exact_jit(refit, **(shardings or {}))


@exact_when_called
def sampled_bytes(weights) -> list[jax.Array]:
    """Returns FP8 bytes to compare with those of the next refit (`changed_bytes`), uint8: of each
    stack of quantised weights the first rows of a layer in its middle, K_BLOCK of each matrix."""
    stacks = [x for x in jax.tree.leaves(weights, is_leaf=is_weight) if is_weight(x)]
    values = [x for x in jax.tree.leaves(stacks) if x.dtype.itemsize == 1]
    rows = [x[x.shape[0] // 2, ..., :K_BLOCK, :] for x in values]
    return [lax.bitcast_convert_type(x, jnp.uint8) for x in rows]


@exact_when_called
def changed_bytes(before: list[jax.Array], after: list[jax.Array]) -> jax.Array:
    """Returns the share of `sampled_bytes` that differ, () float32."""
    pairs = zip(before, after, strict=True)
    changed = jnp.stack([(x != y).sum(dtype=jnp.float32) for x, y in pairs])
    return changed.sum() / sum(x.size for x in before)


def make_calibrate(
    model: ModelConfig, recipe: Recipe | str, parallel: Parallel = ONE_DEVICE
) -> Callable:
    """Returns ``calibrate(params, scaling_state, batch, step, rope)``, jitted.

    Args:
      model, recipe, parallel: shapes, the rollout's numerics, and the devices.

    `calibrate` takes float32 masters and their scaling states; a batch, whose sequences it runs;
    step () int32, stored in the result. It returns `KVScales`, the same bits for any packing.
    """
    recipe = dataclasses.replace(get_recipe(recipe), kv="dynamic", fp8_attention=False)

    def calibrate(params, scaling_state, batch: Batch, step, rope):
        weights = quantize_params(params, recipe, scaling_state)

        def run(part: Batch):
            out = hidden_states(
                weights,
                part.inputs(rope),
                model,
                recipe,
                parallel=parallel,
                observe=Observe(collect=("kv_amax",)),
            )
            return {name: find_amax(x, 1) for name, x in out.aux["kv_amax"].items()}, ()

        amax, _ = over_parts(run, batch, parallel, add=functools.partial(jax.tree.map, jnp.maximum))
        return calibrated_scales(amax, recipe.kv_margin, step)

    return exact_jit(calibrate)
