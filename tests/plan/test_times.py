"""FLOPs, traffic and times of a train step and a decode step, against sums written out by hand."""

from __future__ import annotations

import dataclasses

import h200_times
import numpy as np
import pytest
from planned import mesh_of, resolved_as

from fp8rl_jax import models
from fp8rl_jax.models.presets import preset
from fp8rl_jax.plan import gpus, times
from fp8rl_jax.plan.bytes import WeightBytes, learner_weight_bytes
from fp8rl_jax.plan.gpus import GPUS
from fp8rl_jax.plan.learner import Workload, plan_learner
from fp8rl_jax.plan.planned import Planned
from fp8rl_jax.quant import get_recipe
from fp8rl_jax.rollout.cases import CASES

_D, _F, _V, _L, _E, _K = 128, 256, 512, 2, 8, 2
_DENSE = models.ModelConfig(_V, _D, _F, _L, 4, 2, 32)
_EXPERTS = dataclasses.replace(
    _DENSE, num_experts=_E, num_experts_per_tok=_K, moe_intermediate_size=128
)
_WORK = Workload(rows=2, prompt=64, response=64, micro_batches=4, remat="full")
_TOKENS = 4 * 2 * 128
_FP8 = get_recipe("fp8")


def _sent(model, mesh, hosts=1, **work):
    found = times.step_transfers(model, _FP8, mesh, dataclasses.replace(_WORK, **work), hosts)
    return {what.split(",")[0]: sizes for what, sizes in found.items()}


def test_flops():
    """Four passes over linear layers with remat, three without; attention, whose result is kept;
    the head."""
    linear = _L * (_D * (4 + 2 + 2) * 32 + 4 * 32 * _D + 3 * _D * _F)
    norms = _L * (2 * _D + 2 * 32) + _D
    found = times.step_flops(_DENSE, _WORK)
    assert found["linear layers"] == 4 * 2 * (linear + norms) * _TOKENS
    pairs = _TOKENS * 128 / 2 * 4 * 32 * _L
    assert found["attention"] == pytest.approx(2 * 2 * pairs * (1 + 3.5))
    assert found["output head"] == 4 * 2 * _V * _D * _TOKENS / 2
    plain = times.step_flops(_DENSE, dataclasses.replace(_WORK, remat="none"))
    assert plain["linear layers"] == found["linear layers"] * 3 / 4
    assert plain["attention"] == pytest.approx(2 * 2 * pairs * (1 + 3.5))
    counting = times.step_flops(_DENSE, dataclasses.replace(_WORK, counts=True))
    assert counting["linear layers"] == found["linear layers"] * 5 / 4
    assert counting["attention"] == pytest.approx(2 * 2 * pairs * (2 + 3.5))
    assert counting["output head"] == found["output head"]
    halves = times.step_flops(_DENSE, _WORK, tensor=2)
    assert halves["linear layers"] == found["linear layers"] / 2


def test_windows_leave_out_keys():
    """Counted pair by pair, of a model whose every second layer has no window."""
    model = dataclasses.replace(_DENSE, sliding_window=5, sliding_window_pattern=2)
    lengths = np.array([3.0, 5.0, 6.0, 40.0])
    for n, found in zip(lengths, times.keys_seen(model, lengths), strict=True):
        assert found == (min(n, 5) + n) / 2
    for n in (3, 40):
        seen = sum(min(p + 1, 5) + p + 1 for p in range(n))
        plain, windowed = (times.useful_flops(m, [n], 0) for m in (_DENSE, model))
        left_out = n * (n + 1) - seen  # of two layers' pairs
        assert plain - windowed == pytest.approx(3 * 2 * left_out * 2 * 4 * 32)
    share = (
        times.step_flops(model, _WORK)["attention"] / times.step_flops(_DENSE, _WORK)["attention"]
    )
    assert share == pytest.approx(sum(min(p + 1, 5) + p + 1 for p in range(128)) / (128 * 129))


def test_adapters_alone_have_gradients_to_send():
    mesh = mesh_of(expert=2)
    trained = WeightBytes(stored=10, dense=6, experts=2, layer=4, tables=0, largest=4)
    found = times.step_transfers(_EXPERTS, _FP8, mesh, _WORK, 1, trained)
    name = "expert: gradients of what is no expert, all-reduced"
    assert found[name][0] == 4 * 2 * 6 / 2


