"""The record of one RL step: what happened in it, as metrics, and how long each part took."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from fp8rl_jax.envs import Question, score_terms
from fp8rl_jax.rl import zero_std_fraction
from fp8rl_jax.rollout import Rollout
from fp8rl_jax.training.expert_load import load_metrics
from fp8rl_jax.training.health import add_counts, loss_metrics
from fp8rl_jax.training.runtime import Runtime, Served

_NOT_METRICS = {"good", "bad_layer", "checksum", "health", "expert_tokens"}


class Rewards:
    """Rewards of a step's responses, each computed when it is complete."""

    def __init__(self, runtime: Runtime, questions: list[Question]):
        """`questions`: one for each response."""
        self._runtime, self._questions = runtime, questions
        self.values = np.zeros(len(questions))
        self.by_name = {term.name: np.zeros(len(questions)) for term in runtime.rewards}
        self.errors = 0
        self._scored = np.zeros(len(questions), bool)

    def add(self, rollout: Rollout, done: np.ndarray) -> None:
        """Rewards the responses that are `done` (B,) and have no reward yet."""
        rows = np.flatnonzero(done & ~self._scored)
        fields = (rollout.tokens, rollout.mask, rollout.logprobs, rollout.finished)
        texts = self._runtime.decode(Rollout(*(x[rows] for x in fields), taps={}))
        questions = [self._questions[r] for r in rows]
        found, by_name, errors = score_terms(self._runtime.rewards, questions, texts)
        self.values[rows] = found
        for name, values in by_name.items():
            self.by_name[name][rows] = values
        self.errors += errors
        self._scored[rows] = True


class StepRecord(dict[str, Any]):
    """{metric: value} of an RL step, as metrics.jsonl has it."""

    def __init__(self, step: int):
        super().__init__(step=step)

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Notes the seconds inside as `time_PART`."""
        begin = time.perf_counter()
        yield
        self[f"time_{part}"] = time.perf_counter() - begin

    def add_rollout(self, rollout: Rollout, rewards: Rewards, group: int) -> None:
        """Rewards, and lengths of responses; after `time_rollout`."""
        lengths = rollout.mask.sum(1)
        self.update(
            reward_mean=float(rewards.values.mean()),
            reward_std=float(rewards.values.std()),
            reward_errors=rewards.errors,
            group_zero_std_frac=zero_std_fraction(rewards.values, group),
            response_len_mean=float(lengths.mean()),
            response_len_max=int(lengths.max()),
            truncated_frac=float(1 - rollout.finished.mean()),
            tokens_per_s_rollout=float(lengths.sum() / self["time_rollout"]),
        )
        if len(rewards.by_name) > 1:
            self.update({f"reward/{n}": float(v.mean()) for n, v in rewards.by_name.items()})

    def add_updates(self, updates: Sequence[dict], tokens: float, runtime: Runtime) -> None:
        """Means over the step's updates, and what they counted; after `time_learner`.

        Args:
          updates: metrics of each train step, on the host.
          tokens: of the step's responses.
          runtime: names layers.
        """
        for name in sorted(set(updates[0]) - _NOT_METRICS):
            self[name] = float(np.mean([metrics[name] for metrics in updates]))
        if "expert_tokens" in updates[0]:
            counts = np.sum([metrics["expert_tokens"] for metrics in updates], axis=0)
            self.update(load_metrics(counts, runtime.model.dense_layers))
        health = add_counts([metrics["health"] for metrics in updates if "health" in metrics])
        self.update(loss_metrics(health, runtime.first_layers(runtime.learner_recipe)))
        self["tokens_per_s_learner"] = tokens / self["time_learner"]

    def add_refit(self, served: Served, checksum, runtime: Runtime) -> None:
        """Whether the weights that were sampled are those that the first update computed with
        (`checksum`), where both sides quantise alike; and what quantising them lost."""
        if runtime.same_forward:
            self["refit_checksum_ok"] = bool(checksum == np.asarray(served.checksum))
        if served.health:
            lost = {"weights": jax.device_get(served.health)}
            self.update(loss_metrics(lost, runtime.first_layers(runtime.rollout_recipe)))
