"""Rewards of several terms over the rounds of dynamic sampling."""

from __future__ import annotations

import types

import numpy as np
import pytest

from fp8rl_jax.config import default_config
from fp8rl_jax.data import Stream
from fp8rl_jax.envs import Question, load_rewards
from fp8rl_jax.rollout import Rollout
from fp8rl_jax.sharding import MESH_AXES, make_mesh
from fp8rl_jax.training.sample_step import Version, sample_step


class _Engine(types.SimpleNamespace):
    """A policy that answers right in the second of two samples, from its second round on."""

    def sample(self, weights, prompts, watch, answer):
        rows = len(prompts.temperature)
        tokens = (np.arange(rows) % 2 * (prompts.first_ids[0] > 0))[:, None]
        mask = np.ones((rows, 1), bool)
        return Rollout(tokens, mask, np.zeros((rows, 1)), mask[:, 0], {})

    def metrics(self):
        return {}


def _decode(tokens, mask):
    return [f"step 5 is {token}" for token in tokens[:, 0]]


def _prompts(questions):
    return np.zeros((len(questions), 1)), np.ones(len(questions))


def test_terms_over_all_rounds():
    """`reward/NAME` and `reward_mean` are means over all sampled responses, also of groups that
    were discarded; the rewards of a step are weighted sums."""
    config = default_config()
    config.rollout.update(prompts_per_step=2, group_size=2)
    config.algo.dynamic_sampling = True
    rewards = load_rewards("gsm8k, -0.5*math_equal")
    mesh = make_mesh(dict.fromkeys(MESH_AXES, 1))
    runtime = types.SimpleNamespace(
        config=config,
        resolved=types.SimpleNamespace(
            rewards=rewards, step=None, truncation=None, recorded_numbers=0
        ),
        engine=_Engine(),
        prompts=_prompts,
        decode=_decode,
        conversations=lambda *of_rows: None,
        mesh=mesh,
        own_rows=np.ones(4, bool),
    )
    stream = Stream([Question(str(i), "1") for i in range(4)], 2, 0)
    version = Version(None, 7, np.zeros(2, np.uint32))
    sampled = sample_step(runtime, version, stream, 0, lambda progress: None)
    record, samples = sampled.metrics, sampled.samples
    assert (record["dynamic_rounds"], record["dynamic_discarded_groups"]) == (2, 2)
    assert record["reward/gsm8k"] == 0.25
    weighted = record["reward/gsm8k"] - 0.5 * record["reward/math_equal"]
    assert record["reward_mean"] == pytest.approx(weighted)
    np.testing.assert_array_equal(samples.by_name["gsm8k"], [[0, 1], [0, 1]])
    terms = samples.by_name["gsm8k"] - 0.5 * samples.by_name["math_equal"]
    np.testing.assert_array_equal(samples.rewards, terms)
