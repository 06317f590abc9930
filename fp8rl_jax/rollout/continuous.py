"""Continuous batching: a rollout of any number of samples through a fixed number of slots.

One jitted program: a loop. Each iteration, a *turn*, gives idle slots to waiting requests, prefills
prompts where it is worth a forward pass (schedule.py), and decodes one token of every slot whose
prompt is cached. A slot is refilled as soon as its response ends, without leaving the
program. On a GPU the host waits for the GPU where a loop's number of iterations is not known: twice
in a turn that decodes alone. Keys and values are stored in a pool of
pages (models/kv_cache.py); schedule.py assigns slots and pages.

A prompt is cached without its last token, once for all samples of its group; each sample's first
decode step takes the last token. Log-probabilities equal those of the static sampler, bit for bit:
a token's bits depend on its own sequence alone, and its random bits on its sample and position, not
on other sequences of the batch (tests/rollout/test_continuous.py).

The loop also ends after a given number of turns, so that the host can look at finished responses
while the next turns run. A response of several replies pauses after each: the host puts what the
environment says behind it (`Extension`), and the request waits for a slot again. It is prefilled
anew, so its bits are those of a prompt of that length. On a mesh every device has its slots, pool and queue, for its share of the
prompts. Devices that share experts (`mesh.expert`) take every turn together, because each needs the
experts of all: the work of all of them decides whether there is another turn, and whether it
prefills and decodes. Other devices exchange nothing while they run.

Not done: taps; layers sharded by columns (mesh.tensor); moving requests between devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fp8rl_jax.base import processes
from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.models import (
    PAGE,
    ModelConfig,
    PagedCache,
    Parallel,
    forward,
    init_paged_cache,
    least_pages,
)
from fp8rl_jax.models.kv_cache import Stored
from fp8rl_jax.models.parallel.mesh import EXPERT
from fp8rl_jax.models.parallel.specs import rollout_specs
from fp8rl_jax.quant import Recipe, get_recipe
from fp8rl_jax.rollout import page_pool, schedule
from fp8rl_jax.rollout.sampler import Loop, Prepared, Requests, Rollout, SamplerConfig, is_end
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
    """The state of a rollout: everything that a turn changes.

    Attributes:
      pool: keys and values (`PagedCache.runs`); the page tables are in `schedule`.
      schedule: which request has which slot and pages.
      tokens: (M, S) int32, each request's prompt, directly followed by its response.
      logprobs: (M, R) float32, of the tokens drawn.
      finished: (M,) bool, whether the last reply ended with an end-of-sequence token.
      replies: the replies of each response, or None if every response has one.
      turns, drawn, prefilled: (1,) int32, numbers of turns, tokens drawn and tokens prefilled.
    """

    pool: tuple[Stored, ...]
    schedule: Schedule
    tokens: jax.Array
    logprobs: jax.Array
    finished: jax.Array
    replies: Replies | None
    turns: jax.Array
    drawn: jax.Array
    prefilled: jax.Array


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
        """Number of devices that share experts and take turns together."""
        mesh = self.loop.parallel.mesh
        return 1 if mesh is None else mesh.shape[EXPERT]

    def _of_group(self, counts: jax.Array) -> jax.Array:
        """Sums int32 counts over the devices that take turns together."""
        return counts if self._sharers == 1 else lax.psum(counts, EXPERT)

    def _chunks(self, slots: int) -> tuple[int, int]:
        """Returns the tokens of a chunk, and how many chunks are prefilled together, for requests
        of `slots` tokens."""
        limit = self.batching.prefill_chunk
        chunk = min(limit, slots - self.loop.sampler.max_new_tokens)
        return chunk, min(limit // chunk, self.batching.slots)

    def begin(self, prompts: jax.Array, requests: Requests) -> BatchState:
        """Returns the state before the first turn; prompts (Q, Tp) are right-padded."""
        loop, batching = self.loop, self.batching
        new, group = loop.sampler.max_new_tokens, loop.sampler.group_size
        tokens = jnp.repeat(jnp.pad(prompts, ((0, 0), (0, new))), group, axis=0)
        count, slots = tokens.shape
        least = least_pages(slots)
        if batching.pages < least:
            raise ValueError(
                f"a pool of {batching.pages} pages is too small for sequences of {slots} tokens; "
                f"give at least {least}"
            )
        plan = schedule.new_schedule(
            requests.lengths,
            requests.limits <= 0,
            slots=batching.slots,
            pages=batching.pages,
            tokens=slots,
        )
        zero, none = jnp.zeros((1,), jnp.int32), jnp.zeros((count,), jnp.int32)
        replies = None
        if loop.sampler.max_turns > 1:
            replies = Replies(jnp.zeros((count, new), bool), none, none)
        return BatchState(
            pool=init_paged_cache(
                loop.model, loop.recipe, batching.pages, plan.table, loop.parallel
            ).runs,
            schedule=plan,
            tokens=tokens,
            logprobs=jnp.zeros((count, new), jnp.float32),
            finished=jnp.zeros((count,), bool),
            replies=replies,
            turns=zero,
            drawn=zero,
            prefilled=zero,
        )

    def unfinished(self, state: BatchState) -> jax.Array:
        """Returns the () int32 number of requests that wait or run."""
        return self._of_group(schedule.unfinished(state.schedule))

    def turn(self, prepared: Prepared, requests: Requests, state: BatchState) -> BatchState:
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
            pool = self._copy(state.pool, source, target)
            state = dataclasses.replace(state, pool=pool, schedule=plan)
            prefills = wants(state)[0]
            state = _repeat(prefills, prefill, state)
            return prefills & wants(state)[1], state  # siblings of what was prefilled

        state = _repeat(jnp.logical_or(*wants(state)), fill, state)
        state = self._decode(prepared, requests, state)
        return dataclasses.replace(state, turns=state.turns + 1)

    def _copy(
        self, pool: tuple[Stored, ...], source: jax.Array, target: jax.Array
    ) -> tuple[Stored, ...]:
        """Copies pages `source` (B,) to pages `target` (B,) in all layers; 0 stands for no page.

        Copies _COPIES pages at a time: all at once would need an extra page for every slot.
        """
        pages, count = self.batching.pages, target.shape[0]
        rounds = -(-count // _COPIES)
        slots = page_pool.first_true(target != 0, rounds * _COPIES, otherwise=count)
        source = source.at[slots].get(mode="clip")
        # Where there is nothing to copy the place is outside the pool, another one for each.
        nowhere = pages + jnp.arange(rounds * _COPIES)
        target = jnp.where(slots < count, target.at[slots].get(mode="clip"), nowhere)

        def some(turn: jax.Array, pool: tuple[Stored, ...]) -> tuple[Stored, ...]:
            def of_turn(x: jax.Array) -> jax.Array:
                return lax.dynamic_slice_in_dim(x, turn * _COPIES, _COPIES)

            old, new = of_turn(source), of_turn(target)

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
        out = forward(
            prepared.weights,
            tokens,
            self.loop.model,
            self.loop.recipe,
            positions=positions,
            cache=cache,
            kv_scales=prepared.kv_scales,
            parallel=self.loop.parallel,
            rope=requests.rope,
            output="hidden",
        )
        assert isinstance(out.cache, PagedCache)
        return out.hidden, out.cache.runs

    def _prefill(self, prepared, requests, state: BatchState) -> BatchState:
        """Prefills the next chunks of the first slots that must prefill."""
        plan = state.schedule
        chunk, together = self._chunks(state.tokens.shape[1])
        slots, counts = schedule.to_prefill(plan, chunk, together)
        table = jnp.pad(plan.table, ((0, 1), (0, 0)))[slots]
        start = jnp.append(plan.cached, 0)[slots]
        positions = start[:, None] + jnp.arange(chunk, dtype=jnp.int32)
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
        request, row = jnp.maximum(plan.request, 0), plan.rows(draws)
        position = jnp.where(draws, plan.cached, 0)
        table = jnp.where(draws[:, None], plan.table, 0)
        tokens = state.tokens[request, position][:, None]
        hidden, pool = self._forward(prepared, requests, state, tokens, position[:, None], table)
        keys = sample_keys(requests.key, requests.sample_ids[request], position + 1)
        token, logp, _ = loop.draw(prepared, hidden[:, 0], keys, requests.temperature[request])
        index = position + 1 - plan.prompt_lengths[plan.prompt]
        ended = draws & is_end(token, loop.sampler.eos_ids)
        full = draws & (index + 1 >= requests.limits[request])
        plan, replies = schedule.decoded(plan, draws), state.replies
        if replies is None:
            plan = schedule.end(plan, ended | full)
        else:
            begins, most = replies.begins[request], loop.sampler.max_turn_tokens
            complete = ended | full
            if most:
                complete = complete | (draws & (index + 1 - begins >= most))
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
        )

    def extend(self, requests: Requests, more: Extension, state: BatchState) -> BatchState:
        """Puts tokens behind the replies of paused requests, which wait again, and ends others."""
        assert state.replies is not None
        start, size = state.schedule.lengths, state.tokens.shape[1]
        index = jnp.arange(more.tokens.shape[1])
        column = jnp.where(index < more.counts[:, None], start[:, None] + index, size)
        row = jnp.arange(len(start))[:, None]
        first = jnp.repeat(requests.lengths, self.loop.sampler.group_size)
        begins = jnp.where(more.counts > 0, start + more.counts - first, state.replies.begins)
        return dataclasses.replace(
            state,
            tokens=state.tokens.at[row, column].set(more.tokens, mode="drop"),
            replies=dataclasses.replace(state.replies, begins=begins),
            schedule=schedule.extend(state.schedule, more.counts, more.ends),
        )

    def result(self, requests: Requests, state: BatchState) -> Rollout:
        """Returns the tokens known so far, in the form of the static sampler's result."""
        sampler = self.loop.sampler
        start = jnp.repeat(requests.lengths, sampler.group_size)
        lengths = state.schedule.lengths - start
        index = jnp.arange(sampler.max_new_tokens)
        known = index < lengths[:, None]
        tokens = jnp.take_along_axis(state.tokens, start[:, None] + index, axis=1)
        tokens = jnp.where(known, tokens, sampler.pad_id)
        of_all = state.logprobs, state.finished, {}
        if state.replies is None:
            return Rollout(tokens, known, *of_all)
        return Rollout(tokens, state.replies.drawn, *of_all, lengths)


