"""Advantages, losses, corrections and drift metrics against plain loops over Python floats."""

import math
import statistics

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from fp8rl_jax.rl import (
    clipped_policy_loss,
    group_advantages,
    k3,
    mismatch_metrics,
    tis_weights,
    zero_std_fraction,
)

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


# Advantages.


@hypothesis.settings(deadline=None)
@hypothesis.given(st.data(), st.integers(1, 4), st.integers(2, 6), st.booleans())
def test_group_advantages(data, prompts, group, normalize):
    """Reward minus group mean, over the population deviation plus 1e-4 (GRPO) or as it is."""
    size = prompts * group
    rewards = data.draw(st.lists(_finite(-10, 10), min_size=size, max_size=size))
    expected = []
    for first in range(0, size, group):
        mine = rewards[first : first + group]
        scale = statistics.pstdev(mine) + 1e-4 if normalize else 1.0
        expected += [(r - statistics.fmean(mine)) / scale for r in mine]
    advantages = group_advantages(np.array(rewards), group, normalize)
    assert advantages.dtype == np.float32 and advantages.shape == (size,)
    np.testing.assert_allclose(advantages, expected, rtol=1e-6, atol=1e-6)


def test_group_advantages_by_hand():
    """Prompt-major groups; a group of equal rewards teaches nothing."""
    rewards = np.array([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    plain = group_advantages(rewards, 4, False)
    np.testing.assert_array_equal(plain, [0.75, -0.25, -0.25, -0.25, 0, 0, 0, 0])
    scaled = group_advantages(rewards, 4, True)
    deviation = math.sqrt(3) / 4
    np.testing.assert_allclose(scaled[:4], plain[:4] / (deviation + 1e-4), rtol=1e-6)
    np.testing.assert_array_equal(scaled[4:], 0)


def test_group_advantages_keep_a_bad_reward_in_its_group():
    """NaN spoils its own group visibly and no other."""
    advantages = group_advantages(np.array([1.0, math.nan, 1.0, 0.0]), 2, True)
    assert np.isnan(advantages[:2]).all() and np.isfinite(advantages[2:]).all()


def test_zero_std_fraction():
    assert zero_std_fraction(np.array([1, 1, 0, 1, 0, 0, 1, 0]), 2) == 0.5
    assert zero_std_fraction(np.array([1, 1, 0, 1]), 4) == 0.0
    assert zero_std_fraction(np.zeros(6), 3) == 1.0


def test_zero_std_fraction_of_equal_fractions():
    """Rewards that are all equal teach nothing, whatever their value."""
    assert zero_std_fraction(np.array([0.1, 0.1, 0.1]), 3) == 1.0


# Policy loss.


def _loss_by_loops(logp, old, advantages, mask, low, high, weights):
    """(sum, clipped_low, clipped_high, ratio) of the definition, token by token."""
    total = clipped_low = clipped_high = ratios = 0.0
    for row, advantage in enumerate(advantages):
        for t in range(len(logp[row])):
            if not mask[row][t]:
                continue
            ratio = math.exp(logp[row][t] - old[row][t])
            bounded = min(max(ratio, 1 - low), 1 + high)
            weight = 1.0 if weights is None else weights[row][t]
            total -= weight * min(ratio * advantage, bounded * advantage)
            clipped_low += ratio < 1 - low and advantage < 0
            clipped_high += ratio > 1 + high and advantage > 0
            ratios += ratio
    return total, clipped_low, clipped_high, ratios


def _random_batch(seed, rows=5, slots=7, spread=0.4):
    rng = np.random.default_rng(seed)
    old = -rng.exponential(1.0, (rows, slots)).astype(np.float32)
    logp = old + rng.normal(0, spread, (rows, slots)).astype(np.float32)
    advantages = rng.standard_normal(rows).astype(np.float32)
    mask = (rng.random((rows, slots)) < 0.7).astype(np.float32)
    weights = rng.uniform(0, 2, (rows, slots)).astype(np.float32)
    return logp, old, advantages, mask, weights


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28), (0.05, 0.5)])
def test_clipped_policy_loss(low, high, weighted):
    """Values and clip counts against the loop; both kinds of clip occur."""
    for seed in range(3):
        logp, old, advantages, mask, weights = _random_batch(seed)
        weights = weights if weighted else None
        loss, sums = clipped_policy_loss(logp, old, advantages, mask, low, high, weights)
        expected = _loss_by_loops(
            *(x.tolist() for x in (logp, old, advantages, mask)), low, high, weights
        )
        np.testing.assert_allclose(loss, expected[0], rtol=2e-6)
        assert float(sums["clipped_low"]) == expected[1] > 0
        assert float(sums["clipped_high"]) == expected[2] > 0
        np.testing.assert_allclose(sums["ratio"], expected[3], rtol=2e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),  # on policy: the gradient is that of the plain policy gradient
        (1.0, -2.0, 2.0, 2.0),
        (1.5, 1.0, -1.28, 0.0),  # clipped above
        (1.5, -1.0, 1.5, 1.5),  # not clipped: the pessimistic side
        (0.5, 1.0, -0.5, -0.5),
        (0.5, -1.0, 0.8, 0.0),  # clipped below
        (1.25, 1.0, -1.25, -1.25),  # between the two bounds' distances: clip-higher
        (3.0, 0.0, 0.0, 0.0),
    ],
)
def test_clipped_policy_loss_of_one_token(ratio, advantage, value, slope):
    """Value and gradient by hand for clip_low 0.2, clip_high 0.28."""

    def loss(logp):
        old = jnp.full((1, 1), -1.5)
        return clipped_policy_loss(logp, old, jnp.array([advantage]), jnp.ones((1, 1)), 0.2, 0.28)[
            0
        ]

    logp = jnp.full((1, 1), -1.5 + math.log(ratio))
    got, grad = jax.value_and_grad(loss)(logp)
    np.testing.assert_allclose(got, value, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(grad, [[slope]], rtol=1e-6, atol=1e-7)


def test_clipped_policy_loss_gradient():
    """-w r A where the minimum is the unclipped term, exactly zero elsewhere and off the mask."""
    logp, old, advantages, mask, weights = _random_batch(7, rows=20)
    low, high = 0.1, 0.3
    grad = jax.grad(lambda x: clipped_policy_loss(x, old, advantages, mask, low, high, weights)[0])(
        logp
    )
    zeros = 0
    for row, t in np.ndindex(*logp.shape):
        ratio, a = math.exp(float(logp[row, t]) - float(old[row, t])), float(advantages[row])
        clipped = (ratio > 1 + high and a > 0) or (ratio < 1 - low and a < 0)
        if clipped or not mask[row, t]:
            assert grad[row, t] == 0
            zeros += clipped
        else:
            np.testing.assert_allclose(grad[row, t], -weights[row, t] * ratio * a, rtol=1e-5)
    assert zeros > 10


def test_clipped_policy_loss_sums_carry_no_gradient():
    """The statistics are for the log only."""
    logp, old, advantages, mask, _ = _random_batch(1)

    def statistic(x):
        return clipped_policy_loss(x, old, advantages, mask, 0.2, 0.2)[1]["ratio"]

    np.testing.assert_array_equal(jax.grad(statistic)(logp), 0)


def test_clipped_policy_loss_ignores_what_the_mask_hides():
    """Garbage in hidden slots, finite but huge, changes no bit of value, counts or gradient."""
    logp, old, advantages, mask, weights = _random_batch(3)
    function = jax.value_and_grad(
        lambda x, o: clipped_policy_loss(x, o, advantages, mask, 0.2, 0.2, weights), has_aux=True
    )
    clean = function(logp, old)
    dirty = function(np.where(mask > 0, logp, 1e6), np.where(mask > 0, old, -1e6))
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)


