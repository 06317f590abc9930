"""FP8 numerics: formats, QArray, recipes, the dot_general rule and KV quantisation.

Knows arrays; knows nothing of models.
"""

from fp8rl_jax.quant.dot_general import (
    TrainableWeight,
    Weight,
    compute_value,
    keep_dtypes,
    make_dot_general,
    matmul,
    quantize_rows,
    quantize_weight,
)
from fp8rl_jax.quant.kv import quantize_kv
from fp8rl_jax.quant.qarray import QArray, block_health, quantize
from fp8rl_jax.quant.recipe import Recipe, get_recipe, recipe_names

__all__ = [
    "QArray",
    "Recipe",
    "TrainableWeight",
    "Weight",
    "block_health",
    "compute_value",
    "get_recipe",
    "keep_dtypes",
    "make_dot_general",
    "matmul",
    "quantize",
    "quantize_kv",
    "quantize_rows",
    "quantize_weight",
    "recipe_names",
]
