"""Turns Python keywords into fields of a configuration: `learning_rate=1e-4`, `sft__steps=0`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_collections

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.config import all_fields, override, saved_config
from fp8rl_jax.config.fields import REMOVED
from fp8rl_jax.config.names import field_meant

_SECOND = ("sft", "eval", "mesh")  # their fields share names with fields of other sections


def path_of(name: str) -> str:
    """Returns the path 'section.field' for a keyword `field` or `section__field`.

    A field name that `sft`, `eval` or `mesh` shares with another section means the other section's
    field: `learning_rate` is the optimiser's, `rollout` the recipe.

    Raises:
      UserError: no field has the name, or fields of several sections have it.
    """
    if "__" in name or "." in name:
        return name.replace("__", ".")
    paths = [path for path in (*all_fields(), *REMOVED) if path.partition(".")[2] == name]
    first = [path for path in paths if path.partition(".")[0] not in _SECOND] or paths
    if len(first) == 1:
        return first[0]
    if paths:
        names = " or ".join(path.replace(".", "__") for path in first)
        raise UserError(f"several sections have a field {name!r}: write {names}")
    meant = field_meant(name)
    hint = f"did you mean {meant}?" if meant else "`fp8rl train --help-config` lists every field"
    raise UserError(f"there is no config field {name!r}; {hint}")


def with_fields(
    base: Mapping[str, Mapping[str, Any]], fields: Mapping[str, Any], where: str
) -> ml_collections.ConfigDict:
    """Returns the default configuration, overridden by `base`, then by `fields`.

    Args:
      base: {section: {field: value}}.
      fields: {keyword: value}, with keywords as for `path_of`.
      where: name of the call, for error messages.

    Raises:
      UserError: a field is unknown, or a value has the wrong type.
    """
    content = {section: dict(values) for section, values in base.items()}
    named = {path_of(name): value for name, value in fields.items()}
    if "algo.preset" in named:
        content.pop("algo", None)  # the preset sets its fields
    for path, value in named.items():
        section, _, field = path.partition(".")
        content.setdefault(section, {})[field] = value
    config = saved_config(content, where)
    override(config, ())  # `~` in paths
    return config
