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

from fp8rl_jax.base import processes
from fp8rl_jax.envs import Question
from fp8rl_jax.rollout import Earlier, Progress, Rollout, Watch
from fp8rl_jax.sharding import batch_divisor
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
        rows, most = len(questions) * rollout.group_size, rollout.max_new_tokens
        temperature = np.full(rows, rollout.temperature, np.float32)
        none = np.zeros((rows, most), np.int32)
        kept = None
        if runtime.resolved.recorded_numbers:
            kept = np.zeros((rows, most, runtime.resolved.recorded_numbers), np.int32)
        return cls(
            questions,
            Rollout(
                tokens=none,
                mask=none > 0,
                logprobs=none.astype(np.float32),
                finished=np.zeros(rows, bool),
                taps={},
                kept=kept,
                truncation=runtime.resolved.truncation,
            ),
            none - 1,
            Prompts.numbered(*runtime.prompts(questions), key, temperature, first),
        )

    @property
    def drawn(self) -> int:
        """Number of tokens drawn so far."""
        return int(self.rollout.mask.sum())

    def goes_on(self, rollout: Rollout, version: int) -> Responses:
        """Returns the responses with what `version` has drawn: `rollout` has all tokens."""
        new = rollout.mask & ~self.rollout.mask
        versions = np.where(new, np.int32(version), self.versions)
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
    shape = runtime.config.rollout.most_versions, batch_divisor(runtime.mesh)
    missing = [_ended(begun[0])] * (shape[0] - len(begun))
    everything = [*begun, *missing]

    def joined(values) -> np.ndarray:
        return _together(np.stack([*values]), shape[1])

    def of_rollouts(rollout: Rollout) -> list[Rollout]:
        arrays = {name: _apart(np.asarray(x), *shape) for name, x in rollout.rows.items()}
        of_batch = ({name: x[i] for name, x in arrays.items()} for i in range(shape[0]))
        return [dataclasses.replace(rollout, taps={}, **rows) for rows in of_batch]

    asked, rollouts = [b.prompts for b in everything], [b.rollout for b in everything]
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
        needed=np.full(shape[1], rows // shape[1], np.int32),
        kept=None if rollouts[0].kept is None else joined(r.kept for r in rollouts),
    )

    def watch_first(progress: Progress) -> None:
        done = _apart(np.asarray(progress.done), *shape)[0]
        first = of_rollouts(progress.rollout)[0]
        watch(dataclasses.replace(progress, rollout=first, done=done))

    rollout = runtime.engine.sample(weights, prompts, watch_first, earlier=earlier)
    drawn = zip(begun, of_rollouts(rollout), strict=False)  # without those that were missing
    return [one.goes_on(rollout, version) for one, rollout in drawn]


def own_rows(runtime: Runtime, rows: int) -> np.ndarray:
    """Returns (rows,) bool, which responses of the first batch are on this process's devices."""
    shape = runtime.config.rollout.most_versions, batch_divisor(runtime.mesh)
    return _apart(processes.own_rows(runtime.layout.rows, shape[0] * rows), *shape)[0]


def _ended(like: Responses) -> Responses:
    """Returns responses that end before their first token."""
    rollout = like.rollout
    nothing = dataclasses.replace(
        rollout, mask=np.zeros_like(rollout.mask), finished=np.ones_like(rollout.finished)
    )
    return dataclasses.replace(like, rollout=nothing)


# Each device has rows that follow each other, and among them an equal part of every batch.


def _together(batches: np.ndarray, devices: int) -> np.ndarray:
    """Returns the rows of `batches` (V, N, ...) as (V * N, ...) with an equal part of each batch,
    in their order, on each device."""
    most, rows, *rest = batches.shape
    parts = batches.reshape(most, devices, rows // devices, *rest)
    return np.ascontiguousarray(parts.swapaxes(0, 1).reshape(most * rows, *rest))


def _apart(rows: np.ndarray, most: int, devices: int) -> np.ndarray:
    """Returns the inverse of `_together`."""
    size = len(rows) // most
    parts = rows.reshape(devices, most, size // devices, *rows.shape[1:])
    return parts.swapaxes(0, 1).reshape(most, size, *rows.shape[1:])
