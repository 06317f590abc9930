"""Reads rows of text files: JSON Lines, a JSON list of objects, CSV with a header; each also .gz.

The length of a line and of a JSON list, and the depth of JSON (base/json_file.py), are limited. CSV
cells stay texts: '007' and '24.0' are kept, and an empty cell is an empty text. (Arrow's CSV reader
would need the types of all columns in advance, and blocks as long as the longest row.)

A '.json' file may also hold one object a line, as for Hugging Face's `datasets`. Not read: an
object of columns, a list below a key, CSV with another separator than the comma.
"""

from __future__ import annotations

import collections
import csv
import gzip
import io
import itertools
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.json_file import LONGEST, parse_json
from fp8rl_jax.envs.rows import Rows, Unreadable, marked

JSONL, JSON, CSV = (".jsonl", ".jsonl.gz"), (".json", ".json.gz"), (".csv", ".csv.gz")
_LONGEST_LIST = 2**28  # bytes of a JSON list, which is parsed in one piece
_File = io.BufferedReader | gzip.GzipFile
_BLANK = b"\xef\xbb\xbf \t\r\n"


def read(path: pathlib.Path) -> Rows:
    """Yields the rows of a file whose name ends with one of JSONL, JSON or CSV, with their places.

    Raises:
      UserError: the content is not what the name promises, not UTF-8, or too long.
      OSError, EOFError, zlib.error: the file cannot be read.
    """
    name = path.name.lower()
    with gzip.open(path) if name.endswith(".gz") else path.open("rb") as file:
        if name.endswith(CSV):
            yield from _read_csv(path, file)
        elif name.endswith(JSON):
            yield from _read_json(path, file)
        else:
            yield from _read_jsonl(path, file)


def _lines(path: pathlib.Path, file: _File) -> Iterator[tuple[int, str]]:
    """Yields (number, text) of the lines of a file, without a byte order mark."""
    for number, line in enumerate(iter(lambda: file.readline(LONGEST + 1), b""), 1):
        place = f"{path}:{number}"
        if len(line) > LONGEST:
            raise UserError(
                f"{place} has more than {LONGEST:,} bytes: write one row a line, and no larger ones"
            )
        try:
            yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{place} is not UTF-8 (byte {error.start + 1} of the line): save it as UTF-8"
            ) from None


def _read_jsonl(path: pathlib.Path, file: _File, form: str = "one object a line") -> Rows:
    for number, line in _lines(path, file):
        place = f"{path}:{number}"
        if not (text := line.strip()):
            continue
        try:
            row = _parsed(text)
        except ValueError as error:
            raise UserError(f"{place} is not JSON ({error}): write {form}") from None
        yield place, _checked(place, row, form)


def _read_json(path: pathlib.Path, file: _File) -> Rows:
    """Yields the rows of a JSON list of objects, or of one object a line."""
    form = "a list of objects, [{...}, {...}], or one object a line"
    head = file.peek(4096).lstrip(_BLANK)
    if not head.startswith(b"["):
        lines = _read_jsonl(path, file, form)
        first = list(itertools.islice(lines, 2))
        if len(first) == 1:  # an object of columns, or rows below a key
            raise UserError(f"{path} holds one object: write {form}")
        yield from itertools.chain(first, lines)
        return
    content = file.read(_LONGEST_LIST + 1)
    if len(content) > _LONGEST_LIST:
        raise UserError(
            f"{path} has more than {_LONGEST_LIST:,} bytes in one list: write one object a line "
            "into a .jsonl file"
        )
    try:
        rows = _parsed(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start + 1}): save it as UTF-8") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}): write {form}") from None
    for number, row in enumerate(rows, 1):
        place = f"{path}, row {number}"
        yield place, _checked(place, row, "a list of objects")


def _parsed(text: str) -> Any:
    """Parses a JSON text; values that Python cannot hold become `Unreadable`."""
    return parse_json(text, _object, _integer)


def _integer(digits: str) -> int | Unreadable:
    try:
        return int(digits)
    except ValueError:  # Python's limit on digits
        return Unreadable(f"a whole number of {len(digits.lstrip('-')):,} digits")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        again = Unreadable("the key stands there twice")
        found |= dict.fromkeys(_repeated(key for key, _ in pairs), again)
    return found


def _repeated(names: Iterable[str]) -> list[str]:
    return [name for name, count in collections.Counter(names).items() if count > 1]


def _checked(place: str, row: Any, form: str) -> dict[str, Any]:
    """Returns the row if it is an object; else raises UserError."""
    if isinstance(row, dict):
        return marked(row)
    kind = "int" if isinstance(row, Unreadable) else type(row).__name__
    raise UserError(f"{place} is {kind}; write {form}")


def _read_csv(path: pathlib.Path, file: _File) -> Rows:
    csv.field_size_limit(LONGEST)  # for the process; the default is 128 KiB
    lines = (line for _, line in _lines(path, file))
    head = next(lines, "")
    for separator, name in ((";", "';'"), ("\t", "tabs")):
        if separator in head and "," not in head:
            raise UserError(
                f"{path} seems to be separated by {name} (its first line has no comma): save it "
                "separated by commas"
            )
    reader = csv.reader(itertools.chain([head], lines), strict=True)
    names, begin = list[str](), 1
    twice: dict[str, Any] = {}
    try:
        for cells in reader:
            place, begin = f"{path}:{begin}", reader.line_num + 1
            if len(cells) > len(names) > 0:
                raise UserError(
                    f"{place} has {len(cells)} cells, and the header {len(names)}: put texts that "
                    "hold commas in quotes"
                )
            if names and cells:
                row = dict(itertools.zip_longest(names, cells, fillvalue=""))
                yield place, marked(row | twice)
            elif cells:  # the header; columns without a name are named as in pandas
                names = [name.strip() or f"Unnamed: {index}" for index, name in enumerate(cells)]
                again = Unreadable("the file has several columns of that name")
                twice = dict.fromkeys(_repeated(names), again)
    except csv.Error as error:
        raise UserError(
            f"{path}:{begin} is not CSV ({error}): put texts that hold commas, quotes or line "
            'breaks in quotes, and write a quote in them twice ("")'
        ) from None
