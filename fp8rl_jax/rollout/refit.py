"""Refit: learner parameters -> rollout parameters, in one jitted call per policy update.

There is no name mapping and no second copy of the quantiser: it is `quantize_params`, the function
that the learner's own forward pass uses, and a checksum of the result. The train step reports the
checksum of the bytes that its forward pass used; equality proves that what is served is what was
learnt (`refit_checksum_ok`).
"""

from __future__ import annotations

from collections.abc import Callable

from fp8rl_jax.exact_jit import exact_jit
from fp8rl_jax.models import checksum, quantize_params, weight_health
from fp8rl_jax.quant import Recipe


def make_refit(recipe: Recipe | str, *, shardings: dict | None = None) -> Callable:
    """Returns the jitted ``refit(params) -> (weights, checksum, health)``.

    `weights` is the tree that the sampler takes, `checksum` a uint32 over all its bytes, and
    `health` the counts of `block_health` over all quantised weights ({} without any).
    """

    def refit(params):
        weights = quantize_params(params, recipe)
        return weights, checksum(weights), weight_health(params, weights)

    return exact_jit(refit, **(shardings or {}))
