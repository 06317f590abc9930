"""The record of one RL step: its metrics, and the times of its parts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from fp8rl_jax.models import ModelConfig
from fp8rl_jax.quant import Recipe
from fp8rl_jax.rl import informative_groups, reply_numbers
from fp8rl_jax.rollout import Rollout
from fp8rl_jax.training.conversations import Conversed
from fp8rl_jax.training.counters import first_layers, load_metrics, loss_metrics

_MEANS = ("loss", "grad_norm", "router_aux_loss")
# Statistic of a token -> its metric, the mean over tokens.
_OF_TOKENS = {
    "ratio": "ratio_mean",
    "clipped_low": "clipfrac_low",
    "clipped_high": "clipfrac_high",
    "clipped_dual": "clipfrac_dual",
    "kl": "kl_ref",
    "teacher_kl": "teacher_kl",
    "entropy": "entropy",
}


class StepRecord(dict[str, Any]):
    """{metric: value} of an RL step, a line of metrics.jsonl."""

    def __init__(self, step: int):
        super().__init__(step=step)

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Adds the seconds spent in the block to `time_PART`."""
        begin, name = time.perf_counter(), f"time_{part}"
        yield
        self[name] = self.get(name, 0.0) + time.perf_counter() - begin

    def add_rollout(
        self, rollout: Rollout, rewards: np.ndarray, by_name: dict[str, np.ndarray]
    ) -> None:
        """Adds metrics of rewards (P, G), of each reward by name, and of responses; needs
        `time_rollout`. Responses without a reward (nan) are left out of the means."""
        lengths = rollout.mask.sum(1)
        self.update(
            reward_mean=float(np.nanmean(rewards)),
            reward_std=float(np.nanstd(rewards)),
            group_zero_std_frac=float(1 - informative_groups(rewards).mean()),
            response_len_mean=float(lengths.mean()),
            response_len_max=int(lengths.max()),
            truncated_frac=float(1 - rollout.finished.mean()),
            tokens_per_s_rollout=float(lengths.sum() / self["time_rollout"]),
        )
        if unscored := int(np.isnan(rewards).sum()):
            self["reward_unscored"] = unscored
        if len(by_name) > 1:
            given = {n: v for n, v in by_name.items() if not np.isnan(v).all()}
            self.update({f"reward/{n}": float(np.nanmean(v)) for n, v in given.items()})

    def add_versions(self, versions: np.ndarray, drawn: int) -> None:
        """Adds how many versions drew a response, from `Samples.versions`; `drawn`: number of
        tokens that the step's rollout drew, for this and later steps."""
        newer = (versions[:, 1:] > versions[:, :-1]) & (versions[:, :-1] >= 0)
        counts = newer.sum(1) + (versions[:, 0] >= 0)
        self.update(versions_mean=float(counts.mean()), versions_max=int(counts.max()))
        self["tokens_per_s_rollout"] = drawn / self["time_rollout"]

    def add_conversations(self, conversed: Conversed) -> None:
        """Counts what became of the environment's answers in a rollout."""
        self["env_errors"] = self.get("env_errors", 0) + conversed.errors
        self["observations_cut"] = self.get("observations_cut", 0) + conversed.cut

    def add_turns(self, mask: np.ndarray) -> None:
        """Adds the mean number of replies of responses whose drawn tokens are in `mask` (B, R)."""
        self["turns_mean"] = float(reply_numbers(mask)[:, -1].mean() + 1)

    def add_updates(
        self, updates: Sequence[dict], tokens: float, model: ModelConfig, learner: Recipe
    ) -> None:
        """Adds metrics of the step's updates; needs `time_learner`.

        Loss and gradient norm are means over the updates. A token statistic NAME is that of the
        first update, which is on policy at zero drift; NAME/k is that of update k > 1.

        Args:
          updates: metrics of each train step, on the host, and its `counts`, (B, R) bool.
          tokens: number of tokens of the step's responses.
          model, learner: shapes and recipe of the updates, which give layers' numbers.
        """
        for name in _MEANS:
            if name in updates[0]:
                self[name] = float(np.mean([metrics[name] for metrics in updates]))
        self["checksum"] = int(updates[0]["checksum"])
        for index, metrics in enumerate(updates):
            suffix = f"/{index + 1}" if index else ""
            found = _token_metrics(metrics["tokens"], metrics["counts"])
            self.update({f"{name}{suffix}": value for name, value in found.items()})
        if skipped := sum(not metrics["counts"].any() for metrics in updates):
            self["update_skipped"] = skipped
        if "expert_tokens" in updates[0]:
            counts = np.sum([metrics["expert_tokens"] for metrics in updates], axis=0)
            self.update(load_metrics(counts, model.dense_layers))
        if health := [metrics["health"] for metrics in updates if "health" in metrics]:
            sums = jax.tree.map(lambda *n: np.sum(n, axis=0), *health)
            self.update(loss_metrics(sums, first_layers(model, learner)))
        self["tokens_per_s_learner"] = tokens / self["time_learner"]

    def add_learner_tokens(self, updates: list[dict]) -> None:
        """Adds how many tokens the updates computed, and the share of them that are padding, from
        the metrics of `Engine.update`."""
        self["learner_tokens"] = sum(metrics["computed"] for metrics in updates)
        padding = sum(metrics["padding"] for metrics in updates)
        self["learner_padding"] = padding / self["learner_tokens"]

    def add_rates(self, flops: float, learners: int, samplers: int, peak: float | None) -> None:
        """Adds what each device did: tokens per second of rollout and learner, and the MFU of the
        learner if `peak` is known. Needs the tokens per second of both.

        Args:
          flops: FLOPs that the step's updates need (`plan.times.useful_flops`), on all devices.
          learners, samplers: numbers of devices that learn, and that sample.
          peak: FLOP/s of a device in bf16, the usual reference for FP8 training too, or None.
        """
        for side, devices in (("rollout", samplers), ("learner", learners)):
            self[f"tokens_per_s_device_{side}"] = self[f"tokens_per_s_{side}"] / devices
        if peak is not None:
            self["mfu_learner"] = flops / (self["time_learner"] * learners * peak)

    def add_memory(self) -> None:
        """Adds the most GiB that a device of this process had in use so far, if JAX counts them."""
        counted = [device.memory_stats() or {} for device in jax.local_devices()]
        if peak := max(found.get("peak_bytes_in_use", 0) for found in counted):
            self["memory_peak"] = peak / 2**30

    def add_refit(self, lost: dict, model: ModelConfig, rollout: Recipe) -> None:
        """Adds quantisation losses of the sampler's weights (`Served.health`)."""
        if lost:
            first = first_layers(model, rollout)
            self.update(loss_metrics({"weights": jax.device_get(lost)}, first))


def _token_metrics(tokens: dict[str, np.ndarray], counts: np.ndarray) -> dict[str, float]:
    """Returns means over the tokens that count, and the ratio's extremes; 0 if no token counts."""
    metrics = {}
    for name, values in tokens.items():
        kept = values[counts].astype(np.float64) if counts.any() else np.zeros(1)
        metrics[_OF_TOKENS.get(name, name)] = float(kept.mean())
        if name == "ratio":
            metrics |= {"ratio_min": float(kept.min()), "ratio_max": float(kept.max())}
    return metrics
