"""Rewards of a batch of responses, which workers score during the rollout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fp8rl_jax.envs import Question, Scoring, Tally, Term
from fp8rl_jax.rollout import Rollout


class Rewards:
    """Scores responses as soon as they are complete. Each process scores the rows that are on its
    devices."""

    def __init__(
        self,
        decode: Callable[[np.ndarray, np.ndarray], list[str]],
        questions: list[Question],
        rewards: Sequence[Term],
        own_rows: np.ndarray,
        tally: Tally,
    ):
        """
        Args:
          decode: `Runtime.decode`.
          questions: the question of each response.
          rewards: the reward terms that score them.
          own_rows: (B,) bool, which rows of the sampled batch are this process's; responses of
            `questions` are its first rows.
          tally: tally that counts the calls.
        """
        self._decode = decode
        self._questions = questions
        self._rewards = rewards
        self._tally = tally
        self.names = [term.name for term in rewards]
        self._left = own_rows[: len(questions)].copy()  # rows not yet submitted
        self._scorings: list[tuple[np.ndarray, Scoring]] = []

    def add(self, rollout: Rollout, done: np.ndarray) -> None:
        """Submits for scoring those responses `done` (B,) that were not submitted before."""
        rows = np.flatnonzero(done[: len(self._left)] & self._left)
        self._submit(rows, self._decode(rollout.tokens[rows], rollout.mask[rows]))

    def add_conversations(
        self, replies: Sequence[str], said: Sequence[Sequence[Mapping[str, str]]]
    ) -> None:
        """Submits all responses: the last reply of each conversation, and its messages."""
        rows = np.flatnonzero(self._left).tolist()
        self._submit(rows, [replies[r] for r in rows], [said[r] for r in rows])

    def _submit(self, rows, texts: Sequence[str], said=None) -> None:
        questions = [self._questions[r] for r in rows]
        self._scorings.append((rows, Scoring(self._rewards, questions, texts, said)))
        self._left[rows] = False

    def result(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Waits for all rewards; returns (B,) rewards, and {name: (B,) reward without its weight},
        with nan for responses that were not scored.

        Raises:
          RewardError: the first calls of a reward all time out, or no worker can call it.
        """
        parts = self._tally.everywhere(self._own_result)
        values, by_name = parts[0]
        for others, others_by_name in parts[1:]:  # 0 in rows of other processes
            values = values + others
            by_name = {name: rows + others_by_name[name] for name, rows in by_name.items()}
        return values, by_name

    def _own_result(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        values = np.zeros(len(self._questions))
        by_name = {term.name: np.zeros(len(self._questions)) for term in self._rewards}
        for rows, scoring in self._scorings:
            values[rows], found = scoring.result(self._tally)
            for name, terms in found.items():
                by_name[name][rows] = terms
        return values, by_name
