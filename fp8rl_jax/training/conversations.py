"""Conversations of the policy with an environment, while a rollout runs.

::

    reply complete, response paused --> env.step in a worker --> Step
    response goes on <-- Extension <-- the observation's tokens <--+

Each process makes the calls for the responses on its devices, and all exchange what the environment
said, so that all extend the same responses. When a call returns changes no bit: a token's bits
depend on its response alone.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fp8rl_jax.data.turns import Turns
from fp8rl_jax.envs import Answered, Question, StepCall, Tally, Term
from fp8rl_jax.envs.rewards.scoring import begin_calls
from fp8rl_jax.rollout import Extension, Progress, Replies, Rollout
from fp8rl_jax.training.rewards import Rewards


class _Answer(NamedTuple):
    """What the environment says to a response, in every process.

    Attributes:
      row: the response.
      tokens: what goes behind it; empty if it ends.
    """

    row: int
    tokens: list[int]


@dataclasses.dataclass
class _Episode:
    """A response of this process so far.

    Attributes:
      question: its question.
      said: messages after the prompt.
      rewards: what the environment gave for each reply; nan where its step failed.
      state: the environment's state, as in `StepCall`.
      call: the step that was called last, until its result is read.
      full: whether it ended because there was no room for another reply.
      cut: number of observations that were cut; errors: of steps that failed.
    """

    question: Question
    said: list[dict[str, str]] = dataclasses.field(default_factory=list)
    rewards: list[float] = dataclasses.field(default_factory=list)
    state: bytes = b""
    call: concurrent.futures.Future | None = None
    full: bool = False
    cut: int = 0
    errors: int = 0


class _End(NamedTuple):
    """What all processes learn of an `_Episode`."""

    said: list[dict[str, str]]
    rewards: list[float]
    full: bool
    cut: int
    errors: int


class Conversations:
    """The conversations of a batch; an object is the `rollout.Answer` of one rollout."""

    def __init__(
        self,
        turns: Turns,
        term: Term,
        questions: Sequence[Question],
        own_rows: np.ndarray,
        most: int,
        tally: Tally,
    ):
        """
        Args:
          turns: form of the conversations.
          term: the environment's step, from `load_step`.
          questions: the question of each response; further rows are padding, and end.
          own_rows: (B,) bool, which rows are this process's.
          most: R, tokens of a response.
          tally: tally that counts the calls.
        """
        self._turns, self._term, self._tally, self._most = turns, term, tally, most
        self._own: list[int] = np.flatnonzero(own_rows).tolist()
        self._episodes = {r: _Episode(questions[r]) for r in self._own if r < len(questions)}
        self._count = len(questions)
        self._asked = np.zeros(len(own_rows), int)  # replies for which the step was called
        self._answered = np.zeros(len(own_rows), int)  # replies that were answered

    # During the rollout.

    def __call__(self, progress: Progress) -> Extension:
        assert progress.replies is not None
        counted = progress.replies.counts
        waits = np.asarray(progress.paused) & (counted > self._answered)
        stuck = bool((np.asarray(progress.done) | waits).all())
        self._ask(progress.rollout, progress.replies)
        parts = self._tally.everywhere(lambda: self._own_answers(progress.rollout, waits, stuck))
        rows = len(waits)
        tokens = np.zeros((rows, self._turns.slots), np.int32)
        counts = np.zeros(rows, np.int32)
        ends = np.zeros(rows, bool)
        for answer in (answer for part in parts for answer in part):
            count = len(answer.tokens)
            self._answered[answer.row] = counted[answer.row]
            tokens[answer.row, :count] = answer.tokens
            counts[answer.row] = count
            ends[answer.row] = not count
        return Extension(tokens, counts, ends)

    def _ask(self, rollout: Rollout, replies: Replies) -> None:
        """Calls the step for own replies that are complete and were not seen before."""
        for row, episode in self._episodes.items():
            if replies.counts[row] == self._asked[row]:
                continue
            self._asked[row] = replies.counts[row]
            drawn = rollout.tokens[row, replies.begins[row] : rollout.lengths[row]]
            reply = self._turns.tokenizer.decode(drawn.tolist())
            episode.said.append({"role": "assistant", "content": reply})
            cut = int(drawn[-1]) not in self._turns.tokenizer.eos_ids
            call = StepCall(reply, episode.state, episode.question.row, cut)
            (episode.call,) = begin_calls(self._term, [call])

    def _own_answers(self, rollout: Rollout, waits: np.ndarray, stuck: bool) -> list[_Answer]:
        """Returns the answers that are there for own waiting responses; waits for one if all
        responses are `stuck`."""
        rows = [row for row in self._own if waits[row]]
        answers = [_Answer(row, []) for row in rows if row not in self._episodes]
        calls = {
            row: call
            for row in rows
            if row in self._episodes and (call := self._episodes[row].call) is not None
        }
        if stuck and calls and not answers:
            concurrent.futures.wait(calls.values(), return_when="FIRST_COMPLETED")
        return answers + [self._answer(row, rollout) for row, call in calls.items() if call.done()]

    def _answer(self, row: int, rollout: Rollout) -> _Answer:
        step = self._result(row)
        if step is None or step.done:
            return _Answer(row, [])
        episode = self._episodes[row]
        length = int(rollout.lengths[row])
        last = int(rollout.tokens[row, length - 1])
        tokens, texts = self._turns.encode(step.texts, last, step.called)
        if length + len(tokens) >= self._most:  # no room for a reply
            episode.full = True
            return _Answer(row, [])
        episode.cut += "\n".join(texts) != "\n".join(step.texts)
        episode.said += [{"role": self._turns.role, "content": text} for text in texts]
        return _Answer(row, tokens)

    def _result(self, row: int) -> Answered | None:
        """Waits for the step of a response, and records it; None if the call failed."""
        episode = self._episodes[row]
        assert episode.call is not None
        step = self._tally.value(self._term.said, episode.call.result())
        episode.call = None
        episode.rewards.append(np.nan if step is None else step.reward)
        episode.errors += step is None
        if step is not None:
            episode.state = step.state
        return step

    # After it.

    def result(self, rollout: Rollout) -> tuple[Rollout, Conversed]:
        """Waits for the steps of the last replies; returns the rollout, and what the conversations
        came to, in every process.

        `finished` of the rollout stays whether the last reply ended with an end token, whatever the
        environment says; but it is False where there was no room for another reply.
        """
        parts = self._tally.everywhere(self._own_result)
        ends = {row: end for part in parts for row, end in part.items()}
        said = [ends[row].said for row in range(self._count)]
        rewards = np.zeros((self._count, max(1, *(len(end.rewards) for end in ends.values()))))
        finished = np.array(rollout.finished)
        for row, end in ends.items():
            rewards[row, : len(end.rewards)] = end.rewards
            finished[row] &= not end.full
        return dataclasses.replace(rollout, finished=finished), Conversed(
            said,
            rewards,
            cut=sum(end.cut for end in ends.values()),
            errors=sum(end.errors for end in ends.values()),
        )

    def _own_result(self) -> dict[int, _End]:
        for row, episode in self._episodes.items():
            if episode.call is not None:
                self._result(row)
        return {
            row: _End(e.said, e.rewards, e.full, e.cut, e.errors)
            for row, e in self._episodes.items()
        }


@dataclasses.dataclass(frozen=True)
class Conversed:
    """What conversations came to.

    Attributes:
      said: the messages after each response's prompt.
      rewards: (B, K), what the environment gave for each reply; 0 where there was none, nan where
        its step failed.
      cut: number of observations that were cut; errors: of steps that failed.
    """

    said: list[list[dict[str, str]]]
    rewards: np.ndarray
    cut: int
    errors: int

    def scored(self, rewards: Rewards) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Adds the rewards of the conversations, whose responses are the last replies, to what the
        environment gave. Returns the sums (B,), nan where a call failed, and each by its name."""
        by_name = {"env": self.rewards.sum(axis=1)}
        if not rewards.names:
            return by_name["env"], by_name
        replies = [[m["content"] for m in said if m["role"] == "assistant"] for said in self.said]
        rewards.add_conversations([own[-1] if own else "" for own in replies], self.said)
        values, found = rewards.result()
        return values + by_name["env"], found | by_name
