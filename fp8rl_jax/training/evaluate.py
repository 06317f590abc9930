"""Held-out evaluation: greedy and sampled accuracy on questions that training never sees."""

from __future__ import annotations

import itertools
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from fp8rl_jax.base import processes
from fp8rl_jax.data.turns import transcript
from fp8rl_jax.envs import Question, Tally, Term, extract_answers
from fp8rl_jax.training.accuracy import sample_metrics, standard_error
from fp8rl_jax.training.engine import Prompts
from fp8rl_jax.training.rewards import Rewards
from fp8rl_jax.training.runtime import Runtime


class Evaluation(NamedTuple):
    """A question set's record for eval.jsonl, and transcripts of its first `run.samples` questions
    with their first sampled answers."""

    record: dict[str, Any]
    samples: list[dict[str, Any]]


def evaluate(runtime: Runtime, weights, phase: str, step: int) -> list[Evaluation]:
    """Measures accuracy on all held-out questions, set by set.

    One program answers each question greedily, and `eval.samples` times at `eval.temperature`.
    With several rewards the first decides; in conversations it is added, weighted as in training,
    to what the environment gave.

    Args:
      runtime: result of `make_runtime`.
      weights: rollout weights, from refit.
      phase, step: written into the record; they also select the random bits.

    Returns:
      An evaluation for each set; report/metrics.py explains the keys of its record. A question
      counts if all its responses were scored; `questions_unscored` counts the other questions.

    Raises:
      RewardError: every call of the reward failed, or no question of a set counts.
    """
    tally = Tally(f"evaluation after {phase} step {step}")
    when = {"phase": phase, "step": step}
    sets = itertools.groupby(runtime.questions["eval"], key=lambda question: question.set)
    weights, runtime, found = runtime.for_sampling(weights), runtime.sampling, []
    for index, (name, questions) in enumerate(sets):
        # Numbers below 1 << 31 are steps. The first set's key does not depend on further sets.
        key = runtime.engine.keys["eval"]
        key = jax.random.fold_in(key, (1 << 31) + index) if index else key
        key = jax.random.fold_in(key, step + (phase == "rl") * (1 << 30))
        head = {**when, "set": name} if name else when
        found.append(_evaluate(runtime, weights, list(questions), key, head, tally))
    tally.check()
    return found


def _evaluate(
    runtime: Runtime,
    weights,
    questions: list[Question],
    key: jax.Array,
    head: dict[str, Any],
    tally: Tally,
) -> Evaluation:
    """Measures accuracy on a set; every record begins with `head`."""
    config, engine = runtime.config, runtime.engine
    start = time.perf_counter()
    size = config.eval.batch_size
    rewards, errors = runtime.resolved.rewards[:1], tally.errors
    group = 1 + config.eval.samples
    temperature = np.full((size, group), config.eval.temperature, np.float32)
    temperature[:, 0] = 0.0
    temperature = temperature.reshape(-1)
    values, texts, rates, length = [], [], [], 0
    for index, first in enumerate(range(0, len(questions), size)):
        part = questions[first : first + size]
        rows = group * len(part)  # the remaining rows are padding
        padded = part + [part[-1]] * (size - len(part))
        begin = time.perf_counter()
        prompts = Prompts.numbered(
            *runtime.prompts(padded), jax.random.fold_in(key, index), temperature
        )
        of_rows = [q for q in part for _ in range(group)]
        own = processes.own_rows(runtime.layout.rows, size * group)
        conversations = runtime.conversations(of_rows, own, tally)
        rollout = engine.sample(weights, prompts, answer=conversations, sampler=engine.eval_sampler)
        rates.append((int(rollout.mask[:rows].sum()), time.perf_counter() - begin))
        scoring = Rewards(runtime.decode, of_rows, rewards, own)
        if conversations is None:
            scoring.add(rollout, np.ones(size * group, bool))
            values.append(scoring.result(tally)[1][rewards[0].name])
            texts += runtime.decode(rollout.tokens[:rows], rollout.mask[:rows])
        else:
            _, conversed = conversations.result(rollout)
            values.append(conversed.scored(scoring, tally)[0])
            texts += [transcript(said) for said in conversed.said]
        length += int(rollout.mask[:rows].sum() - rollout.mask[:rows:group].sum())
    found = np.concatenate(values).reshape(-1, group)
    scored = ~np.isnan(found).any(axis=1)
    if not scored.any():
        tally.check()
        raise tally.nothing_scored(f"no question{(head.get('set') and ' of ' + head['set']) or ''}")
    greedy, sampled = found[scored, 0], found[scored, 1:]
    answers = None
    if group > 2 and runtime.resolved.step is None:  # several samples may have a majority
        sampled_texts = [
            text for index, text in enumerate(texts) if index % group and scored[index // group]
        ]
        answers = _answers(rewards[0], sampled_texts, Tally(f"evaluation after {head['phase']}"))
    # The first batch compiles, so it is left out if there are several.
    tokens, seconds = map(sum, zip(*(rates[1:] or rates), strict=True))
    record = {
        **head,
        "accuracy_greedy": float(greedy.mean()),
        "accuracy_greedy_se": standard_error(greedy),
        "accuracy_sampled": float(sampled.mean()),
        "accuracy_sampled_se": standard_error(sampled.mean(1)),
        **sample_metrics(sampled, answers),
        "questions": int(scored.sum()),
        "response_len_mean": length / sampled.size,
        "reward_errors": tally.errors - errors,
        **({} if scored.all() else {"questions_unscored": int((~scored).sum())}),
        "time_eval": time.perf_counter() - start,
        "tokens_per_s_eval": tokens / seconds,
    }
    answered = zip(questions, texts[1::group], found[:, 1], strict=True)
    samples = [
        {
            **head,
            "prompt": question.text,
            "response": response,
            "answer": question.answer,
            "reward": None if np.isnan(value) else float(value),
        }
        for question, response, value in itertools.islice(answered, config.run.samples)
    ]
    return Evaluation(record, samples)


def _answers(reward: Term, texts: list[str], tally: Tally) -> list | None:
    """Runs `extract_answers`, with the texts divided among all processes."""
    count = processes.count()
    own = texts[processes.number() :: count]
    found = tally.everywhere(lambda: extract_answers(reward, own, tally))
    if found[0] is None:
        return None
    return [found[index % count][index // count] for index in range(len(texts))]
