"""Responses of several replies, with what an environment says between them, against an oracle that
shares no scheduler: the static sampler, reply by reply, with all that was said as its prompt.

Whoever shares the batch, whenever the environment answers, and however often a sequence is computed
anew, tokens and log-probabilities keep their bits.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib

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
    Extension,
    Progress,
    Requests,
    SamplerConfig,
    make_sampler,
)

ENDS, PAD = (55, 56, 57, 58, 59), 60
PROMPT, NEW, GROUP, SAID = 62, 100, 2, 9
LENGTHS = np.int32([50, 40, 62, 33, 1, 58])
ROWS = len(LENGTHS) * GROUP
SETTINGS = SamplerConfig(NEW, GROUP, ENDS, PAD, max_turns=5, max_turn_tokens=21)
LEAST = least_pages(PROMPT + NEW)


def _drawn(*about) -> np.random.Generator:
    digest = hashlib.sha256(repr(about).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little"))


def _said(row: int, tokens: list[int]) -> list[int] | None:
    """What the environment says to a response so far; None if it ends the response."""
    rng = _drawn("said", row, tokens)
    return rng.integers(0, 55, rng.integers(1, SAID + 1)).tolist() if rng.random() > 0.1 else None


@functools.cache
def _arguments(model=DENSE, recipe="f32") -> dict:
    weights = rollout_weights(model, get_recipe(recipe))
    rng = np.random.default_rng(0)
    limits = rng.integers(NEW // 2, NEW + 1, ROWS).astype(np.int32)
    limits[[4, 9]] = 0, 1
    return {
        "weights": weights,
        "prompts": rng.integers(0, 55, (len(LENGTHS), PROMPT)).astype(np.int32),
        "requests": Requests(
            lengths=LENGTHS,
            key=jax.random.key(1, impl="threefry2x32"),
            sample_ids=rng.permutation(100)[:ROWS].astype(np.int32),
            temperature=np.where(np.arange(ROWS) % 5 == 3, 0.0, 1.0).astype(np.float32),
            limits=limits,
            rope=tuple(map(jnp.asarray, models.rope_tables(model, PROMPT + 2 * NEW))),
        ),
    }


@dataclasses.dataclass
class _Response:
    """A response of the oracle: tokens, which were drawn, their log-probabilities, replies."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    drawn: list[bool] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    replies: int = 0


@functools.cache
def _oracle(model=DENSE, recipe="f32") -> list[_Response]:
    """Reply by reply: the static sampler continues all that was said."""
    given = dict(_arguments(model, recipe))
    sample = make_sampler(model, recipe, SamplerConfig(NEW, 1, ENDS, PAD))
    requests = given["requests"]
    prompts, limits = np.repeat(given["prompts"], GROUP, axis=0), requests.limits
    starts = np.repeat(LENGTHS, GROUP)
    found, alive = [_Response() for _ in range(ROWS)], limits > 0
    while alive.any():
        tokens = np.zeros((ROWS, PROMPT + NEW), np.int32)
        for row, response in enumerate(found):
            whole = [*prompts[row, : starts[row]], *response.tokens]
            tokens[row, : len(whole)] = whole
        used = np.int32([len(response.tokens) for response in found])
        most = np.minimum(limits - used, SETTINGS.max_turn_tokens)
        left = dataclasses.replace(
            requests,
            lengths=np.int32(starts + used),
            limits=np.where(alive, most, 0).astype(np.int32),
        )
        out = jax.device_get(sample(given["weights"], tokens, left))
        for row in np.flatnonzero(alive):
            response, count = found[row], int(out.mask[row].sum())
            response.tokens += out.tokens[row, :count].tolist()
            response.drawn += [True] * count
            response.logprobs += out.logprobs[row, :count].tolist()
            response.replies += 1
            left = limits[row] - len(response.tokens)
            more = _said(row, response.tokens)
            alive[row] = left and response.replies < SETTINGS.max_turns
            if alive[row] and (more is None or len(more) >= left):
                alive[row] = False
            elif alive[row]:
                response.tokens += more
                response.drawn += [False] * len(more)
                response.logprobs += [0.0] * len(more)
    return found


