"""Aggregations: how the losses of an update's tokens become one number.

An aggregation is linear: a matrix of weights, computed on the host from the mask of all rows of an
update. Micro-batches and devices then only add weighted losses.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fp8rl_jax.base.bounds import bounded

Aggregation = Callable[[np.ndarray], np.ndarray]


def token_mean(mask: np.ndarray) -> np.ndarray:
    """Returns weights ``1 / T`` for each of the T tokens (DAPO, arXiv:2503.14476, equation 8).

    Args:
      mask: (B, R) bool, the tokens that count.

    Returns:
      (B, R) float64 weights, 0 outside the mask.
    """
    return mask / max(mask.sum(), 1)


def seq_mean_token_mean(mask: np.ndarray) -> np.ndarray:
    """Returns weights ``1 / (N n)`` for a response of n tokens, N being the number of responses
    with a token (GRPO, arXiv:2402.03300, equation 3)."""
    tokens = mask.sum(axis=1, keepdims=True)
    return mask / np.maximum(tokens, 1) / _sequences(mask)


def seq_mean_token_sum(mask: np.ndarray) -> np.ndarray:
    """Returns weights ``1 / N`` for N responses with a token (RLOO, arXiv:2402.14740)."""
    return mask / _sequences(mask)


@bounded
def seq_mean_token_sum_norm(length: int) -> Aggregation:
    """Returns weights ``1 / (N length)`` (Dr. GRPO, arXiv:2503.20783, section 3.2)."""
    return lambda mask: mask / (_sequences(mask) * length)


def _sequences(mask: np.ndarray) -> int:
    return max(mask.any(axis=1).sum(), 1)


# Functions without and with arguments (`base.by_name`) that return an aggregation.
AGGREGATIONS: dict[str, Callable[..., Aggregation]] = {
    "token_mean": lambda: token_mean,
    "seq_mean_token_mean": lambda: seq_mean_token_mean,
    "seq_mean_token_sum": lambda: seq_mean_token_sum,
    "seq_mean_token_sum_norm": seq_mean_token_sum_norm,
}
