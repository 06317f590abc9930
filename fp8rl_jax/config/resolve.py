"""From the text of a configuration to one checked value that everything downstream takes.

`resolve_config` reads what the configuration names (a model's shapes, scaling policies, the
reward), checks all of it, and gives a `Resolved`. Shapes and recipes are derived here alone.
"""

from __future__ import annotations

import dataclasses

import ml_collections

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.config import checks
from fp8rl_jax.config.model_source import read_model
from fp8rl_jax.config.precision import SIDES, reference_recipe, side_recipe
from fp8rl_jax.config.resolved import Resolved
from fp8rl_jax.envs import load_rewards
from fp8rl_jax.quant import same_forward
from fp8rl_jax.rl import Algorithm, algorithm_of


def resolve_config(config: ml_collections.ConfigDict) -> Resolved:
    """Checks `config` and looks up what it names; compiles nothing.

    Args:
      config: of `load_config`.

    Raises:
      UserError: the first thing that cannot work, in one sentence.
    """
    checks.check_fields(config)
    env = config.env
    model, positions = read_model(config)
    rollout, learner = (
        side_recipe(config.precision, side, model.num_hidden_layers) for side in SIDES
    )
    resolved = Resolved(
        ml_collections.FrozenConfigDict(config), model, rollout, learner,
        reference_recipe(config.precision, learner),
        _algorithm(config, same_forward(rollout, learner)),
        load_rewards(env.reward, env.reward_timeout, env.reward_memory_gb), positions,
    )  # fmt: skip
    checks.check(resolved)
    return resolved


def with_vocabulary(resolved: Resolved, size: int) -> Resolved:
    """`resolved` with the tokenizer's `size` tokens.

    Raises:
      UserError: the model's own vocabulary is smaller, or `rollout.top_k` larger.
    """
    config, model = resolved.config, resolved.model
    if not (config.model.checkpoint or config.model.name):
        model = dataclasses.replace(model, vocab_size=size)
    if model.vocab_size < size:
        raise UserError(
            f"data.tokenizer: {config.data.tokenizer!r} has ids up to {size - 1}, and the "
            f"model's vocabulary has {model.vocab_size} tokens: take the model's own tokenizer"
        )
    checks.check_top_k(config, model.vocab_size)
    return dataclasses.replace(resolved, model=model)


def _algorithm(config, same: bool) -> Algorithm:
    """`same`: both sides compute the same forward pass, so 'auto' corrects nothing."""
    algo = config.algo
    correction = algo.correction
    if correction == "auto":
        correction = "none" if same or algo.old_logprobs == "rollout" else "tis"
    return algorithm_of(algo, config.rollout.max_new_tokens, correction)
