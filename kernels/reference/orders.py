"""The orders of summation of a CPU's products, written in numpy.

``acc = fma(x[k], w[k], acc)``, a fused multiply-add, is rounded once. Here it is computed in
numpy's longdouble and then rounded to float32. A product of two float32 takes 48 of longdouble's 64
bits, so this double rounding of the sum changes one sum in 2**40. Where longdouble is float64
(macOS on ARM, Windows) it changes one in 100,000.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

AMX_DEPTH = 32  # entries of K that one instruction takes


def _one_by_one(x: np.ndarray, w: np.ndarray, order: Iterable[int]) -> np.ndarray:
    """Multiplies (..., M, K) by (..., K, N), a float32 fused multiply-add for each k of `order`."""
    total = np.zeros((*x.shape[:-1], w.shape[-1]), np.float32)
    x, w = x.astype(np.longdouble), w.astype(np.longdouble)
    for k in order:
        total = (total + x[..., k, None] * w[..., k, None, :]).astype(np.float32)
    return total


def float32_order(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Multiplies (..., M, K) by (..., K, N): ``acc = fma(x[k], w[k], acc)``, k ascending."""
    return _one_by_one(x, w, range(x.shape[-1]))


def pairs_order(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Multiplies (M, K) by (K, N) in the order of VDPBF16PS: for k = 0, 2, 4 ..., first ``acc =
    fma(x[k + 1], w[k + 1], acc)``, then the same with k; an odd K is padded with a zero."""
    pairs = (k for first in range(0, x.shape[-1], 2) for k in (first + 1, first))
    return _one_by_one(x, w, (k for k in pairs if k < x.shape[-1]))


def amx_order(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Multiplies (M, K) by (K, N) in the order of TDPBF16PS: for each 32 of K one chain of even and
    one of odd k, each ``acc = fma(x[k], w[k], acc)`` from 0; then adds the sum of both chains."""
    total = np.zeros((x.shape[0], w.shape[1]), np.float32)
    for start in range(0, x.shape[1], AMX_DEPTH):
        end = min(start + AMX_DEPTH, x.shape[1])
        even, odd = (_one_by_one(x, w, range(first, end, 2)) for first in (start, start + 1))
        total = total + (even + odd)
    return total
