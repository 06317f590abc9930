"""PartitionSpecs of every weight, as devices store it and as they read it.

A weight is split along its output features if this cuts no block of its recipe; attention is split
along its heads.
"""

from __future__ import annotations

import dataclasses
import math

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from fp8rl_jax.kernels import EXP_LANES
from fp8rl_jax.models.arrays import EXPERTS, HEAD, HEADS, LINEAR, array_in
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.parallel.mesh import AXIS, EXPERT, STORAGE, WHOLE
from fp8rl_jax.models.stacks import layer_groups, layer_stacks
from fp8rl_jax.quant import BoundWeight, QArray, Recipe, is_weight
from fp8rl_jax.quant.recipe import Operand
from fp8rl_jax.sharding import stored_over

# Which dimensions may be split.


def _unit(operand: Operand, blocks: tuple[int, ...]) -> int | None:
    """Returns the least common multiple of an operand's `blocks`; None if it must not be split."""
    if operand.policy.stateful and operand.block != (-1, -1):
        return None  # its state has one entry per block
    if -1 in blocks and operand.policy.reads_amax:
        return None  # one scale from all elements
    return math.lcm(*(block for block in blocks if block != -1))


def column_unit(recipe: Recipe) -> int | None:
    """Returns how many output features must stay on one device under `recipe`; None: all of them.

    128 for blocks of 128x128, 32 for MXFP8, 16 where a scale is fixed beforehand or nothing is
    quantised. Blocks of weights and gradients count, so gradients are quantised as on one device.
    """
    units = [EXP_LANES]
    for name in ("weight", "gradient"):
        operand = recipe.operands.get(name)
        if operand is not None:
            unit = _unit(operand, operand.block)
            if unit is None:
                return None
            units.append(unit)
    return math.lcm(*units)


def gathers_quantised(recipe: Recipe, features: int) -> bool:
    """Returns whether a shard of `features` input features can be quantised without the others."""
    if recipe.activation is None:
        return True
    unit = _unit(recipe.activation, recipe.activation.block)
    return unit is not None and features % unit == 0


def is_cut(recipe: Recipe, features: int, parts: int) -> bool:
    unit = column_unit(recipe)
    return parts > 1 and unit is not None and features % (parts * unit) == 0


def splits_heads(config: ModelConfig, parts: int) -> bool:
    """Returns whether `parts` devices split attention by heads."""
    counts = (config.num_attention_heads, config.num_key_value_heads)
    return parts > 1 and all(count % parts == 0 for count in counts)


def head_spec(vocabulary: int, parts: int) -> PartitionSpec:
    """Returns the spec of the (D, V) output head, which is never quantised."""
    cut = parts > 1 and vocabulary % (parts * EXP_LANES) == 0
    return PartitionSpec(None, AXIS) if cut else WHOLE


# Specs and shardings of parameter trees.


def param_shardings(mesh: Mesh | AbstractMesh, tree):
    """Returns the shardings of a tree with parameters, as float32 masters or quantised, and arrays
    of their shapes such as moments; anything else in the tree is replicated.

    A dimension that its mesh axis does not divide is replicated too (scales of small matrices).

    Returns:
      A NamedSharding for every leaf.
    """

    def sharding(keys, leaf):
        array = array_in(keys)
        logical = () if array is None else array.axes
        axes = (stored_over(name, n, mesh) for name, n in zip(logical, leaf.shape, strict=False))
        return NamedSharding(mesh, PartitionSpec(*axes))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def _weight_spec(weight, cut: bool, storage: int):
    """Returns PartitionSpecs of a stacked weight (L, in, out) in any of its forms."""

    def spec(x, columns: bool, rows: int):
        inputs = STORAGE if rows > 1 and x.shape[1] % rows == 0 else None
        if not inputs and not columns:
            return WHOLE
        return PartitionSpec(None, inputs, AXIS if columns else None)

    if isinstance(weight, BoundWeight):
        rows = storage if weight.master is not None else 1
        master = jax.tree.map(lambda x: spec(x, cut, rows), weight.master)
        scaling, probe = (jax.tree.map(lambda _: WHOLE, x) for x in (weight.scaling, weight.probe))
        adapter = weight.adapter and (WHOLE, spec(weight.adapter[1], cut, 1))
        value = _weight_spec(weight.value, cut, rows)
        return BoundWeight(value, master, scaling, probe, adapter)  # type: ignore[arg-type]
    if isinstance(weight, QArray):
        one = weight.block_shape[-1] == -1  # one scale for all columns
        scale = spec(weight.scale, cut and not one, storage)
        value = _weight_spec(weight.qvalue, cut, storage)
        return QArray(value, scale, weight.block_shape)  # type: ignore[arg-type]
    return jax.tree.map(lambda x: spec(x, cut, storage), weight)


def _stack_spec(weight, logical: str, mesh, stored: bool):
    """Returns PartitionSpecs of a stack (L, E, in, out) in any form; no matrix is split.

    Experts are read sharded over the axis `expert`, with the states and probes of their sites,
    (L, E, ...).
    """
    read = WHOLE
    if logical == "experts" and weight.shape[1] % mesh.shape[EXPERT] == 0:
        read = PartitionSpec(None, EXPERT)
    specs = jax.tree.map(lambda _: read, weight)
    if not stored:
        return specs
    kept = PartitionSpec(None, stored_over(logical, weight.shape[1], mesh))
    value, master = (jax.tree.map(lambda _: kept, x) for x in (weight.value, weight.master))
    return dataclasses.replace(specs, value=value, master=master)


def rollout_specs(weights):
    """Returns the PartitionSpec of every array of a sampler's weights in any form, on a mesh whose
    axis `tensor` is 1: experts (L, E, ...) over `expert`, all other arrays replicated."""

    def spec(keys, _):
        array = array_in(keys)
        return PartitionSpec(None, EXPERT) if array and array.axes == EXPERTS else WHOLE

    return jax.tree_util.tree_map_with_path(spec, weights)


def weight_specs(params, config: ModelConfig, recipe: Recipe, mesh, stored: bool = False):
    """Returns the PartitionSpec of every array that `forward` and `head_logits` read.

    Args:
      params: a parameter tree in any form that `forward` takes, or its shapes; entries other than
        linear layers and `lm_head` are replicated.
      config, recipe, mesh: shapes, numerics, devices.
      stored: whether weights with a master are sharded as they are stored (`sharding.RULES`).
        Weights without a master are read at every decoded token: experts are sharded over `expert`,
        columns over `tensor`, nothing over `fsdp`.
    """
    parts = mesh.shape[AXIS]
    recipes = {run.name: run.recipe for run in layer_groups(layer_stacks(config), recipe)}

    def spec(keys, weight):
        array = array_in(keys)
        trained = isinstance(weight, BoundWeight) and weight.master is not None
        if array is not None and array.hf == HEAD:
            return jax.tree.map(lambda _: head_spec(config.vocab_size, parts), weight)
        if array is None or (array.role != LINEAR and array.axes != EXPERTS):
            return jax.tree.map(lambda _: WHOLE, weight)
        if array.axes in (EXPERTS, HEADS):
            return _stack_spec(weight, array.axes[1], mesh, stored and trained)
        site = recipes[keys[0].key].for_module(array.path[-2])
        cut = array.columns and is_cut(site, weight.shape[-1], parts)
        return _weight_spec(weight, cut, mesh.shape[STORAGE] if stored and trained else 1)

    return jax.tree_util.tree_map_with_path(spec, params, is_leaf=is_weight)
