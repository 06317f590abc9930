"""Any mesh of virtual devices gives the log-probabilities of one device, bit for bit."""

from __future__ import annotations

import json

import numpy as np
import pytest
from devices import run_script

_LOSS = 1e-6  # terms of about 1, of either sign, added in another order


def _run(
    devices: int, mesh: dict[str, int], recipe: str, micro_batches: int = 1, *fields: str
) -> dict:
    settings = (json.dumps(mesh), recipe, str(micro_batches), *fields)
    return run_script(devices, "sharded_steps.py", *settings)


@pytest.mark.slow
def test_fsdp_equals_one_device():
    """Two RL steps on each mesh from the same parameters. (Under FP8: test_packing.py.)"""
    one = _run(1, {"data": 1, "fsdp": 1, "tensor": 1}, "f32")
    assert one["drift"] == 0.0 and one["sharded_leaves"] == 0
    many = _run(8, {"data": 1, "fsdp": 8, "tensor": 1}, "f32")
    assert many["devices"] == 8
    assert many["sharded_leaves"] == 9, "every matrix must really lie in parts"
    assert many["drift"] == 0.0
    assert many["tokens"] == one["tokens"]
    assert many["logp"] == one["logp"], "first step: same bits"
    np.testing.assert_allclose(many["loss"], one["loss"], rtol=1e-6, atol=_LOSS)
    np.testing.assert_allclose(many["grad_norm"], one["grad_norm"], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [38, 60], ids=["whole blocks", "blocks on two devices"])
@pytest.mark.parametrize("recipe", ["fp8", "bf16"])
def test_the_state_is_that_of_one_device(recipe, tokens, monkeypatch):
    """Gradients, moments and parameters, bit for bit, with as many threads."""
    monkeypatch.setenv("PJRT_NPROC", "8")
    more = recipe, 1, f"rollout.max_new_tokens={tokens}"
    one = _run(1, {"data": 1, "fsdp": 1}, *more)
    for data, fsdp in ((2, 1), (1, 2), (2, 2)):
        many = _run(data * fsdp, {"data": data, "fsdp": fsdp}, *more)
        assert {**many, "devices": 1, "sharded_leaves": 0, "data_collectives": {}} == {
            **one,
            "data_collectives": {},
        }, (data, fsdp)


@pytest.mark.slow
def test_many_response_tokens():
    """More than the head takes at a time: each device still has equally many of them."""
    many = _run(8, {"data": 1, "fsdp": 8, "tensor": 1}, "f32", 1, "rollout.max_new_tokens=100")
    assert len(many["logp"]) > 1024 and many["drift"] == 0.0


@pytest.mark.slow
def test_products_equal_one_device():
    """However few rows each device has, in every way that the CPU multiplies; and no row goes to
    another device."""
    many = run_script(8, "sharded_products.py")
    assert many["devices"] == 8 and len(many["results"]) == 13 * many["ways"]
    for case, found in many["results"].items():
        assert found == {"differ": 0, "divided": True, "collectives": {}}, case


@pytest.mark.slow
def test_continuous_batching_on_a_mesh_equals_one_device():
    """Each of eight devices runs two responses through a slot of its own, and tells nobody; one
    device runs all sixteen at once."""
    one = _run(1, {"data": 1, "fsdp": 1, "tensor": 1}, "fp8")
    many = _run(8, {"data": 1, "fsdp": 8, "tensor": 1}, "fp8", 1, "rollout.slots=8")
    assert one["drift"] == many["drift"] == 0.0
    assert many["tokens"] == one["tokens"] and many["logp"] == one["logp"]
    assert many["loop_collectives"] == []


@pytest.mark.slow
def test_continuous_batching_with_experts_in_parts():
    """Devices that share experts take their turns together, also where one has nothing left. (Under
    FP8, and between processes: test_processes.py.)"""
    fields = (*_EXPERTS, "rollout.slots=8", "rollout.prefill_chunk=8")
    one = _run(1, {"data": 1, "fsdp": 1, "expert": 1}, "f32", 1, *_EXPERTS)
    for mesh in ({"data": 1, "fsdp": 2, "expert": 2}, {"data": 1, "fsdp": 1, "expert": 4}):
        many = _run(4, mesh, "f32", 1, *fields)
        assert one["drift"] == many["drift"] == 0.0
        assert many["tokens"] == one["tokens"] and many["logp"] == one["logp"]
        assert "all-to-all f32" in many["loop_collectives"], "tokens must travel"


