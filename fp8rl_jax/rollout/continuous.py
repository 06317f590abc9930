"""Continuous batching: a rollout of any number of samples through a fixed number of slots.

One jitted program, which continuous_loop.py describes. It ends after a given number of iterations,
so that the host can look at finished responses while the next iterations run. A response of several
replies pauses after each: the host puts what the environment says behind it (`Extension`), and the
request waits for a slot again.

On a mesh every device has its slots, pool and queue, for its share of the prompts. Devices that
share experts (`mesh.expert`) run every iteration together, because each needs the experts of all:
the work of all of them decides whether there is another iteration, and whether it prefills and
decodes. Other devices exchange nothing while they run.

Not done: moving requests between devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fp8rl_jax.base import processes
from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.models import ModelConfig, Parallel
from fp8rl_jax.models.parallel.specs import rollout_specs
from fp8rl_jax.quant import Recipe, get_recipe
from fp8rl_jax.rollout import schedule
from fp8rl_jax.rollout.continuous_loop import (
    Batching,
    ContinuousLoop,
    Earlier,
    Extension,
    Replies,
    default_chunk,
)
from fp8rl_jax.rollout.sampler import Loop, Requests, Rollout, SamplerConfig


@flax.struct.dataclass
class Progress:
    """The progress of a rollout after some iterations.

    Attributes:
      rollout: the tokens drawn so far.
      done: (M,) bool, whether a response is complete.
      paused: (M,) bool, whether a response waits for an `Extension`.
      replies: as in `BatchState`.
      iterations, drawn, prefilled, preemptions: (D,) int32, a count per device; see `BatchState`
        and `Schedule`.
    """

    rollout: Rollout
    done: jax.Array
    paused: jax.Array
    replies: Replies | None
    iterations: jax.Array
    drawn: jax.Array
    prefilled: jax.Array
    preemptions: jax.Array


Watch = Callable[[Progress], None]  # called during a rollout, see `ContinuousSampler`
Answer = Callable[[Progress], Extension]  # likewise
_ALL_ITERATIONS = 2**30


def _needed(earlier: Earlier | None, rows: int) -> np.ndarray:
    """Returns (M,) bool, which responses a call completes."""
    if earlier is None:
        return np.ones(rows, bool)
    devices = len(earlier.needed)
    return (np.arange(rows // devices) < earlier.needed[:, None]).reshape(-1)


def _advancing(loop: ContinuousLoop) -> Callable:
    """Returns the function that runs at most so many iterations of a loop: (weights, requests,
    iterations, state) -> (state, Progress)."""

    def advance(weights, requests, iterations, state):
        prepared = loop.loop.prepare(weights)
        until = state.iterations[0] + iterations

        def more(carried) -> jax.Array:
            unfinished, state = carried
            return (unfinished > 0) & (state.iterations[0] < until)

        def iterate(carried):
            state = loop.iterate(prepared, requests, carried[1])
            return loop.unfinished(state), state

        _, state = lax.while_loop(more, iterate, (loop.unfinished(state), state))
        return state, Progress(
            rollout=loop.result(requests, state),
            done=state.schedule.status == schedule.DONE,
            paused=state.schedule.status == schedule.PAUSED,
            replies=state.replies,
            iterations=state.iterations,
            drawn=state.drawn,
            prefilled=state.prefilled,
            preemptions=state.schedule.preemptions,
        )

    return advance


def _functions(loop: ContinuousLoop, mesh: Mesh | None) -> tuple[Callable, Callable, Callable]:
    """Returns the functions that begin, advance and extend a loop's state; with a mesh, those that
    do so on each device with its rows of prompts, requests and state."""
    advance = _advancing(loop)
    if mesh is None:
        return loop.begin, advance, loop.extend
    rows: Any = PartitionSpec(mesh.axis_names)
    replicated: Any = PartitionSpec()
    of_requests = Requests(
        lengths=rows,
        key=replicated,
        sample_ids=rows,
        temperature=rows,
        limits=rows,
        rope=replicated,
    )

    def by_device(function: Callable, *specs) -> Callable:
        return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)

    def advance_all(weights, requests, iterations, state):
        run = by_device(advance, rollout_specs(weights), of_requests, replicated, rows)
        return run(weights, requests, iterations, state)

    return (
        by_device(loop.begin, rows, of_requests, rows),
        advance_all,
        by_device(loop.extend, of_requests, rows, rows),
    )


class ContinuousSampler:
    """The sampler of `make_sampler` with continuous batching; same arguments, same bits.

    Attributes:
      progress: the last call's progress after its last iteration.
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
          part: number of iterations between two calls of `watch`.

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
        of_device = static.parallel.within() if devices > 1 else static.parallel
        loop = ContinuousLoop(
            dataclasses.replace(static, parallel=of_device),
            Batching(
                batching.slots // devices,
                batching.pages // devices,
                batching.prefill_chunk or default_chunk(static.on_cpu),
            ),
        )
        self._part = part
        self._slots = batching.slots
        self._most = sampler.max_new_tokens
        self._rows = None if mesh is None else NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        # The state keeps its shardings from call to call, so one program advances it.
        layout = {} if mesh is None else {"out_shardings": self._rows}
        begin, advance, extend = _functions(loop, mesh if devices > 1 else None)
        self._prepare = static.prepare_once()
        self._begin = exact_jit(begin, **layout)
        self._advance = exact_jit(advance, donate_argnums=3, **layout)
        self._extend = exact_jit(extend, donate_argnums=2, **layout)

    def __call__(
        self,
        weights,
        prompts,
        requests: Requests,
        watch: Watch | None = None,
        answer: Answer | None = None,
        earlier: Earlier | None = None,
    ) -> Rollout:
        """Samples responses; takes the arguments of `make_sampler`'s result, and these.

        Args:
          watch: function called on the host with a `Progress` after every `part` iterations, while
            the device runs the next ones, and at the end.
          answer: function that gives paused responses more tokens, called like `watch`, and at the
            end. It may see a response as paused that it has answered already. If no other response
            can go on, it waits until it can answer one. Results do not depend on when it answers.
            Without it a response ends with its first reply.
          earlier: responses that go on; those behind `Earlier.needed` may be returned incomplete.
        """
        weights = self._prepare(weights)
        limits = jnp.minimum(requests.limits, self._most)
        requests = dataclasses.replace(requests, limits=limits)
        state = self._begin(prompts, requests, processes.place(earlier, self._rows))
        needed = _needed(earlier, len(limits))
        looks = watch is not None or answer is not None
        iterations = jnp.int32(self._part if looks else _ALL_ITERATIONS)
        state, progress = self._advance(weights, requests, iterations, state)
        while looks:
            state, following = self._advance(weights, requests, iterations, state)
            seen = processes.fetch(progress)
            if watch is not None:
                watch(seen)
            more = None if answer is None else answer(seen)
            if (seen.done | (seen.paused & (answer is None)))[needed].all():
                break
            if more is not None:
                state = self._extend(requests, processes.place(more, self._rows), state)
            progress = following
        self.progress = progress
        return dataclasses.replace(progress.rollout, kept=state.kept)

    def trace(self, weights, prompts, requests: Requests) -> jax.stages.Traced:
        """Traces the loop's program for the arguments of a call, or for their shapes."""
        state = jax.eval_shape(self._begin, prompts, requests, None)
        iterations = jax.ShapeDtypeStruct((), jnp.int32)
        return self._advance.trace(  # type: ignore[attr-defined]
            jax.eval_shape(self._prepare, weights), requests, iterations, state
        )

    def metrics(self) -> dict[str, float]:
        """Returns how the last call used its slots.

        Returns:
          rollout_slots_used: share of slots that drew a token, over all iterations, 0 without one;
          rollout_preemptions: number of times that a response lost its pages and was recomputed;
          rollout_prefilled: number of tokens prefilled.
        """
        progress = processes.fetch(self.progress)
        places = max(progress.iterations.max(), 1) * self._slots
        return {
            "rollout_slots_used": float(progress.drawn.sum() / places),
            "rollout_preemptions": int(progress.preemptions.sum()),
            "rollout_prefilled": int(progress.prefilled.sum()),
        }
