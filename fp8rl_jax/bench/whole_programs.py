"""A rollout and a train step of a small decoder, end to end, on whatever device there is.

Answers one question that single kernels cannot: are the log-probabilities that the sampler recorded
those that the train step's own forward computes for the same tokens? On a CPU they are, bit for bit
(the tests assert it). On a GPU attention and the norms are still XLA's own and not in canonical
order, so what is found is reported and not asserted.

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
from fp8rl_jax.models import ModelConfig, init_params, rope_tables
from fp8rl_jax.quant import get_recipe
from fp8rl_jax.rollout import SamplerConfig, make_refit, make_sampler

DENSE = ModelConfig(
    vocab_size=1024, hidden_size=256, intermediate_size=768, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, head_dim=64,
)  # fmt: skip
SPARSE = dataclasses.replace(
    DENSE, num_hidden_layers=2, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256
)
PROMPTS, GROUP, PROMPT_SLOTS, NEW = 8, 4, 24, 40


def run(model: ModelConfig, recipe: str, seed: int = 0) -> dict[str, Any]:
    """Samples, then takes one GRPO step on the samples.

    Args:
      model: shapes.
      recipe: of both sides; its products by `kernels='auto'`.
      seed: of weights, prompts and samples.

    Returns:
      recipe; kernels: what 'auto' means here; tokens: compared ones; drift_max, drift_mean: of
      |logp of the learner - logp of the sampler|; equal: share of tokens with equal bits;
      checksum_ok: both sides used the same weights; loss, grad_norm, updated: of the update;
      seconds: with compiling.
    """
    start = time.monotonic()
    numerics = get_recipe(recipe)
    rng = np.random.default_rng(seed)
    key = jax.random.key(seed)
    params = jax.jit(lambda k: init_params(model, k))(key)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = new_state(params, optimizer, jax.random.key_data(key), numerics)
    weights, served, _ = make_refit(numerics)(state.params, state.scaling_state)

    settings = SamplerConfig(NEW, GROUP, eos_ids=(0,), pad_id=0)
    prompts = rng.integers(1, model.vocab_size, (PROMPTS, PROMPT_SLOTS)).astype(np.int32)
    lengths = rng.integers(3, PROMPT_SLOTS + 1, PROMPTS).astype(np.int32)
    rows = PROMPTS * GROUP
    temperature = np.ones(rows, np.float32)
    rope = tuple(map(jnp.asarray, rope_tables(model, PROMPT_SLOTS + NEW)))
    rollout = make_sampler(model, numerics, settings)(
        weights, prompts, lengths, key, np.arange(rows, dtype=np.int32), temperature,
        np.full(rows, NEW, np.int32), rope,
    )  # fmt: skip
    rollout = jax.device_get(rollout)

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
        "checksum_ok": bool(served == metrics["checksum"]),
        "loss": float(metrics["loss"]),
        "grad_norm": float(metrics["grad_norm"]),
        "finite": bool(metrics["good"]) and bool(np.isfinite(logp[mask]).all()),
        "updated": bool(moved),
        "seconds": time.monotonic() - start,
    }


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
