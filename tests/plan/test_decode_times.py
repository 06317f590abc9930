"""The predicted time of a decode step, against sums written out by hand."""

from __future__ import annotations

import dataclasses

import pytest
from planned import mesh_of

from fp8rl_jax import models
from fp8rl_jax.models.presets import preset
from fp8rl_jax.plan.gpus import GPUS
from fp8rl_jax.plan.rollout import CASES
from fp8rl_jax.plan.times import decode_seconds
from fp8rl_jax.quant import get_recipe

_MEMORY, _PRODUCTS = 0.8 * 4.8e12, 0.4 * 989e12  # of an H200: bytes/s, FLOP/s in bf16


def _seconds(model, recipe, sequences, length, gpu="h200", **axes):
    return decode_seconds(model, recipe, mesh_of(**axes), sequences, length, GPUS[gpu])


# Qwen3-8B: 36 layers of width 4096, 32 heads of 128 (8 of keys and values), MLP 12,288.
_LINEAR = 36 * (4096 * 128 * (32 + 8 + 8) + 32 * 128 * 4096 + 3 * 4096 * 12288)
_WEIGHT = {"bf16": 2, "fp8_linears": 1 + 4 / 128**2, "fp8_kv": 2, "fp8": 1 + 4 / 128**2}
_CACHE = {"bf16": 2, "fp8_linears": 2, "fp8_kv": 1 + 4 / 128, "fp8": 1 + 4 / 128}


@pytest.mark.parametrize("case", CASES)
def test_few_sequences_are_bound_by_bytes(case):
    """64 sequences of 2,304 tokens: weights once, the head without the embedding, every key."""
    found = _seconds(preset("qwen3_8b"), CASES[case](), 64, 2304)
    assert found["layers"] == pytest.approx(_WEIGHT[case] * _LINEAR / _MEMORY, rel=1e-3)
    numbers = 64 * 2304 * 36 * 2 * 8 * 128
    assert found["attention"] == pytest.approx(_CACHE[case] * numbers / _MEMORY, rel=1e-9)
    assert found["head"] == pytest.approx(2 * 151936 * 4096 / _MEMORY, rel=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_many_sequences_are_bound_by_products(case):
    """2,000 of them: layers in FP8 at FP8's peak, the head in bf16; attention stays with bytes."""
    found = _seconds(preset("qwen3_8b"), CASES[case](), 2000, 2304)
    peak = 1979 / 989 if _WEIGHT[case] < 2 else 1
    assert found["layers"] == pytest.approx(2 * _LINEAR * 2000 / _PRODUCTS / peak, rel=1e-3)
    assert found["head"] == pytest.approx(2 * 151936 * 4096 * 2000 / _PRODUCTS, rel=1e-9)
    few = _seconds(preset("qwen3_8b"), CASES[case](), 64, 2304)
    assert found["attention"] == pytest.approx(few["attention"] * 2000 / 64, rel=1e-9)


def test_latents_are_bound_by_products():
    """DeepSeek's 128 heads read one latent of a token: 2 x 512 + 64 products a head and key."""
    model = preset("deepseek_v3")
    found = _seconds(model, get_recipe("bf16"), 4, 1000, expert=16)
    products = 4 * 1000 * 61 * 128 * (2 * 512 + 64)
    assert found["attention"] == pytest.approx(2 * products / _PRODUCTS, rel=1e-9)
    assert 2 * products / _PRODUCTS > 4 * 1000 * 61 * 2 * (512 + 64) / _MEMORY


@pytest.mark.parametrize(("sequences", "devices"), [(1, 1), (32, 4), (4000, 4)])
def test_experts(sequences, devices):
    """Qwen3-30B-A3B: a device reads those of its experts that some token of the axis chose, and
    computes with eight for each of its own tokens."""
    found = _seconds(preset("qwen3_30b_a3b"), get_recipe("bf16"), sequences, 512, expert=devices)
    expert, attention = 3 * 2048 * 768, 2048 * 128 * (32 + 4 + 4 + 32)
    tokens = sequences * devices
    read = 128 / devices * (1 - (120 / 128) ** tokens)
    if sequences == 1:
        assert read == pytest.approx(8)
    size = 48 * (2 * attention + 4 * 2048 * 128 + 2 * read * expert)  # the router is float32
    flops = 2 * 48 * (attention + 2048 * 128 + 8 * expert) * sequences
    expected = flops / _PRODUCTS if sequences == 4000 else size / _MEMORY
    assert found["layers"] == pytest.approx(expected, rel=1e-3)
    assert expected == max(flops / _PRODUCTS, size / _MEMORY)


def test_other_constants_and_tables():
    """An H100's memory is slower; a tied table is read as the head; `fake` multiplies in bf16."""
    model = preset("qwen3_8b")
    ours, slower = (_seconds(model, get_recipe("fp8"), 8, 100, gpu) for gpu in ("h200", "h100"))
    assert all(slower[part] / ours[part] == pytest.approx(4.8 / 3.35) for part in ours)
    small = models.ModelConfig(512, 128, 256, 2, 4, 2, 32)
    tied = dataclasses.replace(small, tie_word_embeddings=True)
    heads = [_seconds(m, get_recipe("bf16"), 1, 8)["head"] for m in (small, tied)]
    assert heads == pytest.approx([2 * 512 * 128 / _MEMORY] * 2)
    layers = [_seconds(small, get_recipe(r), 4000, 8)["layers"] for r in ("fake", "bf16", "fp8")]
    assert layers[0] == layers[1] == pytest.approx(layers[2] * 1979 / 989)
