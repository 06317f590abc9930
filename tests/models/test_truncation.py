"""Top-k and top-p: which tokens are kept, and log-probabilities over them, against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import quick_if

from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.models import Draws, Truncation, token_divergences, token_logprobs
from fp8rl_jax.models.truncation import kept_tokens
from fp8rl_jax.quant import get_recipe

_F32 = get_recipe("f32")
_CUTS = [(0, 0.7), (0, 0.05), (0, 0.999), (1, 1.0), (7, 1.0), (40, 1.0), (40, 0.9), (3, 0.5)]
_QUICK = [(97, (0, 0.7)), (1000, (7, 1.0)), (1000, (40, 0.9))]


def sorted_tokens(logits: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """(M, V) bool by sorting in float64: of equal logits top-k takes the smallest ids, and top-p
    all or none."""
    keeps = np.zeros(logits.shape, bool)
    for row, values in enumerate(logits.astype(np.float64)):
        candidates = np.lexsort((np.arange(len(values)), -values))[: top_k or None]
        weight = np.exp(values[candidates] - values.max())
        reached = np.cumsum(weight) >= top_p * weight.sum()
        least = values[candidates][np.argmax(reached)] if top_p < 1 else -np.inf
        keeps[row, candidates[values[candidates] >= least]] = True
    return keeps


def _log_softmax(scaled: np.ndarray, keeps: np.ndarray) -> np.ndarray:
    """Float64, over the kept tokens; -inf for others."""
    scaled = np.where(keeps, scaled.astype(np.float64), -np.inf)
    scaled = scaled - scaled.max(-1, keepdims=True)
    return scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))


def _rows(vocabulary: int) -> np.ndarray:
    """Logits of several spreads, many of them equal to others, negative ones and both zeros."""
    rng = np.random.default_rng(vocabulary)
    rows = rng.standard_normal((24, vocabulary)) * np.linspace(0.1, 6, 24)[:, None]
    rows[:, ::5] = np.round(rows[:, ::5])
    return rows.astype(np.float32)


@pytest.mark.parametrize(
    ("vocabulary", "cut"),
    quick_if(lambda case: case in _QUICK, [(v, c) for v in (97, 1000, 5000) for c in _CUTS]),
)
def test_kept_tokens_are_those_of_sorting(vocabulary, cut):
    """They are the same in any company, and when they are recorded and read back."""
    truncation, rows = Truncation(*cut), _rows(vocabulary)
    width = vocabulary + -vocabulary % 16
    padded = np.pad(rows, ((0, 0), (0, width - vocabulary)), constant_values=-np.inf)

    @exact_jit
    def find(scaled):
        keeps = truncation.cut(scaled, jnp.ones(len(scaled))).keeps(scaled)
        return keeps, truncation.record(keeps, vocabulary)

    keeps, numbers = find(padded)
    assert numbers.shape[1] == truncation.recorded_numbers(vocabulary)
    recorded = truncation.recorded(numbers, vocabulary, width)
    expected = sorted_tokens(rows, *cut)
    # A sum that is rounded to just below or above the share lets one more or less in.
    doubtful = (np.asarray(keeps)[:, :vocabulary] != expected).sum(1)
    assert (doubtful <= 1).all() and (doubtful > 0).mean() < 0.05
    np.testing.assert_array_equal(recorded[:, :vocabulary], keeps[:, :vocabulary])
    assert not np.asarray(recorded)[:, vocabulary:].any()
    for some in (slice(0, 1), slice(5, 8)):
        np.testing.assert_array_equal(find(padded[some])[0], keeps[some])


def test_greedy_rows_keep_all_tokens_and_nan_is_kept():
    rows = jnp.asarray([[1.0, 2, 3], [1, 2, 3], [1, jnp.nan, 3]])
    keeps = Truncation(1, 0.5).cut(rows, jnp.asarray([1.0, 0, 1])).keeps(rows)
    assert keeps.tolist() == [[False, False, True], [True] * 3, [False, True, True]]
    by_id, many = Truncation(2), jnp.zeros((2, 100))  # two ids cannot record a hundred tokens
    heat = jnp.asarray([1.0, 0.0])
    numbers = by_id.record(by_id.cut(many, heat).keeps(many), 100)
    read, _ = kept_tokens(Draws(jnp.asarray([1, 5]), heat, by_id, numbers), many, 100)
    assert numbers.shape == (2, 2) and read.sum(1).tolist() == [2, 100]


_HEAT = np.float32([0.7, 1.0, 1.3])


def _case():
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((3, 5, 16)).astype(np.float32)
    head = (0.4 * rng.standard_normal((16, 97))).astype(np.float32)
    scaled = hidden.astype(np.float64) @ head / _HEAT[:, None, None]
    return hidden, head, scaled


@pytest.mark.parametrize("recorded", [False, True], ids=["found", "recorded"])
def test_logprobs_and_gradients_are_those_of_float64(recorded):
    """Of kept targets, over the kept tokens, and the gradient of the expected score is 0; over the
    whole vocabulary it is not."""
    truncation, (hidden, head, scaled) = Truncation(20, 0.8), _case()
    flat = scaled.reshape(15, -1)
    keeps = sorted_tokens(flat.astype(np.float32), 20, 0.8).reshape(scaled.shape)
    assert (keeps.sum(-1) > 2).all() and (keeps.sum(-1) < 20).any()
    rng = np.random.default_rng(1)
    targets = np.argmax(np.where(keeps, rng.random(keeps.shape), -1), -1).astype(np.int32)
    kept = None
    if recorded:
        kept = truncation.record(jnp.asarray(keeps.reshape(15, -1)), 97).reshape(3, 5, -1)
    weight = rng.standard_normal((3, 5))
    heat = np.broadcast_to(_HEAT[:, None], (3, 5))

    @exact_jit
    def logprobs(hidden, head, targets, weight, kept):
        def loss(hidden, head):
            draws = Draws(targets, heat, truncation, kept)
            logp, entropy = token_logprobs(hidden, head, draws, _F32)
            return (logp * weight).sum(), (logp, entropy)

        return jax.grad(loss, (0, 1), has_aux=True)(hidden, head)

    (dhidden, dhead), (logp, entropy) = logprobs(hidden, head, targets, weight, kept)
    expected = _log_softmax(scaled, keeps)
    at_target = np.take_along_axis(expected, targets[..., None], -1)[..., 0]
    np.testing.assert_allclose(logp, at_target, atol=2e-6)
    p = np.exp(expected)
    of_entropy = -(p * np.where(keeps, expected, 0)).sum(-1)
    np.testing.assert_allclose(entropy, of_entropy, atol=2e-6)
    slope = (np.eye(97)[targets] - p) * (weight / _HEAT[:, None])[..., None]
    np.testing.assert_allclose(dhidden, slope @ head.T, atol=1e-5)
    np.testing.assert_allclose(dhead, np.einsum("btd,btv->dv", hidden, slope), atol=1e-5)

    # The expected score: every kept token of one position with its probability.
    tokens = np.flatnonzero(keeps[0, 0])
    of_all = np.repeat(hidden[:1, :1], len(tokens), 1)
    share = p[0, 0, tokens]
    many = None if kept is None else jnp.repeat(kept[:1, :1], len(tokens), 1)

    def score(truncation, recorded):
        own_heat = np.full((1, len(tokens)), _HEAT[0])
        draws = Draws(tokens[None].astype(np.int32), own_heat, truncation, recorded)

        def expected(head):
            logp, _ = token_logprobs(of_all, head, draws, _F32)
            return (logp[0] * share.astype(np.float32)).sum()

        return np.abs(jax.jit(jax.grad(expected))(head)).max()

    assert score(truncation, many) < 1e-6 < 1e-2 < score(None, None)


def test_divergences_over_the_kept_tokens():
    """Value and gradient against float64; 0 where the other model is the policy."""
    truncation, (hidden, head, scaled) = Truncation(0, 0.8), _case()
    rng = np.random.default_rng(2)
    other = rng.standard_normal(hidden.shape).astype(np.float32)
    targets = scaled.argmax(-1).astype(np.int32)
    keeps = sorted_tokens(scaled.reshape(15, -1).astype(np.float32), 0, 0.8).reshape(scaled.shape)

    @exact_jit
    def divergence(hidden, other):
        def total(hidden):
            heat = np.broadcast_to(_HEAT[:, None], targets.shape)
            draws = Draws(targets, heat, truncation)
            found = token_divergences(hidden, head, (other, head), draws, _F32)
            return found.sum(), found

        return jax.grad(total, has_aux=True)(hidden)

    slope, found = divergence(hidden, other)
    logp = _log_softmax(scaled, keeps)
    logq = _log_softmax(other.astype(np.float64) @ head / _HEAT[:, None, None], keeps)
    p, difference = np.exp(logp), np.where(keeps, logp, 0) - np.where(keeps, logq, 0)
    expected = (p * difference).sum(-1)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    of_logits = p * (difference - expected[..., None]) / _HEAT[:, None, None]
    np.testing.assert_allclose(slope, of_logits @ head.T, atol=1e-4)
    assert (np.asarray(divergence(hidden, hidden)[1]) == 0).all()
