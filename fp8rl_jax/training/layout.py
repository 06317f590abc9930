"""Shapes and shardings of parameters, train states and rollout weights on a mesh."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from fp8rl_jax import learner, sharding
from fp8rl_jax.config.adapters import adapted_shapes
from fp8rl_jax.config.resolved import Resolved
from fp8rl_jax.kernels import resolve
from fp8rl_jax.models import (
    Parallel,
    init_scaling,
    kernel_formats,
    param_shapes,
    param_shardings,
    quantize_params,
    weight_specs,
)
from fp8rl_jax.quant.kv import missing_scales, with_scales
from fp8rl_jax.training.offload import with_host_moments


@dataclasses.dataclass(frozen=True)
class Layout:
    """Shapes and shardings of a run's arrays on a mesh.

    Attributes:
      resolved: configuration with model and recipes.
      mesh: the devices.
      alone: whether they do nothing but sample.
    """

    resolved: Resolved
    mesh: Mesh
    alone: bool = False

    @functools.cached_property
    def parallel(self) -> Parallel:
        return Parallel.on(self.mesh)

    @functools.cached_property
    def rows(self) -> NamedSharding:
        """Sharding of a batch, whose rows are divided over the devices."""
        return sharding.batch_sharding(self.mesh)

    @functools.cached_property
    def replicated(self) -> NamedSharding:
        """Sharding of arrays that every device holds in full."""
        return sharding.replicated(self.mesh)

    @functools.cached_property
    def calibrates(self) -> bool:
        """Whether scales of the KV cache are measured before they are used."""
        return self.resolved.rollout_recipe.calibrates or self.resolved.learner_recipe.calibrates

    def _with_missing_scales(self, scaling: dict) -> dict:
        """Returns a scaling state with the KV scales before the first calibration, if a recipe
        needs any."""
        layers = self.resolved.model.num_hidden_layers
        return with_scales(scaling, missing_scales(layers) if self.calibrates else None)

    @functools.cached_property
    def offloads(self) -> bool:
        """Whether the optimiser's moments are in host memory."""
        return self.resolved.config.learner.offload == "moments"

    @functools.cached_property
    def param_shapes(self):
        """ShapeDtypeStructs of the parameters."""
        return param_shapes(self.resolved.model)

    @functools.cached_property
    def param_shardings(self):
        return param_shardings(self.mesh, self.param_shapes)

    @functools.cached_property
    def weight_shapes(self):
        """ShapeDtypeStructs of the sampler's weights."""
        resolved = self.resolved

        def weights(params):
            scaling = self._with_missing_scales(init_scaling(params, resolved.learner_recipe))
            return quantize_params(params, resolved.rollout_recipe, scaling)

        return jax.eval_shape(weights, self.param_shapes)

    @functools.cached_property
    def weight_shardings(self):
        """Shardings of the sampler's weights: experts over `expert`, other weights over `tensor`;
        on a GPU with the memory layouts that its kernels read."""
        shapes = self.weight_shapes
        specs = weight_specs(shapes, self.resolved.model, self.resolved.rollout_recipe, self.mesh)
        shardings = sharding.named(self.mesh, specs)
        if resolve(self.resolved.rollout_recipe.kernels) == "reference":
            return shardings
        return kernel_formats(shapes, shardings)

    def new_state(self, params, optimizer, rng: np.ndarray, scaling_state: dict | None = None):
        """Returns `learner.new_state` of the run's learner, on the devices of its arguments; its KV
        scales are missing until they are measured."""
        recipe = self.resolved.learner_recipe
        if scaling_state is None:
            scaling_state = init_scaling(params, recipe)
        scaling_state = self._with_missing_scales(scaling_state)
        return learner.new_state(params, optimizer, rng, recipe, scaling_state)

    def state_shapes(self, optimizer) -> learner.TrainState:
        """Returns ShapeDtypeStructs, with shardings, of a phase's state: optimiser moments are
        sharded as their parameters, or in host memory (`learner.offload`)."""
        rng = np.asarray(jax.random.key_data(jax.random.key(0, impl="threefry2x32")))
        make = functools.partial(self.new_state, optimizer=optimizer, rng=rng)
        trained = adapted_shapes(self.resolved.config, self.resolved.model)
        shapes = jax.eval_shape(make, trained)
        shardings = param_shardings(self.mesh, shapes)
        if self.offloads:
            shardings = with_host_moments(shapes, shardings)
        return sharding.laid_out(shapes, shardings)
