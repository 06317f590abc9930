"""Continuous batching's book-keeping, without a model: pages hold what they should, none is lost.

A memory of numpy stands for the pool: what would be a key is the name of its token, (prompt or
request, position). After every turn each slot's pages must hold its own sequence's names, and the
counts of references must be those that tables and prompts make.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax.models import PAGE, least_pages, pages_of
from fp8rl_jax.rollout import page_pool, schedule
from fp8rl_jax.rollout.schedule import DONE, PAUSED, RUNNING, WAITING

_CHUNK, _TOGETHER = 48, 3


@dataclasses.dataclass
class _Turn:
    """What one turn of the loop did, on the host."""

    admitted: schedule.Schedule
    source: np.ndarray
    target: np.ndarray
    slots: np.ndarray
    counts: np.ndarray
    roomy: schedule.Schedule
    after: schedule.Schedule
    drew: np.ndarray


_NEVER = 2**30


@jax.jit
def _turn(s: schedule.Schedule, targets: jax.Array, stops: jax.Array | int = _NEVER) -> tuple:
    """A turn as continuous_loop.py takes it, with one pass of prompts at most; a request ends
    with its target's length, and pauses with the length of its stop."""
    admitted, source, target = schedule.admit(s)
    slots, counts = schedule.to_prefill(admitted, _CHUNK, _TOGETHER)
    counts *= schedule.wants_prefill(schedule.prefill_counts(admitted), _TOGETHER)
    filled = schedule.prefilled(admitted, slots, counts)
    roomy, draws = schedule.make_room(filled)
    after = schedule.decoded(roomy, draws)
    request = jnp.maximum(after.request, 0)
    ended = draws & (after.known >= targets[request])
    if s.parked is not None:
        after = schedule.pause(after, draws & ~ended & (after.known >= stops[request]))
        ended &= after.occupied
    return admitted, source, target, slots, counts, roomy, schedule.end(after, ended), draws


_extend = jax.jit(schedule.extend)


