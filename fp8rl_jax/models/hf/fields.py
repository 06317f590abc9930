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
LARGEST = 2**31 - 1  # of integers, which are sizes and counts
_LARGEST_FLOAT = 1e38  # about that of float32
# Type of a value -> the types that JSON has for it, and what to write.
_KINDS: dict[type, tuple[tuple[type, ...], str]] = {
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    bool: ((bool,), "true or false"),
}


class Fields:
    """The object of a config.json (or a part of it).

    Args:
      values: the JSON object.
      where: the file, and the part of it if any, for messages.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values, self.where = values, where

    def error(self, name: str, what: str) -> UserError:
        """An exception to raise: the field, its value, and `what` is wrong or to be done."""
        return UserError(f"{self.where}: {name} is {reprlib.repr(self.values.get(name))}; {what}")

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """A value of type `kind`: int, float (any number) or bool.

        A field that is absent or null has the default.

        Raises:
          UserError: absent without a default, or of another type.
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

    def part(self, name: str) -> Fields | None:
        """The object that a field holds, None where it is absent or null.

        Raises:
          UserError: it holds something else.
        """
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(name, "write an object, or null")
        return Fields(value, f"{self.where}: {name}")

    def require(self, name: str, supported: tuple[Any, ...], what: str) -> None:
        """Refuses a field that is given with another value than those supported.

        Raises:
          UserError: it has another; `what` says what to do.
        """
        value = self.values.get(name)
        if value is not None and value not in supported:
            raise self.error(name, what)

    def require_finite(self) -> None:
        """Refuses NaN and infinity, which Python's JSON reads, anywhere in the object.

        Raises:
          UserError: it has one; the sentence names where.
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
    """The config.json of a checkpoint.

    Raises:
      UserError: no such directory or file, or no JSON object in it.
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
