"""Reads a configuration: defaults, then a file with its case, then the command line.

A config file has a function ``get_config()`` that returns an `ml_collections.ConfigDict` with the
fields it wants to change; everything else keeps the default of `config.fields`. A precision case
after its name (``FILE:case1``, `config.cases`) changes the recipes. The command line then overrides
single fields (``--config.rollout.group_size=16``). `config.checks` checks the result.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import ml_collections

from fp8rl_jax.base.bounds import shown
from fp8rl_jax.base.errors import UserError, did_you_mean, raised
from fp8rl_jax.base.json_file import plain, tabled
from fp8rl_jax.base.paths import MissingSnapshot, expanded
from fp8rl_jax.config.fields import FIELDS, REMOVED, all_fields
from fp8rl_jax.config.files import read_config_file
from fp8rl_jax.config.names import field_meant
from fp8rl_jax.rl.presets import PRESET_FIELDS, PRESETS


def default_config() -> ml_collections.ConfigDict:
    """Returns a configuration with every field at its default."""
    return ml_collections.ConfigDict(
        {
            section: {
                name: ml_collections.ConfigDict() if field.is_free else field.default
                for name, field in fields.items()
            }
            for section, fields in FIELDS.items()
        }
    )


_FREE = [path for path, field in all_fields().items() if field.is_free]
_FORMER_DEFAULTS = [(path, default) for path, (default, _) in REMOVED.items()]
_LARGEST = 10**300  # bound of an integer that is given for a float


def saved_config(content: dict[str, Any], where: str) -> ml_collections.ConfigDict:
    """Reads a run's config.json; fields that an older file lacks get their defaults.

    Args:
      content: the parsed file.
      where: its path, for error messages.

    Raises:
      UserError: a field is unknown or has the wrong type.
    """
    config = default_config()
    _merge(config, sections_config(content), where)
    return config


def sections_config(content: dict[str, Any]) -> ml_collections.ConfigDict:
    """Returns the sections of a config.json, unchecked; options of free-form fields are `Table`s,
    and removed fields are left out at their defaults.

    Raises:
      AttributeError, TypeError, ValueError: there is a name that no field can have.
    """
    content = {
        section: {
            name: value
            for name, value in fields.items()
            if (f"{section}.{name}", value) not in _FORMER_DEFAULTS
        }
        if isinstance(fields, dict)
        else fields
        for section, fields in content.items()
    }
    for path in _FREE:
        section, _, name = path.partition(".")
        fields = content.get(section)
        if isinstance(fields, dict) and isinstance(options := fields.get(name), dict):
            content[section] = fields | {name: {o: tabled(value) for o, value in options.items()}}
    return ml_collections.ConfigDict(content)


def _unknown(path: str, where: str) -> UserError:
    if path in REMOVED:
        return UserError(f"{where}: there is no config field {path!r}; {REMOVED[path][1]}")
    if path in FIELDS:
        return UserError(f"{where}: {path} is a section; write --config.{path}.FIELD=VALUE")
    path = path[:100]
    meant = field_meant(path)
    hint = f"did you mean {meant}?" if meant else "`fp8rl train --help-config` lists the sections"
    if "." not in path:
        hint = did_you_mean(path, FIELDS, hint, cutoff=0.8 if meant else 0.6)
        return UserError(f"{where}: there is no config section {path!r}; {hint}")
    return UserError(f"{where}: there is no config field {path!r}; {hint}")


def _fits(value: Any, default: Any) -> bool:
    if isinstance(default, bool) != isinstance(value, bool):
        return False
    if isinstance(default, float) and isinstance(value, int):
        return abs(value) < _LARGEST
    kind = dict if isinstance(default, ml_collections.ConfigDict) else type(default)
    return isinstance(value, kind)


def _of_python(value: Any) -> Any:
    """Returns a path as text, a ConfigDict as a dict, and a scalar of numpy or JAX as Python's."""
    if isinstance(value, ml_collections.ConfigDict):
        return value.to_dict()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if getattr(value, "shape", None) == () else value


