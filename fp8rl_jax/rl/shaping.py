"""Shaping of rewards, and which groups of rewards give a gradient. On the host, in float64."""

from __future__ import annotations

import numpy as np

from fp8rl_jax.base.bounds import bounded
from fp8rl_jax.base.errors import UserError


@bounded
def overlong_penalty(
    lengths: np.ndarray, max_length: int, buffer: int, factor: float
) -> np.ndarray:
    """Returns 0 up to ``max_length - buffer`` tokens, then falls to ``-factor`` at `max_length`.

    DAPO's soft overlong punishment (arXiv:2503.14476, equation 13), linear in the length.

    Args:
      lengths: (B,) number of tokens of each response.
      max_length: number of tokens that a response may have.
      buffer: number of tokens over which the penalty grows; 0 for no penalty.
      factor: the largest penalty.

    Returns:
      (B,) float64, to be added to the rewards.

    Raises:
      UserError: a number is out of its bounds, or the buffer above max_length.
    """
    if buffer > max_length:
        raise UserError(
            f"overlong_penalty(buffer={buffer}): write at most max_length = {max_length}"
        )
    if not buffer:
        return np.zeros(len(lengths))
    excess = np.clip(lengths - (max_length - buffer), 0, buffer)
    return -factor * (excess / buffer)


def equal_rewards(rewards: np.ndarray, axis: int | None = None) -> np.ndarray:
    """Returns whether rewards along an axis (None: all) are equal up to float32's rounding: they
    span at most 2^-23 of the largest magnitude. nan (a response not scored) is left out.

    Rewards may be float64 sums, where 0.1 + 0.2 is not 0.3.
    """
    scored = ~np.isnan(rewards)
    highest = np.where(scored, rewards, -np.inf).max(axis=axis)
    lowest = np.where(scored, rewards, np.inf).min(axis=axis)
    magnitude = np.where(scored, np.abs(rewards), 0.0).max(axis=axis)
    return highest - lowest <= np.finfo(np.float32).eps * magnitude


def informative_groups(rewards: np.ndarray) -> np.ndarray:
    """Returns (P,) bool, whether a group's rewards are not all equal (`equal_rewards`). A group of
    equal rewards, or with fewer than two scored responses, has no gradient."""
    return ~equal_rewards(rewards, axis=1)
