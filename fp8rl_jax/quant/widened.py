"""FP8 weights held in the type in which a CPU multiplies them (kernels/reference/products.py).

A decode loop reads every weight once a token. On a CPU each read would convert FP8 again, which
takes longer than the product of a few rows. The conversion is exact, so doing it once, before the
loop, changes no bit; it costs two bytes a weight while the loop runs, four where a CPU multiplies
bf16 as float32.
"""

from __future__ import annotations

import dataclasses

import jax

from fp8rl_jax.kernels import widened
from fp8rl_jax.kernels.reference.products import wide_type
from fp8rl_jax.quant.qarray import QArray


def widen(w: QArray | jax.Array) -> QArray | jax.Array:
    """FP8 bytes as numbers, other weights as they are; products with either have the same bits.

    For forward passes alone: nothing receives a gradient.
    """
    if not isinstance(w, QArray):
        return w
    return dataclasses.replace(w, qvalue=widened(w.qvalue, wide_type()))
