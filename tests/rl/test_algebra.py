"""The formulas of `rl/`: right by their papers, and exact where they promise to be.

The reference is `rl_oracle`, in Python's floats. Host functions are float64 and agree to 1e-12;
losses and KL estimators are float32 and agree to 1e-5. Log-probabilities lie on a lattice that no
clipping bound of a case comes near: next to one, float32 and float64 may rightly disagree.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from oracles import rl_oracle

from fp8rl_jax.rl import advantages, aggregation, corrections, kl, losses, shaping

BASELINES = {
    "group_mean": rl_oracle.group_mean,
    "leave_one_out": rl_oracle.leave_one_out,
    "batch_mean": rl_oracle.batch_mean,
    "none": rl_oracle.no_baseline,
}
SCALES = {
    "group_std": rl_oracle.group_std,
    "batch_std": rl_oracle.batch_std,
    "token_std": rl_oracle.token_std,
    "none": rl_oracle.no_scale,
}
LOSSES = [
    ("ppo", {}),
    ("ppo", {"clip_low": 0.3, "clip_high": 0.5, "dual_clip": 1.9}),
    ("gspo", {}),
    ("gspo", {"clip_low": 0.2, "clip_high": 0.3}),
    ("cispo", {}),
    ("cispo", {"clip_low": 0.4, "clip_high": 0.7}),
    ("reinforce", {}),
    ("sapo", {}),
    ("sapo", {"tau_positive": 2.0, "tau_negative": 0.5}),
    ("gmpo", {}),
    ("gmpo", {"clip_low": 0.7, "clip_high": 0.2}),
]
CORRECTIONS = [
    ("tis", {}),
    ("tis", {"cap": 1.1, "low": 0.6}),
    ("seq_tis", {}),
    ("icepop", {}),
    ("icepop", {"low": 0.98, "high": 1.3}),
    ("mask_sequence", {}),
    ("mask_geometric", {}),
    ("mask_geometric", {"low": 0.5, "high": 1.1}),
    ("mask_k3", {}),
    ("mask_k3", {"most": 0.3}),
    ("veto", {}),
    ("veto", {"least": 0.5}),
    ("opsm", {}),
    ("opsm", {"delta": 0.3}),
]
AGGREGATIONS = [
    "token_mean",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
]
KL = ["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"]
SAME_AT_EQUALITY = ["ppo", "gspo", "cispo", "reinforce"]
GARBAGE = [np.inf, -np.inf, np.nan, 3e38, -3e38]

P, G, R = 3, 2, 8  # of the traced functions: one shape, one compilation
B = P * G

names = functools.partial(pytest.mark.parametrize, "name")
cases = functools.partial(
    pytest.mark.parametrize,
    ("name", "arguments"),
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
seeds = st.integers(0, 2**32 - 1)


def test_every_name_has_an_oracle():
    assert set(advantages.BASELINES) == set(BASELINES)
    assert set(advantages.SCALES) == set(SCALES)
    assert set(aggregation.AGGREGATIONS) == set(AGGREGATIONS)
    assert set(losses.LOSSES) == {name for name, _ in LOSSES}
    assert set(corrections.CORRECTIONS) == {name for name, _ in CORRECTIONS}
    assert set(kl.ESTIMATORS) == set(KL)


# ---------------------------------------------------------------------------------- inputs


def _mask(rng, lengths, holes):
    mask = np.arange(R) < np.array(lengths)[:, None]
    return mask & (rng.random(mask.shape) < 0.7) if holes else mask


def _batch(seed, lengths, holes, fine=False):
    """(logp, old, advantages, mask, weights) of a loss, float32; advantages equal along a row."""
    rng = np.random.default_rng(seed)
    shape = (len(lengths), R)
    steps = 2.0**-14 if fine else 2.0**-6
    old = -rng.integers(0, 256, shape) / 64
    logp = old + rng.integers(-96, 97, shape) * steps
    of_row = rng.choice([0.0, 0.35, -0.1, *rng.standard_normal(6)], (shape[0], 1))
    of_token = np.broadcast_to(of_row, shape)
    arrays = logp, old, of_token, _mask(rng, lengths, holes), rng.random(shape)
    return tuple(a if a.dtype == bool else a.astype(np.float32) for a in arrays)


def batches(test):
    """Passes `batch`; the first has no kept token at all."""
    lengths = st.lists(st.integers(0, R), min_size=B, max_size=B)
    drawn = st.builds(_batch, seeds, lengths, st.booleans(), st.booleans())
    test = example(batch=_batch(1, [0] * B, False))(given(batch=drawn)(test))
    return settings(max_examples=30)(test)


def _step(seed, prompts, group, slots, kept, equal):
    """(rewards (P, G), mask, advantages, log_ratio (B, R)) of one step, float64."""
    rng = np.random.default_rng(seed)
    shape = (prompts * group, slots)
    rewards = rng.choice([0.0, 0.1, 0.35, 1.0, -0.7], (prompts, group))
    alike = rng.random(prompts) < equal
    rewards[alike] = rng.choice([0.1, 0.35, 1.1], (prompts, 1))[alike]
    mask = (np.arange(slots) < rng.integers(0, slots + 1, (shape[0], 1))) & (
        rng.random(shape) < kept
    )
    token = rng.choice([0.1, 0.35, -0.1, *rng.standard_normal(4)], shape)
    log_ratio = rng.integers(-96, 97, shape) / 64 * rng.choice([8, 1, 2**-8], (shape[0], 1))
    return rewards, mask, token, log_ratio


def steps(test):
    """Passes `step`; some have a lone sample, a group of equal rewards, or no kept token."""
    chances = st.sampled_from([0.0, 0.6, 1.0])
    count = functools.partial(st.integers, 1)
    drawn = st.builds(_step, seeds, count(3), count(8), count(5), chances, chances)
    test = example(step=_step(1, 2, 3, 4, 0.0, 1.0))(given(step=drawn)(test))
    return settings(max_examples=30)(test)


def _lists(*arrays):
    return [np.asarray(a, bool if a.dtype == bool else np.float64).tolist() for a in arrays]


def _near(found, wanted, tolerance=1e-12, **options):
    assert np.asarray(found).dtype == np.float64
    np.testing.assert_allclose(found, np.array(wanted, float), tolerance, tolerance, **options)


def _same_bits(found, wanted, what=""):
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    different = np.argwhere(found.view(f"u{found.itemsize}") != wanted.view(f"u{wanted.itemsize}"))
    assert not different.size, f"{what} differs at {different[0]}: {found}, not {wanted}"


def _spoiled(array, mask):
    """Every garbage value somewhere outside the mask, whatever the mask."""
    filled = np.resize(np.array(GARBAGE, array.dtype), array.shape)
    return np.where(mask, array, filled)


# ---------------------------------------------------- advantages, aggregation: host, float64


@names(BASELINES)
@steps
def test_baseline(name, step):
    rewards = step[0]
    if rewards.shape[1] == 1 and name in ("group_mean", "leave_one_out"):
        with pytest.raises(ValueError, match=r"."):
            advantages.BASELINES[name](rewards)
        return
    found = advantages.BASELINES[name](rewards)
    _near(found, BASELINES[name](rewards.tolist()))
    if name in ("group_mean", "leave_one_out"):
        assert np.all(found[rewards.max(1) == rewards.min(1)] == 0)  # not 1e-17


@names(SCALES)
@steps
def test_scale(name, step):
    rewards, mask, token, _ = step
    of_rows = [row[kept][0] for row, kept in zip(token, mask, strict=True) if kept.any()]
    assume(name != "batch_std" or len(set(of_rows)) != 1)  # nothing to divide by
    found = advantages.SCALES[name](token, rewards, mask)
    _near(found, SCALES[name](*_lists(token, rewards, mask)))
    assert np.all(found[~mask] == 0)
    _same_bits(advantages.SCALES[name](_spoiled(token, mask), rewards, mask), found)


@names(SCALES)
@pytest.mark.parametrize("constant", [0.0, 0.1, 0.35])
@pytest.mark.parametrize("slots", [1, 3, 7])
def test_scale_of_what_does_not_vary(name, constant, slots):
    """A deviation of 0 leaves zeros; rounding makes one of 1e-17, which would leave numbers."""
    mask = np.tri(6, slots, dtype=bool)
    if constant and name != "token_std":
        pytest.skip("advantages that are all equal and not 0 have a baseline of none")
    found = advantages.SCALES[name](np.full((6, slots), constant), np.full((2, 3), 0.35), mask)
    assert np.all(found == 0)


@names(AGGREGATIONS)
@steps
def test_aggregation(name, step):
    _, mask, _, _ = step
    weights, length, order = aggregation.AGGREGATIONS[name](mask, 7), 7, np.arange(len(mask))[::-1]
    _near(weights, getattr(rl_oracle, name)(mask.tolist(), length))
    assert np.all(weights[~mask] == 0)
    _same_bits(aggregation.AGGREGATIONS[name](mask[order], length), weights[order])
    if mask.any():
        mean_length = mask.sum() / mask.any(1).sum()
        sums = {"seq_mean_token_sum": mean_length, "seq_mean_token_sum_norm": mean_length / length}
        np.testing.assert_allclose(weights.sum(), sums.get(name, 1.0), 1e-12)


# ----------------------------------------------------------------- losses: traced, float32


@functools.cache
def _traced(name, arguments=()):
    """(logp, old, advantages, mask, weights) -> gradient, value, stats; compiled once."""
    loss = losses.LOSSES[name](**dict(arguments))

    def total(logp, old, advantage, mask, weights):
        value, stats = loss(logp, old, advantage, mask)
        return jnp.sum(value * weights), (value, stats)

    return jax.jit(jax.grad(total, has_aux=True))


def _run(name, arguments, batch):
    gradient, (value, stats) = _traced(name, tuple(arguments.items()))(*batch)
    return jax.tree.map(np.asarray, (value, gradient, stats))


@cases(cases_ := LOSSES)
@batches
def test_loss(name, arguments, batch):
    mask = batch[3]
    value, gradient, stats = _run(name, arguments, batch)
    wanted = getattr(rl_oracle, name)(*_lists(*batch), **arguments)
    assert value.dtype == np.float32 and value.shape == mask.shape
    np.testing.assert_allclose(value, wanted[0], 1e-5, 1e-6)
    np.testing.assert_allclose(gradient, wanted[1], 1e-5, 1e-6)
    assert np.all(value[~mask] == 0) and np.all(gradient[~mask] == 0)
    for stat, numbers in wanted[2].items():
        np.testing.assert_allclose(stats[stat][mask], np.array(numbers)[mask], 1e-5, err_msg=stat)
    for stat in stats:
        assert stats[stat].dtype == np.float32 and stats[stat].shape == mask.shape
        assert not stat.startswith("clipped") or np.all(stats[stat][~mask] == 0)


@cases(LOSSES)
@batches
def test_loss_reads_nothing_outside_the_mask(name, arguments, batch):
    *arrays, mask, weights = batch
    wanted = _run(name, arguments, batch)
    spoiled = [_spoiled(array, mask) for array in arrays]
    found = _run(name, arguments, (*spoiled, mask, weights))
    jax.tree.map(_same_bits, found[:2], wanted[:2])
    for stat in wanted[2]:
        _same_bits(found[2][stat][mask], wanted[2][stat][mask], stat)


@cases(LOSSES)
@batches
def test_loss_of_equal_logprobs(name, arguments, batch):
    """What zero drift makes of the first update: every ratio 1, nothing clipped."""
    logp, _, advantage, mask, weights = batch
    logp = logp + np.float32(0.1)  # off the lattice: no exact number
    value, gradient, stats = _run(name, arguments, (logp, logp, advantage, mask, weights))
    assert np.all(stats["ratio"][mask] == 1)
    assert all(np.all(stats[stat] == 0) for stat in stats if stat.startswith("clipped"))
    plain = "reinforce", {}
    if name == "gmpo":  # a row's gradient is shared out among its tokens
        weights = aggregation.AGGREGATIONS["seq_mean_token_mean"](mask, R).astype(np.float32)
        value, gradient, _ = _run(name, arguments, (logp, logp, advantage, mask, weights))
    wanted = _run(*plain, (logp, logp, advantage, mask, weights))[1]
    np.testing.assert_allclose(gradient, wanted, 1e-6)
    if name in SAME_AT_EQUALITY:
        _same_bits(gradient, wanted, "gradient")
    if name in ("ppo", "gspo", "gmpo"):
        assert np.all(value[mask] == -advantage[mask])


@cases(LOSSES)
@batches
def test_loss_scales_with_the_advantages(name, arguments, batch):
    """By 2, so that the bits say it."""
    logp, old, advantage, mask, weights = batch
    value, gradient, _ = _run(name, arguments, batch)
    twice = _run(name, arguments, (logp, old, 2 * advantage, mask, weights))
    _same_bits(twice[0], 2 * value)
    _same_bits(twice[1], 2 * gradient)


@cases(LOSSES)
@batches
def test_loss_of_permuted_rows(name, arguments, batch):
    order = np.random.default_rng(0).permutation(B)
    value, gradient, _ = _run(name, arguments, batch)
    found = _run(name, arguments, tuple(array[order] for array in batch))
    _same_bits(found[0], value[order])
    _same_bits(found[1], gradient[order])


@names(AGGREGATIONS)
@cases([(n, a) for n, a in LOSSES if n != "sapo"] + [("sapo", {"tau_negative": 2.0})])
@given(
    seed=seeds,
    lengths=st.permutations([4, 2, 1, 1, 0, 0]),
    parts=st.lists(st.integers(0, 2), min_size=B, max_size=B),
)
@settings(max_examples=10)
def test_sum_over_micro_batches(name, arguments, aggregation_name, seed, lengths, parts):
    pass
