"""Drift metrics: how far the learner's log-probabilities are from the rollout's.

All are computed on the host in float64 from the float32 values that the two programs returned,
without rounding, so a single differing last bit shows. In exponentials a difference is clamped to
+-20, as in the losses: a larger one tells no more, and e^D would overflow.
"""

from __future__ import annotations

import numpy as np

from fp8rl_jax.base.bounds import bounded
from fp8rl_jax.rl.losses import MAX_LOG_RATIO


@bounded
def mismatch_metrics(
    learner_logp: np.ndarray, rollout_logp: np.ndarray, mask: np.ndarray, tis_cap: float = 2.0
) -> dict[str, float]:
    """Returns metrics of D = learner_logp - rollout_logp over response tokens; d is D within +-20.

    ==================================  ================================  ===================
    name                                formula                           also called
    ==================================  ================================  ===================
    token_mult_prob_error               mean exp|d|                       (NeMo RL)
    train_rollout_logprob_abs_diff      mean abs D                        (Miles, slime)
    train_rollout_logprob_abs_diff_max  max abs D
    logprob_equal_frac                  share of D == 0
    mismatch_kl                         mean exp(d) - d - 1               k3_kl, gen_kl_error
    mismatch_k1                         mean -D
    chi2_token                          mean exp(2 d) - 1
    ess_ratio                           (sum w)^2 / (n sum w^2), w = e^d
    tis_clipfrac                        share of clip(w, 0, C) != w
    tis_weight_mean, tis_weight_max     of clip(w, 0, C)
    drift_tokens                        number of tokens compared
    ==================================  ================================  ===================

    Args:
      learner_logp, rollout_logp: (B, T) float32, results of the train step and the decode loop.
      mask: (B, T) bool, the tokens to compare.
      tis_cap: cap C of the importance weights.

    Returns:
      Python floats by name; with a NaN among the values every mean is NaN, never zero.

    Raises:
      ValueError: no token is left to compare.

    Example:
      >>> logp = np.log([[0.5, 0.25]])
      >>> found = mismatch_metrics(logp, logp, np.ones((1, 2)))
      >>> found["train_rollout_logprob_abs_diff_max"], found["logprob_equal_frac"]
      (0.0, 1.0)
    """
    mask = np.asarray(mask, bool)
    learner = np.asarray(learner_logp)[mask].astype(np.float64)
    rollout = np.asarray(rollout_logp)[mask].astype(np.float64)
    if learner.size == 0:
        raise ValueError("there is no response token to compare")
    return _of_differences(learner - rollout, tis_cap)


def _of_differences(difference: np.ndarray, tis_cap: float) -> dict[str, float]:
    """Returns the metrics of D, (N,) float64."""
    d = np.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    w = np.exp(d)
    truncated = np.clip(w, 0.0, tis_cap)
    metrics = {
        "token_mult_prob_error": np.exp(np.abs(d)).mean(),
        "train_rollout_logprob_abs_diff": np.abs(difference).mean(),
        "train_rollout_logprob_abs_diff_max": np.abs(difference).max(),
        "logprob_equal_frac": (d == 0).mean(),
        "mismatch_kl": (np.exp(d) - d - 1).mean(),
        "mismatch_k1": (-difference).mean() + 0.0,  # + 0.0: -0.0 becomes 0.0
        "chi2_token": (np.exp(2 * d) - 1).mean(),
        "ess_ratio": w.sum() ** 2 / (w.size * (w**2).sum()),
        "tis_clipfrac": np.nan if np.isnan(d).any() else (truncated != w).mean(),
        "tis_weight_mean": truncated.mean(),
        "tis_weight_max": truncated.max(),
        "drift_tokens": d.size,
    }
    return {name: float(value) for name, value in metrics.items()}
