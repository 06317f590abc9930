"""Intervals and tests of the studies, by scipy and by resampling with fixed seeds.

The unit is a cluster of dependent values, such as the tokens of a sequence or of a question's
samples: a bootstrap draws clusters with replacement (Cameron, Gelbach and Miller, 2008). Intervals
are percentiles of 10,000 draws.

Not done: corrections of the bootstrap's small bias with few clusters (a 95% interval of 8 clusters
covers a few percent less), and corrections for several hypotheses.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import norm, t

DRAWS = 10_000
LEVEL = 0.95
_NORMAL, _POWER = norm.ppf([(1 + LEVEL) / 2, 0.8])
_LARGE = 1000  # seeds, from which on Student's quantile is the normal one, to 0.2%
_SEED = 0
_AT_ONCE = 1 << 24  # most numbers in memory at once


class Estimate(NamedTuple):
    """A figure and its interval of confidence LEVEL."""

    value: float
    low: float
    high: float


class Range(Estimate):
    """The largest of some exact values, with their range as the interval."""


class SeedMean(Estimate):
    """A mean over seeds, with Student's interval.

    Attributes:
      values: (S,) one value for each seed.
      least: least standard deviation that is assumed for the values.
    """

    values: np.ndarray
    least: float

    def __new__(cls, value: float, low: float, high: float, values: np.ndarray, least: float):
        found = super().__new__(cls, value, low, high)
        found.values, found.least = values, least
        return found


class Trend(NamedTuple):
    """A rank correlation from -1 to 1, and its two-sided p-value under no correlation."""

    value: float
    p: float


def cluster_bootstrap(
    clusters: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray]
) -> Estimate:
    """Estimates a statistic of the mean over clusters, with its bootstrap interval.

    Args:
      clusters: (S, ...) one entry for each cluster.
      statistic: function of the means of D draws (D, ...) that returns (D,).

    Raises:
      ValueError: there are fewer than two clusters.
    """
    clusters = np.asarray(clusters, np.float64)
    count = len(clusters)
    if count < 2:
        raise ValueError(f"an interval needs at least two clusters, and there are {count}")
    weights = _draws(count)
    flat = clusters.reshape(count, -1)
    step = max(_AT_ONCE // flat.shape[1], 1)
    values = np.concatenate(
        [
            statistic((part @ flat).reshape(len(part), *clusters.shape[1:]))
            for part in np.split(weights, range(step, DRAWS, step))
        ]
    )
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    value = statistic(clusters.mean(axis=0, keepdims=True))
    return Estimate(float(value[0]), float(low), float(high))


@functools.lru_cache(maxsize=2)
def _draws(count: int) -> np.ndarray:
    """Returns each cluster's share in each draw, (DRAWS, S); all figures use the same draws."""
    rng = np.random.default_rng(_SEED)
    return rng.multinomial(count, np.full(count, 1 / count), size=DRAWS) / count


def clustered_mean(sums: np.ndarray, counts: np.ndarray) -> Estimate:
    """Estimates the mean of values from their sums (S,) and counts (S,) in each cluster."""
    return cluster_bootstrap(np.stack([sums, counts], axis=1), lambda m: m[:, 0] / m[:, 1])


def ratio_of_means(
    sums: np.ndarray, counts: np.ndarray, other_sums: np.ndarray, other_counts: np.ndarray
) -> Estimate:
    """Estimates the ratio of two `clustered_mean`s over the same clusters, drawn together."""
    clusters = np.stack([sums, counts, other_sums, other_counts], axis=1)
    return cluster_bootstrap(clusters, lambda m: m[:, 0] / m[:, 1] / (m[:, 2] / m[:, 3]))


def seed_mean(
    values: np.ndarray, least: float = 0.0, within: tuple[float, float] = (-math.inf, math.inf)
) -> SeedMean:
    """Returns the mean over seeds with Student's interval, which is infinite for one seed.

    Args:
      values: (S,) one value for each seed.
      least: known standard deviation of one value's noise, used if the values' is smaller: a few
        rounded values may be equal by chance.
      within: bounds of the figure, to which Student's interval of two values or more is cut.
    """
    values = np.asarray(values, np.float64)
    mean, count = float(values.mean()), len(values)
    if count < 2:
        return SeedMean(mean, -math.inf, math.inf, values, least)
    reach = float(t.ppf((1 + LEVEL) / 2, count - 1)) * _deviation(values, least) / math.sqrt(count)
    low, high = max(mean - reach, within[0]), min(mean + reach, within[1])
    return SeedMean(mean, low, high, values, least)


