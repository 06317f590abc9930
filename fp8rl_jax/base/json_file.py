"""Reads JSON of other programs within limits (a regular file, limited size and depth, UTF-8), and
writes JSON for them.

Without limits a file could make a command wait (a FIFO), never end (a device) or fail with a
RecursionError (deep nesting). Callers turn an OSError or a ValueError into a UserError.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fp8rl_jax.base.paths import check_status

LONGEST = 2**24  # bytes; a config.json has thousands
DEEPEST = 100  # levels of nested lists and objects


class Table(Mapping[str, Any]):
    """An immutable JSON object in a configuration; `plain` turns it into a dict. (ml_collections
    does not freeze a dict in a list, and refuses a key with a dot.)"""

    def __init__(self, content: dict[str, Any]):
        self._content = content

    def __getitem__(self, name: str) -> Any:
        return self._content[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)

    def __repr__(self) -> str:
        return repr(self._content)

    def __hash__(self) -> int:
        return hash(repr(self))


def tabled(value: Any, deepest: int = DEEPEST) -> Any:
    """Copies a JSON value, with each dict replaced by a `Table`.

    Raises:
      TypeError: a key is not a text.
      ValueError: the value is nested more deeply than `deepest`.
    """
    if not isinstance(value, dict | list | tuple):
        return value
    if not deepest:
        raise ValueError("it is nested too deeply")
    if not isinstance(value, dict):
        return type(value)(tabled(part, deepest - 1) for part in value)
    for name in value:
        if not isinstance(name, str):
            raise TypeError(f"the name {name!r} is no text")
    return Table({name: tabled(part, deepest - 1) for name, part in value.items()})


def plain(value: Any) -> Any:
    """Copies a value, with each `Table` replaced by a dict, and each tuple by a list."""
    if isinstance(value, dict | Table):
        return {name: plain(part) for name, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list | tuple) else value


def is_file_name(name: Any) -> bool:
    """Returns whether a value is a file's name without a path: it cannot leave its directory."""
    return (
        isinstance(name, str)
        and 0 < len(name) <= 255
        and name not in (".", "..")
        and not {"/", "\\", "\0"} & set(name)
    )


def check_regular(path: str | os.PathLike[str]) -> os.stat_result:
    """Returns the status of a regular file.

    Raises:
      OSError: the path does not exist, or is a directory, a FIFO, a socket or a device.
    """
    try:
        status = os.stat(path)
    except ValueError as error:  # a NUL or a lone surrogate
        raise OSError(errno.EINVAL, str(error)) from None
    check_status(status)
    return status


def read_bytes(path: str | os.PathLike[str], most: int = LONGEST) -> bytes:
    """Returns the content of a file.

    Raises:
      OSError: the file cannot be read, is not regular, or has more than `most` bytes.
    """
    status = check_regular(path)
    if status.st_size > most:
        raise OSError(errno.EFBIG, f"it has {status.st_size} bytes, and {most} is the limit")
    return pathlib.Path(path).read_bytes()


def parse_json(
    content: bytes | str,
    pairs: Callable[[list[tuple[str, Any]]], Any] | None = None,
    integers: Callable[[str], Any] | None = None,
) -> Any:
    """Parses a JSON text; NaN and Infinity are numbers, as in `json`.

    Args:
      content: the text.
      pairs: function from (key, value) pairs to an object; by default, the last of equal keys wins.
      integers: function from digits to an integer; by default, Python's limit of digits holds.

    Raises:
      ValueError: the text is not JSON in UTF-8, or is nested more deeply than DEEPEST.
    """
    text = content.decode("utf-8") if isinstance(content, bytes) else content
    try:
        value = json.loads(text, object_pairs_hook=pairs, parse_int=integers)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except MemoryError:
        raise ValueError("it is too large") from None
    level = [value]
    for _ in range(DEEPEST):
        lists = (x.values() if isinstance(x, dict) else x for x in level if type(x) in (list, dict))
        level = list(itertools.chain.from_iterable(lists))
        if not level:
            return value
    raise ValueError("it is nested too deeply")


def strict_json(value: Any) -> str:
    """Writes a value as one line of standard JSON: NaN and infinities become null."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: str | os.PathLike[str], most: int = LONGEST) -> Any:
    """Reads the value in a JSON file.

    Raises:
      OSError: as `read_bytes`.
      ValueError: as `parse_json`.
    """
    return parse_json(read_bytes(path, most))
