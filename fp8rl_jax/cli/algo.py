"""`fp8rl algo list` and `fp8rl algo show NAME`: the algorithms that `algo.preset` names."""

from __future__ import annotations

import argparse

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.cli.arguments import Command, argument


def _list(values: argparse.Namespace) -> int:
    from fp8rl_jax.rl.presets import PRESETS

    width = max(map(len, PRESETS))
    for name, preset in PRESETS.items():
        print(f"{name:<{width}}  {preset.source}")
    return 0


def _show(values: argparse.Namespace) -> int:
    from fp8rl_jax.config.fields import FIELDS
    from fp8rl_jax.rl.presets import PRESET_FIELDS, PRESETS

    names = ", ".join(PRESETS)
    if values.name not in PRESETS:
        wrong = f"{values.name!r} is no preset; " if values.name else ""
        raise UserError(f"fp8rl algo show: {wrong}write one of {names}")
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


COMMANDS = (
    Command("algo", "the RL algorithms of algo.preset: list, show NAME"),
    Command("algo list", "the names of all presets, with their papers", _list),
    Command(
        "algo show",
        "a preset's formula, and the fields that it sets",
        _show,
        (argument("name", "a preset", "NAME", nargs="?"),),
    ),
)
