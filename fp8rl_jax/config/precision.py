"""Makes the recipe of each side from the `precision` section of a configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
from collections.abc import Callable
from typing import Any

import ml_collections

from fp8rl_jax.base.bounds import Bounds, check_number
from fp8rl_jax.base.by_name import choose
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.config.fields import FIELDS
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


def _calibrated(margin: float = 1.05) -> dict[str, Any]:
    """Returns the fields of a Recipe whose KV cache has calibrated scales with that headroom.

    Raises:
      UserError: the headroom is below 1, or too large.
    """
    check_number("margin", margin, Bounds(1, 100))
    return {"kv": "calibrated", "k_dtype": E4M3, "v_dtype": E4M3, "kv_margin": margin}


def _kv_fields(text: str) -> dict[str, Any]:
    """Returns the fields of a Recipe that `precision.kv_cache` sets.

    Raises:
      UserError: the text is not understood.
    """
    if text.startswith("fp8_calibrated"):
        return choose(text, {"fp8_calibrated": _calibrated}, "the format", most=1)[0][1]
    parts = [part.partition("=") for part in text.split(",")]
    dtypes = {name.strip(): value.strip() for name, _, value in parts}
    if text in _KV_DTYPES:
        dtypes = {"k": text, "v": text}
    if set(dtypes) != {"k", "v"} or len(parts) > 2 or not set(dtypes.values()) <= {*_KV_DTYPES}:
        raise UserError(
            f"{text!r} is not understood: write recipe, bf16, fp8, fp8_calibrated, int8, or K and "
            "V apart, such as 'k=int8,v=fp8'"
        )
    return {"kv": "dynamic", "k_dtype": _KV_DTYPES[dtypes["k"]], "v_dtype": _KV_DTYPES[dtypes["v"]]}


def _with_modules(recipe: Recipe, text: str) -> Recipe:
    patterns = tuple(p.strip() for p in text.split(",") if p.strip())
    _check_patterns(patterns or (text,))
    return dataclasses.replace(recipe, bf16_modules=patterns)


# Field -> what it makes of a recipe, in the order in which fields are applied.
_CHANGES: dict[str, Callable[[Recipe, Any], Recipe]] = {
    "kv_cache": lambda recipe, text: dataclasses.replace(recipe, **_kv_fields(text)),
    # `combinations` refuses FP8 attention without K and V in E4M3.
    "attention": lambda recipe, _: dataclasses.replace(recipe, fp8_attention=recipe.kv_e4m3),
    "head": lambda recipe, _: dataclasses.replace(recipe, head=FLOAT32),
    "kernels": lambda recipe, name: dataclasses.replace(recipe, kernels=name),
    "cpu_products": lambda recipe, _: dataclasses.replace(recipe, kernels="exact"),
    "backward": lambda recipe, kind: dataclasses.replace(
        recipe, backward=kind, gradient=recipe.gradient or Operand()
    ),
    "weight_policy": lambda recipe, text: recipe.with_policies(weight=get_scaling_policy(text)),
    "activation_policy": lambda recipe, text: recipe.with_policies(
        activation=get_scaling_policy(text)
    ),
    "gradient_policy": lambda recipe, text: recipe.with_policies(gradient=get_scaling_policy(text)),
    "first_layers_bf16": lambda recipe, count: dataclasses.replace(recipe, first_layers=count),
    "last_layers_bf16": lambda recipe, count: dataclasses.replace(recipe, last_layers=count),
    "bf16_modules": _with_modules,
}
# Fields of these -> what a recipe must quantise for them to change it.
OF_OPERANDS = {
    "weight_policy": "weight",
    "activation_policy": "activation",
    "gradient_policy": "gradient",
    "backward": "weight",
    "first_layers_bf16": "weight",
    "last_layers_bf16": "weight",
    "bf16_modules": "weight",
}


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
    for name, change in _CHANGES.items():
        changes = name not in OF_OPERANDS or OF_OPERANDS[name] in recipe.operands
        if changes and FIELDS["precision"][name].is_set(precision[name]):
            with _field(name):
                recipe = change(recipe, precision[name])
                recipe.layer_segments(layers)
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
    return dataclasses.replace(recipe, kv="dynamic") if recipe.calibrates else recipe


def _check_patterns(patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        if not fnmatch.filter(LINEAR_LAYERS, pattern):
            raise UserError(
                f"{pattern!r} in bf16_modules matches no linear layer; they are "
                + ", ".join(LINEAR_LAYERS)
            )
