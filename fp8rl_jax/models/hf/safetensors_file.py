"""The safetensors format, read in slices and written as a stream.

https://github.com/huggingface/safetensors: eight bytes with the length of a header, the header (a
JSON object of {name: {dtype, shape, data_offsets}}), then the bytes of all tensors, little-endian,
without gaps. This module does not use the library's `safe_open`, which maps entire files into
memory that then counts as the process's, and whose errors about a damaged file name neither file
nor tensor. The writer takes one tensor at a time; the library's takes all tensors of a file at
once. Tests read the written files through the library.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import pathlib
from collections.abc import Callable

import ml_dtypes
import numpy as np

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.json_file import parse_json

DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
_READ = {**DTYPES, "U8": np.dtype(np.uint8)}  # and bytes of packed formats (mxfp4.py)
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LONGEST_HEADER = 100_000_000  # bytes; the format's own limit
_MOST_AXES = 8  # far more than any model has
_AGAIN = "the file is damaged or incomplete: download it again"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor of a file.

    Attributes:
      file: the file that holds it.
      dtype: name of its type in the format, not always one of DTYPES.
      shape: its sizes.
      start, stop: offsets of its bytes in the file.
    """

    file: pathlib.Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(file: pathlib.Path) -> dict[str, Entry]:
    """Reads {name: Entry} of a file's tensors, and checks them against the file's size.

    Raises:
      UserError: the file cannot be read, its header is damaged, or bytes are missing.
    """
    try:
        if not file.is_file():
            raise OSError(errno.EINVAL, "it is no regular file")
        size = file.stat().st_size
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _LONGEST_HEADER):
                raise UserError(f"{file} has no whole safetensors header; {_AGAIN}")
            text = stream.read(length)
    except OSError as error:
        raise UserError(
            f"{file} cannot be read ({error.strerror}): fix its name or its permissions"
        ) from None
    try:
        header = parse_json(text)
        header.pop("__metadata__", None)
        entries = {name: _entry(file, 8 + length, **fields) for name, fields in header.items()}
    except (ValueError, TypeError, AttributeError):
        raise UserError(f"{file} has a safetensors header that is not valid; {_AGAIN}") from None
    end = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.stop > size:
            raise UserError(
                f"{file} ends within tensor {name} (it has {size} bytes and the tensor ends at "
                f"{entry.stop}); {_AGAIN}"
            )
        held = entry.stop - entry.start
        dtype = DTYPES.get(entry.dtype)
        wanted = math.prod(entry.shape) * dtype.itemsize if dtype else held
        if entry.start != end or wanted != held:
            raise UserError(f"{file}: the bytes of tensor {name} do not fit its shape; {_AGAIN}")
        end = entry.stop
    if end != size:
        raise UserError(f"{file} has {size - end} bytes after its last tensor; {_AGAIN}")
    return entries


def _entry(file, data: int, dtype: str, shape: list[int], data_offsets: list[int]) -> Entry:
    start, stop = data_offsets
    if not isinstance(shape, list) or len(shape) > _MOST_AXES:
        raise ValueError("a shape is a list of sizes")
    for n in (*shape, start, stop):
        if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n < 2**63:
            raise ValueError("sizes are whole numbers")
    if not isinstance(dtype, str) or stop < start:
        raise ValueError("a name, and offsets in order")
    return Entry(file, dtype, tuple(shape), data + start, data + stop)


def read_rows(
    entry: Entry, start: int, stop: int, columns: tuple[int, int] | None = None
) -> np.ndarray:
    """Reads rows start..stop (of the first axis) of a tensor.

    Args:
      entry: the tensor; its dtype is one of DTYPES, or U8.
      start, stop: first row and last + 1.
      columns: (first, last + 1) of a matrix; None: all. Only their bytes are read.

    Raises:
      UserError: the file cannot be read or has become shorter.
    """
    dtype = _READ[entry.dtype]
    row = math.prod(entry.shape[1:]) * dtype.itemsize
    begin, end = (c * dtype.itemsize for c in columns) if columns else (0, row)
    shape = (stop - start, *entry.shape[1:])
    pieces = [(entry.start + start * row, (stop - start) * row)]
    if end - begin < row:
        assert columns
        shape = (stop - start, columns[1] - columns[0])
        pieces = [(entry.start + i * row + begin, end - begin) for i in range(start, stop)]
    data = np.empty(sum(size for _, size in pieces), np.uint8)
    done = 0
    try:
        with open(entry.file, "rb", buffering=0) as file:
            for offset, size in pieces:
                file.seek(offset)
                end_of_piece = done + size
                while done < end_of_piece:  # a network file system may return fewer bytes
                    read = file.readinto(data[done:end_of_piece].data)
                    if not read:
                        raise UserError(
                            f"{entry.file} has become shorter while it was read; {_AGAIN}"
                        )
                    done += read
    except OSError as error:
        raise UserError(f"{entry.file} cannot be read ({error.strerror}): try again") from None
    return data.view(dtype).reshape(shape)


@dataclasses.dataclass(frozen=True)
class Output:
    """Tensors to write that are computed together.

    Attributes:
      parts: {name: (shape, dtype)}, dtypes among the values of DTYPES.
      values: function that returns the arrays in the order of `parts`; called when writing them.
    """

    parts: dict[str, tuple[tuple[int, ...], np.dtype]]
    values: Callable[[], tuple[np.ndarray, ...]]

    @property
    def nbytes(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.parts.values())


def write_file(file: pathlib.Path, outputs: list[Output]) -> None:
    """Writes one file, an output at a time, and syncs it to disk."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    end = 0
    for output in outputs:
        for name, (shape, dtype) in output.parts.items():
            start = end
            end += math.prod(shape) * dtype.itemsize
            header[name] = {
                "dtype": _NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [start, end],
            }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight bytes
    with open(file, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for output in outputs:
            for value, part in zip(output.values(), output.parts.values(), strict=True):
                assert (value.shape, value.dtype) == part, output.parts
                stream.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        stream.flush()
        os.fsync(stream.fileno())
