"""Sums of two scores against loops over tokens in Python's floats."""

import bisect
import dataclasses
import math

import numpy as np
import pytest
from random_model import initial_params
from small_models import UNEVEN, UNEVEN_LATENT

from studies import scoring
from studies.measures import CAPS, POSITIONS, PROBABILITIES, SUMS, Pair, measure, pooled
from studies.scoring import Comparison, Scores

_ROWS, _GROUP, _SLOTS, _LAYERS, _TOKENS = 12, 3, 11, 2, 20
_PAIRS = {"pair": ("a", "b")}
_PREFIXES = (1, 2, 4, 8)


def _samples(seed: int = 0) -> dict:
    """Random values where tokens are, and outside them values that would be noticed."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, _SLOTS + 1, _ROWS)
    counts[:2] = 1, _SLOTS
    mask = np.arange(_SLOTS) < counts[:, None]
    shape = (_ROWS, _SLOTS)

    def masked(x: np.ndarray) -> np.ndarray:
        return np.where(mask, x, 0.0)

    return {
        "mask": mask,
        "lengths": counts + rng.integers(1, _TOKENS - _SLOTS + 1, _ROWS),
        "d": masked(rng.normal(0, 0.8, shape) * (rng.random(shape) < 0.8)),
        "kl": masked(rng.random(shape)),
        "square": masked(rng.random(shape)),
        "size": masked(1 + rng.random(shape)),
        "entropy": masked(rng.random(shape)),
        "logp": masked(np.log(rng.choice([0.03, 0.3, 0.7, 0.95, 0.999], shape))),
        "flips": rng.random((_LAYERS, _ROWS, _TOKENS)) < [[[0.2]], [[0.6]]],
    }


def _scores(x: dict, size: int, dense: bool = False):
    """The scores of `size` rows at a time. View b has other values, which nothing may read."""
    for first in range(0, _ROWS, size):
        rows = slice(first, first + size)
        wrong = np.full_like(x["entropy"][rows], 7.0)

        def compare(a: str, b: str, rows=rows) -> Comparison:
            assert (a, b) == ("a", "b")
            flips = None if dense else x["flips"][:, rows]
            return Comparison(*(x[n][rows] for n in ("d", "kl", "square", "size")), flips)

        logprobs = {"a": x["logp"][rows].astype(np.float32), "b": -wrong}
        yield Scores(rows, logprobs, {"a": x["entropy"][rows], "b": wrong}, {}, compare)


def _measured(x: dict, size: int = _ROWS, dense: bool = False) -> Pair:
    found = measure(_scores(x, size, dense), _PAIRS, x["mask"], x["lengths"], _GROUP)
    return Pair(found["pair"])


def _about(value):
    """Sums are kept to five digits."""
    return pytest.approx(value, rel=6e-5, abs=5e-5)


def _tokens(x: dict, rows):
    """(row, slot, D) of every token of some rows."""
    return [(r, s, float(x["d"][r, s])) for r in rows for s in range(_SLOTS) if x["mask"][r, s]]


def test_sums_are_those_of_a_loop():
    x = _samples()
    pair = _measured(x)
    for q in range(_ROWS // _GROUP):
        rows = range(q * _GROUP, (q + 1) * _GROUP)
        tokens = _tokens(x, rows)
        assert pair.tokens[q] == len(tokens)
        theirs = {
            "abs": sum(abs(d) for _, _, d in tokens),
            "expm1": sum(max(math.exp(d), math.exp(-d)) - 1 for _, _, d in tokens),
            "k3": sum(math.exp(d) - 1 - d for _, _, d in tokens),
            "kl": sum(x["kl"][r, s] for r, s, _ in tokens),
            "square": sum(x["square"][r, s] for r, s, _ in tokens),
            "size": sum(x["size"][r, s] for r, s, _ in tokens),
            "entropy": sum(x["entropy"][r, s] for r, s, _ in tokens),
            "unequal": sum(d != 0 for _, _, d in tokens),
        }
        assert set(theirs) == set(SUMS)
        for name, value in theirs.items():
            assert pair.sums[name][q] == _about(value), name
        assert pair.inputs[q] == sum(x["lengths"][r] for r in rows)
        for layer in range(_LAYERS):
            flipped = sum(
                bool(x["flips"][layer, r, t]) for r in rows for t in range(x["lengths"][r])
            )
            assert pair.flips[q, layer] == flipped
    assert pair.most == max(abs(d) for _, _, d in _tokens(x, range(_ROWS)))


def test_tail_has_both_sides():
    """Ratios above C and below 1 / C count alike; those within do not."""
    x = _samples()
    pair = _measured(x)
    for q in range(_ROWS // _GROUP):
        ratios = [math.exp(d) for _, _, d in _tokens(x, range(q * _GROUP, (q + 1) * _GROUP))]
        for i, cap in enumerate(CAPS):
            assert pair.tail[q, i] == sum(ratio > cap or ratio < 1 / cap for ratio in ratios)
    assert 0 < pair.clip_fraction(2.0).value < 1
    planted = dict(x, d=np.where(x["mask"], math.log(2.1), 0.0))
    assert _measured(planted).clip_fraction(2.0).value == 1
    planted["d"] *= -1
    assert _measured(planted).clip_fraction(2.0).value == 1
    assert _measured(planted).clip_fraction(3.0).value == 0
    assert pair.clip_less(_measured(planted), 2.0).value == pair.clip_fraction(2.0).value - 1


def test_bins():
    """By position each bin has its part of the slots; by probability, that of view a."""
    x = _samples()
    summary = _measured(x)
    bins = {
        "position": lambda r, s: s * POSITIONS // _SLOTS,
        "probability": lambda r, s: bisect.bisect(PROBABILITIES[1:-1], math.exp(x["logp"][r, s])),
    }
    for name, place in bins.items():
        found: dict = {}
        for r, s, d in _tokens(x, range(_ROWS)):
            found.setdefault((r // _GROUP, place(r, s)), []).append(abs(d))
        count = {"position": POSITIONS, "probability": len(PROBABILITIES) - 1}[name]
        assert summary.binned[name].shape == (_ROWS // _GROUP, 2, count)
        for q, bin_ in np.ndindex(_ROWS // _GROUP, count):
            values = found.get((q, bin_), [])
            assert summary.binned[name][q, 0, bin_] == len(values)
            assert summary.binned[name][q, 1, bin_] == _about(sum(values))
        means = summary.summary()["by"][name]
        for bin_ in range(count):
            values = [d for (_, place), found_ in found.items() for d in found_ if place == bin_]
            assert means[bin_] == _about(sum(values) / len(values))
    planted = dict(x, logp=np.where(x["mask"], math.log(0.95), 0.0))
    assert [m is None for m in _measured(planted).summary()["by"]["probability"]] == [
        True,
        True,
        True,
        False,
        True,
    ]


def test_sequences_and_their_beginnings():
    x = _samples()
    pair = _measured(x)
    lists = [[d for _, _, d in _tokens(x, [r])] for r in range(_ROWS)]
    for q in range(_ROWS // _GROUP):
        whole = [sum(lists[r]) for r in range(q * _GROUP, (q + 1) * _GROUP)]
        theirs = (_GROUP, sum(whole), sum(d * d for d in whole))
        assert pair.sequence[q] == _about(theirs)
    summary = pair.summary()
    whole = [sum(values) for values in lists]
    assert summary["sequence_mean"] == _about(sum(whole) / _ROWS)
    assert summary["sequence_rms"] == _about(math.sqrt(sum(d * d for d in whole) / _ROWS))
    theirs = []
    for length in _PREFIXES:
        sums = [sum(values[:length]) for values in lists if len(values) >= length]
        theirs.append([length, math.sqrt(sum(d * d for d in sums) / len(sums))])
    assert np.array(summary["prefix_rms"]) == _about(np.array(theirs))


def test_summary():
    """Means over all tokens, the root of the logits' mean square, and shares of flips."""
    x = _samples()
    summary = _measured(x).summary()
    tokens = _tokens(x, range(_ROWS))
    count = len(tokens)
    assert summary["tokens"] == count
    assert summary["mean_abs"].value == _about(sum(abs(d) for _, _, d in tokens) / count)
    rms = math.sqrt(sum(x["square"][r, s] for r, s, _ in tokens) / count)
    assert summary["rms_logits"].value == _about(rms)
    assert summary["rms_logits"].low < rms < summary["rms_logits"].high
    shares = [
        np.mean([x["flips"][i, r, t] for r in range(_ROWS) for t in range(x["lengths"][r])])
        for i in range(_LAYERS)
    ]
    assert summary["flips_by_layer"] == _about(shares)
    assert summary["flips"].value == _about(np.mean(shares))
    assert "flips" not in _measured(x, dense=True).summary()


