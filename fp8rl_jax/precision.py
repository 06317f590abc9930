"""From the `precision` section of a configuration to the recipe of each side."""

from __future__ import annotations

import dataclasses
import fnmatch

import ml_collections

from fp8rl_jax.errors import UserError
from fp8rl_jax.models import LINEAR_LAYERS
from fp8rl_jax.quant import Recipe, get_policy, get_recipe, same_forward

SIDES = ("rollout", "learner")
_KV = {"bf16": "none", "fp8": "dynamic", "fp8_calibrated": "calibrated"}


def side_recipe(config: ml_collections.ConfigDict, side: str) -> Recipe:
    """The recipe of 'rollout' or 'learner': the named one, with the section's changes.

    Policies, layers and modules in bf16 change recipes that quantise; the others have nothing to
    change. The KV cache and FP8 attention change any recipe.

    Raises:
      UserError: no such recipe or policy, or they do not go together.
    """
    precision = config.precision
    try:
        recipe = get_recipe(precision[side])
        changes: dict = {}
        if precision.kv_cache != "recipe":
            changes["kv"] = _KV[precision.kv_cache]
        if precision.attention == "fp8":
            changes["fp8_attention"] = True
        if recipe.quantized:
            for name, operand in recipe.operands.items():
                policy = precision[f"{name}_policy"]
                if policy:
                    changes[name] = dataclasses.replace(operand, policy=get_policy(policy))
            changes |= {
                "first_layers": precision.first_layers_bf16 or recipe.first_layers,
                "last_layers": precision.last_layers_bf16 or recipe.last_layers,
                "bf16_modules": _patterns(precision.bf16_modules) or recipe.bf16_modules,
            }
        recipe = dataclasses.replace(recipe, **changes)
        recipe.layer_segments(config.model.num_hidden_layers)
        return recipe
    except UserError as error:
        raise UserError(f"precision.{side}: {error}") from None


def _patterns(text: str) -> tuple[str, ...]:
    patterns = tuple(part.strip() for part in text.split(",") if part.strip())
    for pattern in patterns:
        if not fnmatch.filter(LINEAR_LAYERS, pattern):
            raise UserError(
                f"precision.bf16_modules: {pattern!r} matches no linear layer; they are "
                + ", ".join(LINEAR_LAYERS)
            )
    return patterns


def same_numerics(config: ml_collections.ConfigDict) -> bool:
    """Whether both sides compute the same forward pass."""
    return same_forward(*(side_recipe(config, side) for side in SIDES))


def zero_drift_required(config: ml_collections.ConfigDict) -> bool:
    """Whether the run must refuse what cannot be exact."""
    setting = config.precision.zero_drift
    return same_numerics(config) if setting == "auto" else setting == "required"
