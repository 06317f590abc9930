"""Assigns requests to slots and pages: the scheduler of continuous batching.

Requests are samples, prompt-major: request m is sample m % G of prompt m // G. A slot is a row of
the decode batch. Everything is arrays and pure functions, so that it runs inside the rollout's
program; nothing here knows a model.

* **Order.** Waiting requests are taken in the order of their numbers. The first sample of a prompt
  prefills the prompt's pages. They stay allocated while siblings, other samples of that prompt,
  wait (`ready`); siblings share the full pages and copy the last, partly filled page before writing
  to it.
* **Prefilling.** A forward pass of prompts costs the same however few of them it has, and a slot
  that waits for its prompt draws nothing. So slots wait until a pass is full, or until it would let
  an eighth as many slots decode as decode already (`wants_prefill`).
* **Running out.** When sequences need more pages than are free, a prompt whose pages no sequence
  reads gives them up; if there is none, the running request with the highest number is preempted:
  it waits again with its tokens, whose keys and values are recomputed later. An iteration frees one
  prompt's or request's pages; sequences that still lack one, the highest numbers first, pause until
  a later iteration. Tokens do not change, because a token's bits depend on its sequence alone. The
  lowest running request is never preempted, so all requests end, given `models.least_pages`.
* **Pausing.** A request whose reply has ended may pause: it has no slot until `extend` gives it
  more tokens and it waits again. Meanwhile it keeps its pages (`Parked`), unless one that runs or
  comes back needs them: those of the highest number are given up first, before a request is
  preempted. A request without pages waits until some are free, or nothing else can run.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from fp8rl_jax.models import PAGE, pages_of
from fp8rl_jax.rollout import page_pool

WAITING, RUNNING, PAUSED, DONE = range(4)
_FEW = 8  # slots that decode for each that would be worth a forward pass of prompts


@flax.struct.dataclass
class Parked:
    """The pages that requests without a slot keep.

    Attributes:
      table: (M, N) int32, as `Schedule.table`, of requests; cached: (M,) int32, 0 for none.
    """

    table: jax.Array
    cached: jax.Array


@flax.struct.dataclass
class Schedule:
    """The state of B slots, M = Q * G requests of Q prompts, and P pages, at most N per sequence.

    Attributes:
      refs: (P,) int32, reference counts of the pages; see page_pool.py.
      table: (B, N) int32, pages of each slot's sequence; 0 for no page.
      request: (B,) int32, request of each slot; -1 for an idle slot.
      cached: (B,) int32, number of tokens of a slot's sequence whose keys and values are stored.
      lengths: (M,) int32, number of known tokens of each request: its prompt and tokens drawn.
      status: (M,) int32: WAITING, RUNNING, PAUSED or DONE.
      prompt_lengths: (Q,) int32, tokens of each prompt.
      prompt_pages: (Q, N) int32, pages that a ready prompt keeps; 0 for no page.
      ready: (Q,) bool, whether a prompt's pages are filled and kept for waiting siblings.
      preemptions: (1,) int32, number of preemptions of running requests.
      parked: pages of requests that pause or wait after a pause; None where none pauses.
    """

    refs: jax.Array
    table: jax.Array
    request: jax.Array
    cached: jax.Array
    lengths: jax.Array
    status: jax.Array
    prompt_lengths: jax.Array
    prompt_pages: jax.Array
    ready: jax.Array
    preemptions: jax.Array
    parked: Parked | None = None

    @property
    def group_size(self) -> int:
        return self.status.shape[0] // self.ready.shape[0]

    @property
    def occupied(self) -> jax.Array:
        """(B,) bool, whether a slot has a request."""
        return self.request >= 0

    @property
    def prompt(self) -> jax.Array:
        """(B,) int32, prompt of each slot's request; 0 for an idle slot."""
        return jnp.maximum(self.request, 0) // self.group_size

    @property
    def known(self) -> jax.Array:
        """(B,) int32, number of known tokens of each slot's request."""
        return self.lengths[jnp.maximum(self.request, 0)]

    @property
    def decoding(self) -> jax.Array:
        """(B,) bool: all tokens but the last are cached, so the next step draws one."""
        return self.occupied & (self.cached == self.known - 1)

    @property
    def prefilling(self) -> jax.Array:
        """(B,) bool: more tokens must be cached before the slot can decode."""
        return self.occupied & (self.cached < self.known - 1)

    def rows(self, slots: jax.Array) -> jax.Array:
        """Returns (B,) request of each slot where `slots` is True; else M, which scatters drop."""
        return jnp.where(slots, self.request, self.status.shape[0])


