"""What `fp8rl recipe` prints: the named recipes, and what one of them does to every GEMM."""

from __future__ import annotations

from fp8rl_jax.quant import get_recipe, recipe_names
from fp8rl_jax.quant.recipes import DESCRIPTIONS


def list_recipes() -> str:
    """Every name that a config may give as a recipe, one line each with what it is."""
    width = max(map(len, recipe_names()))
    return "\n".join(f"{name:<{width}}  {DESCRIPTIONS[name]}" for name in recipe_names())


def show_recipe(name: str) -> str:
    """What a recipe does: its text, as `print` shows it in Python.

    Args:
      name: a name of `recipe_names`, or ``package.module:function``.

    Raises:
      UserError: there is no such recipe.
    """
    return str(get_recipe(name))
