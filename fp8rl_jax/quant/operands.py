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
them. The kernel of a norm or a gate in front of linear layers can quantise its result as well
(`fuses_quantisation`); it then returns both forms, an `Activation`.

A *site* is one use of one weight. Its `SiteScaling` is frozen during an optimiser step and is an
argument of the forward pass. Its `SiteProbe` is an argument too, all zeros, and its **cotangent**
is what the site observed: the amax of each operand (for the policies) and counts of what
quantisation lost (for the health metrics). Observations therefore pass through scan, remat and
shard_map as gradients do, which is also the only way to observe output gradients.

JAX adds cotangents where a value is used twice: every use needs its own site. `merge_probes`
combines micro-batches (amaxes by maximum, counts by sum); over a mesh, jit reduces the amax of a
sharded array over all devices.
"""

from __future__ import annotations

import dataclasses
import functools
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
# A quantised operand, and the float32 amax of each block or, if nothing reads it, None.
Quantized = tuple[QArray, jax.Array | None]
_ROW, _COLUMN = (1, K_BLOCK), (K_BLOCK, 1)


# States and probes of a site.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OperandScaling:
    """State of one operand's policy at one site (or stacked over layers).

    Attributes:
      state: the policy's state (`ScalingPolicy.init`).
      age: int32, optimiser steps since the last amax that was finite and above zero.
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
      amax: float32, shaped as the scales; None if the policy keeps no state.
      counts: (4,) float32, in the order of `COUNTS`; None with health off.
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
        """{operand: observed amax}, an argument of `update_site`."""
        probes = {name: getattr(self, name) for name in OPERAND_CLASSES}
        return {n: p.amax for n, p in probes.items() if p is not None and p.amax is not None}


def stacked(function, stacks: int):
    """Returns `function` mapped over `stacks` leading axes."""
    for _ in range(stacks):
        function = jax.vmap(function)
    return function


