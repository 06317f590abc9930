"""The metrics of an RL step, computed from its results, and the times of its parts.

Each function returns {metric: value}, in plain Python numbers; docs/reference/metrics.md says what
they are.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from fp8rl_jax.base.jax_settings import hold_settings
from fp8rl_jax.models import ModelConfig
from fp8rl_jax.quant import Recipe
from fp8rl_jax.rl import informative_groups
from fp8rl_jax.training.counters import first_layers, load_metrics, loss_metrics

Metrics = dict[str, Any]

_MEANS = ("loss", "grad_norm", "router_aux_loss")
# Statistic of a token -> its metric, the mean over tokens.
_OF_TOKENS = {
    "ratio": "ratio_mean",
    "clipped_low": "clipfrac_low",
    "clipped_high": "clipfrac_high",
    "clipped_dual": "clipfrac_dual",
    "kl": "kl_ref",
    "frozen_kl": "teacher_kl",
    "entropy": "entropy",
}


class Times(dict[str, float]):
    """{'time_PART': seconds} of the parts of a step."""

    @contextlib.contextmanager
    def of(self, part: str) -> Iterator[Times]:
        """Adds the seconds spent in the block to those of a part, which begins with JAX's settings
        as runs rely on them: a user's code may have changed them in the part before."""
        hold_settings()
        begin = time.perf_counter()
        yield self
        name = f"time_{part}"
        self[name] = self.get(name, 0.0) + time.perf_counter() - begin


def rollout_metrics(
    mask: np.ndarray, finished: np.ndarray, rewards: np.ndarray, by_name: dict[str, np.ndarray]
) -> Metrics:
    """Returns metrics of responses, of their rewards (P, G), and of each reward by name; `mask`
    (B, R) of their drawn tokens, `finished` (B,). Responses without a reward (nan) are left out of
    the means of rewards."""
    lengths = mask.sum(1)
    metrics: Metrics = {
        "reward_mean": float(np.nanmean(rewards)),
        "reward_std": float(np.nanstd(rewards)),
        "group_zero_std_frac": float(1 - informative_groups(rewards).mean()),
        "response_len_mean": float(lengths.mean()),
        "response_len_max": int(lengths.max()),
        "truncated_frac": float(1 - finished.mean()),
    }
    if unscored := int(np.isnan(rewards).sum()):
        metrics["reward_unscored"] = unscored
    if len(by_name) > 1:
        for name, values in by_name.items():
            if not np.isnan(values).all():
                metrics[f"reward/{name}"] = float(np.nanmean(values))
    return metrics


def version_metrics(versions: np.ndarray) -> Metrics:
    """Returns how many versions drew a response, from `Samples.versions` (B, R)."""
    newer = (versions[:, 1:] > versions[:, :-1]) & (versions[:, :-1] >= 0)
    counts = newer.sum(1) + (versions[:, 0] >= 0)
    return {"versions_mean": float(counts.mean()), "versions_max": int(counts.max())}


def update_metrics(updates: Sequence[dict], model: ModelConfig, recipe: Recipe) -> Metrics:
    """Returns metrics of the step's updates.

    Loss and gradient norm are means over the updates. A token statistic NAME is that of the
    first update, which is on policy at zero drift; NAME/k is that of update k > 1.

    Args:
      updates: metrics of each update, as `Update.updates`.
      model, recipe: shapes and the learner's recipe, which give layers' numbers.
    """
    metrics: Metrics = {
        name: float(np.mean([update[name] for update in updates]))
        for name in _MEANS
        if name in updates[0]
    }
    metrics["checksum"] = int(updates[0]["checksum"])
    for index, update in enumerate(updates):
        suffix = f"/{index + 1}" if index else ""
        for name, value in _token_metrics(update["tokens"], update["counts"]).items():
            metrics[f"{name}{suffix}"] = value
    if skipped := sum(not update["counts"].any() for update in updates):
        metrics["update_skipped"] = skipped
    if "expert_tokens" in updates[0]:
        counts = np.sum([update["expert_tokens"] for update in updates], axis=0)
        metrics |= load_metrics(counts, model.dense_layers)
    if health := [update["health"] for update in updates if "health" in update]:
        sums = jax.tree.map(lambda *n: np.sum(n, axis=0), *health)
        metrics |= loss_metrics(sums, first_layers(model, recipe))
    return metrics


def _token_metrics(tokens: dict[str, np.ndarray], counts: np.ndarray) -> dict[str, float]:
    """Returns means over the tokens that count, and the ratio's extremes; 0 if no token counts."""
    metrics = {}
    for name, values in tokens.items():
        kept = values[counts].astype(np.float64) if counts.any() else np.zeros(1)
        metrics[_OF_TOKENS.get(name, name)] = float(kept.mean())
        if name == "ratio":
            metrics |= {"ratio_min": float(kept.min()), "ratio_max": float(kept.max())}
    return metrics


def learner_token_metrics(updates: Sequence[dict]) -> Metrics:
    """Returns how many tokens the updates computed, and the share of them that are padding."""
    computed = sum(update["computed"] for update in updates)
    padding = sum(update["padding"] for update in updates)
    return {"learner_tokens": computed, "learner_padding": padding / computed}


def rate_metrics(
    record: Metrics, flops: float, learners: int, samplers: int, peak: float | None
) -> Metrics:
    """Returns what each device did: tokens per second of rollout and learner, and the MFU of the
    learner if `peak` is known.

    Args:
      record: has the tokens per second of both, and `time_learner`.
      flops: FLOPs that the step's updates need (`plan.times.useful_flops`), on all devices.
      learners, samplers: numbers of devices that learn, and that sample.
      peak: FLOP/s of a device in bf16, the usual reference for FP8 training too, or None.
    """
    metrics: Metrics = {
        "tokens_per_s_device_rollout": record["tokens_per_s_rollout"] / samplers,
        "tokens_per_s_device_learner": record["tokens_per_s_learner"] / learners,
    }
    if peak is not None:
        metrics["mfu_learner"] = flops / (record["time_learner"] * learners * peak)
    return metrics


def memory_metrics() -> Metrics:
    """Returns the most GiB that a device of this process had in use so far, if JAX counts them."""
    counted = [device.memory_stats() or {} for device in jax.local_devices()]
    peak = max(stats.get("peak_bytes_in_use", 0) for stats in counted)
    return {"memory_peak": peak / 2**30} if peak else {}
