"""Weights held in float32, for a CPU's products, which are float32 whatever the weight's format.

A decode loop reads every weight once a token. On a CPU each read would convert FP8 or bf16 to
float32 again, which takes longer than the product of a few rows. The conversion is exact, so doing
it once, before the loop, changes no bit; it costs four bytes a weight while the loop runs.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import overload

import jax
import jax.numpy as jnp

from fp8rl_jax.quant.qarray import QArray


@functools.partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Widened:
    """A float32 array of values that bf16 holds: a weight that no product needs to round again."""

    value: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def ndim(self) -> int:
        return self.value.ndim


@overload
def widen(w: QArray) -> QArray: ...
@overload
def widen(w: jax.Array) -> Widened | jax.Array: ...
def widen(w: QArray | jax.Array) -> QArray | Widened | jax.Array:
    """FP8 bytes and bf16 in float32, float32 as it is; products with either have the same bits.

    For forward passes alone: nothing receives a gradient.
    """
    if isinstance(w, QArray):
        return QArray(w.qvalue.astype(jnp.float32), w.scale, w.block_shape)
    return Widened(w.astype(jnp.float32)) if w.dtype == jnp.bfloat16 else w
