"""Runs the two programs that a drift analysis compares, with or without taps.

They are the run's sampler and train step, on its mesh. With taps they also return intermediate
values, which may change the bits of their results; `attribute` checks that it does not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fp8rl_jax.base import processes
from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.batch import of_sequences
from fp8rl_jax.drift.operations import tapped_values
from fp8rl_jax.envs import Question
from fp8rl_jax.learner import LossConfig, TrainState, response_logprobs, step_arguments
from fp8rl_jax.models import Swap, quantize_params, trainable_params
from fp8rl_jax.models.taps import Observe
from fp8rl_jax.rl.losses import reinforce
from fp8rl_jax.rollout import make_refit
from fp8rl_jax.sharding import batch_divisor
from fp8rl_jax.training.engine import Prompts
from fp8rl_jax.training.optimizer import optimizer_of_phase
from fp8rl_jax.training.runtime import Runtime

Host = Any  # a Rollout or a Batch of numpy arrays
Taps = dict[str, np.ndarray]

_COPIES = 4  # copies of the tapped values in memory: those of both sides, and for the swaps
_MOST_BYTES = 4 << 30


def affordable(runtime: Runtime, questions: list[Question]) -> list[Question]:
    """Returns the first of the questions, as many as have all tapped values within 4 GiB, but at
    least one for each device that takes rows of a batch."""
    divisor = batch_divisor(runtime.mesh)
    values = tapped_values(runtime.resolved.model, runtime.resolved.sequence_tokens).values()
    row = _COPIES * sum(x.size * x.dtype.itemsize for x in values)
    count = min(len(questions), _MOST_BYTES // (row * runtime.config.rollout.group_size))
    return questions[: max(count // divisor, 1) * divisor]


@dataclasses.dataclass
class Programs:
    """Sampler and learner of a run at one state, on the same questions.

    Attributes:
      runtime: the run's Runtime.
      state: the learner's train state.
      weights: the sampler's weights.
      questions: P questions; P is a multiple of the number of devices that split a batch.
      key: random key of the rollout.
      first_ids: (P,), the id of each question's first sample; None to count from 0.
    """

    runtime: Runtime
    state: TrainState
    weights: dict
    questions: list[Question]
    key: jax.Array
    first_ids: np.ndarray | None = dataclasses.field(default=None, kw_only=True)

    @classmethod
    def on(cls, runtime: Runtime, state: TrainState, questions: list[Question]) -> Programs:
        """Returns Programs at a state, whose KV scales are measured on the questions."""
        engine = runtime.engine
        state = engine.calibrate(state, of_sequences(*runtime.prompts(questions)))
        return cls(runtime, state, engine.refit(state).weights, questions, engine.keys["rollout"])

    @property
    def prompts(self) -> Prompts:
        """The sampler's input."""
        config = self.runtime.config.rollout
        temperature = np.full(
            len(self.questions) * config.group_size, config.temperature, np.float32
        )
        tokens, lengths = self.runtime.prompts(self.questions)
        if self.first_ids is None:
            return Prompts.numbered(tokens, lengths, self.key, temperature)
        return Prompts(tokens, lengths, self.key, temperature, self.first_ids)

    def rollout(self, taps: Sequence[str] = ()) -> Host:
        """Samples the questions; returns the rollout on the host."""
        engine = self.runtime.sampling.engine
        config = self.runtime.config.rollout
        sampler = engine.sampler
        if taps:
            sampler = engine.make_sampler(
                config.group_size,
                config.top_k,
                config.top_p,
                tuple(taps),
                engine.resolved.recorded_numbers > 0,
            )
        return processes.fetch(
            engine.sample(self.runtime.for_sampling(self.weights), self.prompts, sampler=sampler)
        )

    def batch(self, rollout: Host) -> Host:
        """Returns the learner's batch for a rollout, with alternating advantages +1 and -1."""
        advantages = np.where(np.arange(len(rollout.tokens)) % 2, -1.0, 1.0).astype(np.float32)
        return self.runtime.engine.batch(rollout, self.prompts, advantages)

    def learner(self, batch: Host, taps: Sequence[str] = ()) -> tuple[np.ndarray, Taps]:
        """Returns log-probabilities (B, R) and taps of one train step; `state` is not changed."""
        rt = self.runtime
        optimizer = optimizer_of_phase(rt.config, "rl")
        state = rt.engine.new_state(self.state.params, optimizer, self.state.scaling_state)
        state = dataclasses.replace(state, scaling_state=self.state.scaling_state)
        own = rt.resolved.algorithm.loss
        # Without a gradient XLA would leave the backward pass out, and change the forward pass.
        loss = LossConfig(reinforce() if rt.config.algo.loss == "none" else own)
        step = rt.engine.train_step(
            optimizer,
            loss,
            rt.config.learner.gradient_accumulation_steps,
            taps=tuple(taps),
            donate=False,
        )
        if not taps:
            return rt.engine.update(state, batch, step, distil=False)[1], {}
        _, logp, metrics = step(
            *step_arguments(state, processes.place(batch, rt.layout.rows), rt.engine.rope)
        )
        return processes.fetch((logp, metrics["taps"]))

    def learner_weights(self) -> dict:
        """Returns the weights of the learner's forward pass: a refit under the learner's recipe."""
        refit = make_refit(self.runtime.resolved.learner_recipe)
        return refit(self.state.params, self.state.scaling_state)[0]

    def swapper(self, batch: Host, taps: Taps):
        """Makes a learner that replaces some intermediate values by the rollout's.

        Args:
          batch: the learner's batch.
          taps: {name of LAYER_TAPS: (L, B, T, ...)}, the rollout's values.

        Returns:
          ``swapped(chosen) -> (logp (B, R), {name: (L, B, T, ...)})`` with chosen = {name: (L,)
          bool}, the layers in which a value is replaced; names that are missing are not replaced.
          The returned values are the learner's, before the swap. All choices run one program, so
          their log-probabilities can be compared; it computes gradients, since XLA rewrites some
          operations in forward-only programs.
        """
        rt = self.runtime
        recipe = rt.resolved.learner_recipe
        nowhere = np.zeros(rt.resolved.model.num_hidden_layers, bool)
        values = {name: jnp.asarray(value) for name, value in taps.items()}
        batch = processes.place(batch, rt.layout.rows)
        forward_pass = rt.engine.forward_pass(recipe, rt.config.learner.remat)

        def objective(params, weights, state, batch, rope, swaps):
            paired = trainable_params(params, weights, recipe, state.scaling_state)
            logp, _, aux = response_logprobs(
                forward_pass, paired, batch, rope, Observe(tuple(taps), swaps)
            )
            return (logp * batch.mask).sum(), (logp, aux["taps"])

        @exact_jit
        def score(state, batch, rope, swaps):
            weights = quantize_params(state.params, recipe, state.scaling_state)
            (_, found), grads = jax.value_and_grad(objective, has_aux=True)(
                state.params, weights, state, batch, rope, swaps
            )
            return found, optax.tree.norm(grads)

        def swapped(chosen: dict[str, np.ndarray]) -> tuple[np.ndarray, dict[str, jax.Array]]:
            swaps = {
                name: Swap(jnp.asarray(chosen.get(name, nowhere)), value)
                for name, value in values.items()
            }
            (logp, own), _ = score(self.state, batch, rt.engine.rope, swaps)
            return np.asarray(logp), own

        return swapped
