"""pass@k against all subsets, standard errors against a simulation, majority votes by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fp8rl_jax.training.accuracy import majority, pass_at_k, sample_metrics, standard_error


@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 1), (5, 2), (6, 4), (6, 6)])
def test_pass_at_k_is_the_mean_over_all_subsets(n, k):
    correct = np.array([[i < c for i in range(n)] for c in range(n + 1)])
    subsets = list(itertools.combinations(range(n), k))
    expected = [np.mean([row[list(subset)].any() for subset in subsets]) for row in correct]
    np.testing.assert_allclose(pass_at_k(correct, k), expected, rtol=1e-13)


def test_pass_at_1_is_the_mean_and_extremes_are_exact():
    correct = np.array([[True, False, False], [False] * 3, [True] * 3])
    np.testing.assert_allclose(pass_at_k(correct, 1), [1 / 3, 0, 1], rtol=1e-15)
    assert list(pass_at_k(correct, 3)) == [1, 0, 1]
    with pytest.raises(ValueError, match="4, of 3"):
        pass_at_k(correct, 4)


def test_standard_error_is_clustered_by_question():
    """Eight samples of a question that agree are one observation, not eight."""
    rng = np.random.default_rng(0)
    means = [(rng.random(100) < 0.5).astype(float) for _ in range(2000)]
    measured = np.std([m.mean() for m in means])
    assert standard_error(means[0]) == pytest.approx(measured, rel=0.1)
    repeated = np.repeat(means[0][:, None], 8, axis=1)
    assert sample_metrics(repeated, None)["pass@1_se"] == standard_error(means[0])
    assert standard_error(np.array([1.0])) == 0.0


def test_majority():
    rewards = np.array([[0, 1, 1, 0], [0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 1]], float)
    texts = ["5", "7", "7", "6", "5", "7", "5", "7", "7", "5", "5", "x", "x", "x", "x", "7"]
    answers = [None if text == "x" else text for text in texts]
    # Most votes; the first of equals; outvoted; answers only.
    assert list(majority(rewards, answers)) == [True, False, False, True]


def test_names_of_the_record():
    record = sample_metrics(np.ones((2, 6)), ["1"] * 12)
    assert list(record)[::2] == ["pass@1", "pass@2", "pass@4", "pass@6", "maj@6"]
    assert set(record.values()) == {0.0, 1.0}
    assert list(sample_metrics(np.ones((2, 1)), ["1"] * 2)) == ["pass@1", "pass@1_se"]
