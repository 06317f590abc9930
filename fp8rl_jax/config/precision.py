"""Makes the recipe of each side from the `precision` section of a configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
from typing import Any

import ml_collections

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.models import LINEAR_LAYERS
from fp8rl_jax.quant import Operand, Recipe, get_recipe, get_scaling_policy
from fp8rl_jax.quant.qarray import E4M3, INT8
from fp8rl_jax.quant.recipe import FLOAT32

SIDES = ("rollout", "learner")
_KV_DTYPES = {"bf16": None, "fp8": E4M3, "int8": INT8}


@contextlib.contextmanager
def _field(name: str):
    """Puts the name of the field at fault in front of error messages."""
    try:
        yield
    except UserError as error:
        raise UserError(f"precision.{name}: {error}") from None


def _kv_fields(text: str) -> dict[str, Any]:
    """Returns the fields of a Recipe that `precision.kv_cache` sets.

    Raises:
      UserError: the text is not understood.
    """
    if text == "fp8_calibrated":
        return {"kv": "calibrated", "k_dtype": E4M3, "v_dtype": E4M3}
    parts = [part.partition("=") for part in text.split(",")]
    formats = {name.strip(): value.strip() for name, _, value in parts}
    if text in _KV_DTYPES:
        formats = {"k": text, "v": text}
    if set(formats) != {"k", "v"} or len(parts) > 2 or not set(formats.values()) <= {*_KV_DTYPES}:
        raise UserError(
            f"{text!r} is not understood: write recipe, bf16, fp8, fp8_calibrated, int8, or K and "
            "V apart, such as 'k=int8,v=fp8'"
        )
    dtypes = {f"{name}_dtype": _KV_DTYPES[value] for name, value in formats.items()}
    return {"kv": "dynamic", **dtypes}


def side_recipe(precision: ml_collections.ConfigDict, side: str, layers: int) -> Recipe:
    """Returns the recipe of a side: the named one, changed by the section's other fields.

    Policies, layers and modules in bf16 change only recipes that quantise. The KV cache, FP8
    attention, output head and kernels change any recipe.

    Args:
      precision: section of the configuration.
      side: 'rollout' or 'learner'.
      layers: number of the model's layers.

    Raises:
      UserError: there is no such recipe or policy, or the recipe cannot be changed so.
    """
    with _field(side):
        recipe = get_recipe(precision[side])
        _check_patterns(recipe.bf16_modules)
        recipe.layer_segments(layers)
    if precision.kv_cache != "recipe":
        with _field("kv_cache"):
            recipe = dataclasses.replace(recipe, **_kv_fields(precision.kv_cache))
    if precision.attention == "fp8" and recipe.kv_e4m3:  # else refused by `combinations`
        with _field("attention"):
            recipe = dataclasses.replace(recipe, fp8_attention=True)
    if precision.head == "f32":
        recipe = dataclasses.replace(recipe, head=FLOAT32)
    if precision.kernels != "auto":
        recipe = dataclasses.replace(recipe, kernels=precision.kernels)
    if precision.cpu_products == "exact":
        recipe = dataclasses.replace(recipe, kernels="exact")
    return _change_layers(recipe, precision, layers) if recipe.quantized else recipe


def _change_layers(recipe: Recipe, precision, layers: int) -> Recipe:
    """Returns a quantising recipe with the section's policies, and layers and modules in bf16."""
    if precision.backward != "recipe":
        gradient = recipe.gradient or Operand()
        recipe = dataclasses.replace(recipe, backward=precision.backward, gradient=gradient)
    for name in recipe.operands:
        policy = precision[f"{name}_policy"]
        if policy:
            with _field(f"{name}_policy"):
                recipe = recipe.with_policies(**{name: get_scaling_policy(policy)})
    for end in ("first_layers", "last_layers"):
        count = precision[f"{end}_bf16"]
        if count:
            with _field(f"{end}_bf16"):
                recipe = dataclasses.replace(recipe, **{end: count})
                recipe.layer_segments(layers)
    if precision.bf16_modules:
        with _field("bf16_modules"):
            patterns = tuple(p.strip() for p in precision.bf16_modules.split(",") if p.strip())
            _check_patterns(patterns or (precision.bf16_modules,))
            recipe = dataclasses.replace(recipe, bf16_modules=patterns)
    return recipe


def reference_recipe(precision: ml_collections.ConfigDict, learner: Recipe) -> Recipe:
    """Returns the recipe that scores the reference policy (`precision.reference`).

    Raises:
      UserError: no recipe has that name.
    """
    if precision.reference == "learner":
        return learner
    with _field("reference"):
        recipe = without_calibration(get_recipe(precision.reference))
    return dataclasses.replace(recipe, head=learner.head)


def without_calibration(recipe: Recipe) -> Recipe:
    """Returns the recipe with dynamic KV scales instead of calibrated ones: without a rollout,
    nothing calibrates them."""
    return dataclasses.replace(recipe, kv="dynamic") if recipe.kv == "calibrated" else recipe


def _check_patterns(patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        if not fnmatch.filter(LINEAR_LAYERS, pattern):
            raise UserError(
                f"{pattern!r} in bf16_modules matches no linear layer; they are "
                + ", ".join(LINEAR_LAYERS)
            )
