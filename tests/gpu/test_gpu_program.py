"""A rollout and a train step of a small decoder, end to end.

Are the log-probabilities that the sampler recorded those that the train step's own forward computes
for the same tokens, and does continuous batching, whose slots are refilled and whose cache lies in
pages, record the same ones? Bit for bit, on a GPU as on a CPU. Prompts are random tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fp8rl_jax.batch import Batch, make_batch
from fp8rl_jax.kernels import resolve
from fp8rl_jax.learner import ForwardPass, GradientProgram, make_train_step, new_state
from fp8rl_jax.models import ModelConfig, init_params, pages_of, rope_tables
from fp8rl_jax.models.presets import preset
from fp8rl_jax.quant import Recipe, get_recipe
from fp8rl_jax.rollout import (
    Batching,
    ContinuousSampler,
    Requests,
    SamplerConfig,
    make_refit,
    make_sampler,
)

pytestmark = [pytest.mark.gpu, pytest.mark.first]

DENSE = ModelConfig(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
)
SPARSE = dataclasses.replace(
    DENSE, num_hidden_layers=2, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256
)
GEMMA = dataclasses.replace(
    DENSE,
    sandwich_norms=True,
    unit_offset_norms=True,
    scale_embeddings=True,
    hidden_act="gelu_pytorch_tanh",
    sliding_window=40,
    sliding_window_pattern=3,
    rope_local_base_freq=1e3,
)
GLM = dataclasses.replace(
    SPARSE, qkv_bias=True, partial_rotary_factor=0.5, scoring_func="sigmoid", n_shared_experts=1
)
GPT_OSS = dataclasses.replace(
    SPARSE,
    qk_norm=False,
    qkv_bias=True,
    o_bias=True,
    attention_sinks=True,
    sliding_window=40,
    sliding_window_pattern=2,
    hidden_act="clamped_swiglu",
    moe_bias=True,
)
# A layer of Qwen3-8B: its products take the tiles of the real model.
LAYER = dataclasses.replace(preset("qwen3_8b"), num_hidden_layers=1, vocab_size=1024)
SIZES = {"prompts": 8, "group": 4, "prompt_slots": 24, "new": 120}  # `group` samples of a prompt
SLOTS = 8  # of continuous batching: fewer than there are samples


def _batch(rollout, prompts, lengths, temperature, rng: np.random.Generator) -> Batch:
    """The samples with random advantages, each response right behind its prompt."""
    (rows, new), group = rollout.tokens.shape, len(rollout.tokens) // len(prompts)
    lengths = np.repeat(lengths, group)
    tokens = np.pad(np.repeat(prompts, group, axis=0), ((0, 0), (0, new)))
    np.put_along_axis(tokens, lengths[:, None] + np.arange(new), rollout.tokens, axis=1)
    return make_batch(
        tokens=tokens,
        prompt_lengths=lengths,
        targets=rollout.tokens,
        mask=rollout.mask,
        temperature=temperature,
        advantages=rng.standard_normal(rows).astype(np.float32),
        old_logprobs=rollout.logprobs,
    )


def differing_bits(one, other, mask: np.ndarray) -> int:
    """In how many bits two float32 arrays differ where `mask` is True."""
    found = (np.asarray(x, np.float32)[mask].view(np.uint32) for x in (one, other))
    return int(np.unpackbits(np.bitwise_xor(*found).view(np.uint8)).sum())


def measure(model: ModelConfig, recipe: Recipe | str, sizes: dict[str, int]) -> dict[str, Any]:
    """Samples twice, statically and continuously, then takes one GRPO step on the samples."""
    numerics, rng, key = (
        get_recipe(recipe),
        np.random.default_rng(0),
        jax.random.key(0, impl="threefry2x32"),
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = new_state(init_params(model, key), optimizer, jax.random.key_data(key), numerics)
    weights, served, _ = make_refit(numerics)(state.params, state.scaling_state)

    count, group, width, new = sizes.values()
    settings = SamplerConfig(new, group, eos_ids=(0,), pad_id=0)
    prompts = rng.integers(1, model.vocab_size, (count, width)).astype(np.int32)
    lengths = rng.integers(3, width + 1, count).astype(np.int32)
    rows, slots = count * group, width + new
    temperature = np.ones(rows, np.float32)
    rope = tuple(map(jnp.asarray, rope_tables(model, slots)))
    requests = Requests(
        lengths,
        key,
        np.arange(rows, dtype=np.int32),
        temperature,
        np.full(rows, new, np.int32),
        rope,
    )
    arguments = weights, prompts, requests
    rollout = jax.device_get(make_sampler(model, numerics, settings)(*arguments))
    batching = Batching(SLOTS, (SLOTS + 1) * pages_of(slots) + 1)
    sampler = ContinuousSampler(model, numerics, settings, batching)
    continuous = jax.device_get(sampler(*arguments))

    batch = _batch(rollout, prompts, lengths, temperature, rng)
    before = jax.device_get(state.params["norm"])  # the step takes the state's memory
    step = make_train_step(GradientProgram(ForwardPass(model, numerics)), optimizer)
    state, *scored = step(state, batch, rope)
    logp, metrics = jax.device_get(scored)
    after = jax.device_get(state.params["norm"])
    mask = np.asarray(rollout.mask)
    drift = np.abs(logp - rollout.logprobs)[mask]
    return {
        "kernels": resolve(numerics.kernels),
        "tokens": int(mask.sum()),
        "drift_max": float(drift.max()),
        "drift_mean": float(drift.mean()),
        "equal_frac": float((drift == 0).mean()),
        "continuous_other_tokens": int((continuous.tokens != rollout.tokens).sum()),
        "continuous_bits_from_sampler": differing_bits(continuous.logprobs, rollout.logprobs, mask),
        "continuous_bits_from_learner": differing_bits(continuous.logprobs, logp, mask),
        "same_weights": bool(served == metrics["checksum"]),
        "loss": float(metrics["loss"]),
        "finite": bool(metrics["good"]) and bool(np.isfinite(logp[mask]).all()),
        "updated": any(jax.tree.leaves(jax.tree.map(lambda a, b: (a != b).any(), before, after))),
    }


@pytest.mark.parametrize(
    ("recipe", "model"),
    [
        ("fp8", DENSE),
        ("bf16", DENSE),
        ("fp8_blockwise", DENSE),
        ("fp8", SPARSE),
        ("fp8", GEMMA),
        ("fp8", GLM),
        ("fp8", GPT_OSS),
        ("fp8", LAYER),
        ("bf16", LAYER),
    ],
    ids=[
        "fp8",
        "bf16",
        "fp8_blockwise",
        "fp8, experts",
        "fp8, Gemma",
        "fp8, GLM",
        "fp8, gpt-oss",
        "fp8, Qwen3-8B's layer",
        "bf16, Qwen3-8B's layer",
    ],
)
def test_rollout_and_train_step(recipe, model, record_property, sizes=SIZES):
    found = measure(model, recipe, sizes)
    record_property("program", found)
    print(*(f"{name}: {value}" for name, value in found.items()), sep="\n")
    assert found["same_weights"] and found["finite"] and found["updated"]
    differing = ("drift_max", *(name for name in found if name.startswith("continuous_")))
    assert not any(found[name] for name in differing), "rollout and learner differ"
