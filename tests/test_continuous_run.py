"""A run with continuous batching writes the records of the run without it, bit for bit."""

from __future__ import annotations

import itertools
import pathlib

import numpy as np
import pytest
from dense_reward import share_of_even_bytes

from fp8rl_jax import train
from fp8rl_jax.config import load_config
from fp8rl_jax.metrics import read_jsonl, without_times
from fp8rl_jax.progress import Display

CONFIG = pathlib.Path(__file__).parent / "tiny_config.py"
SLOTS = 5
# Responses of an untrained policy, most of them as long as they may be: beyond a page of 64 tokens.
# An evaluation has fewer rows than there are slots.
FIELDS = {
    "precision.rollout": "f32", "precision.learner": "f32",  # nothing absorbs a difference
    "warmup.steps": 0, "run.steps": 2, "rollout.max_new_tokens": 60, "eval.questions": 4,
    "eval.batch_size": 2, "precision.health": False, "optimizer.learning_rate": 1e-2,
    "optimizer.warmup_steps": 0, "env.reward": "test_continuous_run:reward", "run.seed": 1,
}  # fmt: skip
# (0, None) for a response that is scored, (turns, responses done) for a look at the rollout.
_events: list[tuple[int, np.ndarray | None]] = []


def reward(prompt: str, response: str, answer: str) -> float:
    _events.append((0, None))
    return share_of_even_bytes(prompt, response, answer)


def _run(directory: pathlib.Path, **more) -> tuple[pathlib.Path, train.Outcome]:
    fields = {"run.dir": directory / "run", "run.cache_dir": directory / "cache", **FIELDS, **more}
    overrides = [f"--config.{name}={value}" for name, value in fields.items()]
    return directory / "run", train.train(load_config(str(CONFIG), overrides))


def _records(run: pathlib.Path) -> dict[str, list[dict]]:
    """Without times, and without what only continuous batching has."""
    return {
        name: [
            {k: v for k, v in without_times(r).items() if not k.startswith("rollout_")}
            for r in read_jsonl(run / f"{name}.jsonl")
        ]
        for name in ("metrics", "eval", "samples")
    }


@pytest.fixture(scope="module")
def static_run(tmp_path_factory):
    return _run(tmp_path_factory.mktemp("static"))[0]


@pytest.fixture(scope="module")
def continuous_run(tmp_path_factory):
    """With so few pages that responses lose theirs; (run, outcome, events)."""
    looked = Display.rollout

    def look(self, step, progress):
        _events.append((int(progress.turns.max()), progress.done))
        looked(self, step, progress)

    _events.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Display, "rollout", look)
        fields = {"rollout.slots": SLOTS, "rollout.pages": 6}
        run, outcome = _run(tmp_path_factory.mktemp("continuous"), **fields)
    return run, outcome, list(_events)


def test_equals_the_static_run(static_run, continuous_run):
    run, outcome, _ = continuous_run
    assert _records(run) == _records(static_run)
    assert outcome.compile_counts["sampler"] == outcome.compile_counts["eval_sampler"] == 1
    for record in read_jsonl(run / "metrics.jsonl"):
        assert record["train_rollout_logprob_abs_diff_max"] == 0.0
        assert record["drift_tokens"] > 64 * SLOTS
        assert record["rollout_preemptions"] > 0, "pages must be too few"
        assert 0 < record["rollout_slots_used"] < 1


def test_rewards_are_computed_while_the_rest_decodes(continuous_run):
    """What is scored at a look comes before the part after the next one has been started, so a look
    with another two behind it that still find something to do was early."""
    *_, events = continuous_run
    last = max(i for i, (_, done) in enumerate(events) if done is not None and done.all())
    first = max(i for i, (_, done) in enumerate(events[:last]) if done is not None and done.all())
    step = events[first + 1 : last + 1]
    looks = [i for i, (_, done) in enumerate(step) if done is not None]
    turns = [step[i][0] for i in looks]
    assert len(looks) >= 4 and all(a < b for a, b in itertools.pairwise(turns))
    scored = [sum(done is None for _, done in step[:i]) for i in looks]
    assert 0 < scored[-3] < scored[-1] == 16
    for i, count in zip(looks, scored, strict=True):
        assert count == step[i][1].sum(), "each is scored once, at the first look that finds it"
