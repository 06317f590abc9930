"""Corrections for a rollout whose policy is not the learner's. Off when the drift is zero."""

from __future__ import annotations

import numpy as np

MAX_LOG_RATIO = 20.0


def tis_weights(
    learner_logp: np.ndarray, rollout_logp: np.ndarray, cap: float, floor: float = 0.0
) -> np.ndarray:
    """Token-level truncated importance sampling: ``clip(exp(D), floor, cap)``.

    D = learner_logp - rollout_logp, clamped to +-20 first. FP8-RL, Miles and verl use
    cap = 2. The weights are constants for the gradient.

    Args:
      learner_logp, rollout_logp: (B, T) float32.
      cap, floor: bounds of the weight.

    Returns:
      (B, T) float32.
    """
    log_ratio = np.clip(
        learner_logp.astype(np.float64) - rollout_logp, -MAX_LOG_RATIO, MAX_LOG_RATIO
    )
    return np.clip(np.exp(log_ratio), floor, cap).astype(np.float32)
