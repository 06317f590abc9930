"""Counts bytes of a device's part of a model's arrays from shapes and shardings, without arrays."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from fp8rl_jax import sharding
from fp8rl_jax.base.jax_settings import USABLE
from fp8rl_jax.config.adapters import adapted_shapes
from fp8rl_jax.config.resolved import Resolved
from fp8rl_jax.models import (
    ModelConfig,
    init_paged_cache,
    init_scaling,
    param_shapes,
    param_shardings,
    quantize_params,
)
from fp8rl_jax.models.arrays import EXPERTS, TABLE, array_in
from fp8rl_jax.models.masters import trained
from fp8rl_jax.models.parallel.specs import rollout_specs
from fp8rl_jax.models.stacks import RUNS
from fp8rl_jax.quant import Recipe

_WITHOUT_FRAGMENTS = 0.97


def gib(size: float) -> str:
    """Returns bytes as text in GiB."""
    return f"{size / 2**30:.2f} GiB"


def device_memory() -> int | None:
    """Returns the bytes of the first device that a run may fill: JAX's share of a GPU but for
    fragments, USABLE of a CPU device's part of the machine's memory; None if unknown."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return int(USABLE * machine) // jax.local_device_count()
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return None if limit is None else int(_WITHOUT_FRAGMENTS * limit)


def part_sizes(tree, shardings) -> list[int]:
    """Returns the bytes of a device's part of every array, in the order of the tree's leaves.

    Args:
      tree: tree of arrays or of their shapes.
      shardings: a NamedSharding for every array, as a tree of the same structure.
    """
    leaves = zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True)
    return [math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize for x, s in leaves]


@functools.lru_cache(maxsize=16)
def weight_shapes(model: ModelConfig, recipe: Recipe, learner_recipe: Recipe) -> Any:
    """Returns the shapes of the parameters as `recipe` stores them, with the states of the
    learner's scaling policies."""

    def weights(params):
        return quantize_params(params, recipe, init_scaling(params, learner_recipe))

    return jax.eval_shape(weights, param_shapes(model))


@dataclasses.dataclass(frozen=True)
class WeightBytes:
    """Bytes of a device's parameters in one form: masters, or the weights of a recipe.

    Attributes:
      stored: the device's part of all parameters.
      dense, experts: parameters of all layers without the experts', and the experts', as gathered
        to compute: replicated over `fsdp`, columns over `tensor`, experts over `expert`.
      layer: the largest layer, gathered.
      tables: embedding and head, replicated.
      largest: the device's part of the largest array.
    """

    stored: int
    dense: int
    experts: int
    layer: int
    tables: int
    largest: int


def weight_bytes(tree, mesh: Mesh | AbstractMesh) -> WeightBytes:
    """Counts the bytes of a tree of parameter shapes, in any form."""
    kept = {name: mesh.shape[name] for name in ("tensor", "expert")}
    gathered = sharding.abstract_mesh({"data": 1, "fsdp": 1} | kept)
    stored, read = (part_sizes(tree, param_shardings(m, tree)) for m in (mesh, gathered))
    dense = experts = tables = 0
    layer = dict.fromkeys(RUNS, 0)
    for (path, leaf), size in zip(jax.tree_util.tree_leaves_with_path(tree), read, strict=True):
        array = array_in(path)
        assert array is not None
        if array.role == TABLE:
            tables += leaf.size * leaf.dtype.itemsize
        stack = path[0].key
        if stack in RUNS:
            layer[stack] += size // leaf.shape[0]
            if array.axes == EXPERTS:
                experts += size
            else:
                dense += size
    return WeightBytes(sum(stored), dense, experts, max(layer.values()), tables, max(stored))


def learner_weight_bytes(
    model: ModelConfig, recipe: Recipe, mesh: Mesh | AbstractMesh
) -> tuple[WeightBytes, WeightBytes]:
    """Returns the bytes of the float32 masters, and of the weights in the learner's recipe."""
    masters = weight_bytes(param_shapes(model), mesh)
    return masters, weight_bytes(weight_shapes(model, recipe, recipe), mesh)


def page_bytes(model: ModelConfig, recipe: Recipe) -> int:
    """Returns the bytes of a page of the KV cache, all layers."""
    table = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    cache = jax.eval_shape(lambda table: init_paged_cache(model, recipe, 1, table), table)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.runs))


@dataclasses.dataclass(frozen=True)
class StateBytes:
    """Bytes of a device's part of the train state.

    Attributes:
      masters: float32 parameters; under adapters those, and the frozen base.
      trained: the part of them that is trained.
      moments, host_moments: Adam's two moments, on the device or (`learner.offload`) on its host.
      reference: the reference policy, if `algo.kl_coef` is set, and a frozen model's weights.
      scaling: states of scaling policies, which are replicated.
    """

    masters: int
    trained: int
    moments: int
    host_moments: int
    reference: int
    scaling: int

    @property
    def on_device(self) -> int:
        return self.masters + self.moments + self.reference + self.scaling

    @property
    def checkpoint(self) -> int:
        """Bytes that a checkpoint holds; the reference policy has a file of its own."""
        return self.trained + self.moments + self.host_moments + self.scaling


def state_bytes(resolved: Resolved, mesh: Mesh | AbstractMesh) -> StateBytes:
    """Counts the bytes of a device's part of the train state."""
    params = param_shapes(resolved.model)
    states = jax.eval_shape(lambda p: init_scaling(p, resolved.learner_recipe), params)
    kept = adapted_shapes(resolved.config, resolved.model)
    masters, trains = (
        sum(part_sizes(tree, param_shardings(mesh, tree))) for tree in (kept, trained(kept))
    )
    moments = 2 * trains
    offloaded = resolved.config.learner.offload == "moments"
    reference = resolved.algorithm.needs_reference * trains
    if resolved.frozen_model is not None:
        recipe = resolved.frozen_recipe
        weights = weight_shapes(resolved.frozen_model, recipe, recipe)
        reference += weight_bytes(weights, mesh).stored
    scaling = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(states))
    return StateBytes(
        masters=masters,
        trained=trains,
        moments=0 if offloaded else moments,
        host_moments=moments if offloaded else 0,
        reference=reference,
        scaling=scaling,
    )


def served_bytes(weights, mesh: Mesh | AbstractMesh) -> int:
    """Returns the bytes of a device's part of rollout weights, or of their shapes."""
    return sum(part_sizes(weights, sharding.named(mesh, rollout_specs(weights))))
