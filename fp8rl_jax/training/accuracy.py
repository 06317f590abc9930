"""Accuracy over several samples per question: pass@k, majority vote, standard errors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

CORRECT = 0.5  # a response is correct if its reward is above this


def pass_at_k(correct: np.ndarray, k: int) -> np.ndarray:
    """Returns the probability that one of k samples is correct, for each question.

    ``1 - C(n - c, k) / C(n, k)`` with c of n samples correct, unbiased (Chen et al.,
    arXiv:2107.03374, equation 1); the quotient is the product of ``1 - k / i``, i = n - c + 1 .. n.

    Args:
      correct: (Q, n) bool, whether each sample is correct.
      k: number of samples, at most n.

    Returns:
      (Q,) float64.
    """
    n = correct.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}, of {n} samples")
    count = correct.sum(1)
    factors = np.where(np.arange(1, n + 1) > n - count[:, None], 1 - k / np.arange(1, n + 1), 1.0)
    return np.where(n - count < k, 1.0, 1.0 - factors.prod(axis=1))


def standard_error(values: np.ndarray) -> float:
    """Returns the standard error of the mean of (Q,) values, one per question (a cluster).

    ``std / sqrt(Q)`` with the sample standard deviation; 0 for one question.
    """
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0


def majority(rewards: np.ndarray, answers: Sequence[str | None]) -> np.ndarray:
    """Returns whether the most frequent answer of each question is correct; among equally frequent
    answers, the one given first counts.

    Args:
      rewards: (Q, n) rewards of n responses per question.
      answers: answers of Q * n responses, question by question; None, for a response without an
        answer, is never the most frequent.

    Returns:
      (Q,) bool.
    """
    n = rewards.shape[1]
    chosen = np.zeros(len(rewards), bool)
    for question, row in enumerate(rewards):
        votes: dict[str, list[int]] = {}
        for index, answer in enumerate(answers[question * n : (question + 1) * n]):
            if answer is not None:
                votes.setdefault(answer, []).append(index)
        if votes:
            first = max(votes.values(), key=len)[0]  # max keeps the first of equals
            chosen[question] = row[first] > CORRECT
    return chosen


def sample_metrics(rewards: np.ndarray, answers: Sequence[str | None] | None) -> dict[str, float]:
    """Returns an evaluation record's metrics of n samples per question.

    pass@k for k = 1, 2, 4, .. and n, and maj@n for several samples with known `answers`; each with
    its standard error, NAME_se.
    """
    n = rewards.shape[1]
    counts = sorted({2**i for i in range(n.bit_length())} | {n})
    found = {f"pass@{k}": pass_at_k(rewards > CORRECT, k) for k in counts}
    if n > 1 and answers is not None:
        found[f"maj@{n}"] = majority(rewards, answers).astype(float)
    record: dict[str, float] = {}
    for name, values in found.items():
        record |= {name: float(values.mean()), f"{name}_se": standard_error(values)}
    return record
