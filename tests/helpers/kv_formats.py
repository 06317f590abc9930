"""Recipes whose keys and values are stored in formats of their own.

Each is also a function of no arguments, so that a configuration can name it.
"""

from __future__ import annotations

import dataclasses

from fp8rl_jax.quant import Recipe, get_recipe
from fp8rl_jax.quant.qarray import E4M3, INT8

_DTYPES = {
    "int8": (INT8, INT8),
    "int8_fp8": (INT8, E4M3),
    "bf16_fp8": (None, E4M3),
    "fp8_bf16": (E4M3, None),
    "int8_bf16": (INT8, None),
}


def with_formats(recipe: Recipe, name: str) -> Recipe:
    """`recipe` with K and V in the formats of that name, and dynamic scales."""
    k, v = _DTYPES[name]
    return dataclasses.replace(
        recipe, name=f"{recipe.name} {name}", kv="dynamic", k_dtype=k, v_dtype=v
    )


RECIPES = {name: with_formats(get_recipe("fp8_blockwise"), name) for name in _DTYPES}


def int8() -> Recipe:
    return RECIPES["int8"]


def int8_fp8() -> Recipe:
    return RECIPES["int8_fp8"]
