"""A decode step of Qwen3-8B and two layers of its train step: milliseconds, and which kernels.

Weights, caches and tokens are random. A decode step is the whole of it: 36 layers, output head and
drawing a token, of 64 sequences of 2,048 and of 3,950 keys. A layer's train step is its forward
pass, recomputed for the backward pass, and its gradients, of 4,096 tokens. FP8 and BF16 in one
process, one after the other, so that only one has memory.

A profile is taken with the same program, but XLA leaves CUDA graphs out while it profiles.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_checks import kernels_of, reports

from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.bench.kernel_times import Source
from fp8rl_jax.kernels import as_bytes, resolve
from fp8rl_jax.models import (
    ModelConfig,
    Tokens,
    hidden_states,
    init_params,
    kernel_formats,
    quantize_params,
    rope_tables,
    trainable_params,
)
from fp8rl_jax.models.presets import preset
from fp8rl_jax.models.taps import Observe
from fp8rl_jax.quant import Recipe
from fp8rl_jax.rollout import Loop, Requests, SamplerConfig
from fp8rl_jax.rollout.cases import CASES

pytestmark = pytest.mark.gpu

SEQUENCES, SLOTS, KEYS = 64, 4096, (2048, 3950)
TOKENS = ((1, 4096),)
LAYERS = 2
_STEPS = 8  # timed together; the cache must have room behind the keys for all of them
_REPEATS = 3


def random_like(shapes: Any, source: Source) -> Any:
    """Random arrays of these shapes: floating numbers of about 1, also where a cache stores their
    bits; scales of about 1/50; zeros of other integers."""

    def one(x):
        if number := {jnp.uint8: jnp.float8_e4m3fn, jnp.uint16: jnp.bfloat16}.get(x.dtype.type):
            return as_bytes(source.take(number, *x.shape))
        if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype != jnp.float32:
            return source.take(x.dtype, *x.shape)
        return source.scales(*x.shape) / 50 if x.dtype == jnp.float32 else jnp.zeros_like(x)

    return jax.tree.map(one, shapes)


def random_weights(model: ModelConfig, recipe: Recipe) -> Any:
    """Rollout weights in the layouts that the kernels read, drawn without masters in memory."""
    key = jax.random.key(0, impl="threefry2x32")
    shapes = jax.eval_shape(lambda key: quantize_params(init_params(model, key), recipe), key)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    formats = jax.tree.map(lambda _: here, shapes)
    if resolve(recipe.kernels) != "reference":
        formats = kernel_formats(shapes, formats)
    keys = itertools.count()

    def draw(leaf, form):
        def value(key):
            x = jax.random.normal(key, leaf.shape)
            if leaf.dtype == jnp.float32:  # scales and small weights
                return 0.02 * (0.5 + jnp.minimum(jnp.abs(x), 1))
            return (x * (1 if leaf.dtype.itemsize == 1 else 0.02)).astype(leaf.dtype)

        return jax.jit(value, out_shardings=form)(jax.random.key(next(keys), impl="rbg"))

    return jax.tree.map(draw, shapes, formats)


def decode(model: ModelConfig, recipe: Recipe, weights: Any, keys: int) -> Callable[[], Any]:
    """A function that takes a decode step and returns the new state: sequences of `keys` keys, or
    up to 60 more, as each step adds one."""
    settings = SamplerConfig(160, 1, (), 0, cache_slots=SLOTS)
    loop = Loop(model, recipe, settings)
    rows, ones = SEQUENCES, jnp.ones(SEQUENCES, jnp.int32)
    requests = Requests(
        lengths=ones * keys,
        key=jax.random.key(0, impl="threefry2x32"),
        sample_ids=jnp.arange(rows, dtype=jnp.int32),
        temperature=jnp.ones(rows),
        limits=ones * settings.max_new_tokens,
        rope=tuple(map(jnp.asarray, rope_tables(model, SLOTS))),
    )
    prompts = jax.ShapeDtypeStruct((rows, 64), jnp.int32)
    shapes = jax.eval_shape(
        lambda w, p, r: loop.prefill(loop.prepare(w), p, r), weights, prompts, requests
    )
    state = random_like(shapes, Source())
    assert all(bool(jnp.any(x != 0)) for x in jax.tree.leaves(state.cache)), "nothing is timed on 0"
    state = dataclasses.replace(state, token=jnp.arange(rows, dtype=jnp.int32) * 31)

    def step(weights, requests, state):
        return loop.decode_step(loop.prepare(weights), requests, state)

    program = jax.jit(step, donate_argnums=2)

    def call():
        nonlocal state
        state = program(weights, requests, state)
        return state

    return call


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """(seconds of the first call, median milliseconds of later ones, `_STEPS` in flight)."""
    begun = time.perf_counter()
    jax.block_until_ready(call())
    first = time.perf_counter() - begun
    call()
    found = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        for _ in range(_STEPS):
            out = call()
        jax.block_until_ready(out)
        found.append((time.perf_counter() - start) / _STEPS * 1e3)
    return first, float(np.median(found))


def print_profile(call: Callable[[], Any], directory: pathlib.Path, calls: int = 2) -> dict:
    """Profiles some calls and prints their kernels, per call."""
    jax.block_until_ready(call())
    with jax.profiler.trace(str(directory)):
        for _ in range(calls):
            out = call()
        jax.block_until_ready(out)
    found = {n: (count / calls, us / calls) for n, (count, us) in kernels_of(directory).items()}
    print(
        f"{sum(c for c, _ in found.values()):.0f} launches, "
        f"{sum(us for _, us in found.values()):.0f} us in kernels"
    )
    for name, (count, us) in list(found.items())[:40]:
        print(f"  {us:9.1f} us in {count:6.1f} launches: {name[:90]}")
    return found


@reports
@pytest.mark.parametrize("case", ["fp8", "bf16"])
def test_speed_of_decode(case, record_property, tmp_path, model=None):
    model, recipe = model or preset("qwen3_8b"), CASES[case]()
    weights = random_weights(model, recipe)
    for keys in KEYS:
        call = decode(model, recipe, weights, keys)
        first, found = timed(call)
        record_property(f"ms_{keys}", found)
        assert bool(jnp.isfinite(call().rollout.logprobs).all())
        print(
            f"{case}: {found:.2f} ms a token of {SEQUENCES} sequences of {keys} keys, "
            f"{SEQUENCES / found * 1e3:.0f} tokens/s; first call {first:.1f} s"
        )
        if keys == KEYS[0]:
            record_property("kernels", print_profile(call, tmp_path / str(keys)))
        del call  # and its cache, before the next is made


@reports
@pytest.mark.parametrize("case", ["fp8", "bf16"])
def test_speed_of_learner(case, record_property, tmp_path, model=None):
    model, recipe = model or preset("qwen3_8b"), CASES[case]()
    model = dataclasses.replace(model, num_hidden_layers=LAYERS, vocab_size=1024)
    key = jax.random.key(0, impl="threefry2x32")
    params = exact_jit(functools.partial(init_params, model))(key)
    weights = exact_jit(lambda params: quantize_params(params, recipe))(params)
    source = Source()
    for rows, tokens in TOKENS:
        ids = jax.random.randint(key, (rows, tokens), 0, model.vocab_size)
        cotangent = source.take(jnp.bfloat16, rows, tokens, model.hidden_size)
        rope = tuple(map(jnp.asarray, rope_tables(model, tokens)))

        def loss(params, weights, ids, cotangent, rope):
            paired = trainable_params(params, weights, recipe)
            out = hidden_states(
                paired, Tokens.of(ids, rope), model, recipe, observe=Observe(remat="full")
            )
            return jnp.sum(out.hidden.astype(jnp.float32) * cotangent)

        program = jax.jit(jax.grad(loss))
        call = functools.partial(program, params, weights, ids, cotangent, rope)
        first, ms = timed(call)
        found = ms / LAYERS
        record_property(f"ms_{rows}x{tokens}", found)
        print(
            f"{case}: {found:.2f} ms a layer of {rows} x {tokens} tokens, "
            f"{rows * tokens / found * 1e3:.0f} tokens/s; first call {first:.1f} s"
        )
        if rows == 1:
            record_property("kernels", print_profile(call, tmp_path / str(rows)))
