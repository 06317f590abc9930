"""The forms in which a weight reaches a product, and how each is read.

A plain array is quantised by the product itself: drop-in for any Flax module. A `QArray` is what a
rollout holds: the bytes are all there is. A `BoundWeight` pairs bytes with the master that is
trained, a `StackedLayer` names a layer of a stack that a GPU kernel reads in place, `Bits` holds a
stack as raw bits: otherwise XLA on a CPU would convert the whole stack in every iteration of the
outer loop that takes one layer from it. All give the same bits on one platform.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from fp8rl_jax.kernels import Bits, as_bytes, from_bytes
from fp8rl_jax.quant import formats
from fp8rl_jax.quant.qarray import QArray
from fp8rl_jax.quant.recipe import FLOAT32, Recipe
from fp8rl_jax.quant.site import SiteProbe, SiteScaling, quantize_operand


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BoundWeight:
    """A weight as the forward pass sees it, with all that belongs to it and its call site.

    Attributes:
      value: QArray (quantised once per update: exactly what the rollout holds), or an array.
      master: float32 parameter that `value` stands for. Receives the gradient; its value is read
        only by the backward pass of recipes that need the bf16 weight. None: `value` receives the
        gradient if it is an array.
      scaling: states of the site's policies, frozen; None if no policy keeps any.
      probe: its cotangent is what the site observed; None observes nothing.
    """

    value: QArray | jax.Array
    master: jax.Array | None = None
    scaling: SiteScaling | None = None
    probe: SiteProbe | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def ndim(self) -> int:
        return self.value.ndim

    @property
    def T(self) -> BoundWeight:
        """Transpose of a two-dimensional weight (a tied output head)."""
        return BoundWeight(self.value.mT, None if self.master is None else self.master.mT)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StackedLayer:
    """One layer of stacked weights, named and not cut out. For forward passes alone.

    Cutting a layer out of a stack copies it before a kernel can read it: three times the memory
    traffic of a decode step, whose time is the reading of weights.

    Attributes:
      stack: (L, K, N), or (L, E, K, N) of experts, an array or a QArray.
      layer: () int32.
    """

    stack: QArray | jax.Array
    layer: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stack.shape[1:]

    @property
    def ndim(self) -> int:
        return self.stack.ndim - 1


# What a linear layer takes as its weight.
Weight = jax.Array | QArray | BoundWeight | StackedLayer


def is_weight(x) -> bool:
    """Whether a node of a parameter tree is one weight of several arrays, for `is_leaf=`."""
    return isinstance(x, QArray | BoundWeight | Bits)


def take_layer(tree, layer: jax.Array):
    """Entry `layer` of every array's first axis: a layer, or an expert."""

    def take(x: jax.Array | Bits) -> jax.Array:
        bits = x.bits if isinstance(x, Bits) else as_bytes(x)
        return from_bytes(lax.dynamic_index_in_dim(bits, layer, 0, keepdims=False), x.dtype)

    return jax.tree.map(take, tree, is_leaf=lambda x: isinstance(x, Bits))


def compute_value(x: jax.Array, recipe: Recipe) -> jax.Array:
    """`x` in the recipe's compute dtype (rounded to bf16, or in float32)."""
    return x.astype(jnp.float32) if recipe.compute_dtype == FLOAT32 else formats.round_bf16(x)


def quantize_weight(
    w: jax.Array, recipe: Recipe, scaling: SiteScaling | None = None
) -> tuple[QArray, jax.Array]:
    """Rounds a weight (..., K, N) to bf16 and quantises it; returns it and the amax per block."""
    assert recipe.weight is not None
    return quantize_operand(w, recipe.weight, None if scaling is None else scaling.weight)


def bind(w: Weight) -> BoundWeight:
    """`w` as a BoundWeight."""
    assert not isinstance(w, StackedLayer)
    return w if isinstance(w, BoundWeight) else BoundWeight(w)


def plain_value(w: QArray | jax.Array) -> jax.Array:
    """A weight as an array, for what is not computed on its bytes."""
    return w.dequantize() if isinstance(w, QArray) else w
