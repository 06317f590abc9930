"""Responses that were not scored leave baseline, scale, loss and metrics."""

from __future__ import annotations

import itertools
import statistics

import numpy as np
import pytest

from fp8rl_jax.config import default_config
from fp8rl_jax.rl import Outcomes, informative_groups, prepare
from fp8rl_jax.rl.advantages import BASELINES, SCALES
from fp8rl_jax.rl.algorithm import algorithm_of

_NAN = float("nan")
_REWARDS = np.array([[-1, -12, _NAN, -2], [3, 3, 3, _NAN], [_NAN, 0.5, _NAN, _NAN], [1, 0, 1, 4.5]])
_R = 5


def _prepared(rewards, mask, **fields):
    algo = default_config().algo
    algo.update(fields)
    logps = np.zeros(mask.shape, np.float32)
    algorithm = algorithm_of(algo, _R, "none")
    finished = np.ones(len(mask), bool)
    return algorithm, prepare(algorithm, Outcomes(rewards, mask, finished, logps, logps, logps))


def _mask(shape):
    rng = np.random.default_rng(3)
    return np.arange(_R) < rng.integers(1, _R + 1, np.prod(shape))[:, None]


def _expected(rewards, mask, baseline, scale):
    """Advantages of responses, by lists of those that were scored."""
    groups = [[x for x in row if not np.isnan(x)] for row in rewards]
    everything = list(itertools.chain(*groups))
    found = np.full(rewards.shape, np.nan)
    for i, group in enumerate(groups):
        for j, reward in enumerate(rewards[i]):
            if np.isnan(reward):
                continue
            others = list(group)
            others.remove(reward)
            base = {
                "group_mean": statistics.fmean(group),
                "leave_one_out": statistics.fmean(others) if others else reward,
                "batch_mean": statistics.fmean(everything),
                "none": 0.0,
            }[baseline]
            found[i, j] = reward - base
    if scale == "group_std":
        widths = [statistics.pstdev(g) + 1e-4 if len({*g}) > 1 else np.inf for g in groups]
        found /= np.array(widths)[:, None]
    if scale == "batch_std":
        found /= statistics.pstdev(x for x in found.flat if not np.isnan(x)) + 1e-8
    if scale == "token_std":
        each = [
            x
            for x, row in zip(found.flat, mask, strict=True)
            for _ in range(row.sum())
            if not np.isnan(x)
        ]
        found = (found - statistics.fmean(each)) / (statistics.pstdev(each) + 1e-8)
    return np.nan_to_num(found).reshape(-1)


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("scale", SCALES)
def test_advantages_are_those_of_the_scored(baseline, scale):
    mask = _mask(_REWARDS.shape)
    algorithm, found = _prepared(_REWARDS, mask, baseline=baseline, scale=scale)
    expected = _expected(_REWARDS, mask, baseline, scale)
    np.testing.assert_allclose(found.advantages, expected[:, None] * mask, rtol=1e-5, atol=1e-6)
    unscored = np.isnan(_REWARDS).reshape(-1)
    assert not found.advantages[unscored].any() and not found.keep[unscored].any()
    np.testing.assert_array_equal(found.keep[~unscored], mask[~unscored])
    assert np.isfinite(list(found.metrics.values())).all()
    weights = algorithm.aggregation(found.keep)
    assert not weights[unscored].any() and weights.any()


def test_a_failed_grader_is_not_the_best_of_its_group():
    """Among rewards below 0, as 0 it would be."""
    mask = _mask((1, 4))
    _, found = _prepared(_REWARDS[:1], mask)
    of_rows = found.advantages[:, 0]
    assert of_rows[2] == 0.0 and of_rows.argmax() == 0


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("scale", SCALES)
def test_nothing_changes_where_all_are_scored(baseline, scale):
    """Bit for bit numpy's mean and std."""
    rewards = np.random.default_rng(5).normal(size=(6, 7))
    advantages = {
        "group_mean": rewards - rewards.mean(1, keepdims=True),
        "leave_one_out": (rewards - rewards.mean(1, keepdims=True)) * 7 / 6,
        "batch_mean": rewards - rewards.mean(),
        "none": rewards,
    }[baseline]
    np.testing.assert_array_equal(BASELINES[baseline](rewards), advantages)
    mask = _mask(rewards.shape)
    found = SCALES[scale](advantages.reshape(-1, 1) * np.ones(mask.shape), rewards, mask)
    if scale == "group_std":
        deviation = np.repeat(rewards.std(1) + 1e-4, 7)[:, None]
        np.testing.assert_array_equal(
            found, np.where(mask, advantages.reshape(-1, 1) / deviation, 0)
        )


@pytest.mark.parametrize("baseline", BASELINES)
def test_groups_of_equal_rewards_have_no_gradient(baseline):
    """Also where the baseline is that of the whole step, or none."""
    rewards = np.array([[1.0, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]])
    mask = _mask(rewards.shape)
    _, found = _prepared(rewards, mask, baseline=baseline)
    of_groups = found.advantages.reshape(3, -1)
    assert of_groups.any(axis=1).tolist() == [False, True, False]
    assert np.abs(of_groups).max() < 3


def test_a_group_with_one_score_has_no_gradient():
    np.testing.assert_array_equal(informative_groups(_REWARDS), [True, False, False, True])
    assert not informative_groups(np.full((2, 3), np.nan)).any()