class _Memory:
    """Names of tokens in pages: (pages, PAGE) int64; the sequence's number, then the position."""

    def __init__(self, pages: int, prompt_lengths: np.ndarray, group: int):
        self.names = np.full((pages, PAGE), -1, np.int64)
        self.prompt_lengths, self.group = prompt_lengths, group

    def expected(self, request, count: int) -> np.ndarray:
        """Names of a request's first tokens: those of the prompt are the group's."""
        prompt, position = request // self.group, np.arange(count)
        own = position >= self.prompt_lengths[prompt]
        return np.where(own, request, -2 - prompt) * 4096 + position

    def write(self, table: np.ndarray, request: int, start: int, count: int) -> None:
        position = np.arange(start, start + count)
        names = self.expected(request, start + count)[start:]
        assert (table[position // PAGE] != 0).all(), "every token that counts has a page"
        self.names[table[position // PAGE], position % PAGE] = names

    def follow(self, turn: _Turn) -> None:
        """Copies, prefills and decodes as the turn did."""
        copied = turn.target != 0
        self.names[turn.target[copied]] = self.names[turn.source[copied]]
        admitted, roomy = turn.admitted, turn.roomy
        for slot, count in zip(turn.slots, turn.counts, strict=True):
            if count:
                start = admitted.cached[slot]
                self.write(admitted.table[slot], admitted.request[slot], start, count)
        for slot in np.flatnonzero(turn.drew):
            self.write(roomy.table[slot], roomy.request[slot], roomy.cached[slot], 1)

    def check(self, s: schedule.Schedule) -> None:
        """Every slot reads its own sequence; every reference is counted; nobody shares its own."""
        counts = np.bincount(s.table.ravel(), minlength=len(self.names))
        counts += np.bincount(s.prompt_pages.ravel(), minlength=len(self.names))
        if s.parked is not None:
            counts += np.bincount(s.parked.table.ravel(), minlength=len(self.names))
            for request in np.flatnonzero(s.parked.cached):
                own, cached = s.parked.table[request], s.parked.cached[request]
                found = self.names[own].reshape(-1)[:cached]
                np.testing.assert_array_equal(found, self.expected(request, cached))
                assert s.status[request] in (PAUSED, WAITING)
        counts[0] = 1
        np.testing.assert_array_equal(s.refs, counts)
        busy = s.request >= 0
        found = self.names[s.table[busy]].reshape(-1, s.table.shape[1] * PAGE)
        counts = np.arange(found.shape[1]) < s.cached[busy][:, None]
        expected = self.expected(s.request[busy][:, None], found.shape[1])
        np.testing.assert_array_equal(found[counts], expected[counts])
        assert (s.status[s.request[busy]] == RUNNING).all()
        assert (s.status == RUNNING).sum() == busy.sum() == len(set(s.request[busy]))


def _run(
    requests: int,
    group: int,
    slots: int,
    pages: int,
    seed: int = 0,
    most: int = 200,
    pauses: bool = False,
) -> dict:
    """Random prompts and responses through the schedule until all are done; with `pauses` they are
    extended now and then, by up to 70 tokens that were not drawn."""
    rng = np.random.default_rng(seed)
    prompts = requests // group
    lengths = rng.choice([1, 2, 30, 63, 64, 65, 66, 128, 129, 150], prompts).astype(np.int32)
    new = np.where(rng.random(requests) < 0.06, rng.integers(1, most, requests), 1)
    new = np.maximum(new, rng.integers(1, 120 if pauses else 5, requests)).astype(np.int32)
    targets = np.repeat(lengths, group) + new
    tokens = 150 + most
    never = rng.random(requests) < 0.01
    s = schedule.new_schedule(
        jnp.asarray(lengths),
        jnp.asarray(never),
        slots=slots,
        pages=pages,
        tokens=tokens,
        pauses=pauses,
    )
    starts = np.repeat(lengths, group)
    stops = starts + rng.integers(1, 20, requests) if pauses else np.full(requests, _NEVER)
    paused = kept = 0
    memory = _Memory(pages, lengths, group)
    turns = admissions = 0
    shared = False
    before = jax.device_get(s)
    while (before.status != DONE).any():
        turn = _Turn(*jax.device_get(_turn(s, targets, np.int32(stops))))
        s = turn.after
        memory.follow(turn)
        memory.check(turn.after)
        admissions += int((turn.admitted.request != before.request).sum())
        shared |= bool((turn.after.refs[1:] > 1).any())
        progressed = (
            turn.counts.any()
            or turn.drew.any()
            or (before.request != s.request).any()
            or (before.ready != s.ready).any()
            or (pauses and (before.parked.cached != s.parked.cached).any())
        )
        assert progressed, "a turn admits, prefills, draws, preempts, shares or evicts"
        waits = np.flatnonzero(s.status == PAUSED)
        if len(waits) and (rng.random() < 0.2 or not (s.status <= RUNNING).any()):
            chosen, more = rng.choice(waits, 1 + len(waits) // 2), np.zeros(requests, np.int32)
            more[chosen] = rng.integers(1, 70, len(chosen))
            more = np.minimum(more, np.maximum(targets - s.lengths - 1, 0)).astype(np.int32)
            ends = np.isin(np.arange(requests), chosen) & (more == 0)
            targets = np.where(ends, s.lengths, targets)
            paused, kept = paused + len(chosen), kept + np.count_nonzero(s.parked.cached[chosen])
            s = jax.device_get(_extend(s, more, ends))
            stops = np.where(more > 0, s.lengths + rng.integers(1, 20, requests), stops)
            memory.check(s)
        before, turns = s, turns + 1
        assert turns < 100 * requests, "no request may wait for ever"
    lengths_now = np.where(never, np.repeat(lengths, group), targets)
    np.testing.assert_array_equal(before.lengths, lengths_now)
    assert page_pool.count_free(before.refs) == pages - 1 - np.count_nonzero(before.prompt_pages)
    return {
        "turns": turns,
        "admissions": admissions,
        "wanted": int((~never).sum()),
        "shared": shared,
        "preemptions": int(before.preemptions[0]),
        "paused": paused,
        "kept": kept,
    }


@pytest.mark.slow  # with fewer requests: test_shapes
@pytest.mark.parametrize("requests", [600, 10_000], ids=["600", "10,000"])
def test_admissions_and_endings(requests):
    """With too few pages for all slots: some come in several times, none is lost."""
    found = _run(requests=requests, group=4, slots=8, pages=least_pages(550) + 5, most=400)
    assert found["admissions"] == found["wanted"] + found["preemptions"]
    assert found["preemptions"] > requests // 200 and found["shared"], found


@pytest.mark.parametrize(
    ("group", "slots", "pages"),
    [
        pytest.param(1, 5, 40, id="no groups", marks=pytest.mark.slow),
        pytest.param(3, 5, least_pages(350), id="one sequence's pages"),
        pytest.param(6, 1, least_pages(350), id="one slot", marks=pytest.mark.slow),
        pytest.param(2, 16, 120, id="room for all", marks=pytest.mark.slow),
    ],
)
def test_shapes(group, slots, pages):
    found = _run(requests=120, group=group, slots=slots, pages=pages, seed=group)
    roomy = pages >= slots * pages_of(350)
    assert roomy <= (found["preemptions"] == 0), "nothing is preempted where all have room"


@pytest.mark.parametrize(
    ("slots", "pages"),
    [
        pytest.param(5, least_pages(350) + 3, id="few pages"),
        pytest.param(16, 700, id="room for all", marks=pytest.mark.slow),
        pytest.param(1, least_pages(350), id="one slot", marks=pytest.mark.slow),
    ],
)
def test_pauses(slots, pages):
    """Requests that pause keep their pages where there is room, and lose them where others need
    them; either way each has its own tokens, and all end."""
    found = _run(requests=120, group=3, slots=slots, pages=pages, seed=slots, pauses=True)
    assert found["paused"] > 100
    if pages == 700:
        assert found["kept"] == found["paused"] and found["preemptions"] == 0
    else:
        assert 0 < found["kept"] < found["paused"]


def test_a_prompt_is_stored_once():
    """Eight samples of a prompt of 129 tokens: two whole pages, and each its own for the rest."""
    s = schedule.new_schedule(jnp.int32([129]), jnp.zeros(8, bool), slots=8, pages=40, tokens=200)
    for _ in range(6):
        s = _turn(s, jnp.full(8, 140))[-2]
    assert (s.request >= 0).all()
    assert len(np.unique(s.table[:, :2])) == 2, "whole pages are read by all"
    assert len(np.unique(s.table[:, 2])) == 8
    assert int(page_pool.count_free(s.refs)) == 39 - 2 - 8


def test_order_is_that_of_the_requests():
    """A lower number never comes in after a higher one of another prompt, without preemption."""
    s = schedule.new_schedule(
        jnp.int32([3, 70, 20]), jnp.zeros(6, bool), slots=2, pages=20, tokens=100
    )
    first = np.full(6, -1)
    for turn in range(60):
        s = _turn(s, jnp.repeat(jnp.int32([3, 70, 20]), 2) + 4)[-2]
        for request in np.asarray(s.request)[np.asarray(s.request) >= 0]:
            first[request] = turn if first[request] < 0 else first[request]
    assert (np.diff(first) >= 0).all() and (s.status == DONE).all()


# page_pool.py


def test_allocation_takes_the_lowest_free_pages():
    refs = jnp.int32([1, 0, 0, 0, 0, 0, 0, 0])
    refs = page_pool.hold(refs, jnp.int32([2, 5, 0]))
    refs, pages = page_pool.allocate(refs, jnp.array([[True, False], [True, True]]))
    np.testing.assert_array_equal(pages, [[1, 0], [3, 4]])
    np.testing.assert_array_equal(refs, [1, 1, 1, 1, 1, 1, 0, 0])
    refs = page_pool.release(refs, pages)
    np.testing.assert_array_equal(refs, [1, 0, 1, 0, 0, 1, 0, 0])


def test_page_zero_is_never_given_away():
    refs, pages = page_pool.allocate(jnp.int32([1, 0, 0, 0, 0]), jnp.ones(4, bool))
    assert sorted(np.asarray(pages)) == [1, 2, 3, 4] and int(page_pool.count_free(refs)) == 0