@pytest.mark.parametrize("advantage", [0.0, 1.0])
def test_clipped_policy_loss_survives_an_overflowing_ratio(advantage):
    """A clipped token has gradient 0, however far its ratio is above the bound."""
    one = jnp.ones((1, 1))
    loss, grad = jax.value_and_grad(
        lambda x: clipped_policy_loss(x, -95 * one, jnp.array([advantage]), one, 0.2, 0.2)[0]
    )(-one)
    np.testing.assert_allclose(loss, -1.2 * advantage, rtol=1e-6)
    np.testing.assert_array_equal(grad, [[0.0]])


# KL to a reference.


@hypothesis.settings(deadline=None)
@hypothesis.given(st.lists(st.tuples(_finite(-15, 0), _finite(-15, 0)), min_size=1, max_size=8))
def test_k3(pairs):
    """exp(d) - d - 1 with d = ref - logp."""
    pairs = (pairs * 8)[:8]  # one shape, one compilation
    expected = [math.exp(ref - logp) - (ref - logp) - 1 for logp, ref in pairs]
    logp, ref = np.float32(pairs).T
    np.testing.assert_allclose(k3(logp, ref), expected, rtol=1e-5, atol=3e-7)


def test_k3_of_equal_inputs_is_exactly_zero():
    logp = -np.random.default_rng(0).exponential(1, 1000).astype(np.float32)
    np.testing.assert_array_equal(k3(logp, logp), 0)


