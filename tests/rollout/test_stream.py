"""A rollout in parts gives the bits of the rollout in one program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_model import initial_params, quantized

from fp8rl_jax import models, rollout
from fp8rl_jax.rollout.sampler import is_end

PAD = 256
ENDS = (250, 17, 99)
MODEL = models.ModelConfig(259, 64, 64, 2, 2, 1, 32)
SLOTS, PROMPT = 11, 7


@pytest.fixture(scope="module")
def params():
    params = initial_params(MODEL, 1)
    head = np.array(params["lm_head"])
    rng = np.random.default_rng(0)
    head[:, list(ENDS)] += 0.4 * np.sign(rng.standard_normal((64, len(ENDS))))
    return {**params, "lm_head": jnp.asarray(head)}


def _requests(rows: int) -> tuple[np.ndarray, rollout.Requests]:
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 256, (rows, PROMPT)).astype(np.int32)
    requests = rollout.Requests(
        lengths=rng.integers(1, PROMPT + 1, rows).astype(np.int32),
        key=jax.random.key(3, impl="threefry2x32"),
        sample_ids=np.arange(rows, dtype=np.int32),
        temperature=np.ones(rows, np.float32),
        limits=np.append(np.full(rows - 2, SLOTS), [0, 4]).astype(np.int32),
        rope=tuple(jnp.asarray(t) for t in models.rope_tables(MODEL, PROMPT + SLOTS)),
    )
    return prompts, requests


def _whole(weights, recipe, settings, prompts, requests):
    return jax.device_get(rollout.make_sampler(MODEL, recipe, settings)(weights, prompts, requests))


def _in_parts(weights, recipe, settings, prompts, requests, chunk):
    stream = rollout.make_stream(MODEL, recipe, settings, chunk=chunk)
    prepared = stream.prepare(weights)
    state = stream.begin(prepared, prompts, requests)
    indices = [int(state.index)]
    while not bool(state.done.all()):
        state = stream.advance(prepared, requests, state)
        indices.append(int(state.index))
    assert stream.advance._cache_size() <= 1, "one program for every part"
    return jax.device_get(state.rollout), indices


@pytest.mark.slow  # a quick one: tests/cli/test_sample_command.py, test_sample_is_the_sampler
@pytest.mark.parametrize("recipe", ["f32", "fp8_blockwise"])
def test_parts_have_the_bits_of_the_whole(recipe, params):
    """Tokens, masks, log-probabilities and ends, at a chunk that does not divide the slots; and
    each of several end tokens ends its response."""
    settings = rollout.SamplerConfig(SLOTS, 1, ENDS, PAD)
    weights = quantized(params, recipe)
    prompts, requests = _requests(12)
    whole = _whole(weights, recipe, settings, prompts, requests)
    assert 0 < whole.finished.sum() < 12, "some end, some are cut"
    parts, indices = _in_parts(weights, recipe, settings, prompts, requests, 4)
    assert indices == [0, 4, 8, 10], "each part stops after four tokens"
    jax.tree.map(np.testing.assert_array_equal, parts, whole)

    last = set()
    for tokens, mask, finished in zip(whole.tokens, whole.mask, whole.finished, strict=True):
        row = tokens[mask].tolist()
        assert not set(row[:-1]) & set(ENDS)
        assert finished == bool(row and row[-1] in ENDS)
        last |= set(row[-1:]) & set(ENDS)
    assert len(last) > 1, "more than one of the ends was drawn"


def test_without_ends_nothing_ends():
    """No end token at all is allowed: responses run to their limits."""
    token = jnp.asarray([0, 250])
    assert not is_end(token, ()).any()
    np.testing.assert_array_equal(is_end(token, (250, 3)), [False, True])
