"""Evaluation of several sets: records, random keys, and what is shown of them."""

from __future__ import annotations

import dataclasses
import itertools
import types

import jax
import numpy as np
import pytest

from fp8rl_jax.base.errors import RewardError
from fp8rl_jax.config import default_config
from fp8rl_jax.envs import Question, load_rewards
from fp8rl_jax.rollout import Rollout
from fp8rl_jax.sharding import MESH_AXES, batch_sharding, make_mesh
from fp8rl_jax.training.evaluate import evaluate
from fp8rl_jax.training.logs import RunLogs, read_jsonl


class _Engine(types.SimpleNamespace):
    """A policy that answers 1, 2, 1, 1, ...; it keeps the keys that it was given."""

    def sample(self, weights, prompts, answer, sampler):
        self.used.append(jax.random.key_data(prompts.key).tolist())
        rows = len(prompts.temperature)
        tokens = np.where(np.arange(rows) % 4 == 1, 2, 1)[:, None]
        mask = np.ones((rows, 1), bool)
        return Rollout(tokens, mask, np.zeros((rows, 1)), mask[:, 0], {})


def _decode(tokens, mask):
    return [str(token) for token in tokens[:, 0]]


def _prompts(questions):
    return np.zeros((len(questions), 1), np.int32), np.ones(len(questions), np.int32)


def _runtime(**sets: int) -> types.SimpleNamespace:
    config = default_config()
    config.eval.update(batch_size=2, samples=3)
    questions = [
        Question(f"{n} {i}", "1", set=n) for n, count in sets.items() for i in range(count)
    ]
    keys = {"eval": jax.random.key(3, impl="threefry2x32")}
    runtime = types.SimpleNamespace(
        config=config,
        engine=_Engine(keys=keys, eval_sampler=None, used=[]),
        prompts=_prompts,
        decode=_decode,
        conversations=lambda *of_rows: None,
        layout=types.SimpleNamespace(rows=batch_sharding(make_mesh(dict.fromkeys(MESH_AXES, 1)))),
        questions={"eval": questions},
        resolved=types.SimpleNamespace(rewards=load_rewards("exact_match, 2*gsm8k"), step=None),
        for_sampling=lambda weights: weights,
    )
    runtime.sampling = runtime
    return runtime


def test_one_set_has_no_name():
    runtime = _runtime(**{"": 3})
    ((record, samples, rewards),) = evaluate(runtime, None, "rl", 5)
    assert "set" not in record and record["questions"] == 3
    assert all("set" not in sample for sample in samples)
    # The first reward decides; two of three samples are right, and so is the majority.
    assert (record["accuracy_greedy"], record["maj@3"]) == (1.0, 1.0)
    np.testing.assert_allclose(record["pass@1"], 2 / 3)
    assert rewards.shape == (3, 4) and rewards[:, 0].mean() == record["accuracy_greedy"]


def test_rows_that_fill_a_batch_are_not_counted(monkeypatch):
    """Tokens per second of the batches after the first, by a clock that says 1 s of each."""
    clock = itertools.count()
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    ((record, *_),) = evaluate(_runtime(**{"": 3}), None, "rl", 5)
    assert record["tokens_per_s_eval"] == 4  # one question's, of the two that fill a batch


def test_several_sets(tmp_path):
    """Each has its records and its own random bits; those of the first are the only one's."""
    alone, runtime = _runtime(a=3), _runtime(a=3, b=1)
    runtime.config.run.loggers = ""
    evaluate(alone, None, "rl", 5)
    found = evaluate(runtime, None, "rl", 5)
    assert [(e.record["set"], e.record["questions"]) for e in found] == [("a", 3), ("b", 1)]
    assert runtime.engine.used[:2] == alone.engine.used
    assert len({str(key) for key in runtime.engine.used}) == 3
    logs = RunLogs(tmp_path, None, runtime.config)
    logs.write_evaluations(found)
    logs.close()
    assert [r["set"] for r in read_jsonl(tmp_path / "eval.jsonl")] == ["a", "b"]
    assert [s["set"] for s in read_jsonl(tmp_path / "samples.jsonl")] == ["a"] * 3 + ["b"]


def test_a_reward_that_fails():
    """A question that is not scored is left out and counted; a set without any stops the run."""
    runtime = _runtime(a=1, b=2)
    runtime.resolved.rewards = load_rewards("gsm8k")
    *others, last = runtime.questions["eval"]
    runtime.questions["eval"] = [*others, dataclasses.replace(last, answer="Paris")]
    records = [e.record for e in evaluate(runtime, None, "rl", 5)]
    assert [r["reward_errors"] for r in records] == [0, 4]
    assert [(r["questions"], r.get("questions_unscored", 0)) for r in records] == [(1, 0), (1, 1)]
    assert np.isfinite([records[1][k] for k in ("accuracy_sampled", "pass@1", "maj@3")]).all()
    runtime.questions["eval"] = [*others, dataclasses.replace(last, answer="Paris")][:0:-1][:1]
    message = "evaluation after rl step 5: all 4 calls of the reward 'gsm8k' .*is not a number"
    with pytest.raises(RewardError, match=message):
        evaluate(runtime, None, "rl", 5)
    runtime.questions["eval"] = [others[0], dataclasses.replace(last, answer="Paris")]
    with pytest.raises(RewardError, match=r"step 5: no question of b was scored \(ValueError"):
        evaluate(runtime, None, "rl", 5)
