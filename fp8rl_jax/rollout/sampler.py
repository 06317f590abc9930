"""The jitted rollout: prefill once per prompt, then decode in one `lax.while_loop`.

One program for a batch of prompts times `group_size` samples. It calls the same `forward` and the
same log-probability as the learner, and records each token's log-probability at the moment it is
drawn. Finished sequences keep their row until every sequence has ended or reached its limit.

Not done: replacing finished sequences by new prompts (continuous batching).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from fp8rl_jax.exact_jit import exact_jit
from fp8rl_jax.models import (
    KVCache,
    ModelConfig,
    forward,
    head_logits,
    init_cache,
    logprobs_of_logits,
    output_head,
    scaled_logits,
    tensor_parallel,
    widen_linears,
)
from fp8rl_jax.models.taps import LOGITS
from fp8rl_jax.quant import Recipe, get_recipe, widen
from fp8rl_jax.rollout.recording import begin, write
from fp8rl_jax.rollout.sampling import choose, sample_keys


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """What is fixed when the sampler compiles.

    Attributes:
      max_new_tokens: R, response slots.
      group_size: G, samples per prompt.
      eos_id: token that ends a response; it belongs to the response.
      pad_id: token that fills the slots after the end.
      top_k: 0 for all tokens.
      top_p: 1.0 for all tokens.
      cache_slots: slots per sequence; 0 for prompt length + R.
      taps: intermediate values to return as well: names of models/taps.py, and 'logits'.
    """

    max_new_tokens: int
    group_size: int
    eos_id: int
    pad_id: int
    top_k: int = 0
    top_p: float = 1.0
    cache_slots: int = 0
    taps: tuple[str, ...] = ()


@flax.struct.dataclass
class Rollout:
    """Samples, prompt-major: row p * G + g is sample g of prompt p.

    Attributes:
      tokens: (B, R) int32, `pad_id` after the end.
      mask: (B, R) bool, True for response tokens, the end-of-sequence token included.
      logprobs: (B, R) float32, recorded at decode time; 0 where the mask is False.
      finished: (B,) bool, whether the response ended by itself; the others are truncated.
      taps: {name: (L, B, Tp + R, ...), or (B, Tp + R, ...) outside the layers}, slot == position;
        'logits': (B, R, V) float32. What the last token drawn would have given is not in it.
    """

    tokens: jax.Array
    mask: jax.Array
    logprobs: jax.Array
    finished: jax.Array
    taps: dict[str, jax.Array]


@flax.struct.dataclass
class _LoopState:
    index: jax.Array  # () int32, response slot of `token`
    token: jax.Array  # (B,) int32, last token drawn, not yet in the cache
    done: jax.Array  # (B,) bool, the row's response is complete
    cache: KVCache
    rollout: Rollout


def _converts_each_step() -> bool:
    """Whether the platform's products read weights in another type than they are stored in."""
    return jax.default_backend() == "cpu" and tensor_parallel.size() == 1


