"""Responses that several versions of the weights draw, against an oracle that shares no scheduler:
the static sampler, version by version, with all that was drawn before as its prompt.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_model import rollout_weights
from small_models import CALIBRATED, DENSE, EXPERTS, LATENT

from fp8rl_jax import models
from fp8rl_jax.models import least_pages
from fp8rl_jax.quant import get_recipe
from fp8rl_jax.rollout import (
    Batching,
    ContinuousSampler,
    Earlier,
    Requests,
    SamplerConfig,
    make_sampler,
)

ENDS, PAD = (55,), 60
PROMPT, NEW, GROUP, BATCHES = 62, 100, 2, 3
LENGTHS = np.int32([50, 40, 62, 33, 1, 58])
ROWS = len(LENGTHS) * GROUP
BATCH = ROWS // BATCHES
LEAST = least_pages(PROMPT + NEW)


@functools.cache
def _weights(version: int, model, recipe):
    return rollout_weights(model, get_recipe(recipe), seed=version + 1)


@functools.cache
def _arguments(model=DENSE) -> dict:
    rng = np.random.default_rng(0)
    limits = rng.integers(NEW // 2, NEW + 1, ROWS).astype(np.int32)
    limits[[4, 9]] = 0, 1
    return {
        "prompts": rng.integers(0, 55, (len(LENGTHS), PROMPT)).astype(np.int32),
        "requests": Requests(
            lengths=LENGTHS,
            key=jax.random.key(99, impl="threefry2x32"),  # not to be read
            sample_ids=rng.permutation(100)[:ROWS].astype(np.int32),
            temperature=np.where(np.arange(ROWS) % 5 == 3, 0.0, 1.0).astype(np.float32),
            limits=limits,
            rope=tuple(map(jnp.asarray, models.rope_tables(model, PROMPT + 2 * NEW))),
        ),
    }


def _keys(batch: int) -> jax.Array:
    return jax.random.key(batch, impl="threefry2x32")


def _earlier(rollout, needed: int) -> Earlier:
    keys = np.repeat([jax.random.key_data(_keys(b)) for b in range(BATCHES)], BATCH, axis=0)
    return Earlier(
        tokens=rollout.tokens,
        logprobs=rollout.logprobs,
        counts=rollout.mask.sum(1, dtype=np.int32),
        finished=rollout.finished,
        keys=keys,
        needed=np.int32([needed]),
    )


def _rollouts(slots: int, pages: int, model=DENSE, recipe="f32", part=7) -> list:
    """What each version leaves; version t completes the batches up to t."""
    settings = SamplerConfig(NEW, GROUP, ENDS, PAD)
    sampler = ContinuousSampler(model, recipe, settings, Batching(slots, pages, 32), part=part)
    none = np.zeros((ROWS, NEW), np.int32)
    found = [_Rows(none, none > 0, none.astype(np.float32), none[:, 0] > 0)]
    for version in range(BATCHES):
        given = _arguments(model) | {"weights": _weights(version, model, recipe)}
        earlier = _earlier(found[-1], (version + 1) * BATCH)
        watch = (lambda progress: None) if version == 1 else None
        out = jax.device_get(sampler(**given, watch=watch, earlier=earlier))
        found.append(_Rows(out.tokens, out.mask, out.logprobs, out.finished))
    return found


@dataclasses.dataclass
class _Rows:
    tokens: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    finished: np.ndarray


def _continued(before: _Rows, version: int, model, recipe) -> _Rows:
    """What the static sampler makes of `before`, whose tokens are a part of its prompts."""
    given = _arguments(model)
    used, starts = before.mask.sum(1), np.repeat(LENGTHS, GROUP)
    tokens = np.zeros((ROWS, PROMPT + NEW), np.int32)
    for row, prompt in enumerate(np.repeat(given["prompts"], GROUP, axis=0)):
        whole = [*prompt[: starts[row]], *before.tokens[row, : used[row]]]
        tokens[row, : len(whole)] = whole
    left = np.where(before.finished, 0, given["requests"].limits - used)
    requests = dataclasses.replace(
        given["requests"], lengths=starts + used.astype(np.int32), limits=left.astype(np.int32)
    )
    weights, sample = _weights(version, model, recipe), _static(model, recipe)
    parts = [
        jax.device_get(sample(weights, tokens, dataclasses.replace(requests, key=_keys(b))))
        for b in range(BATCHES)
    ]
    found = dataclasses.replace(before, **{n: x.copy() for n, x in vars(before).items()})
    for row in range(ROWS):
        new, at = parts[row // BATCH], used[row]
        count = int(new.mask[row].sum())
        found.tokens[row, at:] = PAD
        found.tokens[row, at : at + count] = new.tokens[row, :count]
        found.mask[row, at : at + count] = True
        found.logprobs[row, at : at + count] = new.logprobs[row, :count]
        found.finished[row] |= new.finished[row]
    return found


@functools.cache
def _static(model, recipe):
    return make_sampler(model, recipe, SamplerConfig(NEW, 1, ENDS, PAD))


def _check(found: list[_Rows], model=DENSE, recipe="f32") -> None:
    for version, (before, after) in enumerate(itertools.pairwise(found)):
        whole, done = _continued(before, version, model, recipe), (version + 1) * BATCH
        assert (after.mask[:done] == whole.mask[:done]).all(), "complete"
        assert (after.finished[:done] == whole.finished[:done]).all()
        assert (after.mask <= whole.mask).all(), "a part"
        kept = after.mask
        assert (after.tokens[kept] == whole.tokens[kept]).all()
        assert (after.logprobs[kept] == whole.logprobs[kept]).all()
        assert (after.tokens[~kept] == PAD).all() and (after.logprobs[~kept] == 0).all()


def test_equals_the_static_sampler_version_by_version():
    """In float32; pages are so few that sequences lose theirs. Some responses are of all versions,
    and later versions draw other tokens."""
    found = _rollouts(4, LEAST + 1)
    _check(found)
    drawn = np.stack([rows.mask.sum(1) for rows in found])
    parts = np.diff(drawn, axis=0)
    assert (parts[1:, BATCH:] > 0).any(axis=1).all() and ((parts > 0).sum(axis=0) > 1).any()
    assert (parts[0, :BATCH] == drawn[-1, :BATCH]).all(), "the first batch is of one version"
    other = _continued(found[1], 0, DENSE, "f32")
    assert (other.tokens != found[-1].tokens).any(), "versions differ"


def test_a_call_that_has_nothing_to_do():
    """What is needed was complete before: no iteration, and the responses as they were."""
    settings = SamplerConfig(NEW, GROUP, ENDS, PAD)
    sampler = ContinuousSampler(DENSE, "f32", settings, Batching(4, LEAST + 1, 32))
    none = np.zeros((ROWS, NEW), np.int32)
    ended = _Rows(none + PAD, none > 0, none.astype(np.float32), none[:, 0] == 0)
    given = _arguments() | {"weights": _weights(0, DENSE, "f32")}
    out = sampler(**given, earlier=_earlier(ended, BATCH))
    assert not out.mask.any() and out.finished.all() and int(sampler.progress.iterations[0]) == 0
    assert set(sampler.metrics().values()) == {0}


_CASES = [
    (ROWS, 80, DENSE, "f32"),
    (1, LEAST, DENSE, "f32"),
    (4, LEAST + 1, DENSE, CALIBRATED),
    (4, LEAST + 1, EXPERTS, "fp8"),
    (4, LEAST + 1, LATENT, "fp8"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slots", "pages", "model", "recipe"),
    _CASES,
    ids=["all at once", "one at a time", "calibrated", "experts", "latent"],
)
def test_sizes_models_and_recipes(slots, pages, model, recipe):
    _check(_rollouts(slots, pages, model, recipe), model, recipe)


def test_a_key_of_another_step_is_seen(monkeypatch):
    """The comparison finds responses that go on with the key of the step before."""
    given = _earlier

    def before(rollout, needed: int) -> Earlier:
        earlier, step = given(rollout, needed), needed // BATCH - 1
        begun = earlier.counts[:, None] > 0
        keys = np.where(begun, earlier.keys[max(step - 1, 0) * BATCH], earlier.keys)
        return dataclasses.replace(earlier, keys=keys)

    monkeypatch.setitem(globals(), "_earlier", before)
    found = _rollouts(4, LEAST + 1)
    _check(found[:2])
    with pytest.raises(AssertionError):
        _check(found)
