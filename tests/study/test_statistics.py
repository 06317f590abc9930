"""Intervals and tests of the studies, against scipy and against figures written out by hand."""

import numpy as np
import pytest
from scipy import stats

from studies.hypotheses import Hypothesis, Zone
from studies.statistics import (
    cluster_bootstrap,
    clustered_mean,
    equivalence,
    kendall_tau,
    mann_kendall,
    ratio_of_means,
    seed_mean,
    seeds_needed,
    span,
)

_RNG = np.random.default_rng(5)


def test_interval_of_equal_clusters_is_scipys():
    """With one value a cluster the interval is the ordinary percentile bootstrap's."""
    sample = _RNG.normal(3, 1, 40)
    found = clustered_mean(sample, np.ones(40))
    theirs = stats.bootstrap(
        (sample,), np.mean, n_resamples=10_000, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval
    assert found.value == pytest.approx(sample.mean())
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), abs=0.02)


def test_clusters_are_drawn_whole():
    """Values that repeat within clusters carry the information of one: the interval is wider."""
    means = _RNG.normal(0, 1, 20)
    whole = clustered_mean(50 * means, np.full(20, 50.0))
    alone = clustered_mean(np.repeat(means, 50), np.ones(1000))
    assert whole.value == pytest.approx(alone.value)
    assert whole.high - whole.low > 5 * (alone.high - alone.low)


def test_ratio():
    """Clusters of both means are drawn together: an exact multiple has an interval of width 0."""
    sums, counts = _RNG.uniform(1, 9, 12), _RNG.integers(3, 9, 12).astype(float)
    found = ratio_of_means(3 * sums, counts, sums, counts)
    assert found == pytest.approx((3, 3, 3))
    other = ratio_of_means(sums, counts, np.ones(12), np.ones(12))
    assert other.value == pytest.approx(sums.sum() / counts.sum())
    assert other.low < other.value < other.high


def test_one_cluster_has_no_interval():
    with pytest.raises(ValueError, match="two clusters"):
        cluster_bootstrap(np.ones((1, 3)), lambda m: m[:, 0])


def test_two_seeds():
    """One degree of freedom is Cauchy's distribution, whose quantile is a tangent."""
    reach = np.tan(0.475 * np.pi) * 0.1
    assert seed_mean([1.0, 1.2]) == pytest.approx((1.1, 1.1 - reach, 1.1 + reach), abs=1e-12)
    for mean in (0.05, -0.05, 0.5):
        sample = mean + np.array([-0.1, 0.1])
        expected = 0.5 - np.arctan((0.3 - abs(mean)) / 0.1) / np.pi
        assert equivalence(sample, 0.3) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("count", [2, 3, 5, 40])
def test_mean_of_seeds(count):
    """Student's interval, as scipy's; without bounds from one seed."""
    values = _RNG.normal(3, 0.5, count)
    found = seed_mean(values)
    theirs = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert found.value == pytest.approx(values.mean())
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), rel=1e-12)
    assert seed_mean(values[:1]) == (values[0], -np.inf, np.inf)
    assert seed_mean(np.full(count, 2.0)) == (2, 2, 2)


def test_span():
    found = span([0.2, 0.0, 0.3])
    assert found == (0.3, 0.0, 0.3)
    sentence = Hypothesis("h", "It is so", "its size", Zone(0.0, 1.0)).judge(found)["sentence"]
    assert "Its size: 0.3, range 0 to 0.3;" in sentence


def test_mann_kendall():
    """tau is scipy's; with blocks of one the p-value is that of Kendall's test."""
    series = np.arange(15) + _RNG.normal(0, 9, 15)
    theirs = stats.kendalltau(np.arange(15), series)
    found = mann_kendall(series, 1)
    assert found.value == pytest.approx(theirs.statistic)
    assert found.p == pytest.approx(theirs.pvalue, abs=0.06)
    assert kendall_tau(np.array([[1, 2, 3], [3, 2, 1]])).tolist() == [1, -1]
    with pytest.raises(ValueError, match="blocks of 9"):
        mann_kendall(series, 9)


def test_dependence_is_no_trend():
    """A slow wave: independent draws would call it a trend more easily than blocks do."""
    wave = np.repeat(_RNG.normal(size=8), 10) + 0.1 * np.arange(80) / 80
    assert mann_kendall(wave, 20).p > mann_kendall(wave, 1).p


@pytest.mark.parametrize("mean", [0.4, 0.0, -0.05, -1.0])
def test_equivalence(mean):
    """p is the larger one of scipy's two one-sided tests."""
    sample, margin = _RNG.normal(mean, 0.2, 9), 0.3
    above = stats.ttest_1samp(sample, -margin, alternative="greater").pvalue
    below = stats.ttest_1samp(sample, margin, alternative="less").pvalue
    assert equivalence(sample, margin) == pytest.approx(max(above, below), abs=1e-12)


def test_equivalence_of_constants():
    assert equivalence(np.full(4, -0.1), 0.2) == 0
    assert equivalence(np.full(4, -0.3), 0.2) == 1
    with pytest.raises(ValueError, match="margin above 0"):
        equivalence(np.zeros(4), 0)


def test_known_deviation():
    """A larger known deviation takes the place of the sample's."""
    reach = stats.t.ppf(0.975, 4) * 0.3 / 5**0.5
    found = seed_mean(np.ones(5), least=0.3)
    assert found == pytest.approx((1, 1 - reach, 1 + reach), abs=1e-12)
    assert equivalence(np.zeros(5), 0.1) == 0
    assert equivalence(np.zeros(5), 0.1, least=0.3) > 0.05


@pytest.mark.parametrize("effect", [0.2, 0.5, 1.0, 2.0])
def test_seeds_needed(effect):
    """Exact power of the t-test, by the noncentral distribution: four fifths, to one seed."""

    def power(count: int) -> float:
        bound = stats.t.ppf(0.975, count - 1)
        return stats.nct.sf(bound, count - 1, effect * np.sqrt(count))

    found = seeds_needed(np.array([-1.0, 1.0]) / np.sqrt(2), effect)  # sd 1
    assert power(found - 1) < 0.8 < power(found + 1)


def test_seeds_needed_of_constants():
    assert seeds_needed([-1.0, 1.0], 1e-9) > 1e18, "it ends"
    assert seeds_needed(np.zeros(3), 0.03) == 2
    assert seeds_needed(np.zeros(3), 0.03, least=0.1) == seeds_needed([-0.1, 0.0, 0.1], 0.03)
    with pytest.raises(ValueError, match="two differences"):
        seeds_needed(np.zeros(1), 0.03)