@pytest.mark.slow
def test_delayed_scaling_sees_every_device():
    """Amaxes are of the whole batch on 8 devices, and after 2 micro-batches, as on one device."""
    one = _run(1, {"data": 1, "fsdp": 1, "tensor": 1}, "fp8_delayed")
    many = _run(8, {"data": 2, "fsdp": 4, "tensor": 1}, "fp8_delayed", micro_batches=2)
    assert one["drift"] == many["drift"] == 0.0
    assert many["logp"] == one["logp"]
    assert set(one["scaling"]) == set(many["scaling"]) and len(one["scaling"]) == 3 * 7
    for name, amax in one["scaling"].items():
        assert all(value > 0 for value in amax), name
        if name.endswith("gradient"):  # gradients make no bitwise promise
            np.testing.assert_allclose(many["scaling"][name], amax, rtol=0.1)
        else:
            assert many["scaling"][name] == amax, name


@pytest.mark.slow
def test_data_parallel_and_micro_batches():
    """Rows over data x fsdp, gradients over two micro-batches."""
    one = _run(1, {"data": 1, "fsdp": 1, "tensor": 1}, "f32")
    many = _run(8, {"data": 2, "fsdp": 4, "tensor": 1}, "f32", micro_batches=2)
    assert many["drift"] == 0.0
    assert many["logp"] == one["logp"]
    np.testing.assert_allclose(many["loss"], one["loss"], rtol=1e-6, atol=_LOSS)


@pytest.mark.slow
def test_rows_are_worked_on_where_they_are():
    """Of data parallelism only sums travel (gradients, counts, whether all have ended), the
    log-probabilities of a step, and what the gradients of embedding and head are summed from; above
    all no keys and values. (Where a device's rows are no multiple of 128, blocks of gradients cross
    devices, and those rows travel.)"""
    many = _run(2, {"data": 2, "fsdp": 1, "tensor": 1}, "fp8", 1, "rollout.max_new_tokens=38")
    assert many["drift"] == 0.0
    assert many["data_collectives"]["sampler"] == {"all-reduce pred": 1}
    step = many["data_collectives"]["step"]
    assert {name.split()[0] for name in step} <= {"all-reduce", "all-gather", "collective-permute"}
    assert step.get("all-gather f32", 0) <= 13 and sum(step.values()) <= 25, step


_EXPERTS = ("model.num_experts=8", "model.moe_intermediate_size=64")


@pytest.mark.slow
def test_experts_on_a_mesh_equal_one_device():
    """Tokens travel to the devices of their experts, and results back. (In float32: with latent
    attention, below.)"""
    one = _run(1, {"data": 1, "fsdp": 1, "expert": 1}, "fp8_delayed", 2, *_EXPERTS)
    many = _run(8, {"data": 1, "fsdp": 2, "expert": 4}, "fp8_delayed", 2, *_EXPERTS)
    assert one["drift"] == many["drift"] == 0.0
    assert many["sharded_leaves"] == 10, "every matrix and the router"
    assert many["tokens"] == one["tokens"] and many["logp"] == one["logp"]
    np.testing.assert_allclose(many["loss"], one["loss"], rtol=1e-6, atol=_LOSS)
    np.testing.assert_allclose(many["grad_norm"], one["grad_norm"], rtol=1e-2)
    for name, amax in one["scaling"].items():
        if name.endswith("gradient"):  # gradients make no bitwise promise
            np.testing.assert_allclose(many["scaling"][name], amax, rtol=0.1)
        else:
            assert many["scaling"][name] == amax, name


_LATENT = (
    *_EXPERTS,
    "model.family=deepseek_v3",
    "model.family_options.kv_lora_rank=40",
    "model.family_options.q_lora_rank=24",
    "model.family_options.qk_nope_head_dim=32",
    "model.family_options.qk_rope_head_dim=16",
    "model.family_options.v_head_dim=32",
    "model.family_options.n_group=4",
    "model.family_options.topk_group=2",
    "model.family_options.n_shared_experts=1",
    "model.family_options.first_k_dense_replace=1",
)


