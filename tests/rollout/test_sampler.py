"""The sampler: who ends when, which token may be drawn, and that random bits follow the sample."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_model import initial_params, quantized

from fp8rl_jax import models, rollout

EOS, PAD = 258, 256
MODEL = models.ModelConfig(259, 128, 128, 1, 2, 1, 32)
SLOTS = 10


@pytest.fixture(scope="module")
def weights():
    params = initial_params(MODEL, 1)
    head = np.array(params["lm_head"])
    head[:, EOS] += 0.3 * np.sign(np.random.default_rng(0).standard_normal(128))
    return quantized({**params, "lm_head": jnp.asarray(head)}, "fp8")


@pytest.fixture(scope="module")
def rope():
    return tuple(jnp.asarray(t) for t in models.rope_tables(MODEL, 64))


def _sampler(group=1, **fields):
    return rollout.make_sampler(
        MODEL, "fp8", rollout.SamplerConfig(SLOTS, group, (EOS,), PAD, **fields)
    )


# Tests of eight prompts share its program.
_GROUP_4 = _sampler(4, taps=("logits",))
_LENGTHS = [3, 12, 1, 7, 5, 9, 2, 4]


def _run(sample, weights, rope, lengths, group, temperature=1.0, limits=SLOTS, ids=None, seed=0):
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 256, (8, 12)).astype(np.int32)[: len(lengths)]
    rows = len(lengths) * group
    return jax.device_get(
        sample(
            weights,
            prompts,
            rollout.Requests(
                np.asarray(lengths, np.int32),
                jax.random.key(seed, impl="threefry2x32"),
                np.arange(rows, dtype=np.int32) if ids is None else np.asarray(ids, np.int32),
                np.full(rows, temperature, np.float32),
                np.full(rows, limits, np.int32),
                rope,
            ),
        )
    )


def test_shapes_and_padding(weights, rope):
    """After the end everything is padding; the mask is a run of ones; EOS belongs to it."""
    out = _run(_GROUP_4, weights, rope, _LENGTHS, 4)
    assert out.tokens.shape == out.mask.shape == out.logprobs.shape == (32, SLOTS)
    assert 0 < out.finished.sum() < 32, "some end early, some are cut"
    for tokens, mask, logp, finished in zip(
        out.tokens, out.mask, out.logprobs, out.finished, strict=True
    ):
        n = int(mask.sum())
        assert mask[:n].all() and n >= 1
        assert (tokens[n:] == PAD).all() and (logp[n:] == 0).all() and (logp[:n] < 0).all()
        assert finished == (tokens[n - 1] == EOS)
        assert finished or n == SLOTS
        assert EOS not in tokens[: n - 1]


def test_limits(weights, rope):
    for limit in (0, 1, 4):
        out = _run(_GROUP_4, weights, rope, _LENGTHS, 4, limits=limit)
        assert (out.mask.sum(1) <= limit).all()
        assert (out.mask.sum(1) == limit).any()


def test_random_bits_follow_the_sample(weights, rope):
    """The same ids in other rows, beside other prompts, draw the same tokens."""
    whole = _run(_GROUP_4, weights, rope, _LENGTHS, 4)
    swapped = _run(_GROUP_4, weights, rope, _LENGTHS, 4, ids=[2, 3, 0, 1, *range(4, 32)])
    for a, b in ((0, 2), (1, 3), (2, 0), (3, 1)):
        np.testing.assert_array_equal(whole.tokens[a], swapped.tokens[b])
        np.testing.assert_array_equal(whole.logprobs[a], swapped.logprobs[b])
    beside = _run(_GROUP_4, weights, rope, [3, *reversed(_LENGTHS[1:])], 4)
    np.testing.assert_array_equal(whole.tokens[:4], beside.tokens[:4])
    np.testing.assert_array_equal(whole.logprobs[:4], beside.logprobs[:4])
    other = _run(_GROUP_4, weights, rope, _LENGTHS, 4, seed=1)
    assert (other.tokens[:4] != whole.tokens[:4]).any()


@pytest.mark.slow
def test_group_equals_repeated_prompts(weights, rope):
    """A prompt prefilled once for its group gives what four prefills give."""
    grouped = _run(_GROUP_4, weights, rope, _LENGTHS, 4)
    rng = np.random.default_rng(0)
    prompt = np.repeat(rng.integers(0, 256, (8, 12)).astype(np.int32)[:1], 4, axis=0)
    single = jax.device_get(
        _sampler(1)(
            weights,
            prompt,
            rollout.Requests(
                np.full(4, _LENGTHS[0], np.int32),
                jax.random.key(0, impl="threefry2x32"),
                np.arange(4, dtype=np.int32),
                np.ones(4, np.float32),
                np.full(4, SLOTS, np.int32),
                rope,
            ),
        )
    )
    np.testing.assert_array_equal(grouped.tokens[:4], single.tokens)
    np.testing.assert_array_equal(grouped.logprobs[:4], single.logprobs)


def test_greedy_takes_the_most_likely(weights, rope):
    """Temperature 0: all samples of a group agree, and no log-probability is beaten."""
    out = _run(_GROUP_4, weights, rope, _LENGTHS, 4, temperature=0.0)
    assert (out.tokens[0:4] == out.tokens[0]).all()
    best = out.taps["logits"].argmax(-1)
    np.testing.assert_array_equal(out.tokens[out.mask], best[out.mask])
    logits = out.taps["logits"][out.mask].astype(np.float64)
    logits -= logits.max(1, keepdims=True)
    expected = -np.log(np.exp(logits).sum(1))
    np.testing.assert_allclose(out.logprobs[out.mask], expected, atol=1e-5)


def test_a_cache_too_short_is_refused(weights, rope):
    with pytest.raises(ValueError, match="give at least 22"):
        _run(_sampler(1, cache_slots=21), weights, rope, [3], 1)
