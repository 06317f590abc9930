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

BASELINES = ["group_mean", "leave_one_out", "batch_mean", "none"]
SCALES = ["group_std", "batch_std", "token_std", "none"]
AGGREGATIONS = [
    "token_mean",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
]
KL = ["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"]
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
ONE_ALGORITHM = ["ppo", "gspo", "cispo", "reinforce"]  # at equal log-probabilities, to the bit
GARBAGE = [np.inf, -np.inf, np.nan, 3e38, -3e38]

B, R = 6, 8  # of what is traced: one shape, one compilation

names = functools.partial(pytest.mark.parametrize, "name")
cases = functools.partial(
    pytest.mark.parametrize,
    ("name", "arguments"),
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
seeds = st.integers(0, 2**32 - 1)


def test_every_name_is_tested():
    assert set(advantages.BASELINES) == set(BASELINES)
    assert set(advantages.SCALES) == set(SCALES)
    assert set(aggregation.AGGREGATIONS) == set(AGGREGATIONS)
    assert set(losses.LOSSES) == {name for name, _ in LOSSES}
    assert set(corrections.CORRECTIONS) == {name for name, _ in CORRECTIONS}
    assert set(kl.ESTIMATORS) == set(KL)


# ------------------------------------------------------------------------------------- helpers


def _batch(seed, lengths, holes, fine=False):
    """(logp, old, advantages, mask, weights) of a loss; advantages are equal along a row."""
    rng = np.random.default_rng(seed)
    old = -rng.integers(0, 256, (B, R)) / 64
    logp = old + rng.integers(-96, 97, (B, R)) * 2.0 ** (-14 if fine else -6)
    of_row = rng.choice([0.0, 0.35, -0.1, *rng.standard_normal(6)], (B, 1))
    mask = (np.arange(R) < np.array(lengths)[:, None]) & (
        rng.random((B, R)) < (0.7 if holes else 1)
    )
    arrays = logp, old, np.broadcast_to(of_row, (B, R)), rng.random((B, R))
    logp, old, of_token, weights = (array.astype(np.float32) for array in arrays)
    return logp, old, of_token, mask, weights


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
    mask = np.arange(slots) < rng.integers(0, slots + 1, (shape[0], 1))
    mask &= rng.random(shape) < kept
    of_token = rng.choice([0.1, 0.35, -0.1, *rng.standard_normal(4)], shape)
    log_ratio = rng.integers(-96, 97, shape) / 64 * rng.choice([8, 1, 2**-8], (shape[0], 1))
    return rewards, mask, of_token, log_ratio


def steps(test):
    """Passes `step`; some have a lone sample, a group of equal rewards, or no kept token."""
    chances = st.sampled_from([0.0, 0.6, 1.0])
    count = functools.partial(st.integers, 1)
    drawn = st.builds(_step, seeds, count(3), count(8), count(5), chances, chances)
    test = example(step=_step(1, 2, 3, 4, 0.0, 1.0))(given(step=drawn)(test))
    return settings(max_examples=30)(test)


def _lists(*arrays):
    return [np.asarray(a, bool if a.dtype == bool else np.float64).tolist() for a in arrays]


def _near(found, wanted, dtype=np.float64, rtol=1e-12, atol=1e-12, what=""):
    assert np.asarray(found).dtype == dtype
    np.testing.assert_allclose(found, np.asarray(wanted, float), rtol, atol, err_msg=what)


_near_in_float32 = functools.partial(_near, dtype=np.float32, rtol=1e-5, atol=1e-6)


def _same_bits(found, wanted, what=""):
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    different = np.argwhere(found.view(f"u{found.itemsize}") != wanted.view(f"u{wanted.itemsize}"))
    assert not different.size, f"{what} differs at {different[0]}: {found}, not {wanted}"


def _spoiled(array, mask):
    return np.where(mask, array, np.resize(np.array(GARBAGE, array.dtype), array.shape))


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
    _same_bits(advantages.SCALES[name](_spoiled(of_token, mask), rewards, mask), found)


@pytest.mark.parametrize(("name", "equal"), [*((n, 0.0) for n in SCALES), ("token_std", 0.35)])
@pytest.mark.parametrize("slots", [1, 3, 7])
def test_scale_of_what_does_not_vary(name, equal, slots):
    """Zeros, although the deviation of equal numbers may come out as 1e-17, which would not do."""
    mask = np.tri(6, slots, dtype=bool)
    found = advantages.SCALES[name](np.full((6, slots), equal), np.full((2, 3), 0.35), mask)
    assert np.all(found == 0)


@names(AGGREGATIONS)
@steps
def test_aggregation(name, step):
    mask, length, order = step[1], 7, np.arange(len(step[1]))[::-1]
    weights = aggregation.AGGREGATIONS[name](mask, length)
    _near(weights, getattr(rl_oracle, name)(mask.tolist(), length))
    assert np.all(weights[~mask] == 0)
    _same_bits(aggregation.AGGREGATIONS[name](mask[order], length), weights[order])
    if mask.any():
        mean_length = mask.sum() / mask.any(1).sum()
        sums = {"seq_mean_token_sum": mean_length, "seq_mean_token_sum_norm": mean_length / length}
        np.testing.assert_allclose(weights.sum(), sums.get(name, 1.0), 1e-12)


# ----------------------------------------------------------------- losses: traced, float32


@functools.cache
def _traced(name, arguments):
    loss = losses.LOSSES[name](**dict(arguments))

    def total(logp, old, of_token, mask, weights):
        value, stats = loss(logp, old, of_token, mask)
        return jnp.sum(value * weights), (value, stats)

    return jax.jit(jax.grad(total, has_aux=True))


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
    mask = batch[3]
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
@batches
def test_loss_changes_no_bit(name, arguments, batch):
    *arrays, mask, weights = batch
    value, gradient, stats = _run(name, arguments, batch)

    spoiled = [_spoiled(array, mask) for array in arrays]
    found = _run(name, arguments, (*spoiled, mask, weights))
    _same_bits(found[0], value, "value beside garbage")
    _same_bits(found[1], gradient, "gradient beside garbage")
    for stat in stats:
        _same_bits(found[2][stat][mask], stats[stat][mask], f"{stat} beside garbage")

    order = np.random.default_rng(mask.sum()).permutation(B)
    found = _run(name, arguments, [array[order] for array in batch])
    _same_bits(found[0], value[order], "value of permuted rows")
    _same_bits(found[1], gradient[order], "gradient of permuted rows")

    found = _run_in_parts(name, arguments, batch, order % 3)
    _same_bits(found[0], value, "value in a micro-batch")
    _same_bits(found[1], gradient, "gradient in a micro-batch")

    logp, old, of_token = arrays
    found = _run(name, arguments, (logp, old, 2 * of_token, mask, weights))
    _same_bits(found[0], 2 * value, "value of twice the advantages")
    _same_bits(found[1], 2 * gradient, "gradient of twice the advantages")


@cases(LOSSES)
@batches
def test_loss_of_equal_logprobs(name, arguments, batch):
    """What zero drift makes of the first update: every ratio is 1, and the losses are one."""
    logp, _, of_token, mask, _ = batch
    logp = logp + np.float32(0.1)  # off the lattice: no round number
    weights = aggregation.AGGREGATIONS["seq_mean_token_mean"](mask, R).astype(np.float32)
    batch = logp, logp, of_token, mask, weights
    value, gradient, stats = _run(name, arguments, batch)
    assert np.all(stats["ratio"][mask] == 1)
    assert all(np.all(stats[stat] == 0) for stat in stats if stat.startswith("clipped"))
    wanted = _run("reinforce", {}, batch)[1]
    np.testing.assert_allclose(gradient, wanted, 1e-6)
    if name in ONE_ALGORITHM:
        _same_bits(gradient, wanted, "gradient")
    if name in ("ppo", "gspo", "gmpo"):
        assert np.all(value[mask] == -of_token[mask])


@cases([(name, {}) for name in losses.LOSSES if name != "sapo"] + [("sapo", {"tau_negative": 2.0})])
@given(
    seed=seeds,
    lengths=st.permutations([4, 2, 1, 1, 0, 0]),
    parts=st.lists(st.integers(0, 3), min_size=B, max_size=B),
)
@settings(max_examples=10)
def test_micro_batches_add_up(name, arguments, seed, lengths, parts):
    """To the same bits: every number is one of few binary digits, and so is every sum."""
    logp, _, of_token, mask, _ = _batch(seed, lengths, holes=False)
    for aggregate in aggregation.AGGREGATIONS.values():
        weights = aggregate(mask, R).astype(np.float32)
        batch = logp, logp, np.round(8 * of_token) / 8, mask, weights
        value, gradient, _ = _run(name, arguments, batch)
        in_parts = _run_in_parts(name, arguments, batch, parts)
        _same_bits(in_parts[1], gradient, "gradient")
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

    found = correction(_spoiled(log_ratio, mask), mask, _spoiled(of_token, mask))
    _same_bits(found[0], weights, "weights beside garbage")
    _same_bits(found[1], keep, "keep beside garbage")

    found = correction(log_ratio[::-1], mask[::-1], of_token[::-1])
    _same_bits(found[0], weights[::-1], "weights of permuted rows")
    _same_bits(found[1], keep[::-1], "keep of permuted rows")

    weights, keep = correction(0 * log_ratio, mask, of_token)  # zero drift
    assert np.all(weights == 1) and np.array_equal(keep, mask)


@steps
def test_chain(step):
    _, mask, of_token, log_ratio = step
    parts = [make() for make in corrections.CORRECTIONS.values()]
    weights, keep = corrections.chain(*parts)(log_ratio, mask, of_token)
    alone = [part(log_ratio, mask, of_token) for part in parts]
    _near(weights, np.prod([w for w, _ in alone], axis=0))
    np.testing.assert_array_equal(keep, np.all([k for _, k in alone], axis=0), strict=True)


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
        _same_bits(value, _traced_kl(name.removesuffix("+"))(logp, reference)[1], "value")
        _same_bits(gradient, _traced_kl("k2")(logp, reference)[0], "gradient")
    gradient, value = _traced_kl(name)(logp, logp)
    assert np.all(value == 0) and np.all(gradient == (name == "k1"))


@given(st.lists(st.integers(0, 20), max_size=6), st.integers(1, 20), st.sampled_from([1.0, 0.35]))
@settings(max_examples=30)
def test_overlong_penalty(lengths, buffer, factor):
    lengths = np.array([20 - buffer, 20, *lengths])
    found = shaping.overlong_penalty(lengths, 20, buffer, factor)
    _near(found, rl_oracle.overlong_penalty(lengths.tolist(), 20, buffer, factor))
    assert np.all(found[lengths <= 20 - buffer] == 0)


@steps
def test_informative_groups(step):
    found = shaping.informative_groups(step[0])
    np.testing.assert_array_equal(
        found, rl_oracle.informative_groups(step[0].tolist()), strict=True
    )
