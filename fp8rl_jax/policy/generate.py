"""Generates text with a policy and shows it while it is made.

Tokens come in chunks of a few decode steps (`make_stream`), with the bits of the training sampler;
after each chunk, the text that later tokens cannot change is shown. `Timing` does not count
compilation as decoding.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fp8rl_jax.policy.load import Policy, pad
from fp8rl_jax.rollout import Requests, SamplerConfig, make_stream
from fp8rl_jax.training.runtime import Runtime


@dataclasses.dataclass(frozen=True)
class Timing:
    """Number of tokens and duration of a call of `generate`.

    Attributes:
      prompt_tokens, new_tokens: numbers of tokens of all prompts and responses, without padding.
      rows: number of responses.
      compiling, prefill, decode: seconds; prefill includes each response's first token.
    """

    prompt_tokens: int
    new_tokens: int
    rows: int
    compiling: float
    prefill: float
    decode: float

    def __str__(self) -> str:
        after = self.new_tokens - self.rows
        rate = f"{after / self.decode:.1f} tokens/s" if after > 0 and self.decode else "no decoding"
        return (
            f"{self.prompt_tokens} prompt tokens in {self.prefill:.2f} s; {self.new_tokens} new "
            f"tokens: {rate} (compiled in {self.compiling:.1f} s)"
        )


def generate(
    policy: Policy,
    temperature: float,
    show: Callable[[int, str], None],
    finished: Callable[[int, bool], None] = lambda row, by_itself: None,
) -> Timing:
    """Samples a response to each prompt of a policy, with the limits of the section `rollout`
    (`max_new_tokens`, `top_k`, `top_p`).

    Args:
      policy: from `load_policy`.
      temperature: sampling temperature; 0 for greedy.
      show: called as show(row, text) for every piece of text, in order within a row.
      finished: called as finished(row, ended) after a row's last piece; ended is False if the
        response was cut.

    Returns:
      Numbers of tokens, and durations.
    """
    runtime = policy.runtime
    config = runtime.config.rollout
    tokenizer = runtime.tokenizer
    settings = SamplerConfig(
        config.max_new_tokens, 1, tokenizer.eos_ids, tokenizer.pad_id, config.top_k, config.top_p
    )
    stream: Any = make_stream(
        runtime.resolved.model, runtime.resolved.rollout_recipe, settings, runtime.layout.parallel
    )
    prepared = stream.prepare(policy.weights)
    prompts, requests = _requests(runtime, policy.rows, temperature)
    start = time.perf_counter()
    begin = stream.begin.lower(prepared, prompts, requests).compile()
    compiled = time.perf_counter() - start
    start = time.perf_counter()
    state = jax.block_until_ready(begin(prepared, prompts, requests))
    prefill = time.perf_counter() - start
    start = time.perf_counter()
    advance = stream.advance.lower(prepared, requests, state).compile()
    compiled += time.perf_counter() - start

    unfinished = {row: tokenizer.detokenizer() for row in range(len(policy.rows))}
    shown = 0
    decode = 0.0
    while True:
        out, index, done = jax.device_get((state.rollout, state.index, state.done))
        for row, text in list(unfinished.items()):
            part = slice(shown, int(index) + 1)
            show(row, text.push(out.tokens[row, part][out.mask[row, part]]))
            if done[row]:
                show(row, text.finish())
                finished(row, bool(out.finished[row]))
                del unfinished[row]
        shown = int(index) + 1
        if not unfinished:
            break
        start = time.perf_counter()
        state = jax.block_until_ready(advance(prepared, requests, state))
        decode += time.perf_counter() - start
    new = int(out.mask[: len(policy.rows)].sum())
    return Timing(sum(map(len, policy.rows)), new, len(policy.rows), compiled, prefill, decode)


def _requests(runtime: Runtime, rows: list[list[int]], temperature: float):
    """Returns prompt tokens and Requests on the mesh, padded to a multiple of its devices."""
    prompts, lengths = pad(runtime, rows)
    sample_ids = np.arange(len(lengths), dtype=np.int32)
    temperatures = np.full(len(lengths), temperature, np.float32)
    new = runtime.config.rollout.max_new_tokens
    limits = np.where(sample_ids < len(rows), new, 0).astype(np.int32)
    prompts, lengths, sample_ids, temperatures, limits = jax.device_put(
        (prompts, lengths, sample_ids, temperatures, limits), runtime.layout.rows
    )
    key = runtime.engine.keys["rollout"]
    return prompts, Requests(lengths, key, sample_ids, temperatures, limits, runtime.engine.rope)
