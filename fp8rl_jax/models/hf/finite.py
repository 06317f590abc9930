"""Counts of elements of a tensor that are NaN or infinite.

A checkpoint with such weights would load and sample without an error, and the samples would be
useless. An element is not finite if all bits of its exponent are set; NumPy's `isfinite` would
convert each bfloat16 first. E4M3 has no infinity, and its NaN is 0x7f or 0xff.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

_EXPONENTS: dict[np.dtype, tuple[type[np.unsignedinteger], int]] = {
    np.dtype(np.float32): (np.uint32, 0x7F800000),
    np.dtype(np.float16): (np.uint16, 0x7C00),
    np.dtype(ml_dtypes.bfloat16): (np.uint16, 0x7F80),
    np.dtype(ml_dtypes.float8_e4m3fn): (np.uint8, 0x7F),
}


def count_not_finite(values: np.ndarray) -> int:
    """Counts the elements of an array that are NaN or infinite; its dtype is one of those above."""
    bits, exponent = _EXPONENTS[values.dtype]
    mask = bits(exponent)
    return int(np.count_nonzero((values.view(bits) & mask) == mask))


def count_bad_scales(scales: np.ndarray) -> int:
    """Counts scales of E4M3 blocks that are not positive, or that overflow 448 to infinity."""
    with np.errstate(over="ignore", invalid="ignore"):
        good = (scales > 0) & np.isfinite(scales.astype(np.float32) * np.float32(448))
    return scales.size - int(np.count_nonzero(good))