def _merge(config: ml_collections.ConfigDict, changes: Any, where: str) -> None:
    """Sets the fields of `changes`, sections of which are ConfigDicts too."""
    if not isinstance(changes, ml_collections.ConfigDict):
        raise UserError(
            f"{where}: get_config() returned {type(changes).__name__}; return an "
            "ml_collections.ConfigDict"
        )
    for section, fields in changes.items():
        if section not in FIELDS:
            raise _unknown(section, where)
        if not isinstance(fields, ml_collections.ConfigDict):
            raise UserError(f"{where}: {section} is a section; write config.{section}.FIELD = ...")
        if section == "algo":
            _apply_preset(config, fields.get("preset"))
        for name, value in fields.items():
            _set(config, f"{section}.{name}", value, where)


def _set(config: ml_collections.ConfigDict, path: str, value: Any, where: str) -> None:
    """Sets one field, 'section.field', or raises UserError for a wrong name or type."""
    if path not in all_fields():
        raise _unknown(path, where)
    section, _, name = path.partition(".")
    default = FIELDS[section][name].default
    value = _of_python(value)
    if not _fits(value, default):
        raise UserError(f"{where}: {path} is {shown(value)}; write {_article(default)}")
    if isinstance(value, dict):
        value = _options(value, path, where)
    config[section][name] = float(value) if isinstance(default, float) else value


def _options(content: dict[str, Any], path: str, where: str) -> ml_collections.ConfigDict:
    """Returns a free-form field's options as a ConfigDict that config.json can hold.

    Args:
      content: the options.
      path, where: names of the field and of its source, for error messages.

    Raises:
      UserError: JSON cannot hold the options, or one has a name that no option can have.
    """
    try:
        json.dumps(options := plain(content))
        values = {name: tabled(value) for name, value in options.items()}
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"{where}: {path} cannot be written as JSON ({raised(error)}): write numbers, texts, "
            "True or False, lists and dicts of these, with texts as names"
        ) from None
    try:
        ml_collections.FrozenConfigDict(values)
        return ml_collections.ConfigDict(values)
    except (AttributeError, TypeError, ValueError):
        names = ", ".join(map(repr, values))
        raise UserError(
            f"{where}: {path} has the options {names}: write names without dots, other than "
            "Python's own (__class__)"
        ) from None


def _apply_preset(config: ml_collections.ConfigDict, name: Any) -> None:
    """Sets all fields that a preset decides; `checks.check_fields` refuses an unknown name."""
    if isinstance(name, str) and name in PRESETS:
        for field in PRESET_FIELDS:
            config.algo[field] = PRESETS[name].fields.get(field, FIELDS["algo"][field].default)


def _article(default: Any) -> str:
    if isinstance(default, ml_collections.ConfigDict):
        return "a dict, or its options one by one as --config.SECTION.FIELD.NAME=VALUE"
    kind = {bool: "True or False", int: "a whole number", float: "a number", str: "text"}
    return f"{kind[type(default)]} such as {default!r}"


def load_config(path: str, overrides: Sequence[str] = ()) -> ml_collections.ConfigDict:
    """Returns the defaults, changed by a file and then by overrides; checks names and types.

    Args:
      path: path of the file, or `FILE:CASE` with a precision case (`config.cases`).
      overrides: ``--config.section.field=value`` arguments.

    Raises:
      UserError: there is no such file or case, or a field is unknown or has the wrong type.
    """
    config = default_config()
    changes, case = read_config_file(path)
    try:
        _merge(config, changes, path)
    except RecursionError:
        raise UserError(f"{path}: the config holds itself, or is nested too deeply") from None
    config.precision.update(case)
    override(config, overrides)
    return config


