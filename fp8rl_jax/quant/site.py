"""What belongs to one call site: its policies' states, and probes that bring observations back.

A *site* is one use of one weight. Its `SiteScaling` is frozen during an optimiser step and is an
argument of the forward pass. Its `SiteProbe` is an argument too, all zeros, and its **cotangent**
is what the site observed: the amax of each operand (for the policies) and counts of what
quantisation lost (for the health metrics). Observations therefore pass through scan, remat and
shard_map as gradients do, which is also the only way to observe output gradients.

JAX adds cotangents where a value is used twice: every use needs its own site. Micro-batches are
combined by `merge_probes` (amaxes by maximum, counts by sum); over a mesh, jit reduces the amax of
a sharded array over all devices by itself.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fp8rl_jax.quant import formats, qarray, scaling
from fp8rl_jax.quant.recipe import Operand, Recipe

COUNTS = ("saturated", "underflowed", "nonfinite_blocks", "elements")
# Operand of a recipe -> its name in metrics.
OPERAND_CLASSES = {"weight": "weights", "activation": "activations", "gradient": "gradients"}


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
        """{operand: what was observed of it}, as `update_site` takes it."""
        probes = {name: getattr(self, name) for name in OPERAND_CLASSES}
        return {n: p.amax for n, p in probes.items() if p is not None and p.amax is not None}


def _scale_shape(name: str, operand: Operand, weight_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of an operand of ``(M, K) @ (K, N)``, with 1 for M."""
    depth, width = weight_shape[-2:]
    shapes = {"weight": (depth, width), "activation": (1, depth), "gradient": (1, width)}
    return qarray.scale_shape(shapes[name], operand.block)


def stacked(function, stacks: int):
    """`function` mapped over `stacks` leading axes."""
    for _ in range(stacks):
        function = jax.vmap(function)
    return function


def init_site(recipe: Recipe, weight_shape: tuple[int, ...]) -> SiteScaling | None:
    """States of a site at the start; None if no policy of the recipe keeps any.

    Args:
      recipe: of this site (`Recipe.for_module`).
      weight_shape: (..., K, N); axes in front are stacks (layers), each with a state of its own.
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


def merge_probes(one, other):
    """Observations of two micro-batches: amaxes by maximum (NaN stays), counts by sum."""

    def merge(a, b) -> OperandProbe:
        amax = None if a.amax is None else formats.amax(jnp.stack([a.amax, b.amax]), 0)
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
        top = formats.amax(amax[name], tuple(range(stacks, amax[name].ndim)))
        seen = formats.is_finite_amax(top) & (top > 0)
        states[name] = OperandScaling(state, jnp.where(seen, 0, before.age + 1))
    return SiteScaling(**states)


def quantize_operand(
    x: jax.Array, operand: Operand, current: OperandScaling | None
) -> tuple[qarray.QArray, jax.Array]:
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
        return qarray.quantize_with(x, operand.block, operand.dtype, operand.policy, state)

    value = formats.round_bf16(x)
    if current is None or not operand.policy.stateful:
        return quantise(value, ())
    return stacked(quantise, x.ndim - 2)(value, current.state)


def observe(
    x: jax.Array, q: qarray.QArray, amax: jax.Array | None, operand: Operand, probe: OperandProbe
) -> OperandProbe:
    """What `probe` asks for of an operand `x` quantised to `q`: its cotangent."""
    counts = None
    if probe.counts is not None:
        health = qarray.block_health(x, q, saturable=not scaling.never_saturates(operand.policy))
        counts = jnp.stack([health[name] for name in COUNTS])
    return OperandProbe(None if probe.amax is None else amax, counts)
