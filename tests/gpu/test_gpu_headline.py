"""Tokens per second of a long rollout, FP8 against BF16: the figure that the library is for.

Takes minutes and a call of its own: pytest -m gpu --slow tests/gpu/test_gpu_headline.py; --seconds
says how many, and --capture=tee-sys shows each case's line as it comes.

Random weights of Qwen3-8B's shapes, random prompts, response lengths from `long_tail`, two
sequences a slot, by continuous batching. One case after the other, so that only one has memory. A
first call of few tokens compiles; a second one is timed, and from its time the longest responses
are chosen that fit; both cases then sample the same lengths once. What is reported is that last
call and nothing else: its tokens, counted, and its seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from gpu_checks import reports

from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.bench.rollout import CASES, Cell, arguments, served_weights
from fp8rl_jax.bench.rollout_ways import long_tail, make_continuous
from fp8rl_jax.models import ModelConfig, init_params
from fp8rl_jax.models.presets import preset

pytestmark = pytest.mark.gpu

CELL = Cell(batch=64, prompt=256, new=4096, group=4)
SECONDS = 480.0  # for both cases, without --seconds
QUEUE = 2  # sequences a slot
_FEW = 64  # tokens of the responses from which the rest is planned
# Steps of a rollout over the longest response, and the time of a step at full length over that of
# the short call: guesses on the safe side, for the choice of a length alone.
_STEPS, _SLOWER = 1.5, 2.0


def longest(short_s: float, seconds: float, most: int) -> int:
    """Tokens of the longest response that fits into `seconds`: `most`, halved as often as it takes.

    `short_s` are the seconds of a call with responses of `_FEW` tokens.
    """
    step = short_s / (QUEUE * _FEW)
    while most > _FEW and _STEPS * _SLOWER * step * most > seconds:
        most //= 2
    return most


def measure(model: ModelConfig, cell: Cell, seconds: float) -> Iterator[dict[str, Any]]:
    """Samples under BF16, which chooses the lengths and may take half the seconds, then FP8. Yields
    a row for each."""
    start, new, count, bf16_rate = time.monotonic(), 0, QUEUE * cell.batch, 0.0
    for case in ("bf16", "fp8"):
        recipe = CASES[case]()
        params = exact_jit(lambda key: init_params(model, key))(
            jax.random.key(0, impl="threefry2x32")
        )
        weights = jax.block_until_ready(served_weights(params, recipe))
        del params
        sample = make_continuous(model, recipe, cell)

        def call(limits: np.ndarray, sample=sample, weights=weights) -> tuple[int, float]:
            """(tokens, seconds) of one call."""
            given = jax.block_until_ready(arguments(model, weights, cell, len(limits), limits))
            begun = time.perf_counter()
            tokens = int(np.asarray(sample(*given).mask).sum())
            return tokens, time.perf_counter() - begun

        few = np.full(count, min(_FEW, cell.new), np.int32)
        call(np.minimum(few, 2))
        if not new:
            new = longest(call(few)[1], start + seconds / 2 - time.monotonic(), cell.new)
        tokens, took = call(long_tail(count, new))
        bf16_rate = bf16_rate or tokens / took
        yield {
            "case": case,
            "longest": new,
            "samples": count,
            "tokens": tokens,
            "seconds": took,
            "tokens_per_s": tokens / took,
            "over_bf16": tokens / took / bf16_rate,
        }
        del weights, sample, call


@reports
@pytest.mark.slow
def test_long_rollout(record_property, pytestconfig, model=None, cell=CELL):
    seconds = pytestconfig.getoption("seconds", None) or SECONDS
    for row in measure(model or preset("qwen3_8b"), cell, seconds):
        record_property("row", row)
        if row["case"] == "bf16":
            responses = f"{row['samples']} responses of 1 to {row['longest']} tokens"
            print(f"{responses} to prompts of {cell.prompt}, {cell.batch} at a time; one call each")
        rate = f"{row['tokens_per_s']:.0f} tokens/s, {row['over_bf16']:.2f} of bf16's"
        print(f"{row['case']}: {row['tokens']} tokens in {row['seconds']:.1f} s, {rate}")
