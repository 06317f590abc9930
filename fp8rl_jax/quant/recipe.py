"""Recipes: which format, block and scale each operand of each GEMM gets. A recipe is data.

The default is DeepSeek-V3's (arXiv:2412.19437), as NeMo RL and Miles use it: weights E4M3 in
128x128 blocks, activations and output gradients E4M3 in 1x128 blocks along the contraction, wgrad
requantised along tokens from the bf16 value; stored K and V in E4M3 with one scale per (token, kv
head). Embeddings, norms and the output head stay in bf16.

`bf16` and `f32` run the same canonical matmul without quantisation; `f32` is the canary of the
drift tests, because FP8 and bf16 rounding absorb most last-bit differences and float32 none.
"""

from __future__ import annotations

import dataclasses
import difflib

import jax.numpy as jnp

from fp8rl_jax.errors import UserError
from fp8rl_jax.quant import formats

BF16, FLOAT32, E4M3 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32), jnp.dtype(formats.E4M3)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Numerics of one side (rollout or learner).

    Attributes:
      name: the recipe's name.
      compute_dtype: dtype of activations between operations, bf16 or float32.
      quantized: whether the linear layers quantise their operands.
      weight_block: (K, N) block of a weight.
      activation_block: block of an activation or output gradient, (row, contraction).
      dtype: FP8 format of weights, activations and gradients.
      power_of_two: scales are powers of two.
      kv_quantized: whether stored K and V are E4M3 with one scale per (token, kv head).
    """

    name: str
    compute_dtype: jnp.dtype = BF16
    quantized: bool = True
    weight_block: tuple[int, int] = (128, 128)
    activation_block: tuple[int, int] = (1, 128)
    dtype: jnp.dtype = E4M3
    power_of_two: bool = False
    kv_quantized: bool = True

    @property
    def row_local(self) -> bool:
        """Whether an activation's scale depends on its own row only. If not, drift is certain:
        the scale then depends on which other tokens share the batch."""
        return not self.quantized or self.activation_block[0] == 1


_RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("fp8_blockwise"),
        Recipe("fp8_blockwise_pow2", power_of_two=True),
        Recipe("fp8_tensorwise", weight_block=(-1, -1), activation_block=(-1, -1)),
        Recipe("bf16", quantized=False, kv_quantized=False),
        Recipe("f32", compute_dtype=FLOAT32, quantized=False, kv_quantized=False),
    )
}
_ALIASES = {"fp8": "fp8_blockwise"}


def recipe_names() -> list[str]:
    """Every name that `get_recipe` takes, aliases included."""
    return [*_RECIPES, *_ALIASES]


def get_recipe(recipe: Recipe | str) -> Recipe:
    """Returns the recipe of that name; a Recipe is returned as it is.

    Raises:
      UserError: no recipe has that name.
    """
    if isinstance(recipe, Recipe):
        return recipe
    name = _ALIASES.get(recipe, recipe)
    if name not in _RECIPES:
        near = difflib.get_close_matches(str(recipe), recipe_names(), 1)
        hint = f"did you mean {near[0]!r}?" if near else "write one of " + ", ".join(recipe_names())
        raise UserError(f"unknown recipe {recipe!r}; {hint}")
    return _RECIPES[name]
