"""The choice of a token: its distribution, and what is never chosen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow
from scipy import stats

from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.models import Truncation
from fp8rl_jax.rollout.sampling import draw, invert, sample_keys, sample_token

_invert, _draw = exact_jit(invert), exact_jit(draw)
_LAST = 1 - 2.0**-24  # the largest uniform number
_FLAT, _PEAKED = 0.5, 4.0  # standard deviations of logits


def _logits(width: int, deviation: float) -> np.ndarray:
    logits = deviation * np.random.default_rng(width).standard_normal(width)
    return logits.astype(np.float32)


def _truncated(scaled: jax.Array, top_k: int, top_p: float) -> jax.Array:
    """Logits with -inf for the tokens that top-k and top-p leave out."""
    keeps = Truncation(top_k, top_p).cut(scaled, jnp.ones(len(scaled))).keeps(scaled)
    return jnp.where(keeps, scaled, -jnp.inf)


def _counts(logits: np.ndarray, draws: int, temperature=1.0, top_k=0, top_p=1.0) -> np.ndarray:
    """How often each token is chosen with so many keys."""
    one = jnp.full(1, temperature, jnp.float32)
    scaled = _truncated(jnp.asarray(logits, jnp.float32)[None], top_k, top_p)

    def chosen(key):
        return sample_token(scaled, key[None], one)[0]

    @exact_jit
    def count(key):
        keys = jax.random.split(key, draws)
        tokens = jax.lax.map(chosen, keys, batch_size=2000)
        return jnp.zeros(len(logits), jnp.int32).at[tokens].add(1)

    return np.asarray(count(jax.random.key(7, impl="threefry2x32")))


def _kept(logits: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """The softmax in float64 of what top-k and top-p leave."""
    order = np.argsort(-logits.astype(np.float64), kind="stable")
    weight = np.exp(logits.astype(np.float64) - logits.max())
    if top_k:
        weight[order[top_k:]] = 0
    if top_p < 1:
        share = weight[order] / weight.sum()
        weight[order[np.cumsum(share) - share >= top_p]] = 0
    return weight / weight.sum()


def _p_value(counts: np.ndarray, probability: np.ndarray) -> float:
    """Of the chi-squared statistic; tokens that are expected less than 10 times are one bin."""
    assert (counts[probability == 0] == 0).all(), "a token of probability 0 was chosen"
    expected = probability * counts.sum()
    rare = expected < 10
    observed, expected = (
        np.append(x[~rare], x[rare].sum()) for x in (counts.astype(np.float64), expected)
    )
    if expected[-1] < 10:
        observed, expected = (np.append(x[:-2], x[-2:].sum()) for x in (observed, expected))
    assert len(expected) > 1
    return float(stats.chi2.sf(((observed - expected) ** 2 / expected).sum(), len(expected) - 1))


def test_the_distribution_is_the_softmax():
    """In a small vocabulary, whose last block is not full; `test_drawn` has further settings."""
    logits = _logits(1000, 1.0)
    for top_k, top_p in ((0, 1.0), (300, 0.9)):
        counts = _counts(logits, 100_000, top_k=top_k, top_p=top_p)
        assert _p_value(counts, _kept(logits, top_k, top_p)) > 1e-4, (top_k, top_p)
        if not top_k and top_p == 1:
            assert _p_value(counts, _kept(1.1 * logits, 0, 1.0)) < 1e-4, "a wrong temperature"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "deviation", "top_k", "top_p"),
    [
        (151_936, _FLAT, 0, 1.0),
        (8_192, _PEAKED, 0, 1.0),
        (151_936, _PEAKED, 100, 1.0),
        (8_192, _FLAT, 0, 0.9),
        (151_936, _PEAKED, 0, 0.9),
    ],
    ids=["flat", "peaked", "top-k", "top-p flat", "top-p peaked"],
)
def test_the_distribution_in_large_vocabularies(width, deviation, top_k, top_p):
    """A million draws, against the softmax in float64."""
    logits = _logits(width, deviation)
    counts = _counts(logits, 1_000_000, top_k=top_k, top_p=top_p)
    assert counts.sum() == 1_000_000
    assert _p_value(counts, _kept(logits, top_k, top_p)) > 1e-4


def test_every_sample_and_position_has_a_key_of_its_own():
    ids, positions = np.indices((40, 50)).reshape(2, -1).astype(np.int32)
    keys = jax.random.key_data(sample_keys(jax.random.key(3, impl="threefry2x32"), ids, positions))
    assert len(np.unique(np.asarray(keys), axis=0)) == ids.size


@pytest.mark.parametrize(("top_p", "kept"), [(1e-6, 1), (0.3, 1), (0.6, 4), (0.8, 4), (0.9, 6)])
def test_ties_of_top_p_stay_together(top_p, kept):
    """Of probabilities 1/2, three of 1/8 and two of 1/16: with one of equal ones all are kept."""
    logits = jnp.log(jnp.asarray([[0.125, 0.5, 0.0625, 0.125, 0.0625, 0.125]]))
    assert int((_truncated(logits, 0, top_p) > -jnp.inf).sum()) == kept


def test_a_share_of_exact_sums():
    """Weights that are whole numbers have exact sums: the entry is that of the definition."""
    rng = np.random.default_rng(0)
    for width in (1, 7, 64, 2384):
        weights = rng.integers(0, 3, (50, width)).astype(np.float32)
        weights[:, rng.integers(width)] += 1
        uniform = rng.integers(0, 2**11, 50) / 2**11
        uniform[:2] = 0, 1 - 2**-11
        share = uniform[:, None] * weights.sum(1, keepdims=True)
        expected = (np.cumsum(weights, 1) > share).argmax(1)
        found = _invert(jnp.asarray(weights), jnp.asarray(uniform, jnp.float32))
        np.testing.assert_array_equal(found, expected)


def test_extremes():
    """The first and last uniform numbers choose what has a weight, of weights that need rounding
    and are mostly 0."""
    rng = np.random.default_rng(1)
    for width in (16, 8192):
        weights = np.exp(4 * rng.standard_normal((64, width))).astype(np.float32)
        weights[rng.random(weights.shape) < 0.7] = 0
        weights[:, width // 2 :][:32] = 0  # nothing at the end
        weights[:, 3] = 1e-3
        rows = jnp.asarray(weights)
        for u in (0.0, 2.0**-24, 0.5, 1 - 2.0**-23, _LAST):
            of_row = jnp.full(64, u, jnp.float32)
            found = np.asarray(_invert(rows, of_row))
            assert (weights[np.arange(64), found] > 0).all()
            if u == 0:
                np.testing.assert_array_equal(found, (weights > 0).argmax(1))
            for v in (0.0, 0.5, _LAST):
                pair = jnp.stack([of_row, jnp.full(64, v, jnp.float32)], 1)
                token = np.asarray(_draw(rows, pair))
                assert (weights[np.arange(64), token] > 0).all()


def test_a_last_token_that_is_nearly_impossible():
    """What lies below the resolution at the end is not chosen by the last uniform number."""
    weights = jnp.ones((1, 1024)).at[0, -1].set(1e-30)
    last = jnp.full((1, 2), _LAST, jnp.float32)
    assert _invert(weights, last[:, 0])[0] == 1022
    assert _draw(weights, last)[0] < 1023
    single = jnp.zeros((1, 1024)).at[0, -1].set(1e-30)
    for u in (0.0, _LAST):
        assert _draw(single, jnp.full((1, 2), u, jnp.float32))[0] == 1023


def test_greedy_and_rows_of_nan():
    logits = np.array([[1, 3, 3, 0], [np.nan, 2, 3, 1], [5, 4, 4, 5]], np.float32)
    keys = jax.random.split(jax.random.key(0, impl="threefry2x32"), 3)
    for temperature, expected in ((0.0, [1, 0, 0]), (1.0, None)):
        found = np.asarray(sample_token(jnp.asarray(logits), keys, jnp.full(3, temperature)))
        assert found[1] == 0
        assert expected is None or found.tolist() == expected


@pytest.mark.parametrize("settings", [(0, 1.0), slow((20, 0.9))], ids=["all", "top-k and top-p"])
def test_a_row_does_not_depend_on_others(settings):
    """The same tokens alone, among a few and among many."""
    rows = jnp.asarray(np.stack([_logits(1008, 1.0) * s for s in np.linspace(0.1, 3, 33)]))
    keys = jax.random.split(jax.random.key(2, impl="threefry2x32"), 33)
    program = exact_jit(lambda x, k: sample_token(_truncated(x, *settings), k, jnp.ones(len(k))))
    whole = np.asarray(program(rows, keys))
    assert len(set(whole.tolist())) > 5
    for some in (slice(0, 1), slice(32, 33), slice(3, 8)):
        np.testing.assert_array_equal(program(rows[some], keys[some]), whole[some])
