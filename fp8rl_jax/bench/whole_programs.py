"""A rollout and a train step of a small decoder, end to end, on whatever device there is.

Answers one question that single kernels cannot: are the log-probabilities that the sampler recorded
those that the train step's own forward computes for the same tokens, and does continuous batching,
whose slots are refilled and whose cache lies in pages, record the same ones? On a CPU they are, bit
for bit (the tests assert it). On a GPU nobody has measured it yet, so what is found is reported and
not asserted.

Needs neither a config, questions nor a tokenizer: prompts are random tokens.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fp8rl_jax.kernels import resolve
from fp8rl_jax.learner import Batch, LossConfig, make_train_step, new_state
from fp8rl_jax.models import ModelConfig, init_params, pages_of, rope_tables
from fp8rl_jax.quant import get_recipe
from fp8rl_jax.rollout import (
    Batching,
    ContinuousSampler,
    SamplerConfig,
    make_refit,
    make_sampler,
)

DENSE = ModelConfig(
    vocab_size=1024, hidden_size=256, intermediate_size=768, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, head_dim=64,
)  # fmt: skip
SPARSE = dataclasses.replace(
    DENSE, num_hidden_layers=2, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256
)
PROMPTS, GROUP, PROMPT_SLOTS, NEW = 8, 4, 24, 120
SLOTS = 8  # of continuous batching: fewer than there are samples


def run(model: ModelConfig, recipe: str, seed: int = 0) -> dict[str, Any]:
    """Samples, then takes one GRPO step on the samples.

    Args:
      model: shapes.
      recipe: of both sides; its products by `kernels='auto'`.
      seed: of weights, prompts and samples.

    Returns:
      recipe; kernels: what 'auto' means here; tokens: compared ones; drift_max, drift_mean: of
      |logp of the learner - logp of the sampler|; equal: share of tokens with equal bits;
      tokens_unequal: that continuous batching drew otherwise than the sampler; bits_from_sampler,
      bits_from_learner: bits in which its log-probabilities differ from those of the other two;
      checksum_ok: both sides used the same weights; loss, grad_norm, updated: of the update;
      seconds: with compiling.
    """
    start = time.monotonic()
    numerics = get_recipe(recipe)
    rng = np.random.default_rng(seed)
    key = jax.random.key(seed)
    params = init_params(model, key)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = new_state(params, optimizer, jax.random.key_data(key), numerics)
    weights, served, _ = make_refit(numerics)(state.params, state.scaling_state)

    settings = SamplerConfig(NEW, GROUP, eos_ids=(0,), pad_id=0)
    prompts = rng.integers(1, model.vocab_size, (PROMPTS, PROMPT_SLOTS)).astype(np.int32)
    lengths = rng.integers(3, PROMPT_SLOTS + 1, PROMPTS).astype(np.int32)
    rows = PROMPTS * GROUP
    temperature = np.ones(rows, np.float32)
    rope = tuple(map(jnp.asarray, rope_tables(model, PROMPT_SLOTS + NEW)))
    arguments = (
        weights, prompts, lengths, key, np.arange(rows, dtype=np.int32), temperature,
        np.full(rows, NEW, np.int32), rope,
    )  # fmt: skip
    rollout = jax.device_get(make_sampler(model, numerics, settings)(*arguments))
    batching = Batching(SLOTS, (SLOTS + 1) * pages_of(PROMPT_SLOTS + NEW) + 1)
    continuous = ContinuousSampler(model, numerics, settings, batching)(*arguments)
    continuous = jax.device_get(continuous)

    batch = _batch(rollout, prompts, lengths, temperature, rng)
    before = jax.device_get(state.params["norm"])  # the step takes the state's memory
    step = make_train_step(model, numerics, optimizer, LossConfig())
    state, logp, metrics = step(state, batch, rope)
    logp, metrics = jax.device_get((logp, metrics))
    after = jax.device_get(state.params["norm"])
    moved = any(
        (a != b).any() for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    )
    mask = np.asarray(rollout.mask)
    drift = np.abs(logp - rollout.logprobs)[mask]
    return {
        "recipe": recipe,
        "experts": model.num_experts,
        "kernels": resolve(numerics.kernels),
        "tokens": int(mask.sum()),
        "drift_max": float(drift.max()),
        "drift_mean": float(drift.mean()),
        "equal": float((drift == 0).mean()),
        "tokens_unequal": int((continuous.tokens != rollout.tokens).sum()),
        "bits_from_sampler": _differing_bits(continuous.logprobs, rollout.logprobs, mask),
        "bits_from_learner": _differing_bits(continuous.logprobs, logp, mask),
        "checksum_ok": bool(served == metrics["checksum"]),
        "loss": float(metrics["loss"]),
        "grad_norm": float(metrics["grad_norm"]),
        "finite": bool(metrics["good"]) and bool(np.isfinite(logp[mask]).all()),
        "updated": bool(moved),
        "seconds": time.monotonic() - start,
    }


def _differing_bits(one: np.ndarray, other: np.ndarray, mask: np.ndarray) -> int:
    """In how many bits two float32 arrays differ where `mask` is True."""
    found = (np.asarray(x, np.float32)[mask].view(np.uint32) for x in (one, other))
    return int(np.unpackbits(np.bitwise_xor(*found).view(np.uint8)).sum())


def _batch(rollout, prompts, lengths, temperature, rng: np.random.Generator) -> Batch:
    """The samples with random advantages, each response right behind its prompt."""
    lengths = np.repeat(lengths, GROUP)
    pad = np.zeros((len(lengths), NEW), np.int32)
    tokens = np.concatenate([np.repeat(prompts, GROUP, axis=0), pad], axis=1)
    np.put_along_axis(tokens, lengths[:, None] + np.arange(NEW), rollout.tokens, axis=1)
    ones = np.ones(rollout.logprobs.shape, np.float32)
    return Batch(
        tokens=tokens, prompt_lengths=lengths, targets=rollout.tokens,
        mask=np.asarray(rollout.mask, np.float32), temperature=temperature,
        advantages=rng.standard_normal(len(lengths)).astype(np.float32),
        old_logprobs=rollout.logprobs, rollout_weights=ones, ref_logprobs=0 * ones,
    )  # fmt: skip
