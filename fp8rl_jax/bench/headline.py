"""Tokens per second of a long rollout, FP8 against BF16: the figure that the library is for.

Random weights of a real model's shapes, random prompts, response lengths from `long_tail`, two
sequences a slot, by one of `WAYS`. One case after the other, so that only one has memory. A first
call of few tokens compiles; a second one is timed, and from its time the longest responses are
chosen that fit; both cases then sample the same lengths once. What is reported is that last call
and nothing else: its tokens, counted, and its seconds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from fp8rl_jax.bench.rollout import CASES, Cell, arguments, served_weights, settings_of
from fp8rl_jax.bench.rollout_ways import WAYS, long_tail
from fp8rl_jax.errors import UserError
from fp8rl_jax.exact_jit import exact_jit
from fp8rl_jax.models import ModelConfig, init_params

CELL = Cell(batch=64, prompt=256, new=4096, group=4)
_QUEUE = 2  # sequences a slot
_FEW = 64  # tokens of the responses from which the rest is planned
# Steps of a rollout over the longest response, and the time of a step at full length over that of
# the short call: guesses on the safe side, for the choice of a length alone.
_STEPS, _SLOWER = 1.5, 2.0


def longest(short_s: float, seconds: float, most: int) -> int:
    """Tokens of the longest response that fits: `most`, halved as often as it takes.

    Args:
      short_s: seconds of a call with responses of `_FEW` tokens.
      seconds: there are for the long one.
      most: tokens.
    """
    step = short_s / (_QUEUE * _FEW)
    while most > _FEW and _STEPS * _SLOWER * step * most > seconds:
        most //= 2
    return most


def run(
    model: ModelConfig,
    seconds: float,
    cell: Cell = CELL,
    cases: Sequence[str] = ("bf16", "fp8"),
    way: str = "continuous",
) -> list[dict[str, Any]]:
    """Samples under each case; the first chooses the lengths.

    Args:
      model: shapes.
      seconds: for all of it; the first case may take half.
      cell: slots, prompt, most new tokens, group.
      cases: names of `CASES`.
      way: name of `WAYS`.

    Returns:
      Of each case: case; longest: tokens of the longest response; samples; tokens: that were drawn;
      seconds; first_s: of the call that compiles; tokens_per_s; over_first: over the first case's.

    Raises:
      UserError: no such way.
    """
    if way not in WAYS:
        raise UserError(f"there is no way {way!r} to sample; write one of {', '.join(WAYS)}")
    start, new = time.monotonic(), 0
    found: list[dict[str, Any]] = []
    for case in cases:
        count = _QUEUE * cell.batch
        params = exact_jit(lambda key: init_params(model, key))(jax.random.key(0))
        weights = jax.block_until_ready(served_weights(params, CASES[case]()))
        del params
        sample = WAYS[way](model, CASES[case](), settings_of(cell), cell.batch)

        def call(limits: np.ndarray, sample=sample, weights=weights) -> tuple[int, float]:
            """(tokens, seconds) of one call."""
            given = jax.block_until_ready(arguments(model, weights, cell, len(limits), limits))
            begun = time.perf_counter()
            tokens = int(np.asarray(sample(*given).mask).sum())
            return tokens, time.perf_counter() - begun

        few = np.full(count, min(_FEW, cell.new), np.int32)
        _, first = call(np.minimum(few, 2))
        if not new:
            _, short = call(few)
            left = start + seconds / 2 - time.monotonic()
            new = longest(short, left, cell.new)
        tokens, took = call(long_tail(count, new))
        row: dict[str, Any] = {
            "case": case, "longest": new, "samples": count, "tokens": tokens, "seconds": took,
            "first_s": first, "tokens_per_s": tokens / took,
        }  # fmt: skip
        found.append(
            row | {"over_first": row["tokens_per_s"] / (found or [row])[0]["tokens_per_s"]}
        )
        del weights, sample, call
    return found
