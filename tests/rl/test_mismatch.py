"""Drift metrics against plain loops over Python floats."""

import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from fp8rl_jax.rl import mismatch_metrics

_METRICS = {
    "token_mult_prob_error",
    "train_rollout_logprob_abs_diff",
    "train_rollout_logprob_abs_diff_max",
    "logprob_equal_frac",
    "mismatch_kl",
    "mismatch_k1",
    "chi2_token",
    "ess_ratio",
    "tis_clipfrac",
    "tis_weight_mean",
    "tis_weight_max",
    "drift_tokens",
}
_finite = lambda low, high: st.floats(low, high, width=32)


def _metrics_by_loops(learner, rollout, mask, cap):
    d = [
        float(learner[i][j]) - float(rollout[i][j])
        for i in range(len(mask))
        for j in range(len(mask[i]))
        if mask[i][j]
    ]
    n = len(d)
    clamped = [min(max(x, -20.0), 20.0) for x in d]
    w = [math.exp(x) for x in clamped]
    truncated = [min(x, cap) for x in w]
    return {
        "token_mult_prob_error": sum(math.exp(abs(x)) for x in clamped) / n,
        "train_rollout_logprob_abs_diff": sum(abs(x) for x in d) / n,
        "train_rollout_logprob_abs_diff_max": max(abs(x) for x in d),
        "logprob_equal_frac": sum(x == 0 for x in d) / n,
        "mismatch_kl": sum(math.exp(x) - x - 1 for x in clamped) / n,
        "mismatch_k1": -sum(d) / n,
        "chi2_token": sum(math.exp(2 * x) - 1 for x in clamped) / n,
        "ess_ratio": sum(w) ** 2 / (n * sum(x * x for x in w)),
        "tis_clipfrac": sum(x > cap for x in w) / n,
        "tis_weight_mean": sum(truncated) / n,
        "tis_weight_max": max(truncated),
        "drift_tokens": n,
    }


def _rollout(seed, shape=(6, 9), spread=0.5, equal=0.5):
    """Log-probabilities of two sides, some of them equal, and a mask."""
    rng = np.random.default_rng(seed)
    rollout = -rng.exponential(1.0, shape).astype(np.float32)
    noise = rng.normal(0, spread, shape) * (rng.random(shape) > equal)
    return rollout + noise.astype(np.float32), rollout, rng.random(shape) < 0.6


@hypothesis.settings(deadline=None)
@hypothesis.given(st.integers(0, 2**32 - 1), st.floats(0, 3), st.floats(0, 1), st.floats(0.5, 5))
def test_mismatch_metrics(seed, spread, equal, cap):
    """Every metric against its formula in a loop."""
    learner, rollout, mask = _rollout(seed, spread=spread, equal=equal)
    mask[0, 0] = True
    got = mismatch_metrics(learner, rollout, mask, cap)
    expected = _metrics_by_loops(learner, rollout, mask, cap)
    assert set(got) == set(expected) == _METRICS
    for name, value in expected.items():
        assert type(got[name]) is float
        assert got[name] == pytest.approx(value, rel=1e-12, abs=1e-14), name


def test_mismatch_metrics_of_identical_inputs_are_exact():
    """The zero-drift values: not close to them, equal to them."""
    _, rollout, mask = _rollout(0, shape=(100, 50))
    assert mismatch_metrics(rollout, rollout.copy(), mask, 2.0) == {
        "token_mult_prob_error": 1.0,
        "train_rollout_logprob_abs_diff": 0.0,
        "train_rollout_logprob_abs_diff_max": 0.0,
        "logprob_equal_frac": 1.0,
        "mismatch_kl": 0.0,
        "mismatch_k1": 0.0,
        "chi2_token": 0.0,
        "ess_ratio": 1.0,
        "tis_clipfrac": 0.0,
        "tis_weight_mean": 1.0,
        "tis_weight_max": 1.0,
        "drift_tokens": float(mask.sum()),
    }
    k1 = mismatch_metrics(rollout, rollout, mask, 2.0)["mismatch_k1"]
    assert math.copysign(1.0, k1) == 1.0  # no -0.0 in a log