def override(config: ml_collections.ConfigDict, overrides: Sequence[str]) -> None:
    """Sets fields from ``--config.section.field=value`` arguments, in place.

    Raises:
      UserError: a field is unknown or has the wrong type.
    """
    for argument in overrides:
        name, _, preset = argument.lstrip("-").removeprefix("config.").partition("=")
        if name == "algo.preset":
            _apply_preset(config, preset)
    for argument in overrides:
        _apply(config, argument)
    for name in (path for path, field in all_fields().items() if field.is_path):
        section, _, field = name.partition(".")
        try:
            config[section][field] = expanded(config[section][field], name)
        except MissingSnapshot:  # a plan needs none; `model_source` refuses it
            if name != "model.checkpoint":
                raise


def _apply(config: ml_collections.ConfigDict, override: str) -> None:
    """Sets one field, or an option of one, from ``--config.section.field=value``."""
    name, equals, text = override.lstrip("-").removeprefix("config.").partition("=")
    section, _, rest = name.partition(".")
    field, *option = rest.split(".")
    path = f"{section}.{field}"
    if path not in all_fields() or (option and path not in _FREE):
        raise _unknown(name, "command line")
    if not equals:
        raise UserError(f"command line: --config.{name} has no value; write --config.{name}=X")
    if len(option) > 1:
        raise UserError(
            f"command line: {name}: an option's name holds no dot; write --config.{path}.NAME=VALUE"
        )
    if not option:
        _set(config, path, _parsed(text, FIELDS[section][field].default), "command line")
        return
    value = literal(text)
    default = config[section][field].get(option[0])
    if type(default) in (bool, int, float, str) and not _fits(value, default):
        raise UserError(f"command line: {name} is {text!r}; write {_article(default)}")
    set_options(config[section][field], {option[0]: value}, name, "command line")


_BOOLS = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}


def _parsed(text: str, default: Any) -> Any:
    """Returns the value of a field with that default for which a text stands, else the text."""
    if isinstance(default, ml_collections.ConfigDict):
        return literal(text)
    if isinstance(default, bool):
        return _BOOLS.get(text.lower(), text)
    try:
        return type(default)(text)
    except ValueError:
        return text


def set_options(
    options: ml_collections.ConfigDict,
    changes: dict[str, Any],
    path: str = "options",
    where: str = "command line",
) -> None:
    """Sets options of a free-form field in place; they may be new or change their type.

    Args:
      options: the field's options.
      changes: {name: JSON value}.
      path, where: names of the field and of the source of the changes, for error messages.

    Raises:
      UserError: config.json cannot hold the changes.
    """
    checked = _options(changes, path, where)
    with options.unlocked(), options.ignore_type():  # a config file may have locked them
        for name in changes:
            options[name] = checked[name]


class _PythonNames(ast.NodeTransformer):
    """Replaces the names true, false and null, JSON's literals, with Python's constants."""

    VALUES: ClassVar = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self.VALUES[node.id]) if node.id in self.VALUES else node


def literal(text: str) -> Any:
    """Parses a literal of JSON or Python (number, list, true, True, ...); returns other text."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text, parse_constant=_no_literal)
    try:
        return ast.literal_eval(_PythonNames().visit(ast.parse(text.strip(" \t"), mode="eval")))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text


def _no_literal(name: str) -> None:
    raise ValueError(f"{name} is text")


def reset(config: ml_collections.ConfigDict, paths: Iterable[str]) -> None:
    """Sets fields, given as 'section.field', to their defaults."""
    defaults = default_config()
    for section, _, field in (path.partition(".") for path in paths):
        config[section][field] = defaults[section][field]


def flatten(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """Returns {'section.field': value}, with free-form fields as dicts."""
    return {
        f"{section}.{name}": plain(value.to_dict())
        if isinstance(value, ml_collections.ConfigDict)
        else value
        for section, fields in config.items()
        for name, value in fields.items()
    }
