"""Held-out evaluation: greedy and sampled accuracy on questions that training never sees."""

from __future__ import annotations

import time

import jax
import numpy as np

from fp8rl_jax.envs import score
from fp8rl_jax.training.runtime import Runtime


def evaluate(runtime: Runtime, weights, phase: str, step: int) -> tuple[dict, list[dict]]:
    """Accuracy on every held-out question.

    Each question is answered twice in one program: greedily, and at temperature 1. Of several
    rewards the first decides.

    Args:
      runtime: of `make_runtime`.
      weights: rollout weights, from refit.
      phase, step: written into the record; they also choose the random bits.

    Returns:
      The record for eval.jsonl, and the first `run.samples` transcripts (sampled answers).
    """
    config = runtime.config
    start = time.perf_counter()
    questions = runtime.questions["eval"]
    size = config.eval.batch_size
    key = jax.random.fold_in(runtime.keys["eval"], step + (phase == "rl") * (1 << 30))
    temperature = np.tile(np.float32([0.0, 1.0]), size)
    rewards, texts, errors, length = [], [], 0, 0
    rates = []
    reward = runtime.rewards[0].function
    for index, first in enumerate(range(0, len(questions), size)):
        part = questions[first : first + size]
        padded = part + [part[-1]] * (size - len(part))
        begin = time.perf_counter()
        rollout, _, _ = runtime.generate(
            runtime.eval_sampler, weights, padded, jax.random.fold_in(key, index), temperature
        )
        tokens = int(rollout.mask[: 2 * len(part)].sum())  # without the rows that fill the batch
        rates.append((tokens, time.perf_counter() - begin))
        responses = runtime.decode(rollout)[: 2 * len(part)]
        values, failed = score(reward, [q for q in part for _ in range(2)], responses)
        rewards += values
        texts += responses
        errors += failed
        length += int(rollout.mask[1 : 2 * len(part) : 2].sum())
    greedy, sampled = np.asarray(rewards[0::2]), np.asarray(rewards[1::2])
    record = {
        "phase": phase,
        "step": step,
        "accuracy_greedy": float(greedy.mean()),
        "accuracy_sampled": float(sampled.mean()),
        "questions": len(questions),
        "response_len_mean": length / len(questions),
        "reward_errors": errors,
        "time_eval": time.perf_counter() - start,
        "tokens_per_s_eval": _rate(rates),
    }
    samples = [
        {
            "phase": phase,
            "step": step,
            "prompt": question.text,
            "response": response,
            "answer": question.answer,
            "reward": reward,
        }
        for question, response, reward in zip(questions, texts[1::2], sampled, strict=True)
    ][: config.run.samples]
    return record, [{**s, "reward": float(s["reward"])} for s in samples]


def _rate(rates: list[tuple[int, float]]) -> float:
    """Tokens per second from (tokens, seconds) of batches; the first compiles, and is left out
    where there are others."""
    tokens, seconds = map(sum, zip(*(rates[1:] or rates), strict=True))
    return tokens / seconds