def test_parts_and_pools():
    """Rows may come in parts that cut questions, and pooled pairs are the pair of all samples."""
    x, other = _samples(), _samples(1)
    whole = _measured(x)
    for size in (1, 4):
        cut = _measured(x, size)
        assert cut.summary() == whole.summary()
    both = pooled([whole, _measured(other)])
    assert len(both.tokens) == 2 * _ROWS // _GROUP
    assert both.most == max(whole.most, _measured(other).most)
    joined = [_measured(y).summary() for y in (x, other)]
    counts = [found["tokens"] for found in joined]
    for name in ("mean_abs", "kl", "entropy"):
        mean = np.average([found[name].value for found in joined], weights=counts)
        assert both.summary()[name].value == pytest.approx(mean)


def test_small_differences_are_kept():
    """The mean e^|D| of tokens that hardly differ is not rounded to 1."""
    x = _samples()
    x["d"] = np.where(x["mask"], 2e-6, 0.0)
    assert _measured(x).token_mult_prob_error().value - 1 == pytest.approx(2e-6, rel=0.01)


def test_divergence_of_whole_distributions():
    """KL and the logits' mean square, against float64 sums over the vocabulary."""
    rng = np.random.default_rng(2)
    one = rng.normal(0, 3, (3, 4, 17)).astype(np.float32)
    other = one + rng.normal(0, 0.1, one.shape).astype(np.float32) + np.float32(0.7)
    temperature = np.array([1.0, 0.5, 0.0], np.float32)  # 0 stands for 1
    divergence, square, size = (np.asarray(x) for x in scoring._compare(one, other, temperature))
    for b, r in np.ndindex(3, 4):
        scale = temperature[b] or 1.0
        logp, logq = (_log_softmax(x[b, r].astype(np.float64) / scale) for x in (one, other))
        theirs = sum(math.exp(p) * (p - q) for p, q in zip(logp, logq, strict=True))
        assert divergence[b, r] == pytest.approx(theirs, rel=1e-3)
        shift = other[b, r].astype(np.float64) - one[b, r]
        assert square[b, r] == pytest.approx(shift.var(), rel=1e-4)
        assert size[b, r] == pytest.approx(one[b, r].astype(np.float64).var(), rel=1e-4)
    same = scoring._compare(one, one, temperature)
    assert not np.any(same[0]) and not np.any(same[1])


