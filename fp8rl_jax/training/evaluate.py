"""Held-out evaluation: greedy and sampled accuracy on questions that training never sees."""

from __future__ import annotations

import itertools
import time

import jax
import numpy as np

from fp8rl_jax.envs import score
from fp8rl_jax.training.runtime import Runtime


def evaluate(runtime: Runtime, weights, phase: str, step: int) -> tuple[dict, list[dict]]:
    """Accuracy on every held-out question.

    Each question is answered twice in one program: greedily, and at temperature 1.

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
    rewards, texts, rates, errors, length = [], [], [], 0, 0
    for index, first in enumerate(range(0, len(questions), size)):
        part = questions[first : first + size]
        rows = 2 * len(part)  # the others fill the batch
        padded = part + [part[-1]] * (size - len(part))
        begin = time.perf_counter()
        rollout, _, _ = runtime.generate(
            runtime.eval_sampler, weights, padded, jax.random.fold_in(key, index), temperature
        )
        rates.append((int(rollout.mask[:rows].sum()), time.perf_counter() - begin))
        responses = runtime.decode(rollout.tokens[:rows], rollout.mask[:rows])
        values, failed = score(runtime.reward, [q for q in part for _ in range(2)], responses)
        rewards += values
        texts += responses
        errors += failed
        length += int(rollout.mask[1:rows:2].sum())
    greedy, sampled = np.asarray(rewards[0::2]), np.asarray(rewards[1::2])
    # The first batch compiles, so it is left out where there are others.
    tokens, seconds = map(sum, zip(*(rates[1:] or rates), strict=True))
    record = {
        "phase": phase,
        "step": step,
        "accuracy_greedy": float(greedy.mean()),
        "accuracy_sampled": float(sampled.mean()),
        "questions": len(questions),
        "response_len_mean": length / len(questions),
        "reward_errors": errors,
        "time_eval": time.perf_counter() - start,
        "tokens_per_s_eval": tokens / seconds,
    }
    answered = zip(questions, texts[1::2], sampled, strict=True)
    samples = [
        {
            "phase": phase,
            "step": step,
            "prompt": question.text,
            "response": response,
            "answer": question.answer,
            "reward": float(reward),
        }
        for question, response, reward in itertools.islice(answered, config.run.samples)
    ]
    return record, samples
