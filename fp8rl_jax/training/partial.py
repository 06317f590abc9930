"""Responses that several versions of the policy draw: `rollout.most_versions` = V above 1.

A *batch* is the questions of one step. The rollout of step t ends when the responses of batch t are
complete; the slots that they leave draw for later batches, whose responses go on in the next step::

    step t      draws  [ batch t | batch t+1 | ... | batch t+V-1 ]   in this order, until t is done
    step t + 1  draws            [ batch t+1 | ... | batch t+V ]

So batch t is learnt in step t, whole, whatever the lengths of its responses, and at most V versions
draw one of them. Newer weights compute the keys and values of all that is drawn anew: a token's
log-probability is exactly that of the version that drew it, given all tokens before it. Which
version draws a token follows from slots and pages, never from time.

Not done: conversations. How far one gets in a step depends on its environment's time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from fp8rl_jax import sharding
from fp8rl_jax.envs import Question
from fp8rl_jax.rollout import Earlier, Progress, Rollout, Watch
from fp8rl_jax.training.engine import Prompts
from fp8rl_jax.training.runtime import Runtime


@dataclasses.dataclass
class Responses:
    """P questions with G responses each, B = P * G, prompt-major, as far as they were drawn.

    Attributes:
      questions: the question of each group.
      rollout: the responses, on the host; their routing is on the devices.
      versions: (B, R) int32, the step whose weights drew each token; -1 for no token.
      prompts: the prompts that were sampled.
    """

    questions: list[Question]
    rollout: Rollout
    versions: np.ndarray
    prompts: Prompts

    @classmethod
    def new(
        cls, runtime: Runtime, questions: list[Question], key: jax.Array, first: int = 0
    ) -> Responses:
        """Returns questions without any token of a response. `key`: random key of their step;
        `first`: number of their first sample in it."""
        rollout = runtime.config.rollout
        rows = len(questions) * rollout.group_size
        none = np.zeros((rows, rollout.max_new_tokens), np.int32)
        numbers = runtime.resolved.recorded_numbers
        tokens, lengths = runtime.prompts(questions)
        temperature = np.full(rows, rollout.temperature, np.float32)
        return cls(
            questions,
            Rollout(
                tokens=none,
                mask=none > 0,
                logprobs=none.astype(np.float32),
                finished=np.zeros(rows, bool),
                taps={},
                kept=np.zeros((*none.shape, numbers), np.int32) if numbers else None,
                truncation=runtime.resolved.truncation,
            ),
            none - 1,
            Prompts.numbered(tokens, lengths, key, temperature, first),
        )

    @property
    def drawn(self) -> int:
        """Number of tokens drawn so far."""
        return int(self.rollout.mask.sum())

    def goes_on(self, rollout: Rollout, version: int) -> Responses:
        """Returns the responses with what `version` has drawn: `rollout` has all tokens."""
        versions = np.where(rollout.mask & ~self.rollout.mask, np.int32(version), self.versions)
        return dataclasses.replace(self, rollout=rollout, versions=versions)


def complete(
    runtime: Runtime, weights: Any, version: int, begun: Sequence[Responses], watch: Watch
) -> list[Responses]:
    """Completes the responses of the first of `begun`, at most V; others go on as slots allow.

    Args:
      runtime: result of `make_runtime`.
      weights, version: the sampler's weights, and the step of their state.
      begun: batches of one size, the oldest first.
      watch: function called during the rollout with the progress of the first batch's responses;
        counts are of all.
    """
    versions = runtime.config.rollout.most_versions
    devices = sharding.batch_divisor(runtime.mesh)
    missing = [_ended(begun[0])] * (versions - len(begun))
    everything = [*begun, *missing]

    def joined(values) -> np.ndarray:
        return sharding.together(np.stack([*values]), devices)

    def of_rollouts(rollout: Rollout) -> list[Rollout]:
        arrays = {
            name: sharding.apart(np.asarray(x), versions, devices)
            for name, x in rollout.rows.items()
        }
        of_batch = ({name: x[i] for name, x in arrays.items()} for i in range(versions))
        return [dataclasses.replace(rollout, taps={}, **rows) for rows in of_batch]

    asked = [b.prompts for b in everything]
    rollouts = [b.rollout for b in everything]
    prompts = Prompts(
        joined(p.tokens for p in asked),
        joined(p.lengths for p in asked),
        asked[0].key,
        joined(p.temperature for p in asked),
        joined(p.first_ids for p in asked),
    )
    rows = len(asked[0].temperature)
    earlier = Earlier(
        tokens=joined(r.tokens for r in rollouts),
        logprobs=joined(r.logprobs for r in rollouts),
        counts=joined(r.mask.sum(1, dtype=np.int32) for r in rollouts),
        finished=joined(r.finished for r in rollouts),
        keys=joined(np.tile(jax.random.key_data(p.key), (rows, 1)) for p in asked),
        needed=np.full(devices, rows // devices, np.int32),
        kept=None if rollouts[0].kept is None else joined(r.kept for r in rollouts),
    )

    def watch_first(progress: Progress) -> None:
        done = sharding.apart(np.asarray(progress.done), versions, devices)[0]
        watch(dataclasses.replace(progress, rollout=of_rollouts(progress.rollout)[0], done=done))

    rollout = runtime.engine.sample(weights, prompts, watch_first, earlier=earlier)
    drawn = zip(begun, of_rollouts(rollout), strict=False)  # without those that were missing
    return [one.goes_on(rollout, version) for one, rollout in drawn]


def _ended(like: Responses) -> Responses:
    """Returns responses that end before their first token."""
    rollout = like.rollout
    nothing = dataclasses.replace(
        rollout, mask=np.zeros_like(rollout.mask), finished=np.ones_like(rollout.finished)
    )
    return dataclasses.replace(like, rollout=nothing)