def _log_softmax(x: np.ndarray) -> list[float]:
    top = max(x)
    total = math.log(sum(math.exp(value - top) for value in x))
    return [float(value) - top - total for value in x]


def test_flips_are_of_sets():
    rng = np.random.default_rng(3)
    one, other = (
        np.stack([rng.permutation(5)[:3] for _ in range(40)]).reshape(2, 4, 5, 3) for _ in range(2)
    )
    other[0, 0, 0] = one[0, 0, 0][::-1]
    found = np.asarray(scoring._flips(one.astype(np.int32), other.astype(np.int32)))
    for place in np.ndindex(2, 4, 5):
        assert found[place] == (set(one[place].tolist()) != set(other[place].tolist()))
    assert not found[0, 0, 0] and found.any() and not found.all()


@pytest.mark.parametrize("groups", [0, 1, 3])
def test_margin(groups):
    """Of a softmax (0), and of sigmoids with a correction: one group, or the best 2 of 3."""
    draw = np.random.default_rng(4).normal
    logits = draw(0, 2, (2, 3, 4, 6)).astype(np.float32)
    correction = draw(0, 0.3, (2, 6)).astype(np.float32) if groups else None
    router = {"scoring_func": "sigmoid", "n_group": groups, "topk_group": min(groups, 2)}
    config = dataclasses.replace(
        UNEVEN, num_experts=6, num_experts_per_tok=2, **(router if groups else {})
    )
    found = np.asarray(scoring._margin(config, logits, correction))
    for place in np.ndindex(2, 3, 4):
        raised = [math.exp(x) for x in logits[place].astype(float)]
        p = [x / sum(raised) for x in raised]
        if groups:
            p = [x / (1 + x) + float(b) for x, b in zip(raised, correction[place[0]], strict=True)]
        if groups == 3:
            pairs = sorted((p[0:2], p[2:4], p[4:6]), key=sum)
            p = pairs[1] + pairs[2]
        best = sorted(p, reverse=True)
        assert found[place] == pytest.approx(best[1] - best[2], abs=1e-6)


def test_corrections_of_routers():
    params = initial_params(UNEVEN_LATENT)
    params["layers"]["router"]["e_score_correction_bias"] = np.arange(8.0)[None]
    np.testing.assert_array_equal(scoring._correction(params), np.arange(8.0)[None])
    assert scoring._correction(initial_params(UNEVEN)) is None
