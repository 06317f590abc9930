"""`prepare`: the order of its parts, on rewards and masks chosen so that another order shows."""

from __future__ import annotations

import numpy as np
import pytest

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.config import default_config, load
from fp8rl_jax.rl import PRESETS, Outcomes, algorithm_of, prepare
from fp8rl_jax.rl.presets import PRESET_FIELDS

_LENGTH = 4


def _algorithm(correction="none", **fields):
    config = default_config()
    load.override(config, [f"--config.algo.{name}={value}" for name, value in fields.items()])
    return algorithm_of(config.algo, _LENGTH, correction)


def _step(lengths=(4, 2, 3, 1), drift=0.0):
    """Two questions with two responses each; the first is cut at the limit."""
    mask = np.arange(_LENGTH) < np.array(lengths)[:, None]
    rollout = np.where(mask, -1.0, 0.0).astype(np.float32)
    old = np.where(mask, rollout + drift, 0.0).astype(np.float32)
    finished = np.array(lengths) < _LENGTH
    return mask, finished, old, rollout


def _prepare(algorithm, rewards, step, ref=None, **more):
    mask, finished, old, rollout = step
    ref = old if ref is None else ref
    outcomes = Outcomes(np.array(rewards), mask, finished, old, rollout, ref, **more)
    return prepare(algorithm, outcomes)


def test_defaults_are_the_group_s_mean_and_deviation_on_every_token():
    out = _prepare(_algorithm(), [[1.0, 0.0], [1.0, 1.0]], _step())
    expected = np.float32(0.5 / (0.5 + 1e-4))
    assert out.advantages.dtype == np.float32
    np.testing.assert_array_equal(out.advantages[0], np.full(4, expected))
    np.testing.assert_array_equal(out.advantages[1], [-expected, -expected, 0, 0])
    assert not out.advantages[2:].any()
    assert (out.rollout_weights == 1).all() and (out.keep == _step()[0]).all()
    assert out.metrics["advantage_nonzero_frac"] == 0.6


def test_length_penalty_comes_before_the_baseline():
    """At the limit the whole penalty, so of two right answers the long one gets less."""
    algorithm = _algorithm(overlong_buffer=2, overlong_penalty=0.5, scale="none")
    out = _prepare(algorithm, [[1.0, 1.0], [0.0, 0.0]], _step())
    assert list(out.advantages[:, 0]) == [-0.25, 0.25, -0.125, 0.125]
    assert out.metrics["overlong_penalty_mean"] == -0.1875


def test_advantages_come_before_anything_is_dropped():
    """A response that is cut off still counts in its group's mean; its tokens leave the loss."""
    algorithm = _algorithm(mask_truncated=True)
    out = _prepare(algorithm, [[1.0, 0.0], [1.0, 0.0]], _step())
    assert out.advantages[1, 0] < 0 and not out.keep[0].any() and out.keep[1:].any(axis=1).all()
    weights = algorithm.aggregation(out.keep)
    assert weights.sum() == pytest.approx(1) and weights[1, 0] == 1 / 6
    assert out.metrics["kept_sequences_frac"] == 0.75 and out.metrics["kept_tokens_frac"] == 0.6


def test_groups_that_do_not_count():
    out = _prepare(
        _algorithm(), [[1.0, 0.0], [1.0, 0.0]], _step(), keep_groups=np.array([0, 1]) > 0
    )
    assert not out.keep[:2].any() and (out.keep[2:] == _step()[0][2:]).all()


def test_divergence_in_the_reward_is_summed_from_each_token_on():
    """1 a token, weighted by a half: a response of n tokens loses n/2 at its first token."""
    step = _step()
    fields = {"kl_coef": 0.5, "kl_in": "reward"}
    algorithm = _algorithm(baseline="none", scale="none", **fields)
    out = _prepare(algorithm, [[3.0, 3.0], [3.0, 3.0]], step, ref=step[2] - np.float32(1.0))
    np.testing.assert_array_equal(out.advantages[0], [1.0, 1.5, 2.0, 2.5])
    np.testing.assert_array_equal(out.advantages[2], [1.5, 2.0, 2.5, 0.0])
    assert algorithm.kl is None and algorithm.needs_reference
    normalised = _prepare(
        _algorithm(baseline="none", scale="token_std", **fields),
        [[3.0, 3.0], [3.0, 3.0]],
        step,
        ref=step[2] - np.float32(1.0),
    )
    kept = normalised.advantages[step[0]].astype(float)
    assert kept.mean() == pytest.approx(0, abs=1e-6) and kept.std() == pytest.approx(1, abs=1e-6)


def test_corrections_multiply_weights_and_drop_together():
    """Each sees the same log-ratios; what one drops is not lost to the figures of the next."""
    step = _step(drift=0.5)
    chain = _algorithm("mask_sequence(0.1, 5.0), tis(1.25), icepop(0.1, 9.0)")
    out = _prepare(chain, [[1.0, 0.0], [1.0, 0.0]], step)
    ratio = np.exp(0.5)
    assert list(out.keep.any(axis=1)) == [False, True, True, True]  # e^2 is above 5, e^1.5 is not
    np.testing.assert_allclose(out.rollout_weights[1, :2], 1.25 * ratio, rtol=1e-6)
    assert out.metrics["correction/mask_sequence_dropped"] == pytest.approx(0.4)
    assert out.metrics["correction/tis_mean"] == 1.25
    assert out.metrics["correction/icepop_max"] == pytest.approx(ratio)


