"""Advantages of grouped rollouts."""

from __future__ import annotations

import numpy as np


def group_advantages(
    rewards: np.ndarray, group_size: int, normalize_std: bool, eps: float = 1e-4
) -> np.ndarray:
    """GRPO's advantage: reward minus group mean, over group standard deviation.

    Args:
      rewards: (P * G,) float, prompt-major.
      group_size: G.
      normalize_std: divide by the group's standard deviation (GRPO, DeepSeekMath,
        arXiv:2402.03300, section 4.1.2); without it, Dr. GRPO (arXiv:2503.20783).
      eps: added to the standard deviation.

    Returns:
      (P * G,) float32.
    """
    groups = np.asarray(rewards, np.float64).reshape(-1, group_size)
    advantages = groups - groups.mean(axis=1, keepdims=True)
    equal = groups.max(axis=1) == groups.min(axis=1)
    advantages[equal] = 0.0  # the mean of equal numbers may differ from them in the last bit
    if normalize_std:
        advantages = advantages / (groups.std(axis=1, keepdims=True) + eps)
    return advantages.reshape(-1).astype(np.float32)


def zero_std_fraction(rewards: np.ndarray, group_size: int) -> float:
    """Share of groups whose rewards are all equal: they teach nothing."""
    groups = np.asarray(rewards).reshape(-1, group_size)
    return float(np.mean(groups.max(axis=1) == groups.min(axis=1)))