def test_useful_flops():
    """Every token once, whatever pads its row, and each pair of a token and one up to it."""
    linear = _L * (_D * (4 + 2 + 2) * 32 + 4 * 32 * _D + 3 * _D * _F)
    norms = _L * (2 * _D + 2 * 32) + _D
    pairs = (3 * 4 / 2 + 10 * 11 / 2) * _L * 2 * 4 * 32
    forward = 2 * ((linear + norms) * 13 + pairs + _V * _D * 5)
    assert times.useful_flops(_DENSE, np.array([3, 10]), 5) == 3 * forward


def test_gpus_by_their_kind():
    assert gpus.of_kind("NVIDIA H100 80GB HBM3") is GPUS["h100"]
    assert gpus.of_kind("NVIDIA H200") is GPUS["h200"]
    assert gpus.of_kind("NVIDIA H20") is gpus.of_kind("cpu") is None


def test_only_a_tokens_experts_count():
    """Of eight experts a token uses two."""
    found = times.step_flops(_EXPERTS, _WORK)["linear layers"]
    all_used = dataclasses.replace(_EXPERTS, num_experts_per_tok=_E)
    more = times.step_flops(all_used, _WORK)["linear layers"] - found
    assert more == 4 * 2 * _TOKENS * _L * (_E - _K) * 3 * _D * 128


def test_what_fsdp_receives():
    """Quantised layers twice a micro-batch, float32 gradients once, tables once an update."""
    mesh = mesh_of(fsdp=4)
    masters, own = learner_weight_bytes(_DENSE, _FP8, mesh)
    found = _sent(_DENSE, mesh)
    assert found["fsdp: quantised weights"] == (4 * 2 * own.dense * 3 / 4, 0)
    assert found["fsdp: gradients"] == (4 * (masters.dense + masters.tables) * 3 / 4, 0)
    assert found["fsdp: embedding and head"] == ((own.tables + masters.tables) * 3 / 4, 0)
    assert len(found) == 3
    assert not _sent(_DENSE, mesh_of())


def test_what_data_and_expert_receive():
    """All-reduced gradients; rows, results and their gradients are sent, expert weights are not."""
    masters, _ = learner_weight_bytes(_DENSE, _FP8, mesh_of(data=2))
    found = _sent(_DENSE, mesh_of(data=2))
    assert found == {"data: gradients": (4 * (masters.dense + masters.tables), 0)}
    mesh = mesh_of(expert=4)
    masters, _ = learner_weight_bytes(_EXPERTS, _FP8, mesh)
    found = _sent(_EXPERTS, mesh)
    tokens, row, result = _TOKENS * _L, _D + 4 + 4 * _K, _K * 4 * _D * 3 / 4
    assert found["expert: rows to their experts"] == (tokens * 3 * (2 * row + 2 * _D), 0)
    assert found["expert: results of the experts"] == (tokens * 2 * result, 0)
    assert found["expert: gradients of results and of rows"] == (tokens * (result + 3 * 4 * _D), 0)
    share = 4 * 2 * (masters.dense + masters.tables) * 3 / 4
    assert found["expert: gradients of what is no expert"] == (share, 0)
    once = _sent(_EXPERTS, mesh, remat="none")
    assert once["expert: results of the experts"] == (tokens * result, 0)
    passes = _sent(_EXPERTS, mesh, rows=8, remat="none")  # more than 512 tokens: computed again
    assert passes["expert: results of the experts"] == (4 * tokens * 2 * result, 0)


@pytest.mark.parametrize(
    ("axes", "hosts", "axis", "count"),
    [
        ({"fsdp": 8, "expert": 8}, 8, "expert", 8),
        ({"fsdp": 8, "expert": 8}, 8, "fsdp", 1),
        ({"fsdp": 4, "expert": 4}, 2, "fsdp", 2),
        ({"fsdp": 16}, 2, "fsdp", 8),
        ({"data": 2, "fsdp": 8}, 2, "data", 1),
        ({"data": 2, "fsdp": 8}, 2, "fsdp", 8),
        ({"fsdp": 8}, 1, "fsdp", 8),
        ({"fsdp": 8}, 1, "data", 1),
    ],
)
def test_devices_of_a_host(axes, hosts, axis, count):
    """The last axis of the mesh is within a host first."""
    assert times.same_host(mesh_of(**axes), axis, hosts) == count


