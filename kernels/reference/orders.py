"""The orders of summation that products of a CPU keep to, written down in numpy.

``acc = fma(x[k], w[k], acc)``, a fused multiply-add, is rounded once. Here it is computed in
numpy's longdouble: of its 64 bits a product of two float32 takes 48, so that rounding its sum with
a third number once more changes one sum in 2**40. Where longdouble is float64 (macOS on ARM,
Windows) that is one in 100,000.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

_AMX_DEPTH = 32  # of K, that one instruction takes


def _one_by_one(x: np.ndarray, w: np.ndarray, order: Iterable[int]) -> np.ndarray:
    """(..., M, K) times (..., K, N) in float32, a fused multiply-add for each k of `order`."""
    total = np.zeros((*x.shape[:-1], w.shape[-1]), np.float32)
    x, w = x.astype(np.longdouble), w.astype(np.longdouble)
    for k in order:
        total = (total + x[..., k, None] * w[..., k, None, :]).astype(np.float32)
    return total


def float32_order(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """(..., M, K) times (..., K, N) in float32: ``acc = fma(x[k], w[k], acc)``, k ascending."""
    return _one_by_one(x, w, range(x.shape[-1]))


def pairs_order(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """(M, K) times (K, N) in float32, in the order of VDPBF16PS: ``acc = fma(x[k + 1], w[k + 1],
    acc)``, then the same with k, for k = 0, 2, 4 ...; behind an odd K stands a zero."""
    pairs = (k for first in range(0, x.shape[-1], 2) for k in (first + 1, first))
    return _one_by_one(x, w, (k for k in pairs if k < x.shape[-1]))


def amx_order(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """(M, K) times (K, N) in float32, in the order of TDPBF16PS: for each 32 of K one chain of even
    and one of odd k, each ``acc = fma(x[k], w[k], acc)`` from 0, and their sum added."""
    total = np.zeros((x.shape[0], w.shape[1]), np.float32)
    for start in range(0, x.shape[1], _AMX_DEPTH):
        end = min(start + _AMX_DEPTH, x.shape[1])
        even, odd = (_one_by_one(x, w, range(first, end, 2)) for first in (start, start + 1))
        total = total + (even + odd)
    return total