@pytest.mark.slow
def test_latent_attention_on_a_mesh_equals_one_device():
    """DeepSeek's layers: heads in the place of experts, dense layers in a stack of their own.
    (Under FP8: stored in parts, below.)"""
    one = _run(1, {"data": 1, "fsdp": 1, "expert": 1}, "f32", 1, *_LATENT)
    many = _run(8, {"data": 1, "fsdp": 2, "expert": 4}, "f32", 1, *_LATENT)
    assert one["drift"] == many["drift"] == 0.0
    assert many["sharded_leaves"] == 25, "every matrix and the router"
    assert many["tokens"] == one["tokens"] and many["logp"] == one["logp"]
    np.testing.assert_allclose(many["loss"], one["loss"], rtol=1e-6, atol=_LOSS)
    np.testing.assert_allclose(many["grad_norm"], one["grad_norm"], rtol=1e-3)


# Tensor parallelism. Meshes are [data, fsdp, tensor], or with expert as a fourth; each learns from
# the rollout of the one before.

_GRADIENT = {"f32": 1e-5}  # others: the rounding noise of gradients, see `_assert_one_device`


def _assert_one_device(case: dict, cut: int) -> list[dict]:
    """Every mesh of the case gives the first one's bits, with `cut` arrays of weights in parts.

    Gradients are equal up to the order of sums in float32. Where they are rounded to bf16 or FP8 on
    their way down, a last bit moves a code now and then, as a change of all advantages by 1% does:
    between 0.7% (bf16) and 4.5% (FP8) of a gradient's norm, measured on one device.
    """
    first, *others = run_script(8, "tensor_steps.py", json.dumps(case))
    assert first["mesh"] == [1, 1, 1] and first["cut"] == 0 and first["collectives"] == []
    for result in others:
        assert result["cut"] == cut, "weights of the sampler must really lie in parts"
        assert result["tokens"] == first["tokens"] >= 60
        differing = {name: count for name, count in result.items() if name.endswith("_differing")}
        assert len(differing) == 5 and not any(differing.values()), differing
        assert result["drift"] == 0
        assert result["gradient_error"] < _GRADIENT.get(case["recipe"], 0.08)
        for operand in {"activations", "kv"} & set(first["health"]):
            ours, theirs = result["health"][operand], first["health"][operand]
            if "model.num_experts" in case.get("config", {}):  # tiles are filled up with zeros
                assert ours.pop("elements") > 0 and theirs.pop("elements", 1) > 0
            assert ours == theirs
    return others