def make_sampler(
    model: ModelConfig,
    recipe: Recipe | str,
    sampler: SamplerConfig,
    *,
    shardings: dict | None = None,
) -> Callable[..., Rollout]:
    """Returns the jitted sampler.

    Args:
      model: shapes.
      recipe: numerics of the rollout.
      sampler: what is fixed at compile time.
      shardings: keywords for jit (`in_shardings`, `out_shardings`) on a mesh; None on one device.

    Returns:
      ``sample(weights, prompts, lengths, key, sample_ids, temperature, limits, rope)`` with
      weights from refit; prompts (P, Tp) int32 right-padded; lengths (P,) int32; key
      of this step; sample_ids (P*G,) int32; temperature (P*G,) float32, 0 for greedy; limits
      (P*G,) int32, most tokens of each response; rope from `rope_tables` with at least Tp + R
      rows. It returns a `Rollout`.
    """
    recipe = get_recipe(recipe)
    slots_new = sampler.max_new_tokens

    def sample(weights, prompts, lengths, key, sample_ids, temperature, limits, rope):
        kv_scales = weights.get("kv_scales")
        weights = {name: value for name, value in weights.items() if name != "kv_scales"}
        prompt_slots = prompts.shape[1]
        slots = sampler.cache_slots or prompt_slots + slots_new
        if slots < prompt_slots + slots_new:
            raise ValueError(
                f"the cache has {slots} slots for prompts of {prompt_slots} and responses of "
                f"{slots_new}; give at least {prompt_slots + slots_new}"
            )
        head = output_head(weights, model)
        if _converts_each_step():
            weights = widen_linears(weights)
            head = widen(head) if isinstance(head, jax.Array) else head
        start = jnp.repeat(lengths, sampler.group_size)
        batch = start.shape[0]

        def draw(hidden, index):
            logits = head_logits(hidden, head, recipe)
            scaled = scaled_logits(logits, temperature)
            keys = sample_keys(key, sample_ids, start + index)
            token = choose(scaled, keys, temperature, sampler.top_k, sampler.top_p)
            return token, logprobs_of_logits(scaled, token)[0], logits

        def record(rollout, index, done, token, logp, logits):
            taps = rollout.taps
            if LOGITS in taps:
                taps = taps | {LOGITS: taps[LOGITS].at[:, index].set(logits)}
            return dataclasses.replace(
                rollout,
                tokens=rollout.tokens.at[:, index].set(jnp.where(done, sampler.pad_id, token)),
                mask=rollout.mask.at[:, index].set(~done),
                logprobs=rollout.logprobs.at[:, index].set(jnp.where(done, 0.0, logp)),
                finished=rollout.finished | (~done & (token == sampler.eos_id)),
                taps=taps,
            )

        cache = init_cache(model, recipe, prompts.shape[0], prompt_slots)
        prefill = forward(
            weights, prompts, model, recipe,
            cache=cache, kv_scales=kv_scales, rope=rope, output="hidden", taps=sampler.taps,
        )  # fmt: skip
        taps = begin(prefill.aux.get("taps", {}), sampler.group_size, prompt_slots + slots_new)
        if LOGITS in sampler.taps:
            taps[LOGITS] = jnp.zeros((batch, slots_new, model.vocab_size))
        last = jnp.take_along_axis(prefill.hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
        assert prefill.cache is not None
        cache = prefill.cache.repeat(sampler.group_size).grow(slots - prompt_slots)
        shape = (batch, slots_new)
        rollout = Rollout(
            tokens=jnp.full(shape, sampler.pad_id, jnp.int32),
            mask=jnp.zeros(shape, bool),
            logprobs=jnp.zeros(shape, jnp.float32),
            finished=jnp.zeros((batch,), bool),
            taps=taps,
        )
        zero = jnp.int32(0)
        drawn = draw(jnp.repeat(last, sampler.group_size, axis=0), zero)
        done = limits <= 0
        rollout = record(rollout, zero, done, *drawn)
        done = done | rollout.finished | (limits <= 1)
        state = _LoopState(zero, drawn[0], done, cache, rollout)

        def running(state: _LoopState):
            return (state.index + 1 < slots_new) & ~state.done.all()

        def step(state: _LoopState) -> _LoopState:
            out = forward(
                weights, state.token[:, None], model, recipe,
                positions=(start + state.index)[:, None], cache=state.cache,
                kv_scales=kv_scales, rope=rope, output="hidden", taps=sampler.taps,
            )  # fmt: skip
            index = state.index + 1
            drawn = draw(out.hidden[:, 0], index)
            rollout = record(state.rollout, index, state.done, *drawn)
            if "taps" in out.aux:
                taps = rollout.taps | write(rollout.taps, out.aux["taps"], start + state.index)
                rollout = dataclasses.replace(rollout, taps=taps)
            done = state.done | rollout.finished | (index + 1 >= limits)
            assert out.cache is not None
            return _LoopState(index, drawn[0], done, out.cache, rollout)

        return lax.while_loop(running, step, state).rollout

    return exact_jit(sample, **(shardings or {}))
