"""An operand of a GEMM: the forms in which it comes, how it is quantised, its state, its probe.

::

    activation or gradient ----------> quantize_activation --+
    weight: array (bf16 or float32) -> quantize_weight ------+--> QArray, amax --> observe
            QArray (a rollout's bytes) ----------------------+        ^               |
            BoundWeight (bytes, master, state, probe)                 |               v
                                                    SiteScaling (frozen state)   SiteProbe
                                                              ^                       |
                                                              +---- update_site <-----+
                                                                 once per optimiser step

`quantize_operand` defines the result for every recipe. Where the GPU kernels know an operand
(DeepSeek-V3's blocks under dynamic scales) they compute the same bytes and scales in one launch
instead of four, and write the operands of a weight gradient in the order in which its product reads
them. A norm or a gate in front of linear layers can do it in its own launch (`fuses_quantisation`)
and returns both forms of its result, an `Activation`.

A *site* is one use of one weight. Its `SiteScaling` is frozen during an optimiser step and is an
argument of the forward pass. Its `SiteProbe` is an argument too, all zeros, and its **cotangent**
is what the site observed: the amax of each operand (for the policies) and counts of what
quantisation lost (for the health metrics). Observations therefore pass through scan, remat and
shard_map as gradients do, which is also the only way to observe output gradients.

JAX adds cotangents where a value is used twice: every use needs its own site. Micro-batches are
combined by `merge_probes` (amaxes by maximum, counts by sum); over a mesh, jit reduces the amax of
a sharded array over all devices.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8rl_jax.kernels import K_BLOCK, by_platform, gpu_kernels, in_bits, resolve, round_bf16
from fp8rl_jax.quant import scaling
from fp8rl_jax.quant.qarray import QArray, block_health, quantize_with, scale_shape
from fp8rl_jax.quant.recipe import BF16, FLOAT32, Operand, Recipe

COUNTS = ("saturated", "underflowed", "nonfinite_blocks", "elements")
# Operand of a recipe -> its name in metrics.
OPERAND_CLASSES = {"weight": "weights", "activation": "activations", "gradient": "gradients"}
# A quantised operand, and the amax of each block in float32; None where nothing reads it.
Quantized = tuple[QArray, jax.Array | None]
_ROW, _COLUMN = (1, K_BLOCK), (K_BLOCK, 1)


# States and probes of a site.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OperandScaling:
    """State of one operand's policy at one site (or stacked over layers).

    Attributes:
      state: the policy's own state.
      age: int32, optimiser steps since an amax was seen that is finite and above zero.
    """

    state: object
    age: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SiteScaling:
    """States of a site's policies; None for an operand whose policy keeps none."""

    weight: OperandScaling | None = None
    activation: OperandScaling | None = None
    gradient: OperandScaling | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OperandProbe:
    """Zeros whose cotangent is an observation.

    Attributes:
      amax: float32, shaped as the scales; None if no policy asks for it.
      counts: (4,) float32, as `COUNTS`; None with health off.
    """

    amax: jax.Array | None = None
    counts: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SiteProbe:
    """Probes of a site's operands; None for an operand that is not observed."""

    weight: OperandProbe | None = None
    activation: OperandProbe | None = None
    gradient: OperandProbe | None = None

    @property
    def amaxes(self) -> dict[str, jax.Array]:
        """{operand: the amax observed}, as `update_site` takes it."""
        probes = {name: getattr(self, name) for name in OPERAND_CLASSES}
        return {n: p.amax for n, p in probes.items() if p is not None and p.amax is not None}


def stacked(function, stacks: int):
    """`function` mapped over `stacks` leading axes."""
    for _ in range(stacks):
        function = jax.vmap(function)
    return function


