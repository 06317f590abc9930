"""Advantages: a reward minus a baseline, over a scale. On the host, in float64.

B responses are P prompts with G samples each, prompt-major; R is the number of response slots. A
response that was not scored has reward nan: it counts in no mean and no deviation, and its own
advantage has no meaning.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fp8rl_jax.rl.shaping import equal_rewards, informative_groups

Baseline = Callable[[np.ndarray], np.ndarray]
Scale = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def group_mean(rewards: np.ndarray) -> np.ndarray:
    """Returns ``r - mean of the group`` (GRPO, arXiv:2402.03300, section 4.1.2), (P, G)."""
    if rewards.shape[1] < 2:
        raise ValueError("a baseline of the group needs at least 2 samples per question")
    advantages = rewards - np.nanmean(_scored_groups(rewards), axis=1, keepdims=True)
    # The mean of equal numbers may differ from them in the last bits.
    return np.where(informative_groups(rewards)[:, None], advantages, 0.0)


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """Returns ``r - mean of the group's other rewards`` (RLOO, arXiv:2402.14740, equation 8)."""
    scored = (~np.isnan(rewards)).sum(axis=1, keepdims=True)
    return group_mean(rewards) * scored / np.maximum(scored - 1, 1)


def batch_mean(rewards: np.ndarray) -> np.ndarray:
    """Returns ``r - mean of all rewards of the step``."""
    return np.zeros_like(rewards) if equal_rewards(rewards) else rewards - np.nanmean(rewards)


def no_baseline(rewards: np.ndarray) -> np.ndarray:
    """Returns the reward itself."""
    return rewards.copy()


def _scored_groups(rewards: np.ndarray) -> np.ndarray:
    """Returns the rewards, with 0 in groups without a scored response."""
    return np.where(np.isnan(rewards).all(axis=1, keepdims=True), 0.0, rewards)


def group_std(advantages: np.ndarray, rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Returns ``A / (population standard deviation of the group's rewards + 1e-4)`` (GRPO); 0 in a
    group of equal rewards, which a baseline of the whole step, or none, leaves away from 0.

    Libraries that divide by the sample standard deviation (ddof 1) get sqrt((G - 1) / G) of this.
    """
    of_groups = np.nanstd(_scored_groups(rewards), axis=1)
    deviation = np.repeat(of_groups + 1e-4, rewards.shape[1])
    differs = np.repeat(informative_groups(rewards), rewards.shape[1])
    return np.where(mask & differs[:, None], advantages / deviation[:, None], 0.0)


def batch_std(advantages: np.ndarray, rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Returns ``A / (standard deviation of the responses' advantages + 1e-8)`` (Lite PPO,
    arXiv:2508.08221); 0 if all are equal. A response's advantage is that of its first token."""
    first = np.argmax(mask, axis=1)
    of_rows = advantages[np.arange(len(mask)), first][mask.any(axis=1)]
    if not of_rows.size or equal_rewards(of_rows):
        return np.zeros_like(advantages)
    return np.where(mask, advantages / (of_rows.std() + 1e-8), 0.0)


def token_std(advantages: np.ndarray, rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Returns ``(A - mean) / (standard deviation + 1e-8)`` over the step's tokens (REINFORCE++,
    arXiv:2501.03262); 0 if all are equal."""
    of_tokens = advantages[mask]
    if not of_tokens.size or equal_rewards(of_tokens):
        return np.zeros_like(advantages)
    normal = (advantages - of_tokens.mean()) / (of_tokens.std() + 1e-8)
    return np.where(mask, normal, 0.0)


def no_scale(advantages: np.ndarray, rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Returns the advantage itself, 0 outside the mask."""
    return np.where(mask, advantages, 0.0)


BASELINES: dict[str, Baseline] = {
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "batch_mean": batch_mean,
    "none": no_baseline,
}
SCALES: dict[str, Scale] = {
    "group_std": group_std,
    "batch_std": batch_std,
    "token_std": token_std,
    "none": no_scale,
}