def test_truncated_weights_of_fp8_rl():
    """The worked example of FP8-RL ("A Practical and Stable Low-Precision Stack for LLM
    Reinforcement Learning"): C = 2, ratios 1.10, 0.80, 3.00 give weights 1.10, 0.80, 2.00."""
    mask, finished = np.ones((1, 3), bool), np.array([True])
    rollout, learner = (np.log(np.float32([p])) for p in ([0.20, 0.05, 0.01], [0.22, 0.04, 0.03]))
    out = _prepare(
        _algorithm("tis(2.0)", baseline="none"), [[1.0]], (mask, finished, learner, rollout)
    )
    np.testing.assert_allclose(np.exp(learner - rollout), [[1.10, 0.80, 3.00]], rtol=1e-6)
    np.testing.assert_allclose(out.rollout_weights, [[1.10, 0.80, 2.00]], rtol=1e-6)
    assert out.keep.all()


@pytest.mark.parametrize(
    "correction",
    [
        "none",
        "tis",
        "seq_tis",
        "icepop",
        "mask_sequence",
        "mask_geometric",
        "mask_k3",
        "veto",
        "opsm",
        "tis(auto, ess=0.9)",
        "mask_geometric(0.999, 1.001), tis(2.0), veto",
    ],
)
def test_without_drift_a_correction_is_none(correction):
    """Bit for bit, whatever the advantages."""
    rewards = [[1.0, -0.35], [0.1, 0.1]]
    plain, out = (_prepare(_algorithm(c), rewards, _step()) for c in ("none", correction))
    for name in ("advantages", "rollout_weights", "keep"):
        assert getattr(plain, name).tobytes() == getattr(out, name).tobytes()


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name):
    """Each sets every field that presets decide, to a value that is allowed; single fields win."""
    config = default_config()
    load.override(config, [f"--config.algo.{f}=none" for f in ("baseline", "scale")])
    load.override(config, ["--config.algo.clip_low=0.125", f"--config.algo.preset={name}"])
    assert set(PRESETS[name].fields) <= set(PRESET_FIELDS)
    defaults = default_config().algo
    for field in PRESET_FIELDS:
        expected = PRESETS[name].fields.get(field, defaults[field])
        if field == "clip_low":
            expected = 0.125
        assert config.algo[field] == expected, field
    algorithm = algorithm_of(config.algo, 40, "none")
    assert algorithm.overlong_buffer == (8 if name == "dapo" else 0)


@pytest.mark.parametrize(
    ("correction", "fields", "words"),
    [
        ("tiss", {}, ["algo.correction", "'tiss'", "mask_geometric"]),
        ("tis(2.0), tis(3.0)", {}, ["algo.correction", "once"]),
        ("tis(-1)", {}, ["algo.correction", "cap"]),
        ("tis('x')", {}, ["numbers", "tis(cap=2.0, low=0.0, ess=0.0)"]),
        ("tis(", {}, ["not understood", "module:function"]),
        ("none", {"loss": "pop"}, ["algo.loss", "'pop'", "cispo"]),
        ("none", {"loss": "gspo(1, 2, 3)"}, ["algo.loss", "gspo(clip_low=0.0003"]),
        ("none", {"loss": "ppo(dual_clip=0.5)"}, ["algo.loss", "dual_clip"]),
        ("none", {"loss": "ppo, gspo()"}, ["algo.loss", "names 2", "write 1 of ppo"]),
        ("none", {"loss": "()"}, ["algo.loss", "names 0"]),
        ("none", {"loss": "ppo(clip_low=0.1, clip_low=0.2)"}, ["algo.loss", "twice"]),
        ("()", {}, ["algo.correction", "names 0"]),
        ("-" * 5000, {}, ["algo.correction", "not understood"]),
        ("a" + "+a" * 5000, {}, ["algo.correction", "module:function"]),
        ("tis(" + "-" * 5000 + "1)", {}, ["algo.correction"]),
        # Bounds that would drop or weigh what has not drifted.
        ("mask_sequence(2, 3)", {}, ["mask_sequence(low=2)", "from 0 to 1"]),
        ("mask_geometric(0.1, 0.9)", {}, ["mask_geometric(high=0.9)", "from 1 to"]),
        ("icepop(0, 0)", {}, ["icepop(high=0)", "from 1 to"]),
        ("veto(2)", {}, ["veto(least=2)", "from 0 to 1"]),
        ("tis(2, 1.5)", {}, ["tis(low=1.5)", "from 0 to 1"]),
        ("seq_tis(0.5)", {}, ["seq_tis(cap=0.5)", "from 1 to"]),
    ],
)
def test_what_is_not_understood(correction, fields, words):
    with pytest.raises(UserError) as error:
        _algorithm(correction, **fields)
    for word in words:
        assert word in str(error.value)
