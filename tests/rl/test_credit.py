"""Credit by reply: an advantage counts what came from its reply on, beside the replies of the
same number in the group. Against a loop over responses and replies."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fp8rl_jax.config import default_config
from fp8rl_jax.rl import Outcomes, algorithm_of, prepare

_SLOTS = 14


def _algorithm(**fields):
    algo = default_config().algo
    algo.update({"scale": "none", "credit": "turn", **fields})
    return algorithm_of(algo, _SLOTS, "none")


def _conversations(rng: np.random.Generator, responses: int):
    """Masks with a hole between two replies, what each reply was given, and a reward at the end."""
    mask = np.zeros((responses, _SLOTS), bool)
    replies = rng.integers(1, 5, responses)
    turns, last = np.zeros((responses, 4)), rng.normal(size=responses)
    for row, count in enumerate(replies):
        for turn in range(count):
            mask[row, 3 * turn : 3 * turn + rng.integers(1, 3)] = True
        turns[row, :count] = rng.normal(size=count)
    return mask, replies, turns, last


def _expected(mask, replies, turns, last, group: int) -> np.ndarray:
    """Advantages of the group's mean, token by token."""
    expected = np.zeros(mask.shape)
    for row, slot in np.argwhere(mask):
        turn, first = slot // 3, row // group * group
        left = {r: turns[r, turn:].sum() + last[r] for r in range(first, first + group)}
        others = [value for r, value in left.items() if replies[r] > turn]
        expected[row, slot] = left[row] - np.mean(others)
    return expected


def _prepared(algorithm, mask, turns, rewards, group, **more):
    zeros = np.zeros(mask.shape, np.float32)
    finished, lengths = np.ones(len(mask), bool), np.full(len(mask), 3)
    shaped = rewards.reshape(-1, group)
    given = shaped, mask, finished, zeros, zeros, zeros, None
    return prepare(algorithm, Outcomes(*given, turns=turns, lengths=lengths, **more))


@pytest.mark.parametrize("seed", range(3))
def test_rewards_from_a_reply_on(seed):
    mask, replies, turns, last = _conversations(np.random.default_rng(seed), 12)
    rewards = turns.sum(1) + last
    found = _prepared(_algorithm(), mask, turns, rewards, 4)
    expected = _expected(mask, replies, turns, last, 4)
    np.testing.assert_allclose(found.advantages, expected, atol=1e-6)


def test_what_was_not_scored_has_no_part():
    mask, replies, turns, last = _conversations(np.random.default_rng(3), 8)
    turns[2, 0] = np.nan
    found = _prepared(_algorithm(), mask, turns, turns.sum(1) + last, 4)
    assert (found.advantages[2] == 0).all() and not found.keep[2].any()
    assert np.isfinite(found.advantages).all()
    others = np.flatnonzero(np.arange(8) != 2)
    replies[2] = 0
    expected = _expected(mask, replies, np.nan_to_num(turns), last, 4)
    np.testing.assert_allclose(found.advantages[others], expected[others], atol=1e-6)


def test_by_response_all_tokens_have_one():
    mask, _, turns, last = _conversations(np.random.default_rng(4), 8)
    whole = _algorithm(credit="response")
    rewards = turns.sum(1) + last
    found = _prepared(whole, mask, turns, rewards, 4)
    of_one = _prepared(dataclasses.replace(whole), mask, None, rewards, 4)
    np.testing.assert_array_equal(found.advantages, of_one.advantages)
    for row, own in zip(found.advantages, mask, strict=True):
        assert len(set(row[own])) == 1


def test_the_length_counts_what_the_environment_said():
    """The penalty for length takes the whole response, not the drawn tokens alone."""
    mask, _, turns, last = _conversations(np.random.default_rng(5), 8)
    algorithm = dataclasses.replace(_algorithm(), length=3, overlong_buffer=2, overlong_factor=1.0)
    found = _prepared(algorithm, mask, turns, turns.sum(1) + last, 4)
    assert found.metrics["overlong_penalty_mean"] == -1.0


def test_a_group_is_scaled_by_its_replies_of_the_same_number():
    """Not by the deviation of whole responses, which may be 0 where their replies differ."""
    turns = np.array([[0.5, 0.5], [0.0, 1.0]])
    mask = np.zeros((2, _SLOTS), bool)
    mask[:, [0, 3]] = True
    found = _prepared(_algorithm(scale="group_std"), mask, turns, turns.sum(1), 2)
    np.testing.assert_allclose(found.advantages[:, 3], [-1, 1], atol=1e-3)
    np.testing.assert_allclose(found.advantages[:, 0], 0.0)