def _deviation(values: np.ndarray, least: float) -> float:
    """Returns the standard deviation of a sample (S,), at least `least`."""
    return max(float(np.std(values, ddof=1)), least)


def span(values: Sequence[float]) -> Range:
    """Returns the largest of some exact values, and their range."""
    return Range(max(values), min(values), max(values))


def kendall_tau(series: np.ndarray) -> np.ndarray:
    """Returns Mann-Kendall's S of series (..., N) over its largest value: 1 for a rising series."""
    series = np.asarray(series, np.float64)
    length = series.shape[-1]
    total = np.zeros(series.shape[:-1])
    for lag in range(1, length):
        total += np.sign(series[..., lag:] - series[..., :-lag]).sum(axis=-1)
    return total / (length * (length - 1) / 2)


def mann_kendall(series: np.ndarray, block: int) -> Trend:
    """Tests a series (N,) with dependent neighbours for a trend, by Mann-Kendall's test.

    The p-value is from a moving-block bootstrap (Künsch, 1989): a series made of blocks of `block`
    neighbours, drawn with replacement, keeps the dependence but not the trend.

    Raises:
      ValueError: `block` is below 1 or above N / 2.
    """
    series = np.asarray(series, np.float64)
    length = len(series)
    if not 1 <= block <= length // 2:
        raise ValueError(f"blocks of {block} in a series of {length}; write 1 to {length // 2}")
    tau = float(kendall_tau(series))
    rng = np.random.default_rng(_SEED)
    count = -(-length // block)
    starts = rng.integers(0, length - block + 1, size=(DRAWS, count))
    places = (starts[:, :, None] + np.arange(block)).reshape(DRAWS, -1)[:, :length]
    found = kendall_tau(series[places])
    extreme = int((np.abs(found) >= abs(tau) - 1e-12).sum())
    return Trend(tau, (extreme + 1) / (DRAWS + 1))


def equivalence(sample: np.ndarray, margin: float, least: float = 0.0) -> float:
    """Returns the p-value of two one-sided t-tests (TOST) that a mean is within `margin` of 0.

    It is the larger of the two p-values: below 0.05 the mean is equivalent to 0 (Schuirmann, 1987).

    Args:
      sample: (S,) one value for each seed.
      margin: number above 0, set before the data are seen.
      least: as in `seed_mean`.

    Raises:
      ValueError: there are fewer than two values, or `margin` is not above 0.
    """
    sample = np.asarray(sample, np.float64)
    if len(sample) < 2 or not margin > 0:
        raise ValueError("an equivalence test needs two values and a margin above 0")
    distance = float(sample.mean())
    error = _deviation(sample, least) / math.sqrt(len(sample))
    if error == 0:
        return 0.0 if abs(distance) < margin else 1.0
    nearest = (margin - abs(distance)) / error
    return float(t.sf(nearest, len(sample) - 1))


def seeds_needed(differences: np.ndarray, effect: float, least: float = 0.0) -> int:
    """Returns how many pairs of runs a t-test at 5% needs to find a mean difference of `effect` in
    four of five cases: the least n from 2 on with ``n >= ((t + 0.84) sd / effect)^2``.

    sd is the standard deviation of the `differences` (S,), at least `least`; t is the quantile of
    Student's distribution of n - 1 degrees of freedom at 97.5%, and 0.84 that of the normal
    distribution at 80%.

    Raises:
      ValueError: there are fewer than two differences, so no standard deviation.
    """
    if len(differences) < 2:
        raise ValueError("a standard deviation needs two differences")
    deviation = _deviation(np.asarray(differences, np.float64), least)
    count = max(math.ceil(((_NORMAL + _POWER) * deviation / effect) ** 2), 2)
    while (
        count < _LARGE
        and count < ((t.ppf((1 + LEVEL) / 2, count - 1) + _POWER) * deviation / effect) ** 2
    ):
        count += 1
    return count
