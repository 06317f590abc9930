"""A rollout in parts: the sampler's loop, left after every few tokens so that text can be shown.

Prefill is one program and a fixed number of decode steps another; its state (cache, random bits'
position, what was drawn) is passed from one to the next. Both are made of the functions of the
one-program sampler, and give its bits (tests/rollout/test_stream.py). Weights are prepared once,
outside of both.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8rl_jax.exact_jit import exact_jit
from fp8rl_jax.models import ModelConfig
from fp8rl_jax.quant import Recipe, get_recipe
from fp8rl_jax.rollout.sampler import Loop, LoopState, Requests, SamplerConfig


@dataclasses.dataclass(frozen=True)
class Stream:
    """The jitted parts.

    Attributes:
      prepare: ``prepare(weights) -> prepared``, with weights from refit; see `Loop.prepare_once`.
      begin: ``begin(prepared, prompts, requests) -> state``: prefill, and the first token.
      advance: ``advance(prepared, requests, state) -> state`` after at most `chunk` more tokens of
        every row; the old state is donated.
    """

    prepare: Callable[[Any], Any]
    begin: Callable[[Any, jax.Array, Requests], LoopState]
    advance: Callable[[Any, Requests, LoopState], LoopState]


def make_stream(
    model: ModelConfig, recipe: Recipe | str, sampler: SamplerConfig, chunk: int = 16
) -> Stream:
    """The sampler of `make_sampler`, cut after every `chunk` tokens.

    Sharding follows the arguments.
    """
    loop = Loop(model, get_recipe(recipe), sampler)

    def begin(weights, prompts: jax.Array, requests: Requests) -> LoopState:
        return loop.prefill(loop.prepare(weights), prompts, requests)

    def advance(weights, requests: Requests, state: LoopState) -> LoopState:
        prepared = loop.prepare(weights)
        until = state.index + jnp.int32(chunk)

        def cond_fn(state: LoopState) -> jax.Array:
            return loop.cond_fn(state) & (state.index < until)

        step = functools.partial(loop.decode_step, prepared, requests)
        return lax.while_loop(cond_fn, step, state)

    return Stream(loop.prepare_once(), exact_jit(begin), exact_jit(advance, donate_argnums=2))
