"""The promise: decode-time log-probabilities and logits == those of the train step, bit for bit.

float32 is the strict canary: FP8 and bf16 rounding hide most last-bit differences. Recipes, shapes,
lengths and settings are covered in pairs by tests/drift/test_drift_space.py; here are the quick
cases, and what that space does not have.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drift_harness import Case, Result, run
from kind_of_cpu import kind_of_cpu
from known_families import FAMILIES

from fp8rl_jax.quant import Operand, QArray, get_recipe, static

RECIPES = ("f32", "bf16", "fp8")


def _assert_exact(case: Case) -> Result:
    """The train step returns its logits too; the space has cases of one that does not."""
    result = run(dataclasses.replace(case, tap_logits=True))
    assert result.rollout_logp.size >= 24
    assert np.isfinite(result.rollout_logp).all()
    assert result.checksum_ok
    assert result.differing() == (0, 0), kind_of_cpu()
    return result


_FP8 = get_recipe("fp8_blockwise")
_VARIANTS = {
    "fake": get_recipe("fake"),
    "static activations": dataclasses.replace(
        _FP8, activation=Operand(block=(-1, -1), policy=static(amax=32.0))
    ),
    "down_proj in bf16, head in float32": dataclasses.replace(
        _FP8, bf16_modules=("down_*",), head="float32"
    ),
    "FP8 attention": dataclasses.replace(_FP8, fp8_attention=True),
    "calibrated FP8 attention": dataclasses.replace(_FP8, kv="calibrated", fp8_attention=True),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", [pytest.param(recipe, id=name) for name, recipe in _VARIANTS.items()]
)
def test_every_row_local_recipe(recipe):
    """After two updates, past 64 keys, with micro-batches: states are those of the rollout."""
    _assert_exact(
        Case(recipe, prompts=(1, 13, 40), new_tokens=40, layers=3, micro_batches=2, updates=2)
    )


@pytest.mark.slow
def test_a_head_in_float32():
    """A tied one: both sides multiply by the masters, and look rows up as bf16."""
    recipe = dataclasses.replace(get_recipe("fp8"), head="float32")
    _assert_exact(Case(recipe, prompts=(1, 13), layers=1, updates=1, micro_batches=2, tied=True))


_EXPERTS = {
    "f32, top 1 of 5, odd widths": Case(
        "f32", experts=5, experts_per_token=1, norm_topk_prob=False, hidden=96, expert_width=40
    ),
    "fp8, narrow experts": Case(
        "fp8", experts=8, experts_per_token=3, norm_topk_prob=False, expert_width=24
    ),
    "fp8, layers and modules in bf16": Case(
        dataclasses.replace(_FP8, last_layers=1, bf16_modules=("down_*",)), experts=8
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in _EXPERTS.items()])
def test_experts(case):
    """Layers of experts: the learner sorts all tokens of a batch, padding among them, into its
    tiles, the sampler those of one step."""
    _assert_exact(case)


# Each family in float32, the strict one; every other recipe with experts (biases, sinks, windows),
# with latents and, but for those that scale by tensors, with norms on both sides. (What a recipe
# does to layers of no family's own: tests/drift/test_drift_space.py.)
_ENDS_IN_BF16 = dataclasses.replace(_FP8, first_layers=1, last_layers=1)
_FAMILIES = {
    "f32 llama": Case("f32", "llama", prompts=(1, 7, 40), new_tokens=100, updates=2),
    "f32 qwen2, experts": Case("f32", "qwen2", prompts=(1, 7, 20), experts=8, updates=1),
    "f32 mistral": Case("f32", "mistral", prompts=(1, 7, 40), new_tokens=100, updates=2),
    "f32 gemma3": Case("f32", "gemma3", prompts=(1, 7, 40), new_tokens=100, updates=2),
    "bf16 gemma3, tied": Case(
        "bf16", "gemma3", prompts=(1, 7, 40), new_tokens=90, layers=4, remat="full", tied=True
    ),
    "fp8 gemma3, ends in bf16": Case(_ENDS_IN_BF16, "gemma3", layers=4, updates=1),
    "f32 glm": Case("f32", "glm", prompts=(1, 7, 40), experts=8, new_tokens=90, updates=2),
    "fp8 glm": Case("fp8", "glm", prompts=(1, 7, 20), experts=8, updates=1, micro_batches=3),
    "f32 gpt-oss": Case("f32", "gpt-oss", prompts=(1, 7, 40), experts=8, new_tokens=90, updates=2),
    "fp8 gpt-oss": Case(
        "fp8", "gpt-oss", prompts=(1, 7, 20), experts=8, updates=1, micro_batches=3
    ),
    "bf16 gpt-oss": Case(
        "bf16", "gpt-oss", prompts=(1, 7, 20), experts=8, updates=1, layers=4, remat="full"
    ),
    "mxfp8 gpt-oss": Case("mxfp8", "gpt-oss", prompts=(1, 7, 20), experts=8, updates=1),
    "delayed gpt-oss": Case("fp8_delayed", "gpt-oss", prompts=(1, 7, 20), experts=8, updates=1),
    "f32 deepseek past 128 keys": Case(
        "f32", "deepseek", layers=3, prompts=(1, 13, 40), new_tokens=100, remat="full", updates=1
    ),
    "fp8 deepseek, ends in bf16": Case(
        dataclasses.replace(_ENDS_IN_BF16, bf16_modules=("k_b_proj",)),
        "deepseek",
        layers=4,
        updates=1,
        extra_slots=30,
    ),
    "bf16 deepseek": Case("bf16", "deepseek", layers=3, updates=2, micro_batches=3),
    "mxfp8 deepseek": Case("mxfp8", "deepseek", layers=3, remat="full", updates=1),
    "fp8 moonlight": Case("fp8", "moonlight", layers=3, micro_batches=3, updates=2, new_tokens=90),
    "f32 moonlight": Case("f32", "moonlight", layers=2, cache_slots=128, eos_share=1.0),
    "delayed moonlight": Case("fp8_delayed", "moonlight", layers=3, micro_batches=2, updates=2),
    "f32 deepseek, a wide latent": Case(
        "f32", "wide deepseek", layers=2, hidden=256, new_tokens=40
    ),
}
_FAMILIES |= {
    f"{recipe} {family}": Case(recipe, family, prompts=(1, 7, 40), new_tokens=90, updates=1)
    for family in sorted(set(FAMILIES) - {"qwen3", *(case.family for case in _FAMILIES.values())})
    for recipe in ("f32", "fp8")
}


@pytest.mark.slow  # quick, without gradients: tests/models/test_transformer.py
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in _FAMILIES.items()])
def test_families(case):
    """Latent attention, sigmoid routers with groups, shared experts, dense layers before sparse
    ones; models without QK-norm, with biases, stretched rotary frequencies and interleaved
    pairs, with windows, norms on both sides and two rotary bases."""
    _assert_exact(case)


@pytest.mark.slow
def test_one_bit_of_a_router_is_seen():
    """The last bit of some weights of a router that stays float32 under FP8."""

    def plant(weights):
        kernel = weights["layers"]["router"]["kernel"]
        assert kernel.dtype == jnp.float32
        kernel = kernel.at[0].set(jnp.nextafter(kernel[0], jnp.float32(jnp.inf)))
        return {**weights, "layers": {**weights["layers"], "router": {"kernel": kernel}}}

    assert run(Case("f32", experts=8, prompts=(1, 7, 20)), plant=plant).differing()[1] > 0


@pytest.mark.slow
def test_wide_and_long():
    """A width whose K loop runs over many blocks, past 128 keys."""
    _assert_exact(
        Case("f32", hidden=1024, heads=8, kv_heads=1, head_dim=128, prompts=(3, 9), new_tokens=130)
    )


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["f32", "fp8"])
def test_wide_heads(recipe):
    """Heads of two blocks of 128 features, past 128 keys."""
    _assert_exact(Case(recipe, hidden=512, head_dim=256, prompts=(3, 9), new_tokens=130, updates=1))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_threads_and_processes(recipe):
    """With 1, 2 and 64 threads, each in a process of its own: one hash for all, both sides."""
    found = []
    for threads in (1, 2, 64):
        script = str(pathlib.Path(__file__).parent / "helpers" / "drift_process.py")
        done = subprocess.run(
            [sys.executable, script, recipe],
            env={**os.environ, "NPROC": str(threads)},
            capture_output=True,
            text=True,
            timeout=1800,
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert all(result["differing"] == [0, 0] for result in found)
    assert len({result[side] for result in found for side in ("rollout", "learner")}) == 1
    assert found[-1]["threads"] > found[0]["threads"] + 30, "NPROC must really set the threads"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_wide(recipe):
    """A width of 2048."""
    _assert_exact(
        Case(recipe, hidden=2048, heads=8, kv_heads=2, head_dim=128, prompts=(3, 9), new_tokens=20)
    )


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["f32", "fp8"])
def test_after_many_updates(recipe):
    """Weights that have left their initial distribution."""
    _assert_exact(Case(recipe, updates=20, new_tokens=30))


# Prompts of 1 to 40 tokens, responses past 128 keys, temperature and top-p. Three tests share its
# programs.
_CANARY = Case(
    "f32",
    prompts=(1, 13, 40),
    group_size=1,
    new_tokens=100,
    temperature=0.7,
    top_p=0.9,
    tap_logits=True,
    seed=1,
)


def test_the_canary():
    """float32, in which nothing absorbs a difference: log-probabilities and all logits."""
    lengths = _assert_exact(_CANARY).mask.sum(1) + _CANARY.prompts
    assert lengths.max() > 128, "no sequence is that long: take another seed"


def test_early_end():
    """Sequences that end early: masked slots hold zeros, kept ones agree."""
    result = run(dataclasses.replace(_CANARY, eos_share=1.0))
    assert 0.05 < result.mask.mean() < 0.9, "the case must end some sequences early"
    assert result.differing() == (0, 0), kind_of_cpu()


# The comparison must be able to fail.


@pytest.mark.slow
def test_recipes_that_differ_drift():
    """An FP8 rollout with a bf16 learner differs in most log-probabilities."""
    result = run(Case("bf16"), rollout_recipe="fp8")
    drift = np.abs(result.rollout_logp - result.learner_logp)
    assert 1e-3 < drift.mean() < 1.0
    assert (drift == 0).mean() < 0.05


@pytest.mark.slow
def test_per_tensor_activations_drift():
    """Dynamic per-tensor activation scales depend on the batch: never exact."""
    result = run(Case("fp8_tensorwise"))
    assert result.differing()[0] > 0.5 * result.rollout_logp.size


def test_one_planted_ulp_is_seen():
    """One last bit of one float32 weight of the final norm, 1e-7 of its value, shows."""

    def plant(weights):
        weight = weights["norm"]["weight"]
        weight = weight.at[7].set(jnp.nextafter(weight[7], jnp.float32(jnp.inf)))
        return {**weights, "norm": {"weight": weight}}

    result = run(_CANARY, plant=plant)
    logp, logits = result.differing()
    assert logp > 0 and logits > 0
    assert 0 < np.abs(result.rollout_logp - result.learner_logp).max() < 1e-4


@pytest.mark.slow
def test_one_planted_fp8_code_is_seen():
    """One FP8 code of one weight, moved to its neighbour, shows."""

    def plant(weights):
        q = weights["layers"]["down_proj"]["kernel"]
        codes = jax.lax.bitcast_convert_type(q.qvalue, jnp.uint8)
        codes = codes.at[0, 5, 7].set(codes[0, 5, 7] ^ 1)
        qvalue = jax.lax.bitcast_convert_type(codes, q.qvalue.dtype)
        down = {"kernel": QArray(qvalue, q.scale, q.block_shape)}
        return {**weights, "layers": {**weights["layers"], "down_proj": down}}

    logp, logits = run(Case("fp8"), plant=plant).differing()
    assert logp > 0 and logits > 0