@flax.struct.dataclass
class Progress:
    """The progress of a rollout after some turns.

    Attributes:
      rollout: the tokens drawn so far.
      done: (M,) bool, whether a response is complete.
      paused: (M,) bool, whether a response waits for an `Extension`.
      replies: as in `BatchState`.
      turns, drawn, prefilled, preemptions: (D,) int32, a count per device; see `BatchState` and
        `Schedule`.
    """

    rollout: Rollout
    done: jax.Array
    paused: jax.Array
    replies: Replies | None
    turns: jax.Array
    drawn: jax.Array
    prefilled: jax.Array
    preemptions: jax.Array


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


Watch = Callable[[Progress], None]  # called during a rollout, see `ContinuousSampler`
Answer = Callable[[Progress], Extension]  # likewise
_ALL_TURNS = 2**30


class ContinuousSampler:
    """The sampler of `make_sampler` with continuous batching; same arguments, same bits.

    Attributes:
      progress: the last call's progress after its last turn.
    """

    progress: Progress

    def __init__(
        self,
        model: ModelConfig,
        recipe: Recipe | str,
        sampler: SamplerConfig,
        batching: Batching,
        *,
        mesh: Mesh | None = None,
        part: int = 64,
    ):
        """
        Args:
          model, recipe, sampler: as for `make_sampler`, without taps and cache_slots.
          batching: sizes; slots and pages are totals over all devices.
          mesh: devices that share prompts, slots and pages; None for one device.
          part: number of turns between two calls of `watch`.

        Raises:
          ValueError: taps, or sizes that the devices cannot share equally.
        """
        if sampler.taps:
            raise ValueError("continuous batching records no taps")
        devices = mesh.size if mesh is not None else 1
        for name in ("slots", "pages"):
            if getattr(batching, name) % devices:
                raise ValueError(
                    f"{name} = {getattr(batching, name)} do not divide among {devices} devices"
                )
        static = Loop(model, get_recipe(recipe), sampler, Parallel.on(mesh))
        chunk = batching.prefill_chunk or default_chunk(static.on_cpu)
        own = Batching(batching.slots // devices, batching.pages // devices, chunk)
        of_device = static.parallel.within() if devices > 1 else static.parallel
        loop = ContinuousLoop(dataclasses.replace(static, parallel=of_device), own)
        self._part, self._slots, self._most = part, batching.slots, sampler.max_new_tokens

        def advance(weights, requests, turns, state):
            prepared = loop.loop.prepare(weights)
            until = state.turns[0] + turns

            def more(carried) -> jax.Array:
                unfinished, state = carried
                return (unfinished > 0) & (state.turns[0] < until)

            def turn(carried):
                state = loop.turn(prepared, requests, carried[1])
                return loop.unfinished(state), state

            _, state = lax.while_loop(more, turn, (loop.unfinished(state), state))
            return state, Progress(
                rollout=loop.result(requests, state),
                done=state.schedule.status == schedule.DONE,
                paused=state.schedule.status == schedule.PAUSED,
                replies=state.replies,
                turns=state.turns,
                drawn=state.drawn,
                prefilled=state.prefilled,
                preemptions=state.schedule.preemptions,
            )

        begin, extend, layout, self._rows = loop.begin, loop.extend, {}, None
        if mesh is not None:
            rows, replicated = PartitionSpec(mesh.axis_names), PartitionSpec()
            self._rows = NamedSharding(mesh, rows)
            # The state keeps its shardings from call to call, so one program advances it.
            layout = {"out_shardings": self._rows}
        if mesh is not None and devices > 1:
            specs: Any = (rows, replicated, rows, rows, rows, replicated)
            of_requests = Requests(*specs)

            def by_device(run, *specs):
                return jax.shard_map(
                    run, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False
                )

            def advance_all(weights, *arguments):
                held = rollout_specs(weights)
                run = by_device(advance, held, of_requests, replicated, rows)
                return run(weights, *arguments)

            begin = by_device(begin, rows, of_requests)
            extend = by_device(extend, of_requests, rows, rows)
        else:
            advance_all = advance
        self._prepare = static.prepare_once()
        self._begin = exact_jit(begin, **layout)
        self._advance = exact_jit(advance_all, donate_argnums=3, **layout)
        self._extend = exact_jit(extend, donate_argnums=2, **layout)

    def __call__(
        self,
        weights,
        prompts,
        lengths,
        key,
        sample_ids,
        temperature,
        limits,
        rope,
        watch: Watch | None = None,
        answer: Answer | None = None,
    ) -> Rollout:
        """Samples responses; takes the arguments of `make_sampler`'s result, and `watch`.

        Args:
          watch: function called on the host with a `Progress` after every `part` turns, while the
            device runs the next ones, and at the end.
          answer: function that gives paused responses more tokens, called like `watch`; it may see
            a response paused that it has answered, and waits if no other can go on. Needed with
            `SamplerConfig.max_turns` above 1. Results do not depend on when it answers.
        """
        weights = self._prepare(weights)
        limits = jnp.minimum(limits, self._most)
        requests = Requests(lengths, key, sample_ids, temperature, limits, rope)
        state = self._begin(prompts, requests)
        looks = watch is not None or answer is not None
        turns = jnp.int32(self._part if looks else _ALL_TURNS)
        state, progress = self._advance(weights, requests, turns, state)
        while looks:
            state, following = self._advance(weights, requests, turns, state)
            seen = processes.fetch(progress)
            if watch is not None:
                watch(seen)
            if seen.done.all():
                break
            if answer is not None:
                more = processes.place(answer(seen), self._rows)
                state = self._extend(requests, more, state)
            progress = following
        self.progress = progress
        return progress.rollout

    def trace(
        self, weights, prompts, lengths, key, sample_ids, temperature, limits, rope
    ) -> jax.stages.Traced:
        """Traces the loop's program for the arguments of a call, or for their shapes."""
        requests = Requests(lengths, key, sample_ids, temperature, limits, rope)
        state = jax.eval_shape(self._begin, prompts, requests)
        turns = jax.ShapeDtypeStruct((), jnp.int32)
        arguments = jax.eval_shape(self._prepare, weights), requests, turns, state
        return self._advance.trace(*arguments)  # type: ignore[attr-defined]

    def metrics(self) -> dict[str, float]:
        """Returns how the last call used its slots.

        Returns:
          rollout_slots_used: share of slots that drew a token, over all turns; rollout_preemptions:
          number of times that a response lost its pages and was recomputed; rollout_prefilled:
          number of tokens prefilled.
        """
        progress, slots = processes.fetch(self.progress), self._slots
        return {
            "rollout_slots_used": float(progress.drawn.sum() / (progress.turns.max() * slots)),
            "rollout_preemptions": int(progress.preemptions.sum()),
            "rollout_prefilled": int(progress.prefilled.sum()),
        }
