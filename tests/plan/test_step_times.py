"""FLOPs, traffic and times of a train step, against sums written out by hand."""

from __future__ import annotations

import dataclasses

import pytest
from planned import mesh_of, resolved_as

from fp8rl_jax import models
from fp8rl_jax.plan import times
from fp8rl_jax.plan.bytes import learner_weight_bytes
from fp8rl_jax.plan.gpus import GPUS
from fp8rl_jax.plan.learner import Workload
from fp8rl_jax.plan.planned import Planned
from fp8rl_jax.quant import get_recipe

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
    """Four passes over linear layers with remat, three without; attention; the head."""
    linear = _L * (_D * (4 + 2 + 2) * 32 + 4 * 32 * _D + 3 * _D * _F)
    norms = _L * (2 * _D + 2 * 32) + _D
    found = times.step_flops(_DENSE, _WORK)
    assert found["linear layers"] == 4 * 2 * (linear + norms) * _TOKENS
    pairs = _TOKENS * 128 / 2 * 4 * 32 * _L
    assert found["attention"] == pytest.approx(2 * 2 * pairs * (2 + 2.5))
    assert found["output head"] == 4 * 2 * _V * _D * _TOKENS / 2
    plain = times.step_flops(_DENSE, dataclasses.replace(_WORK, remat="none"))
    assert plain["linear layers"] == found["linear layers"] * 3 / 4
    assert plain["attention"] == pytest.approx(2 * 2 * pairs * 3.5)
    counting = times.step_flops(_DENSE, dataclasses.replace(_WORK, counts=True))
    assert counting["linear layers"] == found["linear layers"] * 5 / 4
    assert counting["attention"] == pytest.approx(2 * 2 * pairs * (3 + 2.5))
    assert counting["output head"] == found["output head"]
    halves = times.step_flops(_DENSE, _WORK, tensor=2)
    assert halves["linear layers"] == found["linear layers"] / 2


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
    """All-reduced gradients; rows, results and their gradients travel, expert weights do not."""
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

    def cost(recipe, *moments):
        planned = Planned(resolved_as(_DENSE, recipe), mesh, gpu, hosts=2, memory=0)
        return times.step_cost(planned, _WORK, *moments)

    found = cost(_FP8)
    assert found.tokens == 16 * _TOKENS
    linear = found.flops["linear layers"] / (0.4 * 1979e12)
    assert found.seconds["linear layers"] == pytest.approx(linear)
    both = found.flops["attention"] + found.flops["output head"]
    assert found.seconds["attention and head"] == pytest.approx(both / (0.4 * 989e12))
    between = sum(size for _, size in found.transfers.values())
    assert found.seconds["network between hosts"] == pytest.approx(between / (0.8 * 50e9))
    assert found.least_seconds == max(found.seconds.values()) == found.seconds[found.bound]
    assert found.most_seconds == sum(found.seconds.values())
    away = cost(_FP8, 10**9)
    extra = {name: s for name, s in away.seconds.items() if name not in found.seconds}
    assert [*extra.values()] == [pytest.approx(2e9 / (0.8 * 64e9))], "moments come and go"
    bf16 = cost(get_recipe("bf16"))
    ratio = bf16.seconds["linear layers"] / found.seconds["linear layers"]
    assert ratio == pytest.approx(1979 / 989)
    forward_only = get_recipe("fp8_blockwise")
    forward_only = dataclasses.replace(forward_only, gradient=None)
    half = cost(forward_only)
    assert found.seconds["linear layers"] < half.seconds["linear layers"]
    assert half.seconds["linear layers"] < bf16.seconds["linear layers"]
