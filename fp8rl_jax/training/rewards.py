"""Rewards of a batch of responses, scored by workers while the rollout goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fp8rl_jax.envs import Question, Scoring, Tally, Term
from fp8rl_jax.rollout import Rollout


class Rewards:
    """Rewards of responses, which are scored from the time on when they are complete. Each process
    scores the rows that are on its devices."""

    def __init__(
        self,
        decode: Callable[[np.ndarray, np.ndarray], list[str]],
        questions: list[Question],
        rewards: Sequence[Term],
        own_rows: np.ndarray,
    ):
        """
        Args:
          decode: of `Text`.
          questions: one for each response.
          rewards: the terms that score them.
          own_rows: (B,) bool, rows of this process in the batch that they are sampled in, of which
            they are the first.
        """
        self._decode, self._questions, self._rewards = decode, questions, rewards
        self._left = own_rows[: len(questions)].copy()  # to be handed in
        self._scorings: list[tuple[np.ndarray, Scoring]] = []

    def add(self, rollout: Rollout, done: np.ndarray) -> None:
        """Hands in the responses that are `done` (B,) and have not been handed in."""
        rows = np.flatnonzero(done[: len(self._left)] & self._left)
        texts = self._decode(rollout.tokens[rows], rollout.mask[rows])
        questions = [self._questions[r] for r in rows]
        self._scorings.append((rows, Scoring(self._rewards, questions, texts)))
        self._left[rows] = False

    def result(self, tally: Tally) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Waits for the rewards (B,) of all responses, and each by its name without its weight;
        nan where a response was not scored.

        Raises:
          RewardError: no call of a reward comes to an end.
        """
        parts = tally.everywhere(lambda: self._own_result(tally))
        values, by_name = parts[0]
        for others, others_by_name in parts[1:]:  # 0 in the rows that are not theirs
            values = values + others
            by_name = {name: rows + others_by_name[name] for name, rows in by_name.items()}
        return values, by_name

    def _own_result(self, tally: Tally) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        values = np.zeros(len(self._questions))
        by_name = {term.name: np.zeros(len(self._questions)) for term in self._rewards}
        for rows, scoring in self._scorings:
            values[rows], found = scoring.result(tally)
            for name, terms in found.items():
                by_name[name][rows] = terms
        return values, by_name
