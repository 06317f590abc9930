"""Recipes by the parts of a rollout in 8 bits, as in `fp8`: none, linear layers (W8A8), the KV
cache, or both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from fp8rl_jax.quant import Recipe, get_recipe

CASES: dict[str, Callable[[], Recipe]] = {
    "bf16": lambda: get_recipe("bf16"),
    "fp8_linear": lambda: get_recipe("fp8_linear"),
    "fp8_kv": lambda: dataclasses.replace(get_recipe("fp8").unquantized(), name="fp8_kv"),
    "fp8": lambda: get_recipe("fp8"),
}
