"""`fp8rl recipe` and `fp8rl algo`: `list` and `show NAME` of what a config names."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.cli.arguments import Command, argument


def _print_table(rows: Mapping[str, str]) -> int:
    width = max(map(len, rows))
    for name, text in rows.items():
        print(f"{name:<{width}}  {text}")
    return 0


def _list_recipes(values: argparse.Namespace) -> int:
    from fp8rl_jax.quant import recipe_names
    from fp8rl_jax.quant.recipe import DESCRIPTIONS

    return _print_table({name: DESCRIPTIONS[name] for name in recipe_names()})


def _show_recipe(values: argparse.Namespace) -> int:
    from fp8rl_jax.quant import get_recipe, recipe_names

    if values.name is None:
        raise UserError(
            "fp8rl recipe show: name a recipe, one of " + ", ".join(recipe_names()) + ", or "
            "package.module:function"
        )
    print(get_recipe(values.name))
    return 0


def _list_algorithms(values: argparse.Namespace) -> int:
    from fp8rl_jax.rl.presets import PRESETS

    return _print_table({name: preset.source for name, preset in PRESETS.items()})


def _show_algorithm(values: argparse.Namespace) -> int:
    from fp8rl_jax.config.fields import FIELDS
    from fp8rl_jax.rl.presets import PRESET_FIELDS, PRESETS

    if values.name not in PRESETS:
        wrong = f"{values.name!r} is no preset; " if values.name else ""
        raise UserError(f"fp8rl algo show: {wrong}write one of {', '.join(PRESETS)}")
    preset = PRESETS[values.name]
    print(f"{values.name}: {preset.source}\n\nloss: {preset.formula}\n")
    width = max(map(len, PRESET_FIELDS))
    for name in PRESET_FIELDS:
        default = FIELDS["algo"][name].default
        value = preset.fields.get(name, default)
        mark = "" if value == default else f"  (default {default!r})"
        print(f"  algo.{name:<{width}}  {value!r}{mark}")
    print(
        f"\n--config.algo.preset={values.name} sets all of these; fields that are given, too, win."
    )
    return 0


RECIPES = (
    Command("recipe", "what a precision recipe does: list, show NAME"),
    Command("recipe list", "the names of all recipes", _list_recipes),
    Command(
        "recipe show",
        "formats, blocks and scaling policies of every GEMM",
        _show_recipe,
        (argument("name", "a recipe, or package.module:function", "NAME", nargs="?"),),
    ),
)
ALGORITHMS = (
    Command("algo", "the RL algorithms of algo.preset: list, show NAME"),
    Command("algo list", "the names of all presets, with their papers", _list_algorithms),
    Command(
        "algo show",
        "a preset's formula, and the fields that it sets",
        _show_algorithm,
        (argument("name", "a preset", "NAME", nargs="?"),),
    ),
)
