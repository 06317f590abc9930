"""Turns a configuration into a `Resolved`: one checked value, which all programs take.

`resolve_config` reads what the configuration names (a model's shapes, scaling policies, the
reward) and checks all of it. Shapes and recipes are derived only here.
"""

from __future__ import annotations

import ml_collections

from fp8rl_jax.config import checks
from fp8rl_jax.config.model_source import read_frozen_model, read_model
from fp8rl_jax.config.precision import SIDES, reference_recipe, side_recipe
from fp8rl_jax.config.resolved import Resolved, rewards_of, step_of
from fp8rl_jax.quant import same_forward
from fp8rl_jax.rl import algorithm_of


def resolve_config(config: ml_collections.ConfigDict) -> Resolved:
    """Checks a configuration and looks up what it names; compiles nothing.

    Args:
      config: result of `load_config`.

    Raises:
      UserError: something cannot work; the message names the first problem.
    """
    checks.check_fields(config)
    model, positions = read_model(config)
    rollout, learner = (
        side_recipe(config.precision, side, model.num_hidden_layers) for side in SIDES
    )
    correction = config.algo.correction
    same = same_forward(rollout, learner)
    if correction == "auto":  # nothing to correct where both sides compute the same forward pass
        correction = "none" if same or config.algo.old_logprobs == "rollout" else "tis"
    resolved = Resolved(
        ml_collections.FrozenConfigDict(config),
        model,
        rollout,
        learner,
        reference_recipe(config.precision, learner),
        algorithm_of(config.algo, config.rollout.max_new_tokens, correction),
        rewards_of(config.env),
        step_of(config.env),
        read_frozen_model(config),
        positions,
    )
    checks.check(resolved)
    return resolved