class _Environment:
    """Answers paused responses, late by chance, unless no response could go on otherwise."""

    def __init__(self, patience: float, late: bool = False):
        self._patience, self._late = patience, late
        self._answered = np.zeros(ROWS, int)
        self._looks = 0

    def __call__(self, progress: Progress) -> Extension:
        self._looks += 1
        replies = progress.replies
        waits = progress.paused & (replies.counts > self._answered)
        chance = _drawn("late", self._looks, self._patience).random(ROWS)
        ready = waits & (chance >= self._patience)
        if (progress.done | waits).all() and not ready.any():
            ready = waits
        tokens, counts = np.zeros((ROWS, SAID), np.int32), np.zeros(ROWS, np.int32)
        ends = np.zeros(ROWS, bool)
        for row in np.flatnonzero(ready):
            self._answered[row] = replies.counts[row]
            used = int(progress.rollout.lengths[row])
            more = _said(row, progress.rollout.tokens[row, :used].tolist())
            if more is None or len(more) >= _arguments()["requests"].limits[row] - used:
                ends[row] = True
            else:
                tokens[row, : len(more)], counts[row] = more, len(more)
        if self._late:  # a planted fault: what is said stands one slot too late
            tokens = np.roll(tokens, 1, axis=1)
        return Extension(tokens, counts, ends)


@functools.cache
def _sampler(slots, pages, model=DENSE, recipe="f32", part=7) -> ContinuousSampler:
    sizes = Batching(slots, pages, prefill_chunk=32)
    return ContinuousSampler(model, recipe, SETTINGS, sizes, part=part)


def _differs(out, expected: list[_Response]) -> str:
    """Names what differs between a rollout and the oracle; '' if nothing does."""
    for row, response in enumerate(expected):
        count = len(response.tokens)
        if int(out.lengths[row]) != count:
            return f"row {row}: {out.lengths[row]} tokens, {count} expected"
        for name in ("tokens", "mask", "logprobs"):
            wanted = np.array(response.drawn if name == "mask" else getattr(response, name))
            found = np.asarray(getattr(out, name))[row]
            if (found[:count] != wanted.astype(found.dtype)).any():
                return f"row {row}: {name}"
        if out.mask[row, count:].any() or (out.tokens[row, count:] != PAD).any():
            return f"row {row}: behind the end"
    return ""


_SIZES = {"few pages": (4, LEAST + 1), "all at once": (ROWS, 80), "one at a time": (1, LEAST)}
_SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)


def test_the_oracle_has_conversations():
    """Three replies on average, some of which an end token ends and some their length."""
    expected = _oracle()
    counts = [response.replies for response in expected]
    assert sum(counts) >= 3 * (ROWS - 2) and min(counts) == 0
    assert sum(not all(response.drawn) for response in expected) > ROWS // 2


@pytest.mark.parametrize(
    ("size", "patience"),
    [
        ("few pages", 0.5),
        _SLOW("few pages", 0.0),
        _SLOW("all at once", 0.9),
        _SLOW("one at a time", 0.5),
    ],
)
def test_equals_the_static_sampler_reply_by_reply(size, patience):
    """In float32, which nothing absorbs; prompt and response reach over several pages."""
    sampler = _sampler(*_SIZES[size])
    out = sampler(**_arguments(), answer=_Environment(patience))
    assert not _differs(out, _oracle())
    said = sum(map(len, (response.tokens for response in _oracle()))) - int(out.mask.sum())
    once = int((LENGTHS - 1).sum()) + said  # prompts of a group, and what is said
    prefilled = int(sampler.progress.prefilled[0])
    assert prefilled == once if size == "all at once" else prefilled > once


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "recipe"),
    [(DENSE, CALIBRATED), (EXPERTS, "fp8"), (LATENT, "f32")],
    ids=["calibrated", "experts", "latent f32"],
)
def test_models_and_recipes(model, recipe):
    """What is said is prefilled as prompts are, for which test_continuous.py has more recipes."""
    sampler = _sampler(4, LEAST + 1, model, recipe)
    out = sampler(**_arguments(model, recipe), answer=_Environment(0.5))
    assert not _differs(out, _oracle(model, recipe))


def test_a_slot_too_late_is_seen():
    """The comparison finds an observation that stands one slot too late."""
    out = _sampler(ROWS, 80)(**_arguments(), answer=_Environment(0.0, late=True))
    assert _differs(out, _oracle())
