"""The header of a GGUF file: its metadata, and the places of its tensors.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md: magic, version, two counts, then the
metadata as (name, type, value) and the tensors as (name, sizes, type, offset), then their data.
This module parses it because the reader of the package gguf trusts the counts in a file and reads
element by element: a file of 52 bytes keeps it busy for ever. Here each count is compared with a
limit far above that of any model, and each read with the size of the file.

Not done: arrays of arrays, which no model has, and files of big-endian machines.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import struct
from typing import Any

import numpy as np

from fp8rl_jax.base.json_file import check_regular

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_MOST_FIELDS, _MOST_TENSORS, _MOST_AXES = 2**16, 2**17, 8
_MOST_ELEMENTS = 2**23  # of all arrays in the metadata; a vocabulary has fewer than 2**20 tokens
_LONGEST_TEXT = 2**24  # bytes
# Types of values: numbers by their codes in `struct`; 8 is a text, 9 an array.
_NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor of a file.

    Attributes:
      name: its name in the file.
      shape: its sizes, outermost axis first.
      kind: number of its type.
      start: offset of its first byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int


def read_header(path: pathlib.Path) -> tuple[dict[str, Any], list[Stored]]:
    """Reads a file's metadata, {name: value} with arrays as lists, and its tensors in order.

    Raises:
      OSError: the file cannot be opened.
      ValueError: its header is incomplete or not valid.
    """
    check_regular(path)
    cursor = _Cursor(np.memmap(path, np.uint8, "r"))
    if cursor.take(4) != _MAGIC or cursor.number("I") not in _VERSIONS:
        raise ValueError("it does not begin as a GGUF file")
    tensors, fields = cursor.count(_MOST_TENSORS), cursor.count(_MOST_FIELDS)
    metadata: dict[str, Any] = {}
    for _ in range(fields):
        name = cursor.text()
        if name in metadata:
            raise ValueError(f"its metadata has {name} twice")
        metadata[name] = cursor.value(cursor.number("I"))
    entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(tensors):
        name = cursor.text()
        if name in entries:
            raise ValueError(f"it has tensor {name} twice")
        axes = cursor.number("I")
        if axes > _MOST_AXES:
            raise ValueError(f"tensor {name} has {axes} axes")
        shape = tuple(cursor.number("Q") for _ in range(axes))[::-1]
        entries[name] = (shape, cursor.number("I"), cursor.number("Q"))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError("its alignment is no power of two")
    start = -(-cursor.at // alignment) * alignment
    return metadata, [Stored(name, s, kind, start + at) for name, (s, kind, at) in entries.items()]


class _Cursor:
    """Reads the bytes of a file in order; `at` is the next byte's offset."""

    def __init__(self, data: np.ndarray):
        self._data, self.at, self._elements = memoryview(data), 0, 0  # type: ignore[arg-type]

    def take(self, count: int) -> bytes:
        if count > len(self._data) - self.at:
            raise ValueError("the file ends within its header")
        self.at += count
        return bytes(self._data[self.at - count : self.at])

    def number(self, code: str) -> Any:
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))
        return value

    def count(self, most: int) -> int:
        value = self.number("Q")
        if value > most:
            raise ValueError(f"it states a count of {value}, and {most} is the limit")
        return value

    def text(self) -> str:
        return self.take(self.count(_LONGEST_TEXT)).decode("utf-8")

    def value(self, kind: int) -> Any:
        """Reads a value of the metadata, of the type with number `kind`."""
        if kind == _TEXT:
            return self.text()
        if kind == _ARRAY:
            return self._array(self.number("I"))
        return self.number(self._code(kind))

    def _array(self, kind: int) -> list[Any]:
        count = self.count(_MOST_ELEMENTS)
        self._elements += count
        if self._elements > _MOST_ELEMENTS:
            raise ValueError("its metadata has too many elements")
        if kind == _TEXT:
            return [self.text() for _ in range(count)]
        code = self._code(kind)
        return np.frombuffer(self.take(count * struct.calcsize("<" + code)), "<" + code).tolist()

    def _code(self, kind: int) -> str:
        if kind not in _NUMBERS:
            raise ValueError(f"its metadata has a value of the unknown type {kind}")
        return _NUMBERS[kind]


def check_inside(tensor: Stored, block: int, block_bytes: int, size: int) -> int:
    """Returns the bytes of a row of a tensor whose blocks of `block` elements have `block_bytes`.

    Raises:
      ValueError: a row is no multiple of a block, or the tensor does not end within `size` bytes.
    """
    last = tensor.shape[-1] if tensor.shape else 1
    row = last // block * block_bytes
    if last % block or tensor.start + math.prod(tensor.shape[:-1]) * row > size:
        raise ValueError(f"tensor {tensor.name} does not end within the file")
    return row
