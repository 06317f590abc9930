"""Keeps optimiser moments in host memory while they are not needed (`learner.offload`).

AdamW's moments are half of a step's state and are read once per step, after all gradients are
computed. So one program computes the gradients without the moments, and another updates one
parameter array at a time: the array's moments go to the device, are updated and go back. A device
never holds more than the moments of the largest array, and none during the rollout.

ZeRO-Offload (Ren et al., arXiv:2101.06840) computes the update on the host; here it is computed on
the device, with the arithmetic of the step without offload.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.batch import Batch
from fp8rl_jax.learner import Gradients, TrainState, keep_if
from fp8rl_jax.models.arrays import is_matrix
from fp8rl_jax.models.stacks import path_of
from fp8rl_jax.training.optimizer import Optimizer

_HOST = "pinned_host"
_DEVICE = "device"


def with_host_moments(state, shardings):
    """Returns a train state's shardings with the optimiser's arrays in pinned host memory.

    Args:
      state: a TrainState, or its shapes.
      shardings: the state's shardings.
    """

    def on_host(x, sharding):
        return sharding.with_memory_kind(_HOST) if x.ndim else sharding  # counts are scalars

    moved = jax.tree.map(on_host, state.opt_state, shardings.opt_state)
    return dataclasses.replace(shardings, opt_state=moved)


def init_on_host(shapes):
    """Returns zeros of ShapeDtypeStructs, an optimiser's initial state; each shard is made where it
    is stored."""

    def zeros(x):
        def shard(index):
            spans = (s.indices(n) for s, n in zip(index, x.shape, strict=True))
            return np.zeros([stop - start for start, stop, _ in spans], x.dtype)

        return jax.make_array_from_callback(x.shape, x.sharding, shard)

    return jax.tree.map(zeros, shapes)


def is_on_host(x) -> bool:
    """Returns whether an array is in pinned host memory, where device programs do not read it."""
    return isinstance(x, jax.Array) and x.sharding.memory_kind == _HOST


def to_device(x: jax.Array) -> jax.Array:
    """Returns `x` in its devices' memory."""
    return jax.device_put(x, x.sharding.with_memory_kind(_DEVICE)) if is_on_host(x) else x


class OffloadedStep:
    """A train step with moments in host memory: ``step(state, batch, rope) -> (state, logp,
    metrics)``, as `learner.make_train_step` returns.

    Attributes:
      gradients: the jitted program of the gradients, which needs most memory; it takes a state
        without optimiser state.
    """

    def __init__(
        self,
        gradients: Callable,
        optimizer: Optimizer,
        shardings: tuple[TrainState, Any, Any],
        donate: bool = True,
    ):
        """
        Args:
          gradients: a `learner.GradientProgram`.
          optimizer: result of `make_optimizer`.
          shardings: shardings of the state, with moments on the device, of arrays divided by rows,
            and of replicated arrays.
          donate: give the state's memory to the new state.
        """
        self._donate = donate

        def update(decays, gradient, moments, param, norm, changes):
            clipped = optimizer.clip(gradient, norm)  # in the other program it would need a copy
            step, new = optimizer.by_array(decays).update(clipped, moments, param)
            return keep_if(changes, (optax.apply_updates(param, step), new), (param, moments))

        state, rows, replicated = shardings
        found = Gradients(state.params, replicated, state.scaling_state)
        self.gradients: Any = exact_jit(gradients, out_shardings=(found, rows, replicated))
        self._update = exact_jit(update, static_argnums=0, donate_argnums=(2, 3) if donate else 2)

    def __call__(self, state: TrainState, batch: Batch, rope, base: None = None):
        del base  # of adapters, whose moments are small
        found, logp, metrics = self.gradients(
            dataclasses.replace(state, opt_state=None), batch, rope
        )
        clip, moments = state.opt_state
        changes = found.changes
        scaling = found.scaling_state
        gradients = jax.tree.leaves(found.params)
        del found  # each gradient is given up once it is used
        params, moments = self._by_array(
            gradients, moments, state.params, metrics["grad_norm"], changes
        )
        new = dataclasses.replace(
            state, params=params, opt_state=(clip, moments), scaling_state=scaling
        )
        return new, logp, metrics

    def _by_array(self, gradients: list, moments, params, norm, changes):
        """Updates one parameter array after another; returns (params, moments)."""
        structure: Any = jax.tree.structure(params)
        paths, olds = zip(*jax.tree_util.tree_leaves_with_path(params), strict=True)
        news = []

        def like_params(node) -> bool:
            return structure == jax.tree.structure(node)

        states = []
        for index in range(len(olds)):
            gradient = gradients[index]
            gradients[index] = None
            # The moments, with every tree of the parameters' structure cut to one array.
            before = jax.tree.map(
                lambda node, i=index: jax.tree.leaves(node)[i] if like_params(node) else node,
                moments,
                is_leaf=like_params,
            )
            # Copies: the update donates them, and all arrays share the counts.
            here = jax.tree.map(lambda x: to_device(x) if is_on_host(x) else jnp.copy(x), before)
            shardings = jax.tree.map(lambda x: x.sharding, before)
            if self._donate:
                jax.block_until_ready(here)
                for x in filter(is_on_host, jax.tree.leaves(before)):
                    x.delete()
            decays = is_matrix(path_of(paths[index]))
            new, after = self._update(decays, gradient, here, olds[index], norm, changes)
            after = jax.tree.map(jax.device_put, after, shardings)
            states.append(jax.block_until_ready(after))  # this frees room for the next array
            news.append(new)

        def joined(node, *parts):
            return jax.tree.unflatten(structure, parts) if like_params(node) else parts[-1]

        moments = jax.tree.map(joined, moments, *states, is_leaf=like_params)
        return jax.tree.unflatten(structure, news), moments