def new_schedule(
    prompt_lengths: jax.Array,
    done: jax.Array,
    *,
    slots: int,
    pages: int,
    tokens: int,
    pauses: bool = False,
) -> Schedule:
    """Returns a schedule of waiting requests; those of `done` (M,) bool are done from the start.
    `pauses`: whether requests may pause."""
    (prompts,), (requests,), width = prompt_lengths.shape, done.shape, pages_of(tokens)
    none = jnp.zeros((requests,), jnp.int32)
    return Schedule(
        refs=jnp.zeros((pages,), jnp.int32).at[0].set(1),  # page 0 is not given away
        table=jnp.zeros((slots, width), jnp.int32),
        request=jnp.full((slots,), -1, jnp.int32),
        cached=jnp.zeros((slots,), jnp.int32),
        lengths=jnp.repeat(prompt_lengths, requests // prompts),
        status=jnp.where(done, DONE, WAITING).astype(jnp.int32),
        prompt_lengths=prompt_lengths,
        prompt_pages=jnp.zeros((prompts, width), jnp.int32),
        ready=jnp.zeros((prompts,), bool),
        preemptions=jnp.zeros((1,), jnp.int32),
        parked=Parked(jnp.zeros((requests, width), jnp.int32), none) if pauses else None,
    )


def _first(keys: jax.Array, real: jax.Array) -> jax.Array:
    """Returns (B,) bool, whether an entry is `real`, and no earlier real one has the same key."""
    same = (keys[:, None] == keys[None, :]) & real[:, None] & real[None, :]
    return real & ~jnp.tril(same, -1).any(axis=1)


def _mark(indices: jax.Array, chosen: jax.Array, size: int) -> jax.Array:
    """Returns (size,) bool, True at the chosen indices."""
    place = jnp.where(chosen, indices, size)
    return jnp.zeros((size,), bool).at[place].set(True, mode="drop")


def _prompt_pages(lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the numbers (full pages, all pages) that siblings share: those of a prompt without
    its last token, which each sibling decodes."""
    return (lengths - 1) // PAGE, pages_of(lengths - 1)


def _evict(s: Schedule, prompts: jax.Array) -> Schedule:
    """Releases the pages of those ready prompts that are True in `prompts` (Q,)."""
    return dataclasses.replace(
        s,
        refs=page_pool.release(s.refs, jnp.where((prompts & s.ready)[:, None], s.prompt_pages, 0)),
        ready=s.ready & ~prompts,
        prompt_pages=jnp.where(prompts[:, None], 0, s.prompt_pages),
    )


def _leave(s: Schedule, slots: jax.Array, status: int) -> Schedule:
    """Frees the slots that are True in `slots` (B,), and their pages unless they are parked; sets
    their requests' status."""
    if status == PAUSED:
        assert s.parked is not None
        row = s.rows(slots)
        table = s.parked.table.at[row].set(s.table, mode="drop")
        cached = s.parked.cached.at[row].set(s.cached, mode="drop")
        s = dataclasses.replace(s, parked=Parked(table, cached))
    else:
        s = dataclasses.replace(
            s, refs=page_pool.release(s.refs, jnp.where(slots[:, None], s.table, 0))
        )
    return dataclasses.replace(
        s,
        status=s.status.at[s.rows(slots)].set(status, mode="drop"),
        table=jnp.where(slots[:, None], 0, s.table),
        request=jnp.where(slots, -1, s.request),
        cached=jnp.where(slots, 0, s.cached),
    )


def end(s: Schedule, slots: jax.Array) -> Schedule:
    """Ends the requests of slots that are True in `slots` (B,)."""
    return _leave(s, slots, DONE)


def pause(s: Schedule, slots: jax.Array) -> Schedule:
    """Pauses the requests of slots that are True in `slots` (B,); they keep their pages."""
    return _leave(s, slots, PAUSED)


def _without(parked: Parked, requests: jax.Array) -> Parked:
    """Forgets the pages of requests that are True in `requests` (M,)."""
    return Parked(
        jnp.where(requests[:, None], 0, parked.table), jnp.where(requests, 0, parked.cached)
    )


def _give_up(s: Schedule, requests: jax.Array) -> Schedule:
    """Releases the parked pages of requests that are True in `requests` (M,)."""
    if s.parked is None:
        return s
    refs = page_pool.release(s.refs, jnp.where(requests[:, None], s.parked.table, 0))
    return dataclasses.replace(s, refs=refs, parked=_without(s.parked, requests))


def _last_parked(s: Schedule) -> jax.Array:
    """Returns (M,) bool, True for the highest request that has parked pages; all False if none."""
    if s.parked is None:
        return jnp.zeros(s.status.shape, bool)
    has = s.parked.cached > 0
    number = jnp.arange(s.status.shape[0])
    return has & (number == jnp.max(jnp.where(has, number, -1)))


def extend(s: Schedule, counts: jax.Array, ends: jax.Array) -> Schedule:
    """Lets paused requests wait again, with `counts` (M,) more known tokens where that is not 0;
    ends those of `ends` (M,) bool."""
    status = jnp.where(counts > 0, WAITING, s.status)
    s = _give_up(s, ends)
    return dataclasses.replace(
        s, lengths=s.lengths + counts, status=jnp.where(ends, DONE, status).astype(jnp.int32)
    )


def unfinished(s: Schedule, needed: jax.Array) -> jax.Array:
    """Returns how many of the first `needed` requests wait or run; both () int32."""
    return ((s.status <= RUNNING) & (jnp.arange(s.status.shape[0]) < needed)).sum()


def share_prompts(s: Schedule) -> Schedule:
    """Lets prompts whose pages are filled keep them as long as siblings wait."""
    prompts = s.ready.shape[0]
    wanted = (s.status == WAITING).reshape(prompts, -1).any(axis=1)
    s = _evict(s, s.ready & ~wanted)
    filled = s.occupied & (s.cached >= s.prompt_lengths[s.prompt] - 1)
    giver = _first(s.prompt, filled & wanted[s.prompt] & ~s.ready[s.prompt])
    count = _prompt_pages(s.prompt_lengths[s.prompt])[1]
    pages = jnp.where(jnp.arange(s.table.shape[1]) < count[:, None], s.table, 0)
    pages = jnp.where(giver[:, None], pages, 0)
    place = jnp.where(giver, s.prompt, prompts)
    return dataclasses.replace(
        s,
        refs=page_pool.hold(s.refs, pages),
        prompt_pages=s.prompt_pages.at[place].set(pages, mode="drop"),
        ready=s.ready | _mark(s.prompt, giver, prompts),
    )


def may_admit(s: Schedule) -> jax.Array:
    """Returns () bool, whether a slot is idle and a request waits."""
    return (~s.occupied).any() & (s.status == WAITING).any()


class _Entry(NamedTuple):
    """How the request that each slot considers would begin.

    Attributes:
      request: (B,) int32; 0 where the slot is not idle or too few requests wait.
      eligible: (B,) bool, whether it may begin now, if there are enough pages.
      shares, returns: (B,) bool, whether it begins with its prompt's pages, or with parked ones.
      cached: (B,) int32, tokens whose keys and values are stored in these.
      held: (B, N) int32, these pages.
      first_own: (B,) int32, index of its first page that is allocated anew.
    """

    request: jax.Array
    eligible: jax.Array
    shares: jax.Array
    returns: jax.Array
    cached: jax.Array
    held: jax.Array
    first_own: jax.Array


def _entries(s: Schedule) -> _Entry:
    """Returns how the first waiting requests would begin in the idle slots, one for each."""
    idle = ~s.occupied
    waiting = page_pool.first_true(s.status == WAITING, idle.shape[0], otherwise=s.status.shape[0])
    request = jnp.where(idle, waiting[jnp.cumsum(idle) - 1], s.status.shape[0])
    real = request < s.status.shape[0]
    request = jnp.where(real, request, 0)
    prompt = request // s.group_size
    filling = s.occupied & (s.cached < s.prompt_lengths[s.prompt] - 1)
    busy = _mark(s.prompt, filling, s.ready.shape[0])
    ready = s.ready[prompt]
    full = _prompt_pages(s.prompt_lengths[prompt])[0]
    cached = jnp.where(ready, s.prompt_lengths[prompt] - 1, 0)
    held = jnp.where(ready[:, None], s.prompt_pages[prompt], 0)
    first_own = jnp.where(ready, full, 0)
    returns = jnp.zeros_like(ready)
    if s.parked is not None:
        parked = s.parked.cached[request]
        returns = real & (parked > 0)
        cached = jnp.where(returns, parked, cached)
        held = jnp.where(returns[:, None], s.parked.table[request], held)
        first_own = jnp.where(returns, pages_of(parked), first_own)
    shares = ready & ~returns
    eligible = real & (shares | returns | (~busy[prompt] & _first(prompt, real & ~returns)))
    return _Entry(request, eligible, shares, returns, cached, held, first_own)


def admit(s: Schedule) -> tuple[Schedule, jax.Array, jax.Array]:
    """Gives idle slots to waiting requests.

    Each idle slot considers one of the first waiting requests. The slot stays idle if another slot
    is filling the pages of this request's prompt, or if too few pages are free. There must be pages
    for the request's tokens, and another one for each request that runs, or was admitted before it
    in this iteration, and does not have all of its pages.

    Returns:
      (schedule, source, target): source and target (B,) int32 are pages to copy; 0 for none.
    """
    s = share_prompts(s)
    entry = _entries(s)
    needed = (s.lengths[entry.request] - 1) // PAGE + 1 - entry.first_own
    grows = entry.first_own + needed < s.table.shape[1]
    taken = jnp.cumsum(jnp.where(entry.eligible, needed + grows, 0)) - grows
    growing = (s.occupied & (s.table[:, -1] == 0)).sum()
    chosen = entry.eligible & (taken <= page_pool.count_free(s.refs) - growing)

    page = jnp.arange(s.table.shape[1])
    first_own = entry.first_own[:, None]
    own = (page >= first_own) & (page < first_own + needed[:, None])
    refs, pages = page_pool.allocate(s.refs, own & chosen[:, None])
    begun = jnp.where((page < first_own) & chosen[:, None], entry.held, 0)
    shared = jnp.where(entry.returns[:, None], 0, begun)  # else its own already
    row = pages + begun
    prompt = entry.request // s.group_size
    full, all_shared = _prompt_pages(s.prompt_lengths[prompt])
    partial = chosen & entry.shares & (full < all_shared)

    def last_page(pages: jax.Array) -> jax.Array:
        return jnp.where(partial, jnp.take_along_axis(pages, full[:, None], axis=1)[:, 0], 0)

    stuck = ~(s.occupied | chosen).any()
    admitted = dataclasses.replace(
        s,
        refs=page_pool.hold(refs, shared),
        table=jnp.where(chosen[:, None], row, s.table),
        request=jnp.where(chosen, entry.request, s.request),
        cached=jnp.where(chosen, entry.cached, s.cached),
        status=jnp.where(_mark(entry.request, chosen, s.status.shape[0]), RUNNING, s.status),
    )
    if s.parked is not None:
        back = _mark(entry.request, chosen & entry.returns, s.status.shape[0])
        admitted = dataclasses.replace(admitted, parked=_without(s.parked, back))
        short = (entry.eligible & entry.returns & ~chosen).any()
        admitted = _give_up(admitted, _last_parked(admitted) & (short | stuck))
    admitted = _evict(admitted, admitted.ready & stuck)
    return admitted, last_page(s.prompt_pages[prompt]), last_page(row)


def _needs(s: Schedule) -> jax.Array:
    """Returns (B,) bool, whether the token to decode falls on a page that the slot lacks."""
    page = jnp.minimum(s.cached // PAGE, s.table.shape[1] - 1)
    return s.decoding & (jnp.take_along_axis(s.table, page[:, None], axis=1)[:, 0] == 0)


def _free_some(s: Schedule, short: jax.Array) -> Schedule:
    """If `short` () bool, frees the pages of a prompt that no sequence reads; if there is none,
    those of the highest parked request, else of the highest running one."""
    unread = s.ready & ~_mark(s.prompt, s.occupied, s.ready.shape[0])
    number = jnp.arange(s.ready.shape[0])
    evicted = short & (number == jnp.max(jnp.where(unread, number, -1)))
    spare = _last_parked(s)
    victim = short & ~unread.any() & ~spare.any() & s.occupied & (s.request == s.request.max())
    s = _give_up(s, spare & short & ~unread.any())
    s = _leave(_evict(s, evicted), victim, WAITING)
    return dataclasses.replace(s, preemptions=s.preemptions + victim.any())


def make_room(s: Schedule) -> tuple[Schedule, jax.Array]:
    """Gives decoding slots the page for their next token, the lowest requests first.

    Without branches: on a GPU the host would wait for each.

    Returns:
      The schedule, and (B,) bool, whether a slot decodes now.
    """
    s = share_prompts(s)  # before a prompt's first sample ends or loses its pages
    s = _free_some(s, _needs(s).sum() > page_pool.count_free(s.refs))
    need = _needs(s)
    before = (need & (s.request < s.request[:, None])).sum(axis=1)
    given = need & (before < page_pool.count_free(s.refs))
    refs, pages = page_pool.allocate(s.refs, given)
    page = s.cached // PAGE
    here = given[:, None] & (jnp.arange(s.table.shape[1]) == page[:, None])
    table = jnp.where(here, pages[:, None], s.table)
    return dataclasses.replace(s, refs=refs, table=table), s.decoding & (~need | given)


def prefill_counts(s: Schedule) -> jax.Array:
    """Returns (4,) int32, numbers of slots that must prefill, of slots that could decode if those
    had, of slots that decode, and of waiting requests."""
    prefilling = s.prefilling.sum()
    idle = (~s.occupied).sum()
    waiting = (s.status == WAITING).sum()
    # Siblings of a prompt's first sample are admitted when it is prefilled.
    more = jnp.minimum(jnp.minimum(prefilling * (s.group_size - 1), idle), waiting)
    return jnp.stack([prefilling, prefilling + more, s.decoding.sum(), waiting]).astype(jnp.int32)


def wants_prefill(counts: jax.Array, together: int) -> jax.Array:
    """Returns () bool, whether to prefill now, `together` prompts at most: if a pass is full, if it
    lets many slots decode, or if no more prompts will join it. `counts`: sums of
    `prefill_counts`."""
    prefilling, could, decoding, waiting = counts
    worth = (prefilling >= together) | (_FEW * could >= decoding) | (waiting == 0)
    return (prefilling > 0) & worth


def to_prefill(s: Schedule, chunk: int, count: int = 1) -> tuple[jax.Array, jax.Array]:
    """Returns the first `count` slots that must prefill, (count,), and the number of tokens of each
    one's next chunk; B and 0 where there are fewer."""
    slots = page_pool.first_true(s.prefilling, count, otherwise=s.request.shape[0])
    return slots, jnp.minimum(jnp.append(s.known - 1 - s.cached, 0)[slots], chunk)


def prefilled(s: Schedule, slots: jax.Array, counts: jax.Array) -> Schedule:
    """Records that `counts` more tokens of `slots` (results of `to_prefill`) are cached."""
    return dataclasses.replace(s, cached=s.cached.at[slots].add(counts, mode="drop"))


def decoded(s: Schedule, drew: jax.Array) -> Schedule:
    """Records that the slots `drew` (B,) bool have cached their last token and drawn one more."""
    return dataclasses.replace(
        s, cached=s.cached + drew, lengths=s.lengths.at[s.rows(drew)].add(1, mode="drop")
    )
