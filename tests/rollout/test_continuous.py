"""Continuous batching draws the tokens and log-probabilities of the static sampler, bit for bit.

Whoever shares the batch, whatever the slots and pages, and however often a sequence lost its pages
and was computed anew.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import kv_formats
import numpy as np
import pytest
import small_models
from random_model import initial_params, quantized, rollout_weights
from small_models import TINY
from tiny_run import compilations

from fp8rl_jax import models, rollout
from fp8rl_jax.models import least_pages
from fp8rl_jax.quant import get_recipe
from fp8rl_jax.rollout import Batching, ContinuousSampler, SamplerConfig, make_sampler
from fp8rl_jax.rollout.sampler import Requests

EOS, PAD = 330, 329
PROMPT, NEW, GROUP = 70, 200, 3
DENSE, EXPERTS, LATENT = (  # with so many tokens that responses end late
    dataclasses.replace(model, vocab_size=331)
    for model in (small_models.DENSE, small_models.EXPERTS, small_models.LATENT)
)
LENGTHS = np.int32([3, 70, 64, 65, 1])
SETTINGS = SamplerConfig(NEW, GROUP, (EOS,), PAD)
LEAST = least_pages(PROMPT + NEW)
_SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)


@functools.cache
def _arguments(model=DENSE, recipe="f32") -> tuple:
    """Of a sampler: prompts of many lengths, limits that some responses reach; others end."""
    weights = rollout_weights(model, get_recipe(recipe))
    rng = np.random.default_rng(0)
    count = len(LENGTHS) * GROUP
    limits = rng.integers(60, NEW + 1, count).astype(np.int32)
    limits[[4, 9, 10]] = 0, NEW, 1
    temperature = np.where(np.arange(count) % 4 == 3, 0.0, 1.0).astype(np.float32)
    rope = tuple(map(jnp.asarray, models.rope_tables(model, PROMPT + NEW)))
    prompts = rng.integers(0, 300, (len(LENGTHS), PROMPT)).astype(np.int32)
    ids = rng.permutation(100)[:count].astype(np.int32)
    key = jax.random.key(1, impl="threefry2x32")
    return weights, prompts, Requests(LENGTHS, key, ids, temperature, limits, rope)


@functools.cache
def _static(model=DENSE, recipe="f32"):
    return jax.device_get(make_sampler(model, recipe, SETTINGS)(*_arguments(model, recipe)))


@functools.cache
def _continuous(slots: int, pages: int, model=DENSE, recipe="f32", **sizes) -> ContinuousSampler:
    return ContinuousSampler(model, recipe, SETTINGS, Batching(slots, pages, **sizes), part=7)


def _assert_equal(out, expected) -> None:
    for field in ("tokens", "mask", "logprobs", "finished"):
        found, wanted = getattr(out, field), getattr(expected, field)
        np.testing.assert_array_equal(found, wanted, err_msg=field)


def _count(sampler: ContinuousSampler, name: str) -> int:
    return int(getattr(sampler.progress, name)[0])


@pytest.mark.parametrize(
    ("slots", "pages", "preempted"),
    [(4, LEAST + 1, True), _SLOW(15, 80, False), _SLOW(1, LEAST, False)],
    ids=["too few pages", "all at once", "one at a time"],
)
def test_equals_the_static_sampler(slots, pages, preempted):
    """In float32, which nothing absorbs."""
    expected = _static()
    assert 2 < expected.finished.sum() < 12, "some end by themselves"
    sampler = _continuous(slots, pages)
    _assert_equal(sampler(*_arguments()), expected)
    assert _count(sampler, "drawn") == expected.mask.sum()
    assert (_count(sampler, "preemptions") > 0) == preempted
    metrics = sampler.metrics()
    assert metrics["rollout_preemptions"] == _count(sampler, "preemptions")
    assert metrics["rollout_slots_used"] * slots * _count(sampler, "iterations") == pytest.approx(
        expected.mask.sum()
    )


@pytest.mark.parametrize(
    ("group", "slots", "chunk"),
    [(1, 32, 16), _SLOW(4, 64, 16), _SLOW(1, 32, 128), _SLOW(8, 512, 64)],
)
def test_slots_are_hardly_ever_idle(group, slots, chunk):
    """Short responses, with pages for all slots: not many more iterations than full slots take. A
    pass has two prompts, eight or sixteen."""
    prompt, new, prompts = 8, 24, 128 if slots < 512 else 512
    rng = np.random.default_rng(0)
    limits = rng.integers(1, new + 1, prompts * group).astype(np.int32)
    sampler = ContinuousSampler(
        TINY, "f32", SamplerConfig(new, group, (), 0), Batching(slots, 1 + slots, chunk)
    )
    rows = prompts * group
    sampler(
        quantized(initial_params(TINY), get_recipe("f32")),
        rng.integers(1, 60, (prompts, prompt)).astype(np.int32),
        Requests(
            np.full(prompts, prompt, np.int32),
            jax.random.key(0, impl="threefry2x32"),
            np.arange(rows, dtype=np.int32),
            np.ones(rows, np.float32),
            limits,
            tuple(map(jnp.asarray, models.rope_tables(TINY, prompt + new))),
        ),
    )
    # The last responses to begin take up to `new` iterations with ever fewer others beside them.
    assert _count(sampler, "iterations") <= 1.15 * limits.sum() / slots + new


_CALIBRATED = dataclasses.replace(get_recipe("fp8_blockwise"), kv="calibrated", fp8_attention=True)
_MODELS = {
    "bf16": (DENSE, "bf16"),
    "mxfp8": (DENSE, "mxfp8"),
    "experts": (EXPERTS, "fp8"),
    "latent f32": (LATENT, "f32"),
    "calibrated": (DENSE, _CALIBRATED),
    "first layer": (DENSE, dataclasses.replace(get_recipe("fp8"), first_layers=1)),
    "keys int8, values fp8": (DENSE, kv_formats.RECIPES["int8_fp8"]),
    "latent fp8": (LATENT, "fp8_blockwise"),
    "windows": (
        dataclasses.replace(
            DENSE, sliding_window=9, sliding_window_pattern=2, rope_local_base_freq=100.0
        ),
        "fp8",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "recipe"), _MODELS.values(), ids=_MODELS)
def test_models_and_recipes(model, recipe):
    """With refilled slots, shared prompts and preemptions; two pools where layers differ."""
    sampler = _continuous(4, LEAST + 1, model, recipe, prefill_chunk=48)
    _assert_equal(sampler(*_arguments(model, recipe)), _static(model, recipe))
    assert _count(sampler, "preemptions") > 0


def test_watching():
    """What has ended is complete when it is told, once it is told it stays, and the program is the
    one that nobody watched."""
    sampler, expected, told = _continuous(4, LEAST + 1), _static(), []
    out = sampler(*_arguments(), watch=told.append)
    _assert_equal(out, expected)
    assert len(told) > 5 and told[-1].done.all() and not told[0].done.all()
    for progress, following in itertools.pairwise(told):
        assert (progress.done <= following.done).all()
        assert following.iterations[0] - progress.iterations[0] <= 7
    for progress in told:
        for field in ("tokens", "mask", "logprobs", "finished"):
            found, wanted = getattr(progress.rollout, field), getattr(expected, field)
            np.testing.assert_array_equal(found[progress.done], wanted[progress.done])
        begun = np.where(progress.rollout.mask, expected.tokens, PAD)
        np.testing.assert_array_equal(progress.rollout.tokens, begun)
    assert compilations(sampler) == 1


def test_other_requests_take_the_same_program():
    sampler = _continuous(4, LEAST + 1)
    weights, prompts, requests = _arguments()
    other = dataclasses.replace(
        requests, lengths=requests.lengths[::-1].copy(), key=jax.random.key(9, impl="threefry2x32")
    )
    sampler(weights, prompts[::-1].copy(), other)
    assert compilations(sampler) == 1


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_no_iteration_converts_stacks_of_weights(recipe):
    """One may convert the layer that it has cut out; the stack would be as much work again."""
    sampler = _continuous(4, LEAST + 1, DENSE, recipe)
    weights, prompts, requests = _arguments(DENSE, recipe)
    weights = sampler._prepare(weights)
    state = jax.eval_shape(sampler._begin, prompts, requests)
    program = sampler._advance.lower(weights, requests, jnp.int32(1), state).compile().as_text()
    shapes = {x.shape for x in jax.tree.leaves(weights.weights["layers"]) if x.ndim == 3}
    assert (2, 64, 64) in shapes
    converted = re.findall(r"\w+\[([\d,]+)\]\S* (?:bitcast-)?convert\(", program)
    assert converted
    assert not shapes & {tuple(map(int, shape.split(","))) for shape in converted}


def test_what_cannot_be():
    with pytest.raises(ValueError, match="no taps"):
        ContinuousSampler(
            DENSE, "f32", dataclasses.replace(SETTINGS, taps=("logits",)), Batching(4, 80)
        )
    small = ContinuousSampler(DENSE, "f32", SETTINGS, Batching(4, LEAST - 1))
    with pytest.raises(ValueError, match=f"at least {LEAST}"):
        small(*_arguments())
    mesh = jax.sharding.AbstractMesh((2,), ("data",))
    with pytest.raises(ValueError, match="slots = 5 do not divide among 2 devices"):
        ContinuousSampler(DENSE, "f32", SETTINGS, Batching(5, 80), mesh=mesh)


def test_public_names():
    assert {"Batching", "ContinuousSampler", "Progress", "Watch"} <= set(vars(rollout))
