"""The AdamW optimiser of a run's two phases.

Only matrices are decayed: linear layers, experts, routers, embedding and head. Gains of norms are
not decayed, nor is a sigmoid router's correction bias, which has no gradient and so never changes
(Hugging Face's trainer and Megatron also leave out norms and biases).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_collections
import optax

from fp8rl_jax.config.resolved import rl_updates
from fp8rl_jax.models.arrays import is_matrix
from fp8rl_jax.models.stacks import Path, path_of


class Optimizer(optax.GradientTransformationExtraArgs):
    """An optax chain of two transformations, gradient clipping and AdamW, with both parts.

    Attributes:
      init, update: functions of the chain. `update` takes the gradients' global norm as `norm`, and
        computes it if it is not given.
      schedule: update -> learning rate.
      clip: ``clip(gradient, norm)`` clips one array's gradient as the chain does, given the global
        norm of all gradients.
      by_array: ``by_array(decays)`` returns AdamW for one array, with decay or without. Its state
        has the structure of the chain's second state.
    """

    schedule: optax.Schedule
    clip: Callable[[jax.Array, jax.Array], jax.Array]
    by_array: Callable[[bool], optax.GradientTransformation]


def learning_rates(
    peak: float, warmup_steps: int, decay_steps: int = 0, end_fraction: float = 1.0
) -> optax.Schedule:
    """Returns the schedule (update -> learning rate): linear warm-up, then constant or cosine.

    Args:
      peak: largest learning rate.
      warmup_steps: number of updates of linear warm-up; the first uses 1 / warmup_steps of the
        peak, the last the full peak.
      decay_steps: number of updates, warm-up included, after which a cosine decay ends at
        `end_fraction` of the peak; 0 for a constant rate.
      end_fraction: see decay_steps.
    """
    if decay_steps:
        from_0 = optax.warmup_cosine_decay_schedule(
            0.0, peak, warmup_steps, decay_steps, peak * end_fraction
        )
    else:
        from_0 = optax.linear_schedule(0.0, peak, max(warmup_steps, 1))
    return lambda update: from_0(update + 1)  # from_0(0) is 0: it would change nothing


def make_optimizer(
    schedule: optax.Schedule, b1: float, b2: float, weight_decay: float, clip_norm: float
) -> Optimizer:
    """Returns AdamW after clipping by global norm.

    Args:
      schedule: update -> learning rate, as of `learning_rates`.
      b1, b2: decay rates of AdamW's moments (Loshchilov & Hutter, arXiv:1711.05101).
      weight_decay: AdamW's decoupled decay of matrices.
      clip_norm: largest global norm of the gradient.
    """

    def adamw(decays: Callable[[Path], bool]) -> optax.GradientTransformation:
        def decay(updates, params):
            def one(path, update, param):
                return update + weight_decay * param if decays(path_of(path)) else update

            return jax.tree_util.tree_map_with_path(one, updates, params)

        return optax.chain(
            optax.scale_by_adam(b1, b2),
            optax.stateless(decay) if weight_decay else optax.identity(),
            optax.scale_by_learning_rate(schedule),
        )

    def clip(gradient: jax.Array, norm: jax.Array) -> jax.Array:
        return jnp.where(norm < clip_norm, gradient, gradient / norm * clip_norm)

    def clip_all(gradients, state, params=None, *, norm=None, **others):
        norm = optax.tree.norm(gradients) if norm is None else norm
        return jax.tree.map(functools.partial(clip, norm=norm), gradients), state

    def by_array(decays: bool) -> optax.GradientTransformation:
        return adamw(lambda path: decays)

    clipping = optax.GradientTransformationExtraArgs(optax.init_empty_state, clip_all)
    chain = optax.chain(clipping, adamw(is_matrix))
    optimizer = Optimizer(chain.init, chain.update)
    optimizer.schedule = schedule
    optimizer.clip = clip
    optimizer.by_array = by_array
    return optimizer


def updates_made(opt_state: optax.OptState) -> int:
    """Returns the number of updates that an optimiser of `make_optimizer` has made, without skipped
    ones."""
    _, (adam, *_) = opt_state
    return int(adam.count)


def optimizer_of_phase(config: ml_collections.ConfigDict, phase: str) -> Optimizer:
    """Returns the optimiser of phase 'sft' or 'rl'."""
    chosen = config.sft if phase == "sft" else config.optimizer
    updates = config.sft.steps if phase == "sft" else rl_updates(config)
    schedule = learning_rates(
        chosen.learning_rate,
        chosen.warmup_steps,
        updates if chosen.end_fraction < 1 else 0,
        chosen.end_fraction,
    )
    return make_optimizer(
        schedule, config.optimizer.b1, chosen.b2, chosen.weight_decay, config.optimizer.clip_norm
    )
