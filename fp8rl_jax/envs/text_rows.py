"""Reads rows of text files: JSON Lines, a JSON list of objects, CSV with a header; each also .gz.

The length of a line and of a JSON list, and the depth of JSON (base/json_file.py), are limited. CSV
cells stay texts: '007' and '24.0' are kept, and an empty cell is an empty text. A '.json' file may
also hold one object a line, as for Hugging Face's `datasets`.

Python's `json` and `csv` read them, since Arrow's readers give a column one type: of JSON they
refuse answers of several types (42 and "x"), turn the text "2024-01-05" into a time and an integer
of 30 digits into a float, and give each object the keys of all; of CSV they refuse rows that lack
cells, and read a quote that is not closed as text.

Not read: an object of columns, a list below a key, CSV with another separator than the comma.
"""

from __future__ import annotations

import codecs
import csv
import decimal
import gzip
import io
import pathlib
from collections.abc import Iterator
from typing import Any

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.json_file import LONGEST, parse_json
from fp8rl_jax.envs.rows import TWICE, Rows

JSONL = (".jsonl", ".jsonl.gz")
JSON = (".json", ".json.gz")
CSV = (".csv", ".csv.gz")
_LONGEST_LIST = 2**28  # bytes of a JSON list, which is parsed in one piece
_MOST_DIGITS = 4000  # of an int; Python's limit is 4300
_FORM = "write one object a line, in UTF-8, or into a .json file a list of objects, [{...}, {...}]"
_File = io.BufferedReader | gzip.GzipFile


def read(path: pathlib.Path) -> Rows:
    """Yields the rows of a file whose name ends with one of JSONL, JSON or CSV, with their places.

    Raises:
      UserError: the content is not what the name promises, not UTF-8, or too long.
      OSError, EOFError, zlib.error: the file cannot be read.
    """
    name = path.name.lower()
    with gzip.open(path) if name.endswith(".gz") else path.open("rb") as file:
        if file.peek(3).startswith(codecs.BOM_UTF8):
            file.read(3)
        if name.endswith(CSV):
            yield from _read_csv(path, file)
        elif name.endswith(JSON) and file.peek(4096).lstrip().startswith(b"["):
            yield from _read_list(path, file)
        else:
            for place, line in _lines(path, file):
                if line.strip():
                    yield place, _checked(place, _parsed(place, line))


def _lines(path: pathlib.Path, file: _File) -> Iterator[tuple[str, bytes]]:
    """Yields the lines of a file with their places."""
    for number, line in enumerate(iter(lambda: file.readline(LONGEST + 1), b""), 1):
        place = f"{path}:{number}"
        if len(line) > LONGEST:
            raise UserError(
                f"{place} has more than {LONGEST:,} bytes: write one row a line, and no larger ones"
            )
        yield place, line


def _read_list(path: pathlib.Path, file: _File) -> Rows:
    content = file.read(_LONGEST_LIST + 1)
    if len(content) > _LONGEST_LIST:
        raise UserError(
            f"{path} has more than {_LONGEST_LIST:,} bytes in one list: write one object a line "
            "into a .jsonl file"
        )
    for number, row in enumerate(_parsed(str(path), content), 1):
        place = f"{path}, row {number}"
        yield place, _checked(place, row)


def _parsed(place: str, content: bytes) -> Any:
    try:
        return parse_json(
            content,
            _object,
            lambda digits: int(digits) if len(digits) <= _MOST_DIGITS else decimal.Decimal(digits),
        )
    except ValueError as error:
        raise UserError(f"{place} is not JSON ({error}): {_FORM}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"the key {key[:60]!r} stands twice in an object")
        values[key] = value
    return values


def _checked(place: str, row: Any) -> dict[str, Any]:
    """Returns the row if it is an object; else raises UserError."""
    if not isinstance(row, dict):
        raise UserError(f"{place} is {type(row).__name__}; {_FORM}")
    return row


def _read_csv(path: pathlib.Path, file: _File) -> Rows:
    """Yields the rows of a CSV file; the place of a row is its last line."""
    csv.field_size_limit(LONGEST)  # for the process; the default is 128 KiB
    reader = csv.DictReader(
        (line.decode() for _, line in _lines(path, file)), restval="", strict=True
    )
    begin = 1
    try:
        header = reader.fieldnames or ()
        # Columns without a name are named as in pandas.
        names = [name.strip() or f"Unnamed: {index}" for index, name in enumerate(header)]
        if len(names) == 1 and {";", "\t"} & {*names[0]}:
            raise UserError(
                f"{path} has one column, {names[0][:60]!r}: save it separated by commas"
            )
        reader.fieldnames = names
        begin = reader.line_num + 1
        twice = {name: TWICE for name in names if names.count(name) > 1}
        for row in reader:
            place = f"{path}:{reader.line_num}"
            begin = reader.line_num + 1
            if extra := row.get(None):
                raise UserError(
                    f"{place} has {len(names) + len(extra)} cells, and the header {len(names)}: "
                    "put texts that hold commas in quotes"
                )
            yield place, row | twice
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(
            f"{path}:{begin} is not CSV ({error}): save it as UTF-8, put texts that hold commas, "
            'quotes or line breaks in quotes, and write a quote in them twice ("")'
        ) from None