def test_between_hosts():
    """Of 15 other devices eight are on the other host."""
    mesh = mesh_of(fsdp=16)
    whole, split = _sent(_DENSE, mesh, 1), _sent(_DENSE, mesh, 2)
    for name, (inside, between) in split.items():
        assert whole[name] == (pytest.approx(inside + between), 0)
        assert between == pytest.approx(whole[name][0] * 8 / 15)


def test_times():
    """Each is work over what the GPU gives; the estimate names the largest."""
    gpu, mesh = GPUS["h100"], mesh_of(fsdp=16)

    def cost(recipe, **fields):
        resolved = resolved_as(_DENSE, recipe, **fields)
        plan = plan_learner(resolved, mesh, _WORK)
        return times.step_cost(Planned(resolved, mesh, gpu, hosts=2, memory=0), plan)

    found = cost(_FP8)
    assert found.tokens == 16 * _TOKENS
    linear = found.flops["linear layers"] / (0.5 * 1979e12)
    assert found.seconds["linear layers"] == pytest.approx(linear)
    attention = found.flops["attention"] / (0.2 * 989e12)
    assert found.seconds["attention"] == pytest.approx(attention)
    head = found.flops["output head"] / (0.75 * 989e12)
    assert found.seconds["output head"] == pytest.approx(head)
    features = 2 * _D + (4 + 4 + 2 + 2) * 32 + 3 * _F
    moved = 37 * features * _L * _TOKENS
    between = found.seconds["norms, gates, quantisation"]
    assert between == pytest.approx(moved / (0.8 * 3.35e12))
    assert found.seconds["kernel launches"] == pytest.approx(3e-6 * _L * _WORK.micro_batches * 256)
    sent = sum(size for _, size in found.transfers.values())
    assert found.moving["network between hosts"] == pytest.approx(sent / (0.8 * 50e9))
    own = sum(found.seconds.values())
    assert found.least_seconds == max(own, *found.moving.values())
    assert found.most_seconds == pytest.approx(own + sum(found.moving.values()))
    away = cost(_FP8, learner={"offload": "moments"})
    moments = 2 * learner_weight_bytes(_DENSE, _FP8, mesh)[0].stored
    extra = {name: s for name, s in away.moving.items() if name not in found.moving}
    assert [*extra.values()] == [pytest.approx(2 * moments / (0.8 * 64e9))], "moments come and go"
    bf16 = cost(get_recipe("bf16"))
    ratio = bf16.seconds["linear layers"] / found.seconds["linear layers"]
    assert ratio == pytest.approx(0.5 * 1979 / (0.75 * 989))
    forward_only = get_recipe("fp8_blockwise")
    forward_only = dataclasses.replace(forward_only, backward="bf16")
    half = cost(forward_only)
    assert found.seconds["linear layers"] < half.seconds["linear layers"]
    assert half.seconds["linear layers"] < bf16.seconds["linear layers"]


_HBM, _PRODUCTS = 4.8e12, 0.75 * 989e12  # of an H200: bytes/s, FLOP/s in bf16
_FASTER = 0.5 * 1979 / (0.75 * 989)  # products in FP8


def _seconds(model, recipe, sequences, length, gpu="h200", **axes):
    return times.decode_seconds(model, recipe, mesh_of(**axes), sequences, length, GPUS[gpu])


# Qwen3-8B: 36 layers of width 4096, 32 heads of 128 (8 of keys and values), MLP 12,288.
_LINEAR = 36 * (4096 * 128 * (32 + 8 + 8) + 32 * 128 * 4096 + 3 * 4096 * 12288)
_WEIGHT = {"bf16": 2, "fp8_linear": 1 + 4 / 128**2, "fp8_kv": 2, "fp8": 1 + 4 / 128**2}
_CACHE = {"bf16": 2, "fp8_linear": 2, "fp8_kv": 1 + 4 / 128, "fp8": 1 + 4 / 128}