def test_k3_is_clamped_beyond_20():
    """A reference that is e^20 times surer counts as that, so the loss stays finite."""
    value = float(k3(jnp.float32(-100.0), jnp.float32(0.0)))
    assert value == pytest.approx(math.exp(20) - 21, rel=1e-6)
    assert float(k3(jnp.float32(0.0), jnp.float32(-100.0))) == pytest.approx(19.0, rel=1e-5)


def test_k3_gradient():
    """d k3 / d logp = 1 - exp(ref - logp): towards the reference, zero at it."""
    logp, ref = np.float32([-1.0, -2.0, -0.5]), np.float32([-1.0, -1.0, -3.0])
    grad = jax.grad(lambda x: k3(x, ref).sum())(logp)
    np.testing.assert_allclose(grad, 1 - np.exp(np.float64(ref) - logp), rtol=1e-5, atol=1e-7)


def test_k3_near_the_reference():
    """Never negative, and relatively exact where exp(d) - d - 1 cancels in float32; slope too.

    1e-6 below 0.05; from there on 1e-4, the recorded error of the definition itself.
    """
    d = np.linspace(-0.1, 0.1, 4001, dtype=np.float32)
    exact = d.astype(np.float64)
    expected = np.array([sum(x**n / math.factorial(n) for n in range(2, 12)) for x in exact])
    value = np.asarray(k3(np.zeros_like(d), d))
    assert (value >= 0).all()
    np.testing.assert_allclose(value, expected, rtol=1e-4)
    near = np.abs(d) < 0.0499
    np.testing.assert_allclose(value[near], expected[near], rtol=1e-6)
    slope = jax.grad(lambda logp: k3(logp, d).sum())(np.zeros_like(d))
    np.testing.assert_allclose(slope, -np.expm1(exact), rtol=1e-5, atol=2e-7)


# Importance weights.


@hypothesis.given(
    st.lists(st.tuples(_finite(-60, 0), _finite(-60, 0)), min_size=1, max_size=20),
    _finite(1.0, 10.0),
)
def test_tis_weights(pairs, cap):
    """min(exp(clip(D, -20, 20)), cap), D = learner - rollout."""
    learner, rollout = np.float32(pairs).T[:, None]
    expected = [min(math.exp(min(max(a - b, -20.0), 20.0)), cap) for a, b in pairs]
    weights = tis_weights(learner, rollout, cap)
    assert weights.dtype == np.float32 and weights.shape == (1, len(pairs))
    np.testing.assert_allclose(weights[0], expected, rtol=1e-6)


def test_tis_weights_by_hand():
    """1 for equal inputs, exactly; the cap; never infinite."""
    learner = np.float32([[-1.0, -1.0, -4.0, 0.0, -200.0]])
    rollout = np.float32([[-1.0, -4.0, -1.0, -200.0, 0.0]])
    weights = tis_weights(learner, rollout, 2.0)
    np.testing.assert_allclose(weights, [[1, 2, math.exp(-3), 2, math.exp(-20)]], rtol=1e-6)
    assert weights[0, 0] == 1.0
    assert tis_weights(learner, rollout, math.inf).max() == np.float32(math.exp(20))
    assert np.isnan(tis_weights(np.float32([[math.nan]]), np.float32([[0.0]]), 2.0)).all()


# Drift metrics.


def _metrics_by_loops(learner, rollout, mask, cap):
    d = [
        float(learner[i][j]) - float(rollout[i][j])
        for i in range(len(mask))
        for j in range(len(mask[i]))
        if mask[i][j]
    ]
    n = len(d)
    w = [math.exp(min(max(x, -20.0), 20.0)) for x in d]
    truncated = [min(x, cap) for x in w]
    return {
        "token_mult_prob_error": sum(math.exp(abs(x)) for x in d) / n,
        "train_rollout_logprob_abs_diff": sum(abs(x) for x in d) / n,
        "train_rollout_logprob_abs_diff_max": max(abs(x) for x in d),
        "logprob_equal_frac": sum(x == 0 for x in d) / n,
        "mismatch_kl": sum(math.exp(x) - x - 1 for x in d) / n,
        "mismatch_k1": -sum(d) / n,
        "chi2_token": sum(math.exp(2 * x) - 1 for x in d) / n,
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
