"""The formulas of `rl/`: right by their papers, and exact where they promise to be.

The reference is `rl_oracle`, in Python's floats. Host functions are float64 and agree to 1e-12;
losses and KL estimators are float32 and agree to 1e-5.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles import rl_oracle
from rl_inputs import B, R, batch_of, batches, few, seeds, spoiled, steps

from fp8rl_jax.base.by_name import choose
from fp8rl_jax.rl import advantages, aggregation, corrections, kl, losses, shaping

BASELINES = ["group_mean", "leave_one_out", "batch_mean", "none"]
SCALES = ["group_std", "batch_std", "token_std", "none"]
SEQ_SUMS = ["seq_mean_token_sum", "seq_mean_token_sum_norm"]
AGGREGATIONS = ["token_mean", "seq_mean_token_mean", *SEQ_SUMS]
KL = ["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"]
LOSSES = {
    "ppo": [{}, {"clip_low": 0.3, "clip_high": 0.5, "dual_clip": 1.9}],
    "gspo": [{}, {"clip_low": 0.2, "clip_high": 0.3}],
    "cispo": [{}, {"clip_low": 0.4, "clip_high": 0.7}],
    "reinforce": [{}],
    "sapo": [{}, {"tau_positive": 2.0, "tau_negative": 0.5}],
    "gmpo": [{}, {"clip_low": 0.7, "clip_high": 0.2}],
}
CORRECTIONS = {
    "tis": [{}, {"cap": 1.1, "low": 0.6}],
    "seq_tis": [{}],
    "icepop": [{}, {"low": 0.98, "high": 1.3}],
    "mask_sequence": [{}],
    "mask_geometric": [{}, {"low": 0.5, "high": 1.1}],
    "mask_k3": [{}, {"most": 0.3}],
    "veto": [{}, {"least": 0.5}],
    "opsm": [{}, {"delta": 0.3}],
}
ONE_ALGORITHM = ["ppo", "gspo", "cispo", "reinforce"]  # at equal log-probabilities, to the bit

names = functools.partial(pytest.mark.parametrize, "name")


def cases(arguments_of):
    """Passes `name` and `arguments`."""
    pairs = [(name, arguments) for name, several in arguments_of.items() for arguments in several]
    ids = ["-".join(map(str, [name, *arguments.values()])) for name, arguments in pairs]
    return pytest.mark.parametrize(("name", "arguments"), pairs, ids=ids)


@pytest.mark.parametrize(
    ("offered", "tested"),
    [
        (advantages.BASELINES, BASELINES),
        (advantages.SCALES, SCALES),
        (aggregation.AGGREGATIONS, AGGREGATIONS),
        (losses.LOSSES, {*LOSSES, "none"}),  # the latter in tests/training/test_teacher.py
        (corrections.CORRECTIONS, CORRECTIONS),
        (kl.ESTIMATORS, KL),
    ],
)
def test_every_name_is_tested(offered, tested):
    assert set(offered) == set(tested)


def _lists(*arrays):
    return [np.asarray(a, bool if a.dtype == bool else np.float64).tolist() for a in arrays]


def _near(found, wanted, dtype=np.float64, rtol=1e-12, atol=1e-12, what=""):
    assert np.asarray(found).dtype == dtype
    np.testing.assert_allclose(found, np.asarray(wanted, float), rtol, atol, err_msg=what)


_near_in_float32 = functools.partial(_near, dtype=np.float32, rtol=1e-5, atol=1e-6)


def _same_bits(all_found, all_wanted, what=""):
    for found, wanted in zip(all_found, all_wanted, strict=True):
        found, wanted = np.asarray(found), np.asarray(wanted)
        assert found.dtype == wanted.dtype and found.shape == wanted.shape, what
        bits = f"u{found.itemsize}"
        different = np.argwhere(found.view(bits) != wanted.view(bits))
        assert not different.size, f"{what} {different[0]}: {found}, not {wanted}"


# ---------------------------------------------------- advantages, aggregation: host, float64


@names(BASELINES)
@steps
def test_baseline(name, step):
    rewards, by_group = step[0], name in ("group_mean", "leave_one_out")
    if by_group and rewards.shape[1] == 1:
        with pytest.raises(ValueError, match=r"."):
            advantages.BASELINES[name](rewards)
        return
    found = advantages.BASELINES[name](rewards)
    oracle = rl_oracle.no_baseline if name == "none" else getattr(rl_oracle, name)
    _near(found, oracle(rewards.tolist()))
    if by_group:
        assert np.all(found[rewards.max(1) == rewards.min(1)] == 0)  # not 1e-17


@names(SCALES)
@steps
def test_scale(name, step):
    rewards, mask, of_token, _ = step
    of_rows = [row[kept][0] for row, kept in zip(of_token, mask, strict=True) if kept.any()]
    assume(name != "batch_std" or len(set(of_rows)) != 1)  # nothing to divide by
    found = advantages.SCALES[name](of_token, rewards, mask)
    oracle = rl_oracle.no_scale if name == "none" else getattr(rl_oracle, name)
    # Of equal rewards, the deviation may be 1e-16 for 0, and that is added to 1e-4.
    _near(found, oracle(*_lists(of_token, rewards, mask)), rtol=1e-11)
    assert np.all(found[~mask] == 0)
    _same_bits([advantages.SCALES[name](*spoiled(mask, of_token), rewards, mask)], [found])


@pytest.mark.parametrize(("name", "equal"), [*((n, 0.0) for n in SCALES), ("token_std", 0.35)])
@pytest.mark.parametrize("slots", [1, 3, 7])
def test_scale_of_what_does_not_vary(name, equal, slots):
    """Zeros, although the deviation of equal numbers may come out as 1e-17, which would not do."""
    mask = np.tri(6, slots, dtype=bool)
    found = advantages.SCALES[name](np.full((6, slots), equal), np.full((2, 3), 0.35), mask)
    assert np.all(found == 0)


def _aggregation(name, length):
    ((_, function),) = choose(name, aggregation.AGGREGATIONS, "aggregation", length=length)
    return function


@names(AGGREGATIONS)
@steps
def test_aggregation(name, step):
    mask, length, order = step[1], 7, np.arange(len(step[1]))[::-1]
    weights_of = _aggregation(name, length)
    weights = weights_of(mask)
    _near(weights, getattr(rl_oracle, name)(mask.tolist(), length))
    assert np.all(weights[~mask] == 0)
    _same_bits([weights_of(mask[order])], [weights[order]])
    if mask.any():
        mean_length = mask.sum() / mask.any(1).sum()
        sums = dict(zip(SEQ_SUMS, [mean_length, mean_length / length], strict=True))
        np.testing.assert_allclose(weights.sum(), sums.get(name, 1.0), 1e-12)


# ----------------------------------------------------------------- losses: traced, float32


def _derived(name, arguments):
    loss = losses.LOSSES[name](**dict(arguments))

    def total(logp, old, of_token, mask, weights):
        value, stats = loss(logp, old, of_token, mask)
        return jnp.sum(value * weights), (value, stats)

    return jax.grad(total, has_aux=True)


_traced = functools.cache(lambda name, arguments: jax.jit(_derived(name, arguments)))


def _run(name, arguments, batch):
    """(value, gradient of the weighted sum, stats)"""
    gradient, (value, stats) = _traced(name, tuple(arguments.items()))(*batch)
    return jax.tree.map(np.asarray, (value, gradient, stats))


def _run_in_parts(name, arguments, batch, parts):
    """(value, gradient) by micro-batches, each filled up with rows of 77 without a token."""
    value, gradient = np.zeros((2, B, R), np.float32)
    for part in set(parts):
        rows = np.flatnonzero(np.equal(parts, part))
        some = [np.full_like(array, 0 if array.dtype == bool else 77) for array in batch]
        for into, array in zip(some, batch, strict=True):
            into[: len(rows)] = array[rows]
        found = _run(name, arguments, some)
        value[rows], gradient[rows] = found[0][: len(rows)], found[1][: len(rows)]
    return value, gradient


@cases(LOSSES)
@batches
def test_loss(name, arguments, batch):
    logp, old, of_token, mask, weights = batch
    if name != "gmpo":  # whose responses have one advantage each
        batch = logp, old, of_token * (weights - np.float32(0.5)), mask, weights
    value, gradient, stats = _run(name, arguments, batch)
    wanted = getattr(rl_oracle, name)(*_lists(*batch), **arguments)
    _near_in_float32(value, wanted[0], what="value")
    _near_in_float32(gradient, wanted[1], what="gradient")
    assert np.all(value[~mask] == 0) and np.all(gradient[~mask] == 0)
    for stat, numbers in wanted[2].items():
        _near_in_float32(stats[stat][mask], np.array(numbers)[mask], what=stat)
    for stat in stats:
        assert stats[stat].dtype == np.float32 and stats[stat].shape == mask.shape
        assert not stat.startswith("clipped") or np.all(stats[stat][~mask] == 0)


@cases(LOSSES)
def test_loss_reads_nothing_outside_the_mask(name, arguments):
    """Not compiled: XLA makes a choice of a product with the mask, and that forgives."""
    *arrays, mask, weights = batch_of(0, [0, 1, 3, 8, 5, 8], holes=True)
    derived = _derived(name, arguments.items())
    gradient, (value, stats) = derived(*arrays, mask, weights)
    garbage = spoiled(mask, *arrays)
    for which in ([0], [1], [2], [0, 1, 2]):
        some = [garbage[k] if k in which else arrays[k] for k in range(3)]
        found, (found_value, found_stats) = derived(*map(jnp.asarray, some), mask, weights)
        _same_bits((found_value, found), (value, gradient))
        for stat in stats:
            _same_bits([found_stats[stat][mask]], [stats[stat][mask]], stat)


@cases(LOSSES)
@batches
def test_loss_changes_no_bit(name, arguments, batch):
    logp, old, of_token, mask, weights = batch
    value, gradient, _ = _run(name, arguments, batch)

    order = np.random.default_rng(mask.sum()).permutation(B)
    found = _run(name, arguments, [array[order] for array in batch])[:2]
    _same_bits(found, (value[order], gradient[order]), "of permuted rows")

    found = _run_in_parts(name, arguments, batch, order % 3)
    _same_bits(found, (value, gradient), "in micro-batches")

    found = _run(name, arguments, (logp, old, 2 * of_token, mask, weights))[:2]
    _same_bits(found, (2 * value, 2 * gradient), "of twice the advantages")


@cases(LOSSES)
@batches
def test_loss_of_equal_logprobs(name, arguments, batch):
    """What zero drift makes of the first update: every ratio is 1, and the losses are one."""
    logp, _, of_token, mask, _ = batch
    logp = logp + np.float32(0.1)  # off the lattice: no round number
    weights = aggregation.seq_mean_token_mean(mask).astype(np.float32)
    batch = logp, logp, of_token, mask, weights
    value, gradient, stats = _run(name, arguments, batch)
    assert np.all(stats["ratio"][mask] == 1)
    assert all(np.all(stats[stat] == 0) for stat in stats if stat.startswith("clipped"))
    wanted = _run("reinforce", {}, batch)[1]
    np.testing.assert_allclose(gradient, wanted, 1e-6)
    if name in ONE_ALGORITHM:
        _same_bits([gradient], [wanted])
    if name in ("ppo", "gspo", "gmpo"):
        assert np.all(value[mask] == -of_token[mask])


@cases({name: [{"tau_negative": 2.0} if name == "sapo" else {}] for name in LOSSES})
@given(
    seed=seeds,
    lengths=st.permutations([4, 2, 1, 1, 0, 0]),
    parts=st.lists(st.integers(0, 3), min_size=B, max_size=B),
)
@settings(max_examples=10)
def test_micro_batches_add_up(name, arguments, seed, lengths, parts):
    """To the same bits: every number is one of few binary digits, and so is every sum."""
    logp, _, of_token, mask, _ = batch_of(seed, lengths, holes=False)
    for aggregate in AGGREGATIONS:
        weights = _aggregation(aggregate, R)(mask).astype(np.float32)
        batch = logp, logp, np.round(8 * of_token) / 8, mask, weights
        value, gradient, _ = _run(name, arguments, batch)
        in_parts = _run_in_parts(name, arguments, batch, parts)
        _same_bits(in_parts[1:], [gradient])
        sums = [(in_parts[0] * weights)[np.equal(parts, part)].sum() for part in range(4)]
        assert sum(sums) == (value * weights).sum()


# ------------------------------------------------------------- corrections: host, float64


@cases(CORRECTIONS)
@steps
def test_correction(name, arguments, step):
    _, mask, of_token, log_ratio = step
    correction = corrections.CORRECTIONS[name](**arguments)
    weights, keep = correction(log_ratio, mask, of_token)
    wanted = getattr(rl_oracle, name)(*_lists(log_ratio, mask, of_token), **arguments)
    np.testing.assert_array_equal(keep, np.array(wanted[1], bool), strict=True)
    floor = np.exp(-rl_oracle.LARGEST_EXPONENT)  # a smaller weight is as good as none
    _near(np.maximum(weights, floor), np.maximum(wanted[0], floor))
    assert np.all(weights[~mask] == 1)

    garbage = spoiled(mask, log_ratio, of_token)
    found = correction(garbage[0], mask, garbage[1])
    _same_bits(found, (weights, keep), "beside garbage")
    found = correction(log_ratio[::-1], mask[::-1], of_token[::-1])
    _same_bits(found, (weights[::-1], keep[::-1]), "of permuted rows")

    weights, keep = correction(0 * log_ratio, mask, of_token)  # zero drift
    assert np.all(weights == 1) and np.array_equal(keep, mask)


# ------------------------------------------------------------------------------- KL, shaping


@functools.cache
def _traced_kl(name):
    def total(logp, reference):
        value = kl.ESTIMATORS[name](logp, reference)
        return jnp.sum(value), value

    return jax.jit(jax.grad(total, has_aux=True))


@names(KL)
@batches
def test_kl(name, batch):
    logp, reference, *_ = batch
    gradient, value = _traced_kl(name)(logp, reference)
    one_by_one = np.vectorize(functools.partial(rl_oracle.kl, name))
    wanted = one_by_one(logp.astype(np.float64), reference.astype(np.float64))
    _near_in_float32(value, wanted[0], what="value")
    _near_in_float32(gradient, wanted[1], what="gradient")
    if name.endswith("+"):
        plain = _traced_kl(name.removesuffix("+"))(logp, reference)[1]
        _same_bits((gradient, value), (_traced_kl("k2")(logp, reference)[0], plain))
    gradient, value = _traced_kl(name)(logp, logp)
    assert np.all(value == 0) and np.all(gradient == (name == "k1"))


@given(st.lists(st.integers(0, 20), max_size=6), st.integers(1, 20), st.sampled_from([1.0, 0.35]))
@few
def test_overlong_penalty(lengths, buffer, factor):
    lengths = np.array([20 - buffer, 20, *lengths])
    found = shaping.overlong_penalty(lengths, 20, buffer, factor)
    _near(found, rl_oracle.overlong_penalty(lengths.tolist(), 20, buffer, factor))
    assert np.all(found[lengths <= 20 - buffer] == 0)


@pytest.mark.parametrize("size", [1.0, -7.0, 1e-12, 3e20])
def test_rewards_that_differ_by_a_rounding_are_equal(size):
    """0.1 + 0.2 beside 0.3: no group of them has a gradient; a bit of float32 is a difference."""
    rounded = size * np.array([[0.1 + 0.2, 0.3, 0.3, 0.3]])
    apart = size * np.array([[1.0, 1.0, 1.0, 1 + 2.0**-22]])
    np.testing.assert_array_equal(shaping.informative_groups(rounded), [False])
    np.testing.assert_array_equal(shaping.informative_groups(apart), [True])
    mask = np.ones((4, 3), bool)
    for name, baseline in advantages.BASELINES.items():
        if name != "none":
            np.testing.assert_array_equal(baseline(rounded), 0.0)
            assert (baseline(apart) != 0).all()
    for name in ("batch_std", "token_std"):
        values = rounded.reshape(4, 1) * mask
        np.testing.assert_array_equal(advantages.SCALES[name](values, rounded, mask), 0.0)


@steps
def test_informative_groups(step):
    found = shaping.informative_groups(step[0])
    np.testing.assert_array_equal(
        found, rl_oracle.informative_groups(step[0].tolist()), strict=True
    )


def test_a_cap_that_keeps_the_effective_sample_size():
    """The largest from 1 on: exactly that of sorted ratios tried one by one; 1 where nothing
    drifted, none where the weights are equal enough without one."""
    rng = np.random.default_rng(0)
    d, mask = rng.standard_normal((4, 50)), rng.random((4, 50)) < 0.8
    for ess in (0.6, 0.7, 0.8):
        weights, keep = corrections.tis("auto", ess=ess)(d, mask, None)
        own = weights[mask]
        assert (keep == mask).all() and (weights[~mask] == 1).all()
        found = own.sum() ** 2 / (own.size * (own**2).sum())
        cap = own.max()
        np.testing.assert_allclose(own, np.minimum(np.exp(d[mask]), cap))
        more = np.minimum(np.exp(d[mask]), cap * 1.001)
        assert found >= ess - 1e-12
        assert more.sum() ** 2 / (more.size * (more**2).sum()) < ess
    for spread, cap in ((0.0, 1.0), (0.01, np.exp(0.01 * d[mask].max())), (100.0, 1.0)):
        weights, _ = corrections.tis("auto", ess=0.9)(spread * d, mask, None)
        assert weights[mask].max() == pytest.approx(cap, rel=1e-12)
