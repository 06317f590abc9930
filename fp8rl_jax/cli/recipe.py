"""`fp8rl recipe list` and `fp8rl recipe show NAME`: the named recipes, and the fields of one."""

from __future__ import annotations

import argparse

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.cli.arguments import Command, argument


def _list(values: argparse.Namespace) -> int:
    from fp8rl_jax.quant import recipe_names
    from fp8rl_jax.quant.recipe import DESCRIPTIONS

    width = max(map(len, recipe_names()))
    for name in recipe_names():
        print(f"{name:<{width}}  {DESCRIPTIONS[name]}")
    return 0


def _show(values: argparse.Namespace) -> int:
    from fp8rl_jax.quant import get_recipe, recipe_names

    if values.name is None:
        raise UserError(
            "fp8rl recipe show: name a recipe, one of " + ", ".join(recipe_names()) + ", or "
            "package.module:function"
        )
    print(get_recipe(values.name))
    return 0


COMMANDS = (
    Command("recipe", "what a precision recipe does: list, show NAME"),
    Command("recipe list", "the names of all recipes", _list),
    Command(
        "recipe show",
        "formats, blocks and scaling policies of every GEMM",
        _show,
        (argument("name", "a recipe, or package.module:function", "NAME", nargs="?"),),
    ),
)
