"""Verdicts and their sentences."""

import numpy as np
import pytest

from studies.hypotheses import Hypothesis, Zone
from studies.statistics import Estimate, seed_mean


@pytest.mark.parametrize(
    ("interval", "p", "verdict"),
    [
        ((1.1, 1.9), 0.01, "supported"),
        ((1.1, 1.9), 0.2, "not resolved"),
        ((0.9, 1.9), 0.01, "not resolved"),
        ((2.1, 2.9), 0.01, "not supported"),
    ],
)
def test_verdicts(interval, p, verdict):
    hypothesis = Hypothesis("h", "It is so", "its size", Zone(1.0, 2.0), "a test")
    found = hypothesis.judge(Estimate(sum(interval) / 2, *interval), p)
    assert found["verdict"] == verdict
    assert f"It is so: **{verdict}**. Its size:" in found["sentence"]
    assert f"95% interval {interval[0]} to {interval[1]}" in found["sentence"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        # sd 1.1547, 0.5 above the criterion; Student's quantile is 2.018: (2.859 sd / 0.5)^2 = 43.6
        ([0.5, 0.5, 2.5, 2.5], " About 44 seeds would tell, "),
        ([1.6, 2.0], " About 4 seeds would tell, "),
        ([0.5, 1.6], " More than 200 seeds would tell, "),
        ([1.0], ""),
        ([0.5, 1.5], ""),
        ([2.0, 2.1, 2.2], ""),
    ],
    ids=["wide", "few", "near", "one", "on the criterion", "told"],
)
def test_seeds_that_would_tell(values, words):
    found = Hypothesis("h", "It is so", "its size", Zone(low=1.0)).judge(
        seed_mean(np.array(values)), seeds=values
    )
    assert words in found["sentence"]
    assert ("would tell" in found["sentence"]) == bool(words)


def test_seeds_that_need_not_agree():
    """Their scatter tells how many would do, and one outside of the zone refutes nothing."""
    values = [1.4, 1.5, 1.6, 0.9]
    hypothesis = Hypothesis("h", "It is so", "its size", Zone(low=0.6))
    found = hypothesis.judge(seed_mean(np.array(values)))
    assert found["verdict"] == "supported" and not found["seeds"]
    hypothesis = Hypothesis("h", "It is so", "its size", Zone(low=1.0))
    found = hypothesis.judge(seed_mean(np.array(values)))
    assert found["verdict"] == "not resolved" and " seeds would tell" in found["sentence"]


def test_seeds_that_agree_by_chance():
    """The evaluation's noise, which made the interval wide, is what further seeds must beat."""
    found = Hypothesis("h", "It is so", "its size", Zone(low=1.0)).judge(
        seed_mean(np.full(3, 1.1), least=0.3)
    )
    assert " About 73 seeds would tell, " in found["sentence"]


def test_no_number_of_seeds_where_another_thing_is_missing():
    """The interval is of questions, or the study has a reason of its own."""
    hypothesis = Hypothesis("h", "It is so", "its size", Zone(low=1.0))
    values = [0.5, 2.5, 2.5]
    found = [
        hypothesis.judge(Estimate(1.5, 0.5, 2.5), seeds=values),
        hypothesis.judge(seed_mean(np.array(values)), seeds=values, unresolved="for a reason"),
    ]
    assert all(x["verdict"] == "not resolved" for x in found)
    assert not any("would tell" in x["sentence"] for x in found)
