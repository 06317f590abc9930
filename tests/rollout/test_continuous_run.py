"""A run with continuous batching writes the records of the run without it, bit for bit.

In float32, which nothing absorbs: tests/rollout/test_continuous.py.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tiny_run import overrides, reproducible, train_counting

from fp8rl_jax.envs import Scoring
from fp8rl_jax.training.logs import read_jsonl
from fp8rl_jax.training.progress import Display

SLOTS, STEPS = 5, 3
# (0, None) for a response that goes to its reward, (iterations, responses done) for a look at the
# rollout.
_events: list[tuple[int, np.ndarray | None]] = []


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of an untrained policy, whose responses are long, without and with continuous batching.

    With so few pages that responses lose theirs: (static run, continuous run, outcome, events).
    """
    looked, begin = Display.rollout, Scoring.__init__

    def hand_in(self, terms, questions, responses, *more):
        _events.extend([(0, None)] * len(responses))
        begin(self, terms, questions, responses, *more)

    def look(self, step, progress):
        _events.append((int(progress.iterations.max()), progress.done))
        looked(self, step, progress)

    static, continuous = (tmp_path_factory.mktemp(name) for name in ("static", "continuous"))
    fields = {"run.steps": STEPS, "sft.steps": 0}
    train_counting(overrides(static, **fields))
    _events.clear()
    fields |= {"rollout.slots": SLOTS, "rollout.pages": 4}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Display, "rollout", look)
        patch.setattr(Scoring, "__init__", hand_in)
        _, counts = train_counting(overrides(continuous, **fields))
    return static, continuous, counts, list(_events)


def _without_slots(records: list[dict]) -> list[dict]:
    """RL steps and evaluations without what only continuous batching has."""
    return [{k: v for k, v in record.items() if not k.startswith("rollout_")} for record in records]


@pytest.mark.slow
def test_equals_the_static_run(runs):
    static, directory, counts, _ = runs
    ours, theirs = reproducible(directory), reproducible(static)
    for name in ("metrics", "eval", "samples"):
        assert theirs[name] and _without_slots(ours[name]) == theirs[name], name
    assert counts["sampler"] == counts["eval_sampler"] == 1
    records = read_jsonl(directory / "run" / "metrics.jsonl")
    preemptions = [record["rollout_preemptions"] for record in records]
    assert sum(preemptions) > 0, f"pages must be too few: {preemptions}"
    for record in records:
        assert record["train_rollout_logprob_abs_diff_max"] == 0.0
        assert 0 < record["rollout_slots_used"] < 1


@pytest.mark.slow
def test_rewards_are_computed_while_the_rest_decodes(runs):
    """What is scored at a look comes before the part after the next one has been started, so a look
    with another two behind it that still find something to do was early."""
    *_, events = runs
    last = max(i for i, (_, done) in enumerate(events) if done is not None and done.all())
    first = max(i for i, (_, done) in enumerate(events[:last]) if done is not None and done.all())
    step = events[first + 1 : last + 1]
    looks = [i for i, (_, done) in enumerate(step) if done is not None]
    iterations = [step[i][0] for i in looks]
    assert len(looks) >= 4 and all(a < b for a, b in itertools.pairwise(iterations))
    scored = [sum(done is None for _, done in step[:i]) for i in looks]
    assert 0 < scored[-3] < scored[-1] == 16
    for i, count in zip(looks, scored, strict=True):
        assert count == step[i][1].sum(), "each is scored once, at the first look that finds it"