def _scale_shape(name: str, operand: Operand, weight_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of an operand of ``(M, K) @ (K, N)``, with 1 for M."""
    depth, width = weight_shape[-2:]
    shapes = {"weight": (depth, width), "activation": (1, depth), "gradient": (1, width)}
    return scale_shape(shapes[name], operand.block)


def init_site(recipe: Recipe, weight_shape: tuple[int, ...]) -> SiteScaling | None:
    """States of a site at the start; None if no policy of the recipe keeps any.

    Args:
      recipe: of this site (`Recipe.for_module`).
      weight_shape: (..., K, N); axes in front are stacks (layers), each with its own state.
    """
    stack = weight_shape[:-2]

    def start(name: str, operand: Operand):
        state = operand.policy.init(_scale_shape(name, operand, weight_shape))
        spread = jax.tree.map(lambda x: jnp.broadcast_to(x, (*stack, *jnp.shape(x))), state)
        return OperandScaling(spread, jnp.zeros(stack, jnp.int32))

    states = {n: start(n, o) for n, o in recipe.operands.items() if o.policy.stateful}
    return SiteScaling(**states) if states else None


def init_probe(
    recipe: Recipe, weight_shape: tuple[int, ...], health: bool, weight: bool = False
) -> SiteProbe | None:
    """Zeros that collect a site's observations; None if there is nothing to observe.

    Args:
      recipe, weight_shape: as for `init_site`.
      health: also count what quantisation lost.
      weight: also observe the weight (where it is quantised by the matmul itself; a refit that
        quantises beforehand observes it there).
    """
    stack = weight_shape[:-2]
    probes = {}
    for name, operand in recipe.operands.items():
        if name == "weight" and not weight:
            continue
        shape = (*stack, *_scale_shape(name, operand, weight_shape))
        amax = jnp.zeros(shape) if operand.policy.stateful else None
        counts = jnp.zeros((*stack, len(COUNTS))) if health else None
        if amax is not None or counts is not None:
            probes[name] = OperandProbe(amax, counts)
    return SiteProbe(**probes) if probes else None


def observe(
    x: jax.Array, q: QArray, amax: jax.Array | None, operand: Operand, probe: OperandProbe
) -> OperandProbe:
    """The cotangent of `probe`: what it asks for of an operand `x` that was quantised to `q`."""
    counts = None
    if probe.counts is not None:
        health = block_health(x, q, saturable=not scaling.never_saturates(operand.policy))
        counts = jnp.stack([health[name] for name in COUNTS])
    return OperandProbe(None if probe.amax is None else amax, counts)


def merge_probes(one, other):
    """Observations of two micro-batches: amaxes by maximum (NaN stays), counts by sum."""

    def merge(a, b) -> OperandProbe:
        amax = None if a.amax is None else scaling.find_amax(jnp.stack([a.amax, b.amax]), 0)
        return OperandProbe(amax, None if a.counts is None else a.counts + b.counts)

    return jax.tree.map(merge, one, other, is_leaf=lambda x: isinstance(x, OperandProbe))


def update_site(recipe: Recipe, site: SiteScaling, amax: dict[str, jax.Array]) -> SiteScaling:
    """The states after an optimiser step.

    Args:
      recipe: of this site.
      site: the states that the step used, possibly stacked.
      amax: {operand name: what the step observed}, for every operand with a state.
    """

    states = {}
    for name, operand in recipe.operands.items():
        if (before := getattr(site, name)) is None:
            continue
        stacks = before.age.ndim
        state = stacked(operand.policy.update, stacks)(before.state, amax[name])
        top = scaling.find_amax(amax[name], tuple(range(stacks, amax[name].ndim)))
        seen = scaling.is_finite_amax(top) & (top > 0)
        states[name] = OperandScaling(state, jnp.where(seen, 0, before.age + 1))
    return SiteScaling(**states)


# The forms of activations and weights.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Activation:
    """An activation, and its quantised form where the operation that made it quantised it, too.

    Attributes:
      value: (..., K). Receives the gradient, and wgrad's operand is made from it.
      q: (M, K), the value's rows as `quantize_activation` quantises them; a product takes it
        instead of quantising again. None: the product quantises the value.
    """

    value: jax.Array
    q: QArray | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    def matrix(self) -> Activation:
        """The value as (M, K)."""
        return Activation(self.value.reshape(-1, self.shape[-1]), self.q)


def as_activation(x: jax.Array | Activation) -> Activation:
    """`x` as an Activation."""
    return x if isinstance(x, Activation) else Activation(x)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BoundWeight:
    """A weight as the forward pass sees it, with its master and the states of its site.

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


# What a linear layer takes as its weight. All give the same bits on one platform.
Weight = jax.Array | QArray | BoundWeight


def is_weight(x) -> bool:
    """Whether a node of a parameter tree is one weight of several arrays, for `is_leaf=`."""
    return isinstance(x, QArray | BoundWeight)


def bind(w: Weight) -> BoundWeight:
    """`w` as a BoundWeight."""
    return w if isinstance(w, BoundWeight) else BoundWeight(w)


def plain_value(w: QArray | jax.Array) -> jax.Array:
    """A weight as an array: dequantised if it is a QArray."""
    return w.dequantize() if isinstance(w, QArray) else w


def take_layer(tree, layer: jax.Array):
    """Entry `layer` of every array's first axis: a layer, or an expert."""

    def take(x: jax.Array) -> jax.Array:
        return lax.dynamic_index_in_dim(x, layer, 0, keepdims=False)

    return jax.tree.map(lambda x: in_bits(take, x), tree)


# Quantisation.


def compute_value(x: jax.Array, recipe: Recipe) -> jax.Array:
    """`x` in the recipe's compute dtype (rounded to bf16, or in float32)."""
    return x.astype(jnp.float32) if recipe.compute_dtype == FLOAT32 else round_bf16(x)


def quantize_operand(
    x: jax.Array, operand: Operand, current: OperandScaling | None
) -> tuple[QArray, jax.Array]:
    """Rounds a (..., rows, columns) array to bf16 and quantises it; returns QArray and amaxes.

    Raises:
      ValueError: the policy keeps a state and none is given.
    """
    if operand.policy.stateful and current is None:
        raise ValueError(
            f"the policy {operand.policy.name} keeps a state; make one with init_site and pass it "
            "(make_dot_general(recipe, state=...), quantize_params(..., scaling=...))"
        )

    def quantise(x, state):
        return quantize_with(x, operand.block, operand.dtype, operand.policy, state)

    value = round_bf16(x)
    if current is None or not operand.policy.stateful:
        return quantise(value, ())
    return stacked(quantise, x.ndim - 2)(value, current.state)


def quantize_weight(
    w: jax.Array, recipe: Recipe, scaling: SiteScaling | None = None
) -> tuple[QArray, jax.Array]:
    """Rounds a weight (..., K, N) to bf16 and quantises it; returns it and the amax per block."""
    assert recipe.weight is not None
    return quantize_operand(w, recipe.weight, None if scaling is None else scaling.weight)


def kernel_settings(operand: Operand) -> dict[str, Any] | None:
    """{'dtype', 'power_of_two'} for the kernels; None for an operand that no kernel knows."""
    powers = {scaling.dynamic(): False, scaling.power_of_two(scaling.dynamic()): True}
    if operand.policy not in powers or operand.block not in (_ROW, _COLUMN):
        return None
    return {"dtype": operand.dtype, "power_of_two": powers[operand.policy]}


def fuses_quantisation(recipe: Recipe) -> bool:
    """Whether the kernel of a norm or a gate can quantise its result as a linear layer would.

    It quantises the value in the compute dtype, which must be what the layer rounds to.
    """
    operand = recipe.activation
    if operand is None or resolve(recipe.kernels) == "reference":
        return False
    rows = operand.block == _ROW and kernel_settings(operand) is not None
    return rows and recipe.compute_dtype == BF16


def quantize_activation(
    x: jax.Array, operand: Operand, current: OperandScaling | None, implementation: str
) -> Quantized:
    """`quantize_operand`, by a GPU kernel where there is one.

    Args:
      x: (..., rows, columns), activations or output gradients; axes in front are stacks, with
        blocks of their own.
      operand, current: as for `quantize_operand`.
      implementation: of `Recipe.kernels`.

    Returns:
      QArray, and the amax of each block where the policy keeps a state.
    """
    settings = kernel_settings(operand)
    whole_blocks = operand.block == _ROW or x.ndim == 2 or x.shape[-2] % K_BLOCK == 0
    if settings is None or not whole_blocks:
        return quantize_operand(x, operand, current)

    def kernel(x):
        rows = round_bf16(x).reshape(-1, x.shape[-1])
        if operand.block == _ROW:
            q, scale = gpu_kernels().norm.quantize_rows(rows, **settings)
            scale = scale.T.reshape(*x.shape[:-1], -1)
        else:
            q, scale = gpu_kernels().norm.quantize_columns(rows, **settings)
            q, scale = q.T, scale.reshape(*x.shape[:-2], -1, x.shape[-1])
        return QArray(q.reshape(x.shape), scale, operand.block)

    def plain(x):
        return quantize_operand(x, operand, None)[0]

    return by_platform(implementation, kernel, plain, x), None
