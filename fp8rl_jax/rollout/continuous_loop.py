"""The loop of continuous batching: the functions that its program traces (continuous.py).

Each iteration gives idle slots to waiting requests, prefills prompts where it is worth a forward
pass (schedule.py), and decodes one token of every slot whose prompt is cached. A slot is refilled
as soon as its response ends, without leaving the program. On a GPU the host waits for the GPU where
a loop's number of iterations is not known: twice in an iteration that decodes alone. Keys and
values are stored in a pool of pages (models/kv_cache.py); schedule.py assigns slots and pages.

A prompt is cached without its last token, once for all samples of its group; each sample's first
decode step takes the last token. Log-probabilities equal those of the static sampler, bit for bit:
a token's bits depend on its own sequence alone, and its random bits on its sample and position, not
on other sequences of the batch (tests/rollout/test_continuous.py). So a response of several replies
has them too, which waits for the environment after each, and continues with the keys and values
that it kept or that are computed anew (tests/rollout/test_replies.py).

Not done: taps; layers sharded by columns (mesh.tensor).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from fp8rl_jax.models import PAGE, PagedCache, Tokens, hidden_states, init_paged_cache, least_pages
from fp8rl_jax.models.kv_cache import Stored
from fp8rl_jax.models.parallel.mesh import EXPERT
from fp8rl_jax.rollout import page_pool, schedule
from fp8rl_jax.rollout.sampler import Loop, Prepared, Requests, Rollout, is_end
from fp8rl_jax.rollout.sampling import sample_keys
from fp8rl_jax.rollout.schedule import Schedule

_T = TypeVar("_T")
_COPIES = 8  # pages that are copied at a time


@dataclasses.dataclass(frozen=True)
class Batching:
    """Sizes of the batch and of the page pool, fixed when the program compiles.

    Attributes:
      slots: B, number of sequences that decode at a time.
      pages: P, number of pages of 64 tokens that all slots share; at least `models.least_pages`.
      prefill_chunk: largest number of tokens prefilled at a time; prompts that are shorter are
        prefilled together. 0 for `default_chunk`.
    """

    slots: int
    pages: int
    prefill_chunk: int = 0


def default_chunk(on_cpu: bool) -> int:
    """Returns the default of `rollout.prefill_chunk`: on a GPU as many tokens as it takes until
    computing takes longer than reading the weights."""
    return 64 if on_cpu else 1024


@flax.struct.dataclass
class Replies:
    """The replies of M responses.

    Attributes:
      drawn: (M, R) bool, which tokens were drawn, and not written by the environment.
      counts: (M,) int32, number of complete replies.
      begins: (M,) int32, response slot with which the latest reply begins.
    """

    drawn: jax.Array
    counts: jax.Array
    begins: jax.Array


@flax.struct.dataclass
class BatchState:
    """The state of a rollout: everything that an iteration changes.

    Attributes:
      pool: keys and values (`PagedCache.runs`); the page tables are in `schedule`.
      schedule: which request has which slot and pages.
      tokens: (M, S) int32, each request's prompt, directly followed by its response.
      logprobs: (M, R) float32, of the tokens drawn.
      finished: (M,) bool, whether the last reply ended with an end-of-sequence token.
      replies: the replies of each response, or None if every response has one.
      iterations, drawn, prefilled: (1,) int32, numbers of iterations, of tokens drawn, and of
        tokens prefilled.
      needed: (1,) int32; the rollout ends with the first so many requests.
      keys: (M, 2) uint32 as in `Earlier`, or None if `Requests.key` is the key of all.
      kept: (M, R, C) int32 as in `Rollout`, or None.
    """

    pool: tuple[Stored, ...]
    schedule: Schedule
    tokens: jax.Array
    logprobs: jax.Array
    finished: jax.Array
    replies: Replies | None
    iterations: jax.Array
    drawn: jax.Array
    prefilled: jax.Array
    needed: jax.Array
    keys: jax.Array | None
    kept: jax.Array | None


@flax.struct.dataclass
class Earlier:
    """What earlier calls, with other weights, drew of the responses of a call; on D devices.

    Attributes:
      tokens, logprobs: (M, R), int32 and float32; counts: (M,) int32, tokens drawn.
      finished: (M,) bool, whether a response ended with an end-of-sequence token.
      keys: (M, 2) uint32, key data of the step that numbered a response's sample.
      needed: (D,) int32, number of each device's first requests that the call completes; it ends
        with them, whatever others lack.
      kept: (M, R, C) int32 as in `Rollout`, or None.
    """

    tokens: Any
    logprobs: Any
    counts: Any
    finished: Any
    keys: Any
    needed: Any
    kept: Any = None


@flax.struct.dataclass
class Extension:
    """What the environment says to paused responses, on the host.

    Attributes:
      tokens: (M, E) int32; counts: (M,) int32, how many of them go behind the response; 0 leaves it
        as it is. A response must have room for them and one more.
      ends: (M,) bool, responses that are complete.
    """

    tokens: Any
    counts: Any
    ends: Any


def _behind(tokens: jax.Array, start: jax.Array, more: jax.Array, counts: jax.Array) -> jax.Array:
    """Writes the first `counts` (M,) of `more` (M, E) from `start` (M,) on into `tokens` (M, S)."""
    index = jnp.arange(more.shape[1])
    column = jnp.where(index < counts[:, None], start[:, None] + index, tokens.shape[1])
    return tokens.at[jnp.arange(len(start))[:, None], column].set(more, mode="drop")


def _repeat(wanted: jax.Array, run: Callable[[_T], tuple[jax.Array, _T]], state: _T) -> _T:
    """Runs ``wanted, state = run(state)`` while `wanted` () bool; returns the state.

    Also where one iteration is enough: XLA:GPU updates the pool in place in a loop; the branches of
    `lax.cond` return copies.
    """
    carried = wanted, state
    return lax.while_loop(lambda carried: carried[0], lambda carried: run(carried[1]), carried)[1]


@dataclasses.dataclass(frozen=True)
class ContinuousLoop:
    """Functions to trace: the parts of the loop for one model, recipe and sampler config."""

    loop: Loop
    batching: Batching

    @property
    def _sharers(self) -> int:
        """Number of devices that share experts and run iterations together."""
        mesh = self.loop.parallel.mesh
        return 1 if mesh is None else mesh.shape[EXPERT]

    def _of_group(self, counts: jax.Array) -> jax.Array:
        """Sums int32 counts over the devices that run iterations together."""
        return counts if self._sharers == 1 else lax.psum(counts, EXPERT)

    def _chunks(self, slots: int) -> tuple[int, int]:
        """Returns the tokens of a chunk, and how many chunks are prefilled together, for requests
        of `slots` tokens."""
        limit = self.batching.prefill_chunk
        chunk = min(limit, slots - self.loop.sampler.max_new_tokens)
        return chunk, min(limit // chunk, self.batching.slots)

    def begin(
        self, prompts: jax.Array, requests: Requests, earlier: Earlier | None = None
    ) -> BatchState:
        """Returns the state before the first iteration; prompts (Q, Tp) are right-padded."""
        loop = self.loop
        new = loop.sampler.max_new_tokens
        tokens = jnp.repeat(jnp.pad(prompts, ((0, 0), (0, new))), loop.sampler.group_size, axis=0)
        count, slots = tokens.shape
        least = least_pages(slots)
        if self.batching.pages < least:
            raise ValueError(
                f"a pool of {self.batching.pages} pages is too small for sequences of {slots} "
                f"tokens; give at least {least}"
            )
        done = requests.limits <= 0
        if earlier is not None:
            start = jnp.repeat(requests.lengths, loop.sampler.group_size)
            tokens = _behind(tokens, start, earlier.tokens, earlier.counts)
            done = done | earlier.finished | (earlier.counts >= requests.limits)
        plan = schedule.new_schedule(
            requests.lengths,
            done,
            slots=self.batching.slots,
            pages=self.batching.pages,
            tokens=slots,
            pauses=loop.sampler.max_turns > 1,
        )
        if earlier is not None:
            plan = dataclasses.replace(plan, lengths=plan.lengths + earlier.counts)
        zero = jnp.zeros((1,), jnp.int32)
        none = jnp.zeros((count,), jnp.int32)
        replies = None
        if loop.sampler.max_turns > 1:
            replies = Replies(jnp.zeros((count, new), bool), none, none)
        return BatchState(
            pool=init_paged_cache(
                loop.model, loop.recipe, self.batching.pages, plan.table, loop.parallel
            ).runs,
            schedule=plan,
            tokens=tokens,
            logprobs=earlier.logprobs if earlier else jnp.zeros((count, new), jnp.float32),
            finished=earlier.finished if earlier else jnp.zeros((count,), bool),
            replies=replies,
            iterations=zero,
            drawn=zero,
            prefilled=zero,
            needed=earlier.needed if earlier else zero + count,
            keys=earlier.keys if earlier else None,
            kept=earlier.kept if earlier else loop.sampler.no_kept(count, loop.model.vocab_size),
        )

    def unfinished(self, state: BatchState) -> jax.Array:
        """Returns the () int32 number of needed requests that wait or run."""
        return self._of_group(schedule.unfinished(state.schedule, state.needed[0]))

    def iterate(self, prepared: Prepared, requests: Requests, state: BatchState) -> BatchState:
        """Admits requests, prefills, and decodes one token of every slot that can decode."""

        together = self._sharers * self._chunks(state.tokens.shape[1])[1]

        def wants(state: BatchState) -> tuple[jax.Array, jax.Array]:
            """Whether to prefill, and whether to admit requests."""
            plan = state.schedule
            may_admit = schedule.may_admit(plan).astype(jnp.int32)
            counts = self._of_group(jnp.append(schedule.prefill_counts(plan), may_admit))
            return schedule.wants_prefill(counts[:4], together), counts[4] > 0

        def prefill(state: BatchState) -> tuple[jax.Array, BatchState]:
            state = self._prefill(prepared, requests, state)
            return wants(state)[0], state

        def fill(state: BatchState) -> tuple[jax.Array, BatchState]:
            plan, source, target = schedule.admit(state.schedule)
            state = dataclasses.replace(
                state, pool=self._copy(state.pool, source, target), schedule=plan
            )
            prefills = wants(state)[0]
            state = _repeat(prefills, prefill, state)
            return prefills & wants(state)[1], state  # siblings of what was prefilled

        state = _repeat(jnp.logical_or(*wants(state)), fill, state)
        state = self._decode(prepared, requests, state)
        return dataclasses.replace(state, iterations=state.iterations + 1)

    def _copy(
        self, pool: tuple[Stored, ...], source: jax.Array, target: jax.Array
    ) -> tuple[Stored, ...]:
        """Copies pages `source` (B,) to pages `target` (B,) in all layers; 0 stands for no page.

        Copies _COPIES pages at a time: all at once would need an extra page for every slot.
        """
        pages = self.batching.pages
        count = target.shape[0]
        rounds = -(-count // _COPIES)
        slots = page_pool.first_true(target != 0, rounds * _COPIES, otherwise=count)
        source = source.at[slots].get(mode="clip")
        # Where there is nothing to copy the place is outside the pool, another one for each.
        nowhere = pages + jnp.arange(rounds * _COPIES)
        target = jnp.where(slots < count, target.at[slots].get(mode="clip"), nowhere)

        def some(part: jax.Array, pool: tuple[Stored, ...]) -> tuple[Stored, ...]:
            def of_part(x: jax.Array) -> jax.Array:
                return lax.dynamic_slice_in_dim(x, part * _COPIES, _COPIES)

            old = of_part(source)
            new = of_part(target)

            def copy(x: jax.Array) -> jax.Array:
                layers = jnp.arange(x.shape[0] // pages)[:, None]
                outside = x.shape[0] + layers * _COPIES + new
                into = jnp.where(new < pages, layers * pages + new, outside)
                return x.at[into].set(x[layers * pages + old], mode="drop", unique_indices=True)

            return jax.tree.map(copy, pool)

        return lax.fori_loop(0, rounds, some, pool)

    # The model.

    def _forward(self, prepared, requests, state: BatchState, tokens, positions, table):
        cache = PagedCache(state.pool, table, self.batching.pages)
        out = hidden_states(
            prepared.weights,
            Tokens.of(tokens, requests.rope, positions=positions),
            self.loop.model,
            self.loop.recipe,
            cache=cache,
            parallel=self.loop.parallel,
        )
        return out.hidden, out.cache.runs

    def _prefill(self, prepared, requests, state: BatchState) -> BatchState:
        """Prefills the next chunks of the first slots that must prefill."""
        plan = state.schedule
        chunk, together = self._chunks(state.tokens.shape[1])
        slots, counts = schedule.to_prefill(plan, chunk, together)
        table = jnp.pad(plan.table, ((0, 1), (0, 0)))[slots]
        positions = jnp.append(plan.cached, 0)[slots][:, None] + jnp.arange(chunk, dtype=jnp.int32)
        # Positions after a chunk's tokens are rewritten before they are read, or are in page 0.
        positions = jnp.minimum(positions, plan.table.shape[1] * PAGE - 1)
        request = jnp.maximum(jnp.append(plan.request, 0)[slots], 0)
        column = jnp.minimum(positions, state.tokens.shape[1] - 1)
        tokens = state.tokens[request[:, None], column]
        _, pool = self._forward(prepared, requests, state, tokens, positions, table)
        return dataclasses.replace(
            state,
            pool=pool,
            schedule=schedule.prefilled(plan, slots, counts),
            prefilled=state.prefilled + counts.sum(),
        )

    def _decode(self, prepared, requests: Requests, state: BatchState) -> BatchState:
        """Draws one token for every slot that can decode; results of other slots are dropped."""
        loop = self.loop
        plan, draws = schedule.make_room(state.schedule)
        request = jnp.maximum(plan.request, 0)
        row = plan.rows(draws)
        position = jnp.where(draws, plan.cached, 0)
        table = jnp.where(draws[:, None], plan.table, 0)
        # Idle slots all write slot 0 of page 0, at the same time: with one token, the same bits.
        tokens = jnp.where(draws, state.tokens[request, position], 0)[:, None]
        hidden, pool = self._forward(prepared, requests, state, tokens, position[:, None], table)
        key = requests.key
        if state.keys is not None:
            key = jax.random.wrap_key_data(state.keys[request], impl="threefry2x32")
        keys = sample_keys(key, requests.sample_ids[request], position + 1)
        token, logp, _, kept = loop.draw(
            prepared, hidden[:, 0], keys, requests.temperature[request]
        )
        index = position + 1 - plan.prompt_lengths[plan.prompt]
        ended = draws & is_end(token, loop.sampler.eos_ids)
        full = draws & (index + 1 >= requests.limits[request])
        plan = schedule.decoded(plan, draws)
        replies = state.replies
        if replies is None:
            plan = schedule.end(plan, ended | full)
        else:
            begins = replies.begins[request]
            complete = ended | full
            if loop.sampler.max_turn_tokens:
                complete = complete | (draws & (index + 1 - begins >= loop.sampler.max_turn_tokens))
            counts = replies.counts[request] + complete
            last = complete & (full | (counts >= loop.sampler.max_turns))
            plan = schedule.pause(schedule.end(plan, last), complete & ~last)
            replies = dataclasses.replace(
                replies,
                drawn=replies.drawn.at[row, index].set(True, mode="drop"),
                counts=replies.counts.at[row].set(counts, mode="drop"),
            )
        return dataclasses.replace(
            state,
            pool=pool,
            schedule=plan,
            tokens=state.tokens.at[row, position + 1].set(token, mode="drop"),
            logprobs=state.logprobs.at[row, index].set(logp, mode="drop"),
            finished=state.finished.at[row].set(ended, mode="drop"),
            replies=replies,
            drawn=state.drawn + draws.sum(),
            kept=None if state.kept is None else state.kept.at[row, index].set(kept, mode="drop"),
        )

    def extend(self, requests: Requests, more: Extension, state: BatchState) -> BatchState:
        """Puts tokens behind the replies of paused requests, which wait again, and ends others."""
        assert state.replies is not None
        start = state.schedule.lengths
        first = jnp.repeat(requests.lengths, self.loop.sampler.group_size)
        begins = jnp.where(more.counts > 0, start + more.counts - first, state.replies.begins)
        return dataclasses.replace(
            state,
            tokens=_behind(state.tokens, start, more.tokens, more.counts),
            replies=dataclasses.replace(state.replies, begins=begins),
            schedule=schedule.extend(state.schedule, more.counts, more.ends),
        )

    def result(self, requests: Requests, state: BatchState) -> Rollout:
        """Returns the tokens known so far, in the form of the static sampler's result, but without
        `kept`, which may be large."""
        sampler = self.loop.sampler
        start = jnp.repeat(requests.lengths, sampler.group_size)
        lengths = state.schedule.lengths - start
        index = jnp.arange(sampler.max_new_tokens)
        known = index < lengths[:, None]
        tokens = jnp.take_along_axis(state.tokens, start[:, None] + index, axis=1)
        tokens = jnp.where(known, tokens, sampler.pad_id)
        mask = known if state.replies is None else state.replies.drawn
        return Rollout(
            tokens=tokens,
            mask=mask,
            logprobs=state.logprobs,
            finished=state.finished,
            taps={},
            lengths=None if state.replies is None else lengths,
            truncation=sampler.scored_truncation,
        )
