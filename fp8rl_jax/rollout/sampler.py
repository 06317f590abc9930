"""The jitted rollout: prefill once per prompt, then decode in one `lax.while_loop`.

::

    weights --Loop.prepare--> Prepared --+--> Loop.prefill: prompts, first token --> LoopState
                                         |                                              |
                                         +--> Loop.decode_step: one more token <--------+ repeated

One program for a batch of prompts times `group_size` samples. It calls the same forward and
log-probability functions as the learner, and records each token's log-probability when drawn.
Finished sequences keep their row until every sequence has ended or reached its limit.

Not done here: replacing finished sequences by waiting ones (rollout/continuous.py does it).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.kernels import KV_STEP, backend, resolve
from fp8rl_jax.models import (
    ONE_DEVICE,
    PAGE,
    KVCache,
    ModelConfig,
    Parallel,
    Tokens,
    Truncation,
    drawn_logprobs,
    for_decoding,
    head_logits,
    hidden_states,
    init_cache,
    output_head,
    pages_of,
    scaled_logits,
)
from fp8rl_jax.models.taps import LOGITS, Observe, batch_axis
from fp8rl_jax.quant import Recipe, get_recipe
from fp8rl_jax.quant.recipe import FLOAT32
from fp8rl_jax.rollout.sampling import sample_keys, sample_token


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """Settings that are fixed when the sampler compiles.

    Attributes:
      max_new_tokens: R, response slots.
      group_size: G, samples per prompt.
      eos_ids: end-of-sequence ids; the id is part of the response. An empty tuple: responses never
        end early.
      pad_id: token that fills the slots after the end.
      top_k: number of most likely tokens to draw from; 0 for all tokens.
      top_p: probability mass to draw from; 1.0 for all tokens.
      cache_slots: slots per sequence, rounded up to pages; 0 for prompt slots + R.
      max_turns: replies of a response at most; above 1 only in rollout/continuous.py.
      max_turn_tokens: tokens of a reply at most; 0 for what is left of R.
      taps: names of intermediate values to return as well (models/taps.py, and 'logits').
      whole_logprobs: record log-probabilities over the whole vocabulary, not over the tokens that
        top_k and top_p keep.
      records_kept: record which tokens these are.
    """

    max_new_tokens: int
    group_size: int
    eos_ids: tuple[int, ...]
    pad_id: int
    top_k: int = 0
    top_p: float = 1.0
    cache_slots: int = 0
    max_turns: int = 1
    max_turn_tokens: int = 0
    taps: tuple[str, ...] = ()
    whole_logprobs: bool = False
    records_kept: bool = False

    @property
    def truncation(self) -> Truncation | None:
        """Which tokens are drawn from; None for all."""
        whole = self.top_k == 0 and self.top_p == 1.0
        return None if whole else Truncation(self.top_k, self.top_p)

    @property
    def scored_truncation(self) -> Truncation | None:
        """The truncation over whose tokens log-probabilities are recorded; None for all tokens."""
        return None if self.whole_logprobs else self.truncation

    def no_kept(self, rows: int, vocabulary: int) -> jax.Array | None:
        """Returns (rows, R, C) int32, records of kept tokens that hold nothing; None without."""
        if self.scored_truncation is None or not self.records_kept:
            return None
        numbers = self.scored_truncation.recorded_numbers(vocabulary)
        return jnp.zeros((rows, self.max_new_tokens, numbers), jnp.int32)


@flax.struct.dataclass
class Rollout:
    """Samples, prompt-major: row p * G + g is sample g of prompt p.

    Attributes:
      tokens: (B, R) int32, `pad_id` after the end.
      mask: (B, R) bool, True for tokens that were drawn, the end-of-sequence token included.
      logprobs: (B, R) float32, recorded at decode time; 0 where the mask is False.
      finished: (B,) bool, True if the response's last reply ended with an end-of-sequence token,
        False if it was truncated.
      lengths: (B,) int32, tokens of the response with those of the environment between its replies;
        None for responses of one reply, whose tokens were all drawn.
      kept: (B, R, C) int32, which tokens the truncation kept for each draw, by `Truncation.record`;
        None if that was not recorded.
      truncation: the truncation over whose tokens the log-probabilities are; None for all tokens.
      taps: {name: (L, B, Tp + R, ...), or (B, Tp + R, ...) outside the layers}, slot == position;
        'logits': (B, R, V) float32. The last token drawn was not run through the model, so it has
        no taps.
    """

    tokens: Any  # jax.Array or, on the host, numpy; the same holds for mask, logprobs, finished
    mask: Any
    logprobs: Any
    finished: Any
    taps: dict[str, jax.Array]
    lengths: Any = None
    kept: Any = None
    truncation: Truncation | None = flax.struct.field(pytree_node=False, default=None)

    @property
    def rows(self) -> dict[str, Any]:
        """The arrays (B, ...) that are there, by the names of their fields."""
        names = ("tokens", "mask", "logprobs", "finished", "lengths", "kept")
        arrays = {name: getattr(self, name) for name in names}
        return {name: array for name, array in arrays.items() if array is not None}


@flax.struct.dataclass
class LoopState:
    """The state of decoding: everything that a step changes."""

    index: jax.Array  # () int32, response slot of `token`
    token: jax.Array  # (B,) int32, last token drawn, not yet in the cache
    done: jax.Array  # (B,) bool, the row's response is complete
    cache: KVCache
    rollout: Rollout


@flax.struct.dataclass
class Requests:
    """The inputs of a rollout besides weights and prompt tokens.

    Attributes:
      lengths: (P,) int32, lengths of the prompts.
      key: random key of this step.
      sample_ids: (B,) int32, numbers of the samples, which select their random bits.
      temperature: (B,) float32, 0 for greedy.
      limits: (B,) int32, maximal number of tokens of each response.
      rope: tables of `rope_tables`, at least Tp + R rows.
    """

    lengths: Any  # jax.Array or numpy; the same holds for the others
    key: jax.Array
    sample_ids: Any
    temperature: Any
    limits: Any
    rope: Any


@flax.struct.dataclass
class Prepared:
    """Rollout weights in the form that the loop reads (`Loop.prepare`).

    Attributes:
      weights: the tree; on a CPU converted by `for_decoding`.
      head: result of `output_head`.
    """

    weights: Any
    head: Any


def is_end(token: jax.Array, eos_ids: tuple[int, ...]) -> jax.Array:
    """Returns (B,) bool, whether each token (B,) is one of `eos_ids`."""
    found = [token == eos for eos in eos_ids]
    return functools.reduce(jnp.logical_or, found) if found else jnp.zeros(token.shape, bool)


@dataclasses.dataclass(frozen=True)
class Loop:
    """Functions to trace: prefill and decode steps of one model, recipe and sampler config.

    `make_sampler` (a rollout in one program) and `make_stream` (in several programs) call them.
    """

    model: ModelConfig
    recipe: Recipe
    sampler: SamplerConfig
    parallel: Parallel = ONE_DEVICE

    @property
    def on_cpu(self) -> bool:
        """Whether XLA:CPU computes the products."""
        return backend() == "cpu" and resolve(self.recipe.kernels) == "reference"

    @property
    def converts(self) -> bool:
        """Whether `prepare` converts the weights (`for_decoding`)."""
        small = self.recipe.weight is not None or self.recipe.compute_dtype != FLOAT32
        return self.on_cpu and small and self.parallel.tensor == 1

    def prepare(self, weights) -> Prepared:
        """Separates the output head from the weights, and converts the rest if `converts`. Weights
        that are prepared already are returned unchanged."""
        if isinstance(weights, Prepared):
            return weights
        head = output_head(weights, self.model, self.parallel)
        if self.converts:
            weights = for_decoding(weights, self.recipe, stacks=not self.sampler.taps)
        return Prepared(weights, head)

    def prepare_once(self) -> Callable[[Any], Any]:
        """Returns `prepare` as a separate program if it `converts`, else the identity.

        With the identity each program of a rollout calls `prepare` itself: a separate program would
        return copies of all weights, and not in the layouts of `kernel_formats`.
        """
        return exact_jit(self.prepare) if self.converts else lambda weights: weights

    def _start(self, requests: Requests) -> jax.Array:
        """Returns the (B,) int32 position of each response's first token."""
        return jnp.repeat(requests.lengths, self.sampler.group_size)

    def draw(
        self, prepared: Prepared, hidden: jax.Array, keys: jax.Array, temperature: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Draws tokens (M,) from hidden states (M, D); returns them, their log-probabilities (M,),
        logits (M, V), and which tokens were kept (M, C), or None if that is not recorded."""
        sampler = self.sampler
        logits = head_logits(hidden, prepared.head, self.recipe, self.parallel)
        scaled = scaled_logits(logits, temperature)
        keeps = kept = None
        drawn_from = scaled
        if sampler.truncation is not None:
            keeps = sampler.truncation.cut(scaled, temperature).keeps(scaled)
            drawn_from = jnp.where(keeps, scaled, -jnp.inf)
            if sampler.records_kept and not sampler.whole_logprobs:
                kept = sampler.truncation.record(keeps, logits.shape[1])
        token = sample_token(drawn_from, keys, temperature)
        logp, _, _ = drawn_logprobs(
            logits,
            scaled,
            token,
            temperature,
            self.recipe,
            self.parallel,
            None if sampler.whole_logprobs else keeps,
        )
        return token, logp, logits, kept

    def _draw(self, prepared: Prepared, requests: Requests, hidden, index):
        keys = sample_keys(requests.key, requests.sample_ids, self._start(requests) + index)
        return self.draw(prepared, hidden, keys, requests.temperature)

    def _record(self, rollout: Rollout, index, done, token, logp, logits, kept) -> Rollout:
        taps = rollout.taps
        if LOGITS in taps:
            taps = taps | {LOGITS: taps[LOGITS].at[:, index].set(logits)}
        return dataclasses.replace(
            rollout,
            tokens=rollout.tokens.at[:, index].set(jnp.where(done, self.sampler.pad_id, token)),
            mask=rollout.mask.at[:, index].set(~done),
            logprobs=rollout.logprobs.at[:, index].set(jnp.where(done, 0.0, logp)),
            finished=rollout.finished | (~done & is_end(token, self.sampler.eos_ids)),
            taps=taps,
            kept=None if rollout.kept is None else rollout.kept.at[:, index].set(kept),
        )

    def prefill(self, prepared: Prepared, prompts: jax.Array, requests: Requests) -> LoopState:
        """Prefills prompts (P, Tp) and draws the first tokens."""
        sampler = self.sampler
        prompt_slots = prompts.shape[1]
        slots_new = sampler.max_new_tokens
        slots = sampler.cache_slots or prompt_slots + slots_new
        if slots < prompt_slots + slots_new:
            raise ValueError(
                f"the cache has {slots} slots for prompts of {prompt_slots} and responses of "
                f"{slots_new}; give at least {prompt_slots + slots_new}"
            )
        slots = PAGE * pages_of(slots)
        slots += -slots % (KV_STEP if slots > KV_STEP else PAGE)  # else a CPU copies it, to pad
        batch = prompts.shape[0] * sampler.group_size
        cache = init_cache(self.model, self.recipe, prompts.shape[0], prompt_slots, self.parallel)
        prefill = hidden_states(
            prepared.weights,
            Tokens.of(prompts, requests.rope),
            self.model,
            self.recipe,
            cache=cache,
            parallel=self.parallel,
            observe=Observe(sampler.taps),
        )
        taps = self._begin_taps(prefill.aux.get("taps", {}), prompt_slots + slots_new)
        if LOGITS in sampler.taps:
            taps[LOGITS] = jnp.zeros((batch, slots_new, self.model.vocab_size))
        ends = (requests.lengths - 1)[:, None, None]
        last = jnp.take_along_axis(prefill.hidden, ends, axis=1)[:, 0]
        cache = prefill.cache.repeat(sampler.group_size).grow(slots - prompt_slots)
        shape = (batch, slots_new)
        rollout = Rollout(
            tokens=jnp.full(shape, sampler.pad_id, jnp.int32),
            mask=jnp.zeros(shape, bool),
            logprobs=jnp.zeros(shape, jnp.float32),
            finished=jnp.zeros((batch,), bool),
            taps=taps,
            kept=sampler.no_kept(batch, self.model.vocab_size),
            truncation=sampler.scored_truncation,
        )
        zero = jnp.int32(0)
        last = jnp.repeat(last, sampler.group_size, axis=0)
        token, logp, logits, kept = self._draw(prepared, requests, last, zero)
        done = requests.limits <= 0
        rollout = self._record(rollout, zero, done, token, logp, logits, kept)
        done = done | rollout.finished | (requests.limits <= 1)
        return LoopState(zero, token, done, cache, rollout)

    def _begin_taps(self, prefill: dict[str, jax.Array], slots: int) -> dict[str, jax.Array]:
        """Returns buffers (..., P * G, slots, ...) that begin with the prompts' values
        (..., P, Tp, ...); slot == position, as in the KV cache and the learner's sequences."""
        taps = {}
        for name, x in prefill.items():
            batch = batch_axis(name)
            x = jnp.repeat(x, self.sampler.group_size, axis=batch)
            widths = [(0, 0)] * x.ndim
            widths[batch + 1] = (0, slots - x.shape[batch + 1])
            taps[name] = jnp.pad(x, widths)
        return taps

    def _write_taps(self, taps: dict, new: dict, positions: jax.Array) -> dict[str, jax.Array]:
        """Returns `taps` with a decode step's values (T = 1) written at `positions` (B,)."""
        rows = jnp.arange(positions.shape[0])
        written = {
            name: taps[name].at[rows, positions].set(x[:, 0])
            if batch_axis(name) == 0
            else taps[name].at[:, rows, positions].set(x[:, :, 0])
            for name, x in new.items()
        }
        return taps | written

    def cond_fn(self, state: LoopState) -> jax.Array:
        """Returns whether a response slot is left and some response is not complete."""
        return (state.index + 1 < self.sampler.max_new_tokens) & ~state.done.all()

    def decode_step(self, prepared: Prepared, requests: Requests, state: LoopState) -> LoopState:
        """Draws one more token for every row."""
        positions = self._start(requests) + state.index
        out = hidden_states(
            prepared.weights,
            Tokens.of(state.token[:, None], requests.rope, positions=positions[:, None]),
            self.model,
            self.recipe,
            cache=state.cache,
            parallel=self.parallel,
            observe=Observe(self.sampler.taps),
        )
        index = state.index + 1
        token, logp, logits, kept = self._draw(prepared, requests, out.hidden[:, 0], index)
        rollout = self._record(state.rollout, index, state.done, token, logp, logits, kept)
        if "taps" in out.aux:
            taps = self._write_taps(rollout.taps, out.aux["taps"], positions)
            rollout = dataclasses.replace(rollout, taps=taps)
        done = state.done | rollout.finished | (index + 1 >= requests.limits)
        return LoopState(index, token, done, out.cache, rollout)


def make_sampler(
    model: ModelConfig,
    recipe: Recipe | str,
    sampler: SamplerConfig,
    parallel: Parallel = ONE_DEVICE,
) -> Callable[..., Rollout]:
    """Returns the jitted sampler. Its results have the sharding of its arguments.

    Args:
      model: shapes of the model.
      recipe: numerics of the rollout.
      sampler: settings that are fixed at compile time.
      parallel: the devices that share a rollout.

    Returns:
      ``sample(weights, prompts, requests) -> Rollout`` with weights from refit, and prompts (P, Tp)
      int32, right-padded.
    """
    loop = Loop(model, get_recipe(recipe), sampler, parallel)

    def sample(weights, prompts, requests: Requests) -> Rollout:
        prepared = loop.prepare(weights)
        state = loop.prefill(prepared, prompts, requests)
        step = functools.partial(loop.decode_step, prepared, requests)
        return lax.while_loop(loop.cond_fn, step, state).rollout

    return exact_jit(sample)


@dataclasses.dataclass(frozen=True)
class Stream:
    """A rollout in several calls, each of a few tokens, so that text can be shown in between.

    Weights are prepared once, before the first call. Results are bit-equal to those of
    `make_sampler` (tests/rollout/test_stream.py).

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
    model: ModelConfig,
    recipe: Recipe | str,
    sampler: SamplerConfig,
    parallel: Parallel = ONE_DEVICE,
    chunk: int = 16,
) -> Stream:
    """Returns the sampler of `make_sampler` as a `Stream` of calls of at most `chunk` tokens."""
    loop = Loop(model, get_recipe(recipe), sampler, parallel)

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
