"""MXFP4 in gpt-oss's checkpoints: experts in four bits a number, with a scale for 32 of them.

OCP Microscaling Formats 1.0: a block is 32 numbers of E2M1 and one power of two, E8M0. For each
tensor X (E, in, out) of packed experts the files hold::

    X_blocks    (E, out, in / 32, 16) U8: two numbers a byte, the first in its low half
    X_scales    (E, out, in / 32)     U8: exponents, with a bias of 127; 255 is NaN

Every number is exact in bf16, as which it is read: a bf16 checkpoint of the same numbers gives the
same parameters.
"""

from __future__ import annotations

import math
import pathlib
from typing import Any

import ml_dtypes
import numpy as np

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.models.hf.reader import Source
from fp8rl_jax.models.hf.safetensors_file import Entry

_BLOCKS = "_blocks"
_SCALES = "_scales"
_BLOCK = 32
_VALUES = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


class Unpacked:
    """A `Source` whose MXFP4 tensors appear as BF16, (E, in, out).

    Args:
      source: the files.

    Raises:
      UserError: scales are missing, blocks and scales do not fit each other, or a tensor is there
        in bf16, too.
    """

    where: pathlib.Path
    entries: dict[str, Entry]

    def __init__(self, source: Source):
        self.where = source.where
        self.entries = dict(source.entries)
        self._source = source
        self._last: tuple[Any, np.ndarray] | None = None  # gate and up are read one after the other
        self._packed = [
            held.removesuffix(_BLOCKS) for held in source.entries if held.endswith(_BLOCKS)
        ]
        for name in self._packed:
            if name in source.entries:
                raise UserError(
                    f"{self.where} holds tensor {name} twice, as {name + _BLOCKS} too: keep the "
                    "files of one checkpoint alone"
                )
            self.entries[name] = self._entry(name)

    def _entry(self, name: str) -> Entry:
        blocks = self.entries.pop(name + _BLOCKS)
        scales = self.entries.pop(name + _SCALES, None)
        if scales is None:
            raise UserError(
                f"{blocks.file} holds tensor {name + _BLOCKS}, and there is no {name + _SCALES} "
                "with its scales: download all files again"
            )
        for entry, ending in ((blocks, _BLOCKS), (scales, _SCALES)):
            if entry.dtype != "U8" or entry.stop - entry.start != math.prod(entry.shape):
                raise UserError(
                    f"{entry.file}: tensor {name + ending} has type {entry.dtype}, shape "
                    f"{list(entry.shape)} and {entry.stop - entry.start} bytes, and MXFP4 has a U8 "
                    "of one byte for each element: download all files again"
                )
        if len(blocks.shape) != 4 or blocks.shape != (*scales.shape, _BLOCK // 2):
            raise UserError(
                f"{blocks.file}: tensor {name + _BLOCKS} has shape {list(blocks.shape)}, which "
                f"does not fit {list(scales.shape)} of its scales: download all files again"
            )
        experts, outputs, count, _ = blocks.shape
        return Entry(
            file=blocks.file,
            dtype="BF16",
            shape=(experts, count * _BLOCK, outputs),
            start=blocks.start,
            stop=blocks.stop,
        )

    def rows(
        self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None
    ) -> np.ndarray:
        if name not in self._packed:
            return self._source.rows(name, start, stop, columns)
        assert columns is None  # packed experts are read whole
        key = name, start, stop
        if self._last is None or self._last[0] != key:
            blocks = self._source.rows(name + _BLOCKS, start, stop)
            self._last = key, unpack(blocks, self._source.rows(name + _SCALES, start, stop))
        return self._last[1]


def unpack(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the numbers of MXFP4 blocks.

    Args:
      blocks: (n, out, b, 16) uint8.
      scales: (n, out, b) uint8.

    Returns:
      (n, in, out) bfloat16 with in = 32 b, exact; infinite beyond bf16's range.
    """
    halves = np.stack([blocks & 15, blocks >> 4], axis=-1)
    values = _VALUES[halves.reshape(*scales.shape, _BLOCK)]
    factor = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    numbers = (values * factor[..., None]).astype(ml_dtypes.bfloat16)
    return np.swapaxes(numbers.reshape(*scales.shape[:2], -1), 1, 2)