def _scale_shape(name: str, operand: Operand, weight_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of an operand's scales in ``(M, K) @ (K, N)`` with M = 1."""
    depth, width = weight_shape[-2:]
    shapes = {"weight": (depth, width), "activation": (1, depth), "gradient": (1, width)}
    return scale_shape(shapes[name], operand.block)


def init_site(recipe: Recipe, weight_shape: tuple[int, ...]) -> SiteScaling | None:
    """Returns the initial states of a site; None if no policy of the recipe keeps any.

    Args:
      recipe: numerics of this site (`Recipe.for_module`).
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
    """Returns zeros that collect a site's observations; None if there is nothing to observe.

    Args:
      recipe, weight_shape: as for `init_site`.
      health: also count what quantisation lost.
      weight: also observe the weight: for weights that the matmul quantises. A refit quantises
        them beforehand and observes them there.
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
    """Returns the cotangent of `probe`: the amax and counts of operand `x`, quantised to `q`."""
    counts = None
    if probe.counts is not None:
        health = block_health(x, q, saturable=not scaling.never_saturates(operand.policy))
        counts = jnp.stack([health[name] for name in COUNTS])
    return OperandProbe(None if probe.amax is None else amax, counts)


def merge_probes(one, other):
    """Combines observations of two micro-batches: amaxes by maximum (NaN stays), counts by sum."""

    def merge(a, b) -> OperandProbe:
        amax = None if a.amax is None else scaling.find_amax(jnp.stack([a.amax, b.amax]), 0)
        return OperandProbe(amax, None if a.counts is None else a.counts + b.counts)

    return jax.tree.map(merge, one, other, is_leaf=lambda x: isinstance(x, OperandProbe))


def update_site(recipe: Recipe, site: SiteScaling, amax: dict[str, jax.Array]) -> SiteScaling:
    """Returns the states after an optimiser step.

    Args:
      recipe: numerics of this site.
      site: the states that the step used, possibly stacked.
      amax: {operand: amax that the step observed}, for every operand with a state.
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
    """An activation, with its quantised form if the operation that made it has quantised it.

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
        """Returns the activation with its value as (M, K)."""
        return Activation(self.value.reshape(-1, self.shape[-1]), self.q)


def as_activation(x: jax.Array | Activation) -> Activation:
    """Returns `x` as an Activation."""
    return x if isinstance(x, Activation) else Activation(x)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BoundWeight:
    """A weight as the forward pass sees it, with its master and the states of its site.

    Attributes:
      value: QArray (quantised once per update: exactly what the rollout holds), or an array. Its
        FP8 and bf16 may be `Bits` (`kernels.keep`).
      master: float32 parameter that `value` stands for. Receives the gradient; its value is read
        only by the backward pass of recipes that need the bf16 weight. None: `value` receives the
        gradient if it is an array.
      scaling: states of the site's policies, frozen; None if no policy keeps any.
      probe: its cotangent is what the site observed; None observes nothing.
      adapter: (a, b), a (..., K, r) and b (..., r, N) whose product `value` contains, or None. They
        receive gradients, and the weight none.
    """

    value: QArray | jax.Array
    master: jax.Array | None = None
    scaling: SiteScaling | None = None
    probe: SiteProbe | None = None
    adapter: tuple[jax.Array, jax.Array] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def ndim(self) -> int:
        return self.value.ndim

    @property
    def T(self) -> BoundWeight:
        """Transpose of a matrix (a tied output head), without scaling and probe."""
        return BoundWeight(self.value.mT, None if self.master is None else self.master.mT)


# The forms of a linear layer's weight. All give the same bits on one platform.
Weight = jax.Array | QArray | BoundWeight


def is_weight(x) -> bool:
    """Returns whether a node of a parameter tree is a weight of several arrays; for `is_leaf=`."""
    return isinstance(x, QArray | BoundWeight)


def bind(w: Weight) -> BoundWeight:
    """Returns `w` as a BoundWeight."""
    return w if isinstance(w, BoundWeight) else BoundWeight(w)


def plain_value(w: QArray | jax.Array) -> jax.Array:
    """Returns a weight as an array, dequantised if it is a QArray."""
    return w.dequantize() if isinstance(w, QArray) else w


def take_layer(tree, layer: jax.Array):
    """Returns entry `layer` of every array's first axis (layers or experts)."""

    def take(x: jax.Array) -> jax.Array:
        return lax.dynamic_index_in_dim(x, layer, 0, keepdims=False)

    return jax.tree.map(lambda x: in_bits(take, x), tree)


# Quantisation.


def compute_value(x: jax.Array, recipe: Recipe) -> jax.Array:
    """Returns `x` in the recipe's compute dtype (rounded to bf16, or in float32)."""
    return x.astype(jnp.float32) if recipe.compute_dtype == FLOAT32 else round_bf16(x)


def quantize_operand(
    x: jax.Array, operand: Operand, current: OperandScaling | None
) -> tuple[QArray, jax.Array]:
    """Rounds a (..., rows, columns) array to bf16 and quantises it; returns QArray and amaxes.

    Raises:
      ValueError: the policy keeps a state and none is given.
    """
    quantise = functools.partial(
        quantize_with, block_shape=operand.block, dtype=operand.dtype, policy=operand.policy
    )
    value = round_bf16(x)
    if not operand.policy.stateful:
        return quantise(value)
    if current is None:
        raise ValueError(
            f"the policy {operand.policy.name} keeps a state; make one with init_site and pass it "
            "(make_dot_general(recipe, state=...), quantize_params(..., scaling=...))"
        )
    return stacked(quantise, x.ndim - 2)(value, state=current.state)


def quantize_weight(
    w: jax.Array, recipe: Recipe, scaling: SiteScaling | None = None
) -> tuple[QArray, jax.Array]:
    """Rounds a weight (..., K, N) to bf16 and quantises it; returns QArray and amaxes."""
    assert recipe.weight is not None
    return quantize_operand(w, recipe.weight, None if scaling is None else scaling.weight)


def kernel_settings(operand: Operand) -> dict[str, Any]:
    """Returns {'dtype', 'power_of_two'} for the kernels that quantise rows or columns."""
    return {"dtype": operand.dtype, "power_of_two": operand.policy != scaling.dynamic()}


def fuses_quantisation(recipe: Recipe) -> bool:
    """Returns whether the kernel of a norm or gate can quantise its result as a linear layer would.

    Such a kernel quantises the value in the compute dtype; the layer must round to the same dtype.
    """
    operand = recipe.activation
    if operand is None or resolve(recipe.kernels) == "reference":
        return False
    rows = operand.block == _ROW and scaling.never_saturates(operand.policy)
    return rows and recipe.compute_dtype == BF16


def quantize_activation(
    x: jax.Array, operand: Operand, current: OperandScaling | None, implementation: str
) -> Quantized:
    """Quantises as `quantize_operand` does, with a GPU kernel where one supports the operand.

    Args:
      x: (..., rows, columns), activations or output gradients; axes in front are stacks, with
        blocks of their own.
      operand, current: as for `quantize_operand`.
      implementation: value of `Recipe.kernels`.

    Returns:
      QArray, and the amax of each block; None where a kernel may run: its policies keep no state.
    """
    whole_columns = x.ndim == 2 or x.shape[-2] % K_BLOCK == 0
    known = operand.block == _ROW or (operand.block == _COLUMN and whole_columns)
    if not known or not scaling.never_saturates(operand.policy):
        return quantize_operand(x, operand, current)

    def kernel(x):
        settings = kernel_settings(operand)
        rows = round_bf16(x).reshape(-1, x.shape[-1])
        if operand.block == _ROW:
            q, scale = gpu_kernels().norm.quantize_rows(rows, **settings)
            scale = scale.T.reshape(*x.shape[:-1], -1)
        else:
            q, scale = gpu_kernels().norm.quantize_columns(rows, **settings)
            q = q.T
            scale = scale.reshape(*x.shape[:-2], -1, x.shape[-1])
        return QArray(q.reshape(x.shape), scale, operand.block)

    def plain(x):
        return quantize_operand(x, operand, None)[0]

    return by_platform(implementation, kernel, plain, x), None
