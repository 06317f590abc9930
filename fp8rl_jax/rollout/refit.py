"""Refit: learner parameters -> rollout parameters, in one jitted call per policy update.

There is no name mapping and no second copy of the quantiser: it is `quantize_params`, the function
that the learner's own forward pass uses, and a checksum of the result. The train step reports the
checksum of the bytes that its forward pass used; equality proves that what is served is what was
learnt (`refit_checksum_ok`).
"""

from __future__ import annotations

from collections.abc import Callable

from fp8rl_jax.exact_jit import exact_jit
from fp8rl_jax.models import checksum, quantize_params, weight_health, with_kv_scales
from fp8rl_jax.quant import Recipe


def make_refit(
    recipe: Recipe | str, *, health: bool = False, shardings: dict | None = None
) -> Callable:
    """Returns ``refit(params, scaling_state, kv_scales) -> (weights, checksum, health)``, jitted.

    `weights` is the tree that the sampler takes, with the frozen states of activation policies and
    calibrated KV scales; `checksum` is a uint32 over all its bytes. `health` is `weight_health`, {}
    with health=False.
    """

    def refit(params, scaling_state=None, kv_scales=None):
        weights = quantize_params(params, recipe, scaling_state)
        lost = weight_health(params, weights, recipe) if health else {}
        weights = with_kv_scales(weights, kv_scales)
        return weights, checksum(weights), lost

    return exact_jit(refit, **(shardings or {}))
