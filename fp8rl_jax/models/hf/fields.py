"""Typed access to the fields of a config.json, with errors that name the file and the field."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from fp8rl_jax.errors import UserError

CONFIG = "config.json"
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
        """What is wrong with a field, and what to do, as an exception to raise."""
        return UserError(f"{self.where}: {name} is {self.values.get(name)!r}; {what}")

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """A value of type `kind`: int, float (any number) or bool.

        A field that is absent or null has the default.

        Raises:
          UserError: absent without a default, or of another type.
        """
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise UserError(
                f"{self.where} has no field {name}: this is no complete configuration of that "
                "model type; take the file that the model was published with"
            )
        types, wanted = _KINDS[kind]
        if not isinstance(value, types) or isinstance(value, bool) != (kind is bool):
            raise self.error(name, f"write {wanted}")
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


def read_fields(directory: pathlib.Path) -> Fields:
    """The config.json of a checkpoint.

    Raises:
      UserError: no such directory or file, or no JSON object in it.
    """
    path = directory / CONFIG
    if not directory.is_dir():
        raise UserError(
            f"{directory} is no directory; name the local directory of a checkpoint in Hugging "
            "Face's format (download a published one first)"
        )
    if not path.is_file():
        raise UserError(
            f"{directory} has no {CONFIG}; name the directory of a checkpoint in Hugging Face's "
            "format"
        )
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): fix its permissions") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}): download it again") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds no JSON object: download it again")
    return Fields(values, str(path))
