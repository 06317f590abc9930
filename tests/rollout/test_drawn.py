"""What is recorded is what is drawn: tokens of every sampler are counted, and their frequencies are
the recorded probabilities. The judge is the draws, not another of our definitions."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow
from random_model import initial_params
from scipy import stats
from small_models import TINY

from fp8rl_jax import models
from fp8rl_jax.quant import get_recipe
from fp8rl_jax.rollout import (
    Batching,
    ContinuousSampler,
    Earlier,
    Extension,
    Requests,
    Rollout,
    SamplerConfig,
    make_refit,
    make_sampler,
)

DRAWS = 4096
_PROMPT = np.int32([[3, 1, 4, 1, 5]])
_RECIPE = get_recipe("f32")


def _weights(seed: int):
    """Weights with a head that gives some tokens a few times the probability of others."""
    params = initial_params(TINY, seed)
    head = 3 * np.array(params["lm_head"])
    return make_refit(_RECIPE)({**params, "lm_head": jnp.asarray(head)}, {})[0]


def _arguments(weights, temperature: float, tokens: int) -> tuple:
    return (
        weights,
        _PROMPT,
        Requests(
            np.int32([_PROMPT.shape[1]]),
            jax.random.key(0, impl="threefry2x32"),
            np.arange(DRAWS, dtype=np.int32),
            np.full(DRAWS, temperature, np.float32),
            np.full(DRAWS, tokens, np.int32),
            tuple(map(jnp.asarray, models.rope_tables(TINY, 16))),
        ),
    )


def _settings(tokens: int, top_k: int, top_p: float, **fields) -> SamplerConfig:
    return SamplerConfig(tokens, DRAWS, (), 0, top_k, top_p, **fields)


def _continuous(settings: SamplerConfig) -> ContinuousSampler:
    return ContinuousSampler(TINY, _RECIPE, settings, Batching(1024, 1100), part=2)


@functools.cache
def _sampler(kind: str, top_k: int, top_p: float):
    settings = _settings(2, top_k, top_p)
    if kind == "continuous":
        return _continuous(settings)
    return make_sampler(TINY, _RECIPE, dataclasses.replace(settings, taps=("logits",)))


def _one_reply(kind: str, temperature: float, top_k: int, top_p: float) -> Rollout:
    arguments = _arguments(_weights(0), temperature, 2)
    return jax.device_get(_sampler(kind, top_k, top_p)(*arguments))


def _two_versions(temperature: float, top_k: int, top_p: float) -> Rollout:
    """The first token is drawn by one version, the second by another."""
    sampler = _continuous(_settings(2, top_k, top_p, records_kept=True))
    first = sampler(*_arguments(_weights(0), temperature, 1))
    arguments = _arguments(_weights(1), temperature, 2)
    earlier = Earlier(
        tokens=first.tokens,
        logprobs=first.logprobs,
        counts=np.ones(DRAWS, np.int32),
        finished=np.zeros(DRAWS, bool),
        keys=np.tile(jax.random.key_data(arguments[2].key), (DRAWS, 1)),
        needed=np.int32([DRAWS]),
        kept=first.kept,
    )
    return sampler(*arguments, earlier=earlier)


def _conversation(temperature: float, top_k: int, top_p: float) -> Rollout:
    """Two replies of one token, and between them a token of the environment."""
    settings = _settings(3, top_k, top_p, max_turns=2, max_turn_tokens=1)

    answered = np.zeros(DRAWS, bool)

    def answer(progress) -> Extension:
        waits = np.asarray(progress.paused) & ~answered
        answered[waits] = True
        said = np.full((DRAWS, 1), 7, np.int32)
        return Extension(said, waits.astype(np.int32), np.zeros(DRAWS, bool))

    return _continuous(settings)(*_arguments(_weights(0), temperature, 3), answer=answer)


def _p_value(tokens: np.ndarray, logprobs: np.ndarray) -> float:
    """Of the chi-squared statistic of draws against the recorded probabilities, which must be equal
    for equal tokens, and sum to 1."""
    distinct, first, counts = np.unique(tokens, return_index=True, return_counts=True)
    probability = np.exp(logprobs[first].astype(np.float64))
    for token, value in zip(distinct, logprobs[first], strict=True):
        assert (logprobs[tokens == token] == value).all(), "one token, one probability"
    missing = 1 - probability.sum()
    # What was not drawn in n draws has a probability p with (1 - p)^n not far from 1.
    assert -1e-5 < missing < 20 / len(tokens), f"what is drawn has probability {1 - missing}"
    expected = probability * len(tokens)
    rare = expected < 10
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], len(tokens) - expected[~rare].sum())
    if expected[-1] < 1:
        observed, expected = observed[:-1], expected[:-1]
    if len(expected) == 1:
        return 1.0
    return float(stats.chi2.sf(((observed - expected) ** 2 / expected).sum(), len(expected) - 1))


def _check(rollout: Rollout) -> None:
    """Every drawn position, for the responses that begin with the most frequent tokens."""
    rows = np.ones(DRAWS, bool)
    for position in range(rollout.tokens.shape[1]):
        tokens = rollout.tokens[:, position]
        if rollout.mask[:, position].any():
            assert rollout.mask[:, position].all()
            assert _p_value(tokens[rows], rollout.logprobs[rows, position]) > 1e-4
        rows &= tokens == np.bincount(tokens[rows]).argmax()


_CUTS = [(0, 1.0), (0, 0.5), (0, 0.95), (1, 1.0), (7, 1.0), (7, 0.95)]


@pytest.mark.parametrize(
    ("kind", "temperature", "top_k", "top_p"),
    [
        ("static", 0.7, 7, 0.95),
        *(
            slow(kind, temperature, *cut)
            for kind in ("static", "continuous")
            for temperature in (0.7, 1.0)
            for cut in _CUTS
        ),
    ],
)
def test_recorded_probabilities_are_those_of_the_draws(kind, temperature, top_k, top_p):
    _check(_one_reply(kind, temperature, top_k, top_p))


@pytest.mark.slow
@pytest.mark.parametrize("draw", [_two_versions, _conversation])
@pytest.mark.parametrize(("top_k", "top_p"), _CUTS[1:])
def test_of_versions_and_replies(draw, top_k, top_p):
    _check(jax.device_get(draw(0.7, top_k, top_p)))


def test_the_count_can_fail():
    """Probabilities over the whole vocabulary are not those of truncated draws."""
    rollout = _one_reply("static", 0.7, 7, 0.95)
    scaled = rollout.taps["logits"].astype(np.float64) / 0.7
    whole = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
    of_tokens = np.take_along_axis(whole, rollout.tokens[..., None], -1)[..., 0]
    with pytest.raises(AssertionError, match="what is drawn has probability"):
        _check(dataclasses.replace(rollout, logprobs=of_tokens.astype(np.float32)))


def test_greedy_is_recorded_at_temperature_1_over_all_tokens():
    rollout = _one_reply("static", 0.0, 7, 0.95)
    logits = rollout.taps["logits"][0, 0].astype(np.float64)
    expected = logits.max() - np.log(np.exp(logits).sum())
    assert (rollout.tokens[:, 0] == logits.argmax()).all()
    np.testing.assert_allclose(rollout.logprobs[:, 0], expected, rtol=1e-5)