@pytest.mark.parametrize("case", CASES)
def test_few_sequences_are_bound_by_bytes(case):
    """64 sequences of 2,304 tokens: weights once, the head without the embedding, every key."""
    found = _seconds(preset("qwen3_8b"), CASES[case](), 64, 2304)
    reached = 1.87e12 if _WEIGHT[case] < 2 else 2.78e12
    assert found["layers"] == pytest.approx(_WEIGHT[case] * _LINEAR / reached, rel=1e-3)
    numbers = 64 * 2304 * 36 * 2 * 8 * 128
    reached = 3.6e12 if _CACHE[case] < 2 else 0.85 * _HBM
    assert found["attention"] == pytest.approx(_CACHE[case] * numbers / reached, rel=1e-9)
    assert found["head"] == pytest.approx(2 * 151936 * 4096 / (0.8 * _HBM), rel=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_many_sequences_are_bound_by_products(case):
    """2,000 of them: layers in FP8 at FP8's peak, the head in bf16; attention stays with bytes."""
    found = _seconds(preset("qwen3_8b"), CASES[case](), 2000, 2304)
    peak = _FASTER if _WEIGHT[case] < 2 else 1
    assert found["layers"] == pytest.approx(2 * _LINEAR * 2000 / _PRODUCTS / peak, rel=1e-3)
    assert found["head"] == pytest.approx(2 * 151936 * 4096 * 2000 / _PRODUCTS, rel=1e-9)
    few = _seconds(preset("qwen3_8b"), CASES[case](), 64, 2304)
    assert found["attention"] == pytest.approx(few["attention"] * 2000 / 64, rel=1e-9)


def test_latents_are_bound_by_instructions():
    """DeepSeek's 128 heads read one latent of a token: 2 x 512 + 64 products a head and key, in
    eight tiles of 16 heads."""
    model = preset("deepseek_v3")
    found = _seconds(model, get_recipe("bf16"), 4, 1000, expert=16)
    products = 4 * 1000 * 61 * 128 * (2 * 512 + 64)
    loops = 4 * 1000 * 61 * 8 / 64 * (2 * 512 + 64) / 256
    expected = loops * 338 / (132 * 0.45 * 1.98e9)
    assert found["attention"] == pytest.approx(expected, rel=1e-9)
    cache = 4 * 1000 * 61 * 2 * (512 + 64)
    assert expected > 2 * products / (0.2 * 989e12) > cache / (0.85 * _HBM)


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
    reached = 2.78e12
    expected = flops / _PRODUCTS if sequences == 4000 else size / reached
    assert found["layers"] == pytest.approx(expected, rel=1e-3)
    assert expected == max(flops / _PRODUCTS, size / reached)


def test_other_constants_and_tables():
    """An H100's memory is slower, which products do not wait for; a tied table is read as the head;
    `fake` multiplies in bf16."""
    model = preset("qwen3_8b")
    ours, slower = (_seconds(model, get_recipe("fp8"), 8, 100, gpu) for gpu in ("h200", "h100"))
    assert slower["head"] / ours["head"] == pytest.approx(4.8 / 3.35)
    assert slower["attention"] / ours["attention"] == pytest.approx(3.6 / (0.85 * 3.35))
    assert slower["layers"] == ours["layers"]
    slow = _seconds(model, get_recipe("bf16"), 8, 100, "h100")["layers"]
    assert slow == pytest.approx(2 * _LINEAR / 2.78e12, rel=1e-3), (
        "2.85 TB/s are 85% of the memory's"
    )
    others = 2.2e-6 * (36 * (11 - 6) + 41) + 0.2e-6 * (36 * 11 + 41)
    assert slower["other kernels"] == ours["other kernels"] == pytest.approx(others)
    small = models.ModelConfig(512, 128, 256, 2, 4, 2, 32)
    tied = dataclasses.replace(small, tie_word_embeddings=True)
    heads = [_seconds(m, get_recipe("bf16"), 1, 8)["head"] for m in (small, tied)]
    assert heads == pytest.approx([2 * 512 * 128 / (0.8 * _HBM)] * 2)
    layers = [_seconds(small, get_recipe(r), 4000, 8)["layers"] for r in ("fake", "bf16", "fp8")]
    assert layers[0] == layers[1] == pytest.approx(layers[2] * _FASTER)


@pytest.mark.parametrize("figure", h200_times.predicted_of_measured())
def test_as_measured(figure):
    """Decode steps within a sixteenth of what an H200 took, by the kernels of that day, and a
    layer's train step within a tenth. None of these times decides a constant."""
    predicted, measured = h200_times.predicted_of_measured()[figure]
    assert abs(predicted / measured - 1) < (1 / 16 if figure.startswith("decode") else 0.1)
