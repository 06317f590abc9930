"""Corrections for a rollout whose policy is not the learner's.

A correction is a pure function ``(log_ratio, mask, advantages) -> (weights, keep)`` of arrays
(B, R) on the host: log_ratio D is the learner's log-probability before the first update minus the
rollout's, in float64. Weights multiply the loss and are constants for the gradient; a token whose
`keep` is False leaves the loss and its denominators. At zero drift D is 0, and every built-in
correction returns weights of exactly 1 and keeps all tokens: it does nothing. Bounds of a ratio
that exclude 1 are therefore refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from fp8rl_jax.base.bounds import bounded

MAX_LOG_RATIO = 20.0
Correction = Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def _ratio(log_ratio: np.ndarray) -> np.ndarray:
    return np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _row_sum(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    return np.where(mask, x, 0.0).sum(axis=1, keepdims=True)


def _row_mean(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    return _row_sum(x, mask) / np.maximum(mask.sum(axis=1, keepdims=True), 1)


def _weighted(weights: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.where(mask, weights, 1.0), mask


def _kept(keep: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.ones(mask.shape), mask & keep


def effective_sample_size(weights: np.ndarray) -> float:
    """Returns (sum w)^2 / (n sum w^2) of weights (n,): the share of samples that as many equal
    weights would need for the same variance (Kong, 1992)."""
    return float(weights.sum() ** 2 / max(weights.size * (weights**2).sum(), 1e-300))


def _cap_for(ratio: np.ndarray, low: float, ess: float) -> float:
    """Returns the largest cap, at least 1, with which weights (n,) have this effective sample
    size; 1 if none is small enough. The size falls as the cap rises, so bisection finds it."""

    def enough(cap: float) -> bool:
        return effective_sample_size(np.clip(ratio, low, cap)) >= ess

    least, most = 1.0, max(1.0, float(ratio.max(initial=1.0)))
    if enough(most):
        return most
    for _ in range(60):
        middle = float(np.sqrt(least * most))
        least, most = (middle, most) if enough(middle) else (least, middle)
    return least


@bounded
def tis(cap: float | Literal["auto"] = 2.0, low: float = 0.0, ess: float = 0.0) -> Correction:
    """Weighs a token by ``clip(e^D, low, cap)``: truncated importance sampling (FP8-RL, Miles and
    verl: cap 2).

    ``tis(auto, ess=0.9)`` takes in every step the largest cap with which the weights have an
    effective sample size of 0.9, and 1 if only a smaller one had it: less bias than a fixed one
    where the policies are close, and less variance where they are not.
    """
    if (cap == "auto") != (ess > 0):
        raise ValueError("auto and ess go together: write tis(auto, ess=0.9), or leave both out")

    def correction(d, mask, advantages):
        ratio = _ratio(d)
        most = _cap_for(ratio[mask], low, ess) if cap == "auto" else cap
        return _weighted(np.clip(ratio, low, most), mask)

    return correction


@bounded
def seq_tis(cap: float = 5.0) -> Correction:
    """Weighs all tokens of a response by ``min(exp(sum D), cap)``."""
    return lambda d, mask, advantages: _weighted(
        np.minimum(_ratio(_row_sum(d, mask)), cap) * np.ones(mask.shape), mask
    )


@bounded
def icepop(low: float = 0.5, high: float = 5.0) -> Correction:
    """Weighs a token by e^D within the bounds, else by 0; it stays in the denominators."""

    def correction(d, mask, advantages):
        ratio = _ratio(d)
        return _weighted(np.where((low <= ratio) & (ratio <= high), ratio, 0.0), mask)

    return correction


@bounded
def mask_sequence(low: float = 0.5, high: float = 2.0) -> Correction:
    """Keeps responses with ``low <= exp(sum D) <= high``."""

    def correction(d, mask, advantages):
        ratio = _ratio(_row_sum(d, mask))
        return _kept((low <= ratio) & (ratio <= high), mask)

    return correction


@bounded
def mask_geometric(low: float = 0.999, high: float = 1.001) -> Correction:
    """Keeps responses with ``low <= exp(mean D) <= high``."""

    def correction(d, mask, advantages):
        ratio = _ratio(_row_mean(d, mask))
        return _kept((low <= ratio) & (ratio <= high), mask)

    return correction


@bounded
def mask_k3(most: float = 0.01) -> Correction:
    """Keeps responses with ``mean(e^D - 1 - D) <= most``."""

    def correction(d, mask, advantages):
        d = np.clip(d, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        return _kept(_row_mean(np.expm1(d) - d, mask) <= most, mask)

    return correction


@bounded
def veto(least: float = 1e-4) -> Correction:
    """Drops a response with a token whose ``e^D`` is below `least` (Miles, slime)."""

    def correction(d, mask, advantages):
        return _kept(np.where(mask, _ratio(d), np.inf).min(axis=1, keepdims=True) >= least, mask)

    return correction


@bounded
def opsm(delta: float = 1e-4) -> Correction:
    """Drops tokens with a negative advantage in responses with ``mean(-D)`` above `delta`:
    off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556, equation 9)."""

    def correction(d, mask, advantages):
        return _kept(~((advantages < 0) & (_row_mean(-d, mask) > delta)), mask)

    return correction


CORRECTIONS: dict[str, Callable[..., Correction]] = {
    "tis": tis,
    "seq_tis": seq_tis,
    "icepop": icepop,
    "mask_sequence": mask_sequence,
    "mask_geometric": mask_geometric,
    "mask_k3": mask_k3,
    "veto": veto,
    "opsm": opsm,
}