@pytest.mark.parametrize("level", [-1e-4, -0.7, -9.0])
@pytest.mark.parametrize("direction", [-math.inf, math.inf])
def test_mismatch_metrics_see_one_ulp(level, direction):
    """One last bit in one of 10,000 tokens shows in the maximum, the share and the means."""
    rollout = np.full((100, 100), level, np.float32)
    learner = rollout.copy()
    learner[37, 11] = np.nextafter(np.float32(level), np.float32(direction))
    got = mismatch_metrics(learner, rollout, np.ones((100, 100), bool), 2.0)
    step = abs(float(learner[37, 11]) - float(np.float32(level)))
    assert got["train_rollout_logprob_abs_diff_max"] == step > 0
    assert got["train_rollout_logprob_abs_diff"] == pytest.approx(step / 10_000)
    assert got["logprob_equal_frac"] == 0.9999
    assert got["token_mult_prob_error"] > 1
    assert got["mismatch_k1"] != 0
    assert got["drift_tokens"] == 10_000


@pytest.mark.parametrize("side", [0, 1])
def test_mismatch_metrics_of_nan(side):
    """One NaN on either side makes means and maxima NaN; the token does not count as equal."""
    pair = [np.full((2, 5), -1.0, np.float32) for _ in range(2)]
    pair[side][1, 2] = math.nan
    got = mismatch_metrics(*pair, np.ones((2, 5), bool), 2.0)
    shares = {"logprob_equal_frac", "tis_clipfrac", "drift_tokens"}
    assert all(math.isnan(got[name]) for name in _METRICS - shares)
    assert got["logprob_equal_frac"] == 0.9


def test_mismatch_metrics_ignore_what_the_mask_hides():
    """Hidden slots may hold anything, NaN and infinity included."""
    learner, rollout, mask = _rollout(5)
    clean = mismatch_metrics(learner, rollout, mask, 2.0)
    for junk in (math.nan, math.inf, -1e30, 0.0):
        dirty = np.where(mask, learner, np.float32(junk))
        assert mismatch_metrics(dirty, rollout, mask, 2.0) == clean
    assert mismatch_metrics(learner, rollout, mask.astype(np.float32), 2.0) == clean


def test_mismatch_metrics_cap():
    """The cap bounds the logged weights, and a weight at the cap is not clipped."""
    learner = np.log(np.array([[1.0, 3.0, 0.25, 0.5]]))
    rollout = np.zeros((1, 4))
    got = mismatch_metrics(learner, rollout, np.ones((1, 4)), 2.0)
    assert got["tis_clipfrac"] == 0.25
    assert got["tis_weight_max"] == 2.0
    assert got["tis_weight_mean"] == pytest.approx((1 + 2 + 0.25 + 0.5) / 4)
    assert mismatch_metrics(rollout, rollout, np.ones((1, 4)), 1.0)["tis_clipfrac"] == 0.0


def test_mismatch_metrics_need_a_token():
    empty = np.zeros((3, 4), np.float32)
    with pytest.raises(ValueError, match="no response token"):
        mismatch_metrics(empty, empty, np.zeros((3, 4), bool), 2.0)


@pytest.mark.parametrize("size", [25.0, 400.0, 1e30])
def test_a_difference_that_no_exponential_holds(size):
    """Every metric is a finite number; the differences themselves are not clamped."""
    learner, rollout = np.float32([[-size, 0.0]]), np.float32([[0.0, -size]])
    metrics = mismatch_metrics(learner, rollout, np.ones((1, 2), bool))
    assert all(map(math.isfinite, metrics.values()))
    assert metrics["train_rollout_logprob_abs_diff"] == pytest.approx(size)
    assert metrics["token_mult_prob_error"] == pytest.approx(math.exp(20))
    assert metrics["chi2_token"] == pytest.approx((math.exp(40) + math.exp(-40)) / 2 - 1)
