"""`Resolved`: a checked configuration, and the model, recipes and functions that it names."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import ml_collections

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.config.precision import without_calibration
from fp8rl_jax.envs import Term, eval_tasks, load_rewards, load_step
from fp8rl_jax.models import ModelConfig, Truncation
from fp8rl_jax.quant import Recipe, same_forward
from fp8rl_jax.rl import Algorithm


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A checked configuration, and the model, recipes and functions that it names.

    What follows from them is computed once, when it is first read.

    Attributes:
      config: every field; frozen.
      model: shapes of the model. If they are fields of the configuration, vocab_size is 1 until
        `with_vocabulary`.
      rollout_recipe, learner_recipe: numerics of the two sides.
      reference_recipe: numerics of the reference policy's log-probabilities.
      algorithm: loss, advantages and corrections that section `algo` chooses.
      rewards: functions that `env.reward` names, with their weights; 'auto' is 'exact_match'
        until `with_tasks`.
      step: the environment of `env.step` or `env.tools`; None for one reply.
      frozen_model: shapes of a model that is not trained, from which the loss has the policy's
        divergence (`algo.teacher`); None without one.
      positions: longest sequence that `model.checkpoint` allows, in tokens; None if unknown.
    """

    config: ml_collections.FrozenConfigDict
    model: ModelConfig
    rollout_recipe: Recipe
    learner_recipe: Recipe
    reference_recipe: Recipe
    algorithm: Algorithm
    rewards: tuple[Term, ...]
    step: Term | None
    frozen_model: ModelConfig | None
    positions: int | None

    @functools.cached_property
    def same_forward(self) -> bool:
        """Whether both sides compute the same forward pass."""
        return same_forward(self.rollout_recipe, self.learner_recipe)

    @functools.cached_property
    def frozen_recipe(self) -> Recipe:
        """Numerics of the frozen model: those of the reference, without scales of a rollout."""
        return without_calibration(self.reference_recipe)

    @functools.cached_property
    def frozen_kl_coef(self) -> float:
        """Weight of the divergence from the frozen model; 0 without one."""
        return self.config.algo.teacher_coef if self.frozen_model else 0.0

    @functools.cached_property
    def zero_drift(self) -> bool:
        """Whether settings that cannot give zero drift are refused (`precision.zero_drift`)."""
        setting = self.config.precision.zero_drift
        return self.same_forward if setting == "auto" else setting == "required"

    @functools.cached_property
    def stale(self) -> bool:
        """Whether steps learn from what older versions of the policy drew."""
        return self.config.rollout.ahead > 0 or self.config.rollout.most_versions > 1

    @functools.cached_property
    def truncation(self) -> Truncation | None:
        """The truncation over whose tokens log-probabilities of responses are; None for all."""
        rollout = self.config.rollout
        whole = rollout.top_k == 0 and rollout.top_p == 1.0
        if whole or self.config.algo.truncated_sampling == "whole":
            return None
        return Truncation(rollout.top_k, rollout.top_p)

    @functools.cached_property
    def recorded_numbers(self) -> int:
        """int32 numbers by which a rollout records the tokens that were kept for each draw; 0 where
        only the weights and the recipe that drew them score the responses, with the same bits."""
        if self.truncation is None:
            return 0
        updates = self.config.algo.epochs * self.config.algo.num_minibatches
        others = self.stale or updates > 1 or self.algorithm.needs_reference
        if not others and self.same_forward and self.zero_drift:
            return 0
        return self.truncation.recorded_numbers(self.model.vocab_size)

    @functools.cached_property
    def step_samples(self) -> int:
        """Responses of an RL step."""
        return self.config.rollout.prompts_per_step * self.config.rollout.group_size

    @functools.cached_property
    def minibatch_samples(self) -> int:
        """Responses of an optimiser update."""
        return self.step_samples // self.config.algo.num_minibatches

    @functools.cached_property
    def sequence_tokens(self) -> int:
        """Tokens of the longest prompt with the longest response."""
        return self.config.rollout.max_prompt_tokens + self.config.rollout.max_new_tokens

    def takes_rollout_logprobs(self, drifted: bool) -> bool:
        """Returns whether the sampler's log-probabilities serve as the old ones, which saves a
        forward pass.

        With `algo.old_logprobs` 'auto' and without corrections they do so in two cases: where older
        versions of the policy drew tokens, since nothing else would weigh these; and under zero
        drift, until the self-check or a first update has shown (`drifted`) that the learner's
        log-probabilities differ.
        """
        setting = self.config.algo.old_logprobs
        if setting != "auto":
            return setting == "rollout"
        if self.algorithm.corrections:
            return False
        return self.stale or (self.zero_drift and not drifted)

    def with_tasks(self) -> Resolved:
        """Returns a copy with the rewards that 'auto' means for the tasks. Imports reasoning_gym,
        which takes a second, so call it only in programs that ask questions."""
        env = self.config.env
        return dataclasses.replace(self, rewards=rewards_of(env, [env.task, *eval_tasks(env)]))

    def with_vocabulary(self, size: int) -> Resolved:
        """Returns a copy for a tokenizer of `size` tokens, which is the vocabulary unless the
        model's checkpoint or name has one.

        Raises:
          UserError: the model's vocabulary is smaller than `size`, or `rollout.top_k` larger than
            the vocabulary.
        """
        model = self.model
        if not (self.config.model.checkpoint or self.config.model.name):
            model = dataclasses.replace(model, vocab_size=size)
        if model.vocab_size < size:
            raise UserError(
                f"data.tokenizer: {self.config.data.tokenizer!r} has ids up to {size - 1}, and the "
                f"model's vocabulary has {model.vocab_size} tokens: take the model's own tokenizer"
            )
        check_top_k(self.config, model.vocab_size)
        return dataclasses.replace(self, model=model)


def rewards_of(env: ml_collections.ConfigDict, tasks: Sequence[str] = ()) -> tuple[Term, ...]:
    """Returns the rewards of section `env`, as `load_rewards`; none beside those of `env.step`,
    unless `env.reward` names them."""
    if env.step and env.reward == "auto":
        return ()
    return load_rewards(env.reward, env.reward_timeout, env.reward_memory_gb, tasks)


def step_of(env: ml_collections.ConfigDict) -> Term | None:
    """Returns the environment of section `env`, or None: `env.step`, else the tools."""
    for role in ("step", "tools"):
        if env[role]:
            return load_step(env[role], role, env.reward_timeout, env.reward_memory_gb)
    return None


def rl_updates(config: ml_collections.ConfigDict) -> int:
    """Returns the number of updates of a run's RL phase, if none is skipped."""
    return config.run.steps * config.algo.epochs * config.algo.num_minibatches


def check_top_k(config: ml_collections.ConfigDict, vocabulary: int) -> None:
    """Raises UserError if `rollout.top_k` is larger than the vocabulary."""
    if config.rollout.top_k > vocabulary:
        raise UserError(
            f"rollout.top_k is {config.rollout.top_k}, more than the vocabulary of {vocabulary} "
            "tokens: lower it, or write 0 for all"
        )
