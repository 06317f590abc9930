"""Shaping of rewards, and which groups of them have a gradient. On the host, in float64."""

from __future__ import annotations

import numpy as np


def overlong_penalty(
    lengths: np.ndarray, max_length: int, buffer: int, factor: float
) -> np.ndarray:
    """0 up to ``max_length - buffer`` tokens, then linear down to ``-factor`` at `max_length`.

    DAPO's soft overlong punishment (arXiv:2503.14476, equation 13).

    Args:
      lengths: (B,) tokens of each response.
      max_length: tokens that a response may have.
      buffer: tokens over which the penalty grows; 0 for none.
      factor: the largest penalty.

    Returns:
      (B,) float64, to be added to the rewards.
    """
    if not buffer:
        return np.zeros(len(lengths))
    excess = np.clip(lengths - (max_length - buffer), 0, buffer)
    return -factor * (excess / buffer)


def informative_groups(rewards: np.ndarray) -> np.ndarray:
    """(P,) bool: groups with rewards (P, G) that differ. The others have no gradient, nor has a
    group in which fewer than two responses were scored; nan is a response that was not."""
    scored = ~np.isnan(rewards)
    highest = np.where(scored, rewards, -np.inf).max(axis=1)
    lowest = np.where(scored, rewards, np.inf).min(axis=1)
    return scored.any(axis=1) & (highest != lowest)