def test_columns_equal_one_device():
    """The strict canary: rollout on one device, learner on 2 x 2 x 2."""
    case = {"recipe": "f32", "meshes": [[1, 1, 1], [2, 2, 2]]}
    case["config"] = {"rollout.max_new_tokens": 4}
    _assert_one_device(case, cut=8)  # seven layers and the head


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            {"recipe": "fp8", "meshes": [[1, 1, 1], [2, 4, 1]]}, marks=pytest.mark.slow, id="fp8"
        ),
        pytest.param(
            {"recipe": "f32", "meshes": [[1, 1, 1], [8, 1, 1], [1, 8, 1], [2, 2, 2]]},
            marks=pytest.mark.slow,
            id="f32",
        ),
    ],
)
def test_rows_by_hand_equal_one_device(case):
    """As GPU kernels need it, without columns in parts; norms and gates quantise in passing."""
    pytest.importorskip("jax_triton", reason="traces the kernels: pip install 'fp8rl_jax[dev]'")
    case = case | {"by_hand": True, "config": {"rollout.max_new_tokens": 4}}
    first, *others = run_script(8, "tensor_steps.py", json.dumps(case))
    for result in others:
        differing = {name: count for name, count in result.items() if name.endswith("_differing")}
        assert len(differing) == 5 and not any(differing.values()), differing
        assert result["drift"] == 0 and result["gradient_error"] < 0.08
        assert result["health"] == first["health"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "recipe"),
    [(_EXPERTS, "f32"), (_EXPERTS, "fp8_delayed"), (_LATENT, "f32"), (_LATENT, "fp8")],
    ids=["experts f32", "experts delayed", "latent f32", "latent fp8"],
)
def test_stored_experts_equal_one_device(config, recipe):
    """As GPU kernels need it: experts, shared ones, latents and heads are stored in parts, and
    gathered over fsdp in each layer; tokens travel to experts; gradients come back as the parts."""
    pytest.importorskip("jax_triton", reason="traces the kernels: pip install 'fp8rl_jax[dev]'")
    fields = {"rollout.max_new_tokens": 4, "learner.remat": "full"}
    fields |= dict(field.split("=") for field in config)
    meshes = [[1, 1, 1], [1, 2, 1, 4], [2, 2, 1, 2]]
    if config is _EXPERTS:  # latents are not shared over tensor
        meshes.append([1, 2, 2, 2])
    case = {"recipe": recipe, "config": fields, "meshes": meshes, "by_hand": True}
    for result in run_script(8, "tensor_steps.py", json.dumps(case))[1:]:
        assert result["stored"] == (25 if config is _LATENT else 10), "every matrix and the router"
        differing = {name: count for name, count in result.items() if name.endswith("_differing")}
        assert len(differing) == 5 and not any(differing.values()), differing
        assert result["drift"] == 0
        assert result["gradient_error"] < {"f32": 1e-5, "fp8": 0.08}.get(recipe, 0.3)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["f32", "fp8"])
def test_replay_balance_and_shared_experts(recipe):
    """As GPU kernels need it: the routing of another mesh's rollout is replayed, the balancing loss
    is that of all tokens, and shared experts stay whole over tensor."""
    fields = {
        "rollout.max_new_tokens": 4,
        "learner.remat": "full",
        "model.family": "glm4_moe",
        "model.family_options.n_shared_experts": 1,
        "algo.routing_replay": "weights",
        "algo.router_aux_loss_coef": 0.5,
    }
    fields |= dict(field.split("=") for field in _EXPERTS)
    meshes = [[1, 1, 1], [1, 2, 1, 4], [1, 2, 2, 2]]
    case = {"recipe": recipe, "config": fields, "meshes": meshes, "by_hand": True}
    for result in run_script(8, "tensor_steps.py", json.dumps(case))[1:]:
        differing = {name: count for name, count in result.items() if name.endswith("_differing")}
        assert len(differing) == 5 and not any(differing.values()), differing
        assert result["drift"] == 0
        assert result["gradient_error"] < {"f32": 1e-5}.get(recipe, 0.08)


_FEW_EXPERTS = {"model.num_experts": 8, "model.moe_intermediate_size": 64}
# After one device two, over which nothing but columns is cut, and eight.
_MESHES = [[1, 1, 1], [1, 1, 2], [2, 2, 2]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "cut", "meshes"),
    [
        ("f32", 8, [*_MESHES, [1, 2, 2]]),
        ("bf16", 8, _MESHES[:2]),
        ("fp8", 15, _MESHES),
        ("mxfp8", 15, _MESHES[:2]),
        ("kv_formats:int8_fp8", 15, _MESHES[:2]),
    ],
)
def test_columns_under_every_recipe(recipe, cut, meshes):
    """Rollout and learner on different meshes; no sum of the forward pass crosses devices."""
    case = {"recipe": recipe, "meshes": meshes, "collectives": True}
    two, *_ = _assert_one_device(case, cut)
    kinds = {entry.split()[0] for entry in two["collectives"]}
    assert kinds == {"all-gather"}, two["collectives"]
    assert ("all-gather u8" in two["collectives"]) == (cut == 15)


