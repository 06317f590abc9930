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
    """A question set's record for eval.jsonl, transcripts of its first `run.samples` questions with
    their first sampled answers, and rewards (Q, 1 + `eval.samples`): of the greedy answer and of
    the sampled ones, nan where an answer was not scored."""

    record: dict[str, Any]
    samples: list[dict[str, Any]]
    rewards: np.ndarray


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
    weights = runtime.for_sampling(weights)
    runtime = runtime.sampling
    found = []
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
    start = time.perf_counter()
    errors = tally.errors
    answers = _sampled(runtime, weights, questions, key, tally)
    group = answers.rewards.shape[1]
    scored = ~np.isnan(answers.rewards).any(axis=1)
    if not scored.any():
        tally.check()
        raise tally.nothing_scored(f"no question{(head.get('set') and ' of ' + head['set']) or ''}")
    greedy = answers.rewards[scored, 0]
    sampled = answers.rewards[scored, 1:]
    votes = None
    if group > 2 and runtime.resolved.step is None:  # several samples may have a majority
        texts = [
            text
            for index, text in enumerate(answers.texts)
            if index % group and scored[index // group]
        ]
        again = Tally(f"evaluation after {head['phase']}")
        votes = _votes(runtime.resolved.rewards[0], texts, again)
    record = {
        **head,
        "accuracy_greedy": float(greedy.mean()),
        "accuracy_greedy_se": standard_error(greedy),
        "accuracy_sampled": float(sampled.mean()),
        "accuracy_sampled_se": standard_error(sampled.mean(1)),
        **sample_metrics(sampled, votes),
        "questions": int(scored.sum()),
        "response_len_mean": answers.sampled_tokens / sampled.size,
        "reward_errors": tally.errors - errors,
        **({} if scored.all() else {"questions_unscored": int((~scored).sum())}),
        "time_eval": time.perf_counter() - start,
        "tokens_per_s_eval": answers.tokens_per_s,
    }
    of_questions = zip(questions, answers.texts[1::group], answers.rewards[:, 1], strict=True)
    samples = [
        {
            **head,
            "prompt": question.text,
            "response": response,
            "answer": question.answer,
            "reward": None if np.isnan(value) else float(value),
        }
        for question, response, value in itertools.islice(of_questions, runtime.config.run.samples)
    ]
    return Evaluation(record, samples, answers.rewards)


class _Sampled(NamedTuple):
    """The answers to Q questions: a greedy one, then `eval.samples` sampled ones.

    Attributes:
      rewards: (Q, 1 + samples), nan where an answer was not scored.
      texts: Q * (1 + samples) answers, or transcripts of conversations.
      sampled_tokens: number of tokens of the sampled answers.
      tokens_per_s: rate of sampling.
    """

    rewards: np.ndarray
    texts: list[str]
    sampled_tokens: int
    tokens_per_s: float


def _sampled(
    runtime: Runtime, weights, questions: list[Question], key: jax.Array, tally: Tally
) -> _Sampled:
    """Answers questions, and rewards the answers, in batches of one size."""
    config = runtime.config.eval
    size = config.batch_size
    group = 1 + config.samples
    temperature = np.full((size, group), config.temperature, np.float32)
    temperature[:, 0] = 0.0
    rewards = []
    texts = []
    rates = []
    sampled_tokens = 0
    for index, first in enumerate(range(0, len(questions), size)):
        part = questions[first : first + size]
        rows = group * len(part)  # the remaining rows are padding
        begin = time.perf_counter()
        tokens, lengths = runtime.prompts(part + [part[-1]] * (size - len(part)))
        prompts = Prompts.numbered(
            tokens, lengths, jax.random.fold_in(key, index), temperature.reshape(-1)
        )
        of_rows = [question for question in part for _ in range(group)]
        own = processes.own_rows(runtime.layout.rows, size * group)
        conversations = runtime.conversations(of_rows, own, tally)
        rollout = runtime.engine.sample(
            weights, prompts, answer=conversations, sampler=runtime.engine.eval_sampler
        )
        rates.append((int(rollout.mask[:rows].sum()), time.perf_counter() - begin))
        scoring = Rewards(runtime.decode, of_rows, runtime.resolved.rewards[:1], own, tally)
        if conversations is None:
            scoring.add(rollout, np.ones(size * group, bool))
            rewards.append(scoring.result()[1][scoring.names[0]])
            texts += runtime.decode(rollout.tokens[:rows], rollout.mask[:rows])
        else:
            _, conversed = conversations.result(rollout)
            rewards.append(conversed.scored(scoring)[0])
            texts += [transcript(said) for said in conversed.said]
        sampled_tokens += int(rollout.mask[:rows].sum() - rollout.mask[:rows:group].sum())
    # The first batch compiles, so it is left out if there are several.
    drawn, seconds = map(sum, zip(*(rates[1:] or rates), strict=True))
    return _Sampled(
        np.concatenate(rewards).reshape(-1, group), texts, sampled_tokens, drawn / seconds
    )


def _votes(reward: Term, texts: list[str], tally: Tally) -> list | None:
    """Runs `extract_answers`, with the texts divided among all processes."""
    count = processes.count()
    own = texts[processes.number() :: count]
    found = tally.everywhere(lambda: extract_answers(reward, own, tally))
    if found[0] is None:
        return None
    return [found[index % count][index // count] for index in range(len(texts))]
