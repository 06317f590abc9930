"""Typed access to the fields of a config.json, with errors that name the file and the field."""

from __future__ import annotations

import math
import os
import pathlib
import reprlib
from collections.abc import Mapping
from typing import Any

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.json_file import read_json
from fp8rl_jax.base.paths import hub_download

CONFIG = "config.json"
LARGEST = 2**31 - 1  # largest integer; integers are sizes and counts
EVERY_LAYER = "experts in every layer are supported, or in all but the first: take another model"
TAKE_ONE_OUT = "take one of the two out"  # of two fields that contradict each other
_LARGEST_FLOAT = 1e38  # about the largest float32
# Type of a value -> (its types in parsed JSON, what the error message tells to write).
_KINDS: dict[type, tuple[tuple[type, ...], str]] = {
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    bool: ((bool,), "true or false"),
    str: ((str,), "a text"),
}


class Fields:
    """The JSON object of a config.json, or a part of it.

    Args:
      values: the JSON object.
      where: the file, or the part of it that `values` is, for messages.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values, self.where = values, where

    def error(self, name: str, what: str) -> UserError:
        """Returns an exception that names the field, its value, and `what` is wrong or to do."""
        return UserError(f"{self.where}: {name} is {reprlib.repr(self.values.get(name))}; {what}")

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """Returns a field's value as `kind`: int, float (any number), bool or str.

        A field that is absent or null has the default.

        Raises:
          UserError: the field is absent without a default, of another type, or too large.
        """
        value: Any = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise UserError(
                f"{self.where} has no field {name}: this is no complete configuration of that "
                "model type; take the file that the model was published with"
            )
        types, wanted = _KINDS[kind]
        if not isinstance(value, types) or isinstance(value, bool) != (kind is bool):
            raise self.error(name, f"write {wanted}")
        most = LARGEST if kind is int else _LARGEST_FLOAT
        if isinstance(value, int | float) and abs(value) > most:
            raise self.error(name, f"write {wanted} of at most {most}")
        return kind(value)

    def with_values(self, **changes: Any) -> Fields:
        """Returns the fields with other values of some."""
        return Fields({**self.values, **changes}, self.where)

    def part(self, name: str) -> Fields | None:
        """Returns the object in a field; None if the field is absent or null.

        Raises:
          UserError: the field holds something else.
        """
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(name, "write an object, or null")
        return Fields(value, f"{self.where}: {name}")

    def require(self, name: str, supported: tuple[Any, ...], what: str) -> None:
        """Refuses a field whose value is not supported; an absent or null field passes.

        Raises:
          UserError: the value is not supported; the message ends with `what`.
        """
        value = self.values.get(name)
        if value is not None and value not in supported:
            raise self.error(name, what)

    def require_finite(self) -> None:
        """Refuses NaN and infinity, which Python's JSON reads, anywhere in the object.

        Raises:
          UserError: there is one; the message names its place.
        """
        places: list[tuple[str, Any]] = list(self.values.items())
        while places:
            name, value = places.pop()
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(f"{self.where}: {name} is {value}; write a number that is finite")
            if isinstance(value, Mapping):
                places += ((f"{name}.{key}", inner) for key, inner in value.items())
            elif isinstance(value, list):
                places += ((f"{name}[{i}]", inner) for i, inner in enumerate(value))


def read_fields(directory: pathlib.Path) -> Fields:
    """Reads the config.json of a checkpoint.

    Raises:
      UserError: the directory or file is missing or unreadable, or holds no JSON object.
    """
    path = directory / CONFIG
    if not os.path.isdir(directory):
        command = hub_download(str(directory)) or "download a published one first"
        raise UserError(
            f"{directory} is no directory; name the local directory of a checkpoint in Hugging "
            f"Face's format ({command})"
        )
    if not os.path.lexists(path):
        raise UserError(
            f"{directory} has no {CONFIG}; name the directory of a checkpoint in Hugging Face's "
            "format"
        )
    try:
        values = read_json(path)
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}): put the file there, and make it readable"
        ) from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}): download it again") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds no JSON object: download it again")
    return Fields(values, str(path))