@pytest.mark.slow
def test_columns_with_delayed_scaling():
    """States of whole tensors: parts are quantised with the scale of all. Gradients of the first
    step are E5M2 at a scale of 1, where most are denormals, so they are not compared closely."""
    case = {"recipe": "fp8_delayed", "meshes": [[1, 1, 1], [2, 2, 2]]}
    first, two = run_script(8, "tensor_steps.py", json.dumps(case))
    assert two["cut"] == 8 and two["drift"] == two["train_differing"] == 0
    assert two["gradient_error"] < 0.3
    assert two["health"]["activations"] == first["health"]["activations"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "fields", "cut"),
    [
        ("f32", {"lora.base": "f32"}, 8),
        ("fp8", {"lora.base": "fp8", "learner.remat": "full"}, 15),
        ("fp8", {"lora.base": "bf16", **_FEW_EXPERTS}, 9),
    ],
    ids=["f32", "a base in fp8", "experts"],
)
def test_columns_of_adapters(recipe, fields, cut):
    """B is cut as the weight that it is added to; A is whole, and its gradient the sum of parts."""
    config = {"lora.rank": 4, "lora.alpha": 8.0, "lora.modules": "*_proj", **fields}
    _assert_one_device({"recipe": recipe, "config": config, "meshes": [[1, 1, 1], [2, 2, 2]]}, cut)


_TIED = {"model.tie_word_embeddings": True, "model.embedding_init_std": 0.05}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "cut"),
    [
        pytest.param(
            {
                "recipe": "fp8",
                "config": {
                    "model.num_key_value_heads": 1,
                    "precision.kv_cache": "fp8_calibrated",
                    "precision.attention": "fp8",
                    "precision.first_layers_bf16": 1,
                    "precision.bf16_modules": "gate_*",
                    "learner.remat": "full",
                },
                "micro_batches": 2,
                "meshes": [[1, 1, 1], [2, 2, 2]],
            },
            17,
            id="calibrated FP8 attention with all heads, mixed layers, remat",
        ),
        pytest.param(
            {
                "recipe": "f32",
                "vocabulary": 270,
                "config": {**_TIED, "model.num_key_value_heads": 2, "learner.remat": "full"},
                "micro_batches": 2,
                "meshes": [[1, 1, 1], [2, 1, 4]],
            },
            7,
            id="tied head that stays whole, heads that do not divide",
        ),
        pytest.param(
            {
                "recipe": "f32",
                "config": {
                    **_TIED,
                    "model.num_attention_heads": 6,
                    "model.num_key_value_heads": 3,
                    "model.head_dim": 48,
                },
                "meshes": [[1, 1, 1], [2, 1, 3]],
            },
            3,
            id="three devices, layers that stay whole around attention by heads",
        ),
        pytest.param(
            {"recipe": "fp8", "config": _FEW_EXPERTS, "meshes": [[1, 1, 1], [2, 2, 2]]},
            9,
            id="experts, which stay whole over tensor",
        ),
        pytest.param(
            {
                "recipe": "fp8",
                "config": {"model.family": "gpt_oss", **_FEW_EXPERTS},
                "meshes": [[1, 1, 1], [2, 2, 2]],
            },
            9,
            id="biases and sinks, which stay whole around cut products",
        ),
        pytest.param(
            {
                "recipe": "fp8",
                "config": {
                    "model.family": "gemma3_text",
                    "model.family_options.sliding_window": 9,
                    "model.family_options.sliding_window_pattern": 2,
                },
                "meshes": [[1, 1, 1], [2, 2, 2]],
            },
            15,
            id="windows, and norms of results, which are gathered for them",
        ),
        pytest.param(
            {
                "recipe": "fp8",
                "config": {"model.family": "olmo2"},
                "meshes": [[1, 1, 1], [1, 1, 2], [2, 2, 2]],
            },
            15,
            id="norms of results alone, and of queries and keys over cut columns",
        ),
        pytest.param(
            {
                "recipe": "fp8",
                "vocabulary": 259,
                "config": {
                    "model.hidden_size": 128,
                    "model.intermediate_size": 128,
                    "model.head_dim": 32,
                    "model.num_key_value_heads": 2,
                },
                "meshes": [[1, 1, 1], [2, 1, 4]],
            },
            0,
            id="blocks of 128 that stay whole",
        ),
    ],
)
def test_columns_that_do_not_divide(case, cut):
    """What cannot be cut is computed whole; the bits stay those of one device."""
    _assert_one_device(case, cut)
