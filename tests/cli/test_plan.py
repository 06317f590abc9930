"""The plan of a rollout's memory: counted against real arrays, estimated against the compiler."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import pytest
from marks import slow
from random_model import initial_params

from fp8rl_jax import cli, models
from fp8rl_jax.cli.plan import plan_config
from fp8rl_jax.config import load_config
from fp8rl_jax.errors import UserError
from fp8rl_jax.exact_jit import exact_jit
from fp8rl_jax.models.presets import preset
from fp8rl_jax.quant import get_recipe
from fp8rl_jax.rollout import Batching, ContinuousSampler, Loop, Requests, SamplerConfig, make_refit
from fp8rl_jax.rollout.memory_plan import (
    RolloutPlan,
    page_bytes,
    plan_rollout,
    train_bytes,
    weight_bytes,
    workspace_bytes,
)
from fp8rl_jax.sharding import abstract_mesh
from fp8rl_jax.training import runtime

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_TINY, _QWEN = (str(_ROOT / "configs" / f"{n}.py") for n in ("tiny_arithmetic", "qwen3_8b"))
_DENSE = models.ModelConfig(97, 64, 64, 2, 4, 2, 16)
_EXPERTS = dataclasses.replace(
    _DENSE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64
)
_LATENT = models.ModelConfig(
    97, 64, 64, 2, 4, 4, 16, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8,
    v_head_dim=16,
)  # fmt: skip
_TIED = dataclasses.replace(_DENSE, tie_word_embeddings=True)
_SETTINGS = SamplerConfig(64, 4, (1,), 0)
_GIB = 2**30


def _nbytes(tree) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def _loop(model, recipe: str, **changes) -> Loop:
    return Loop(model, dataclasses.replace(get_recipe(recipe), **changes), _SETTINGS)


@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        (_DENSE, "fp8"), slow(_DENSE, "bf16"), (_DENSE, "f32"), slow(_DENSE, "fp8_delayed"),
        slow(_TIED, "fp8"), (_EXPERTS, "fp8"), (_LATENT, "fp8"), slow(_LATENT, "bf16"),
    ],
    ids=["fp8", "bf16", "f32", "delayed", "tied", "experts", "latent", "latent bf16"],
)  # fmt: skip
def test_counts_are_those_of_real_arrays(model, recipe):
    """Weights as refit makes them, pages as the sampler allocates them, masters and moments."""
    named = get_recipe(recipe)
    params = initial_params(model)
    scaling = exact_jit(lambda p: models.init_scaling(p, named))(params)
    weights = make_refit(named)(params, scaling, None)[0]
    one = abstract_mesh({"data": 1, "fsdp": 1, "tensor": 1, "expert": 1})
    assert weight_bytes(_loop(model, recipe, kernels="triton"), named, one) == _nbytes(weights)
    prepared = ContinuousSampler(model, recipe, _SETTINGS, Batching(2, 8))._prepare(weights)
    made = 0 if prepared is weights else _nbytes(prepared)
    assert weight_bytes(_loop(model, recipe), named, one) == _nbytes(weights) + made
    assert (made > 0) == (recipe != "f32")
    cache = models.init_paged_cache(model, named, 5, jnp.zeros((1, 1), jnp.int32))
    assert 5 * page_bytes(model, named) == _nbytes(cache.runs)
    assert train_bytes(model, named, one) == 3 * _nbytes(params) + _nbytes(scaling)
    assert train_bytes(model, named, one, True) == 4 * _nbytes(params) + _nbytes(scaling)
    if model.num_experts:
        half = abstract_mesh({"data": 1, "fsdp": 1, "tensor": 1, "expert": 2})
        experts = sum(_nbytes(x["layers"]["experts"]) for x in (weights, prepared.weights))
        found = weight_bytes(_loop(model, recipe), named, half)
        assert found == _nbytes(weights) + made - experts // 2


def _compiled_workspace(model, recipe: str, slots: int) -> int:
    """Temporary bytes of the sampler's program, as XLA:CPU planned them."""
    prompts, length = 4, 64
    sampler = ContinuousSampler(model, recipe, _SETTINGS, Batching(slots, 40))
    count, named = prompts * _SETTINGS.group_size, get_recipe(recipe)

    def arguments():
        params = models.init_params(model, jax.random.key(0))
        rope = models.rope_tables(model, length + _SETTINGS.max_new_tokens)
        ids = jnp.zeros(count, jnp.int32)
        requests = Requests(
            jnp.ones(prompts, jnp.int32), jax.random.key(1), ids, jnp.ones(count), ids,
            tuple(map(jnp.asarray, rope)),
        )  # fmt: skip
        return models.quantize_params(params, named), requests, jnp.int32(1)

    weights, requests, turns = jax.eval_shape(arguments)
    prepared = jax.eval_shape(sampler._prepare, weights)
    tokens = jax.ShapeDtypeStruct((prompts, length), jnp.int32)
    state = jax.eval_shape(sampler._begin, tokens, requests)
    lowered = sampler._advance.lower(prepared, requests, turns, state)
    return lowered.compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "slots"),
    [
        (models.ModelConfig(512, 128, 256, 2, 4, 2, 32), 8),
        (models.ModelConfig(8192, 128, 256, 2, 4, 2, 32), 32),
        (models.ModelConfig(512, 512, 1536, 2, 4, 2, 32), 8),
    ],
    ids=["small", "large vocabulary", "wide"],
)  # fmt: skip
def test_workspace_is_an_upper_estimate(model, slots):
    """Never below the compiler's figure, and not far above it."""
    found = workspace_bytes(_loop(model, "fp8"), slots, 64) / _compiled_workspace(
        model, "fp8", slots
    )
    assert 1 <= found <= 4, found


def _plan(**changes) -> RolloutPlan:
    sizes = dict(
        weights=2 * _GIB, train_state=_GIB, workspace=_GIB, page=2**20, memory=None, tokens=200,
        slots=8,
    )  # fmt: skip
    return RolloutPlan(**{**sizes, **changes})


def test_pages_follow_the_room():
    """All that the slots can fill, then what fits, then a sentence with the fields."""
    assert _plan().pages == _plan(memory=80 * _GIB).pages == _plan().wanted == 8 * 4 + 4
    for megabytes in (10, 20, 30):
        plan = _plan(memory=int((4 * _GIB + megabytes * 2**20 + 100) / 0.92))
        assert plan.pages == plan.room == megabytes
        assert plan.slots_of(200) == (megabytes - 4) // 4
        assert plan.slots_of(100) == (megabytes - 4) // 2
    least = models.least_pages(200)
    tight = _plan(memory=int((4 * _GIB + least * 2**20 + 100) / 0.92))
    assert tight.pages == least
    for memory in (tight.memory - 2**20, _GIB):
        with pytest.raises(UserError, match=r"rollout\.max_prompt_tokens.*rollout\.slots.*fsdp"):
            _ = _plan(memory=memory).pages
    assert _plan(memory=_GIB).room == _plan(memory=_GIB).slots_of(200) == 0


def test_train_state_lies_in_parts():
    """Over fsdp, all that it divides; an axis of -1 has one device unless more are named."""
    axes = {"data": -1, "fsdp": 8, "tensor": 1, "expert": 1}
    model, recipe = preset("qwen3_8b"), get_recipe("fp8")
    eighth = train_bytes(model, recipe, abstract_mesh(axes))
    whole = train_bytes(model, recipe, abstract_mesh(axes | {"fsdp": 1}))
    assert 1 <= eighth * 8 / whole < 1.01
    assert abstract_mesh(axes).size == 8
    assert abstract_mesh(axes, 32).shape["data"] == 4
    with pytest.raises(UserError, match="8 places for 12 devices"):
        abstract_mesh(axes | {"data": 1}, 12)


@pytest.fixture
def tiny():
    """A runtime with four slots, and the settings of its sampler."""
    fields = ("rollout.slots=4", "eval.questions=16", "env.train_questions=16", "sft.steps=0")
    config = load_config(_TINY, [f"--config.{field}" for field in fields])
    return runtime.make_runtime(config, with_questions=False)


def test_a_run_allocates_the_plan(tiny, monkeypatch):
    """`rollout.pages` 0 gives the sampler the plan's pages, a share to every device."""
    made, settings = [], dataclasses.replace(_SETTINGS, max_new_tokens=4)
    monkeypatch.setattr(runtime, "ContinuousSampler", lambda *a, **_: made.append(a[3]))

    def plan(mesh, slots: int, memory: int) -> RolloutPlan:
        return plan_rollout(
            Loop(tiny.model, tiny.rollout_recipe, settings), tiny.learner_recipe, mesh,
            prompt_tokens=36, batching=Batching(slots * mesh.size, 1), memory=memory,
        )  # fmt: skip

    for spare in (100, 5):
        bare = plan(tiny.mesh, 4, _GIB)
        used = bare.weights + bare.train_state + bare.workspace
        memory = int((used + spare * bare.page + 10) / 0.92)
        monkeypatch.setattr(runtime, "device_memory", lambda memory=memory: memory)
        tiny.make_sampler(8, 0, 1.0)
        assert made[-1].pages == plan(tiny.mesh, 4, memory).pages == min(spare, 8)
    many = abstract_mesh({"data": 2, "fsdp": 2, "tensor": 1, "expert": 1})
    spread = dataclasses.replace(tiny, mesh=many)
    monkeypatch.setattr(runtime, "device_memory", lambda: _GIB)
    assert spread.batching(settings).pages == 4 * plan(many, 1, _GIB).pages == 4 * 5
    monkeypatch.setattr(runtime, "device_memory", lambda: 2**20)
    with pytest.raises(UserError, match="a device of"):
        tiny.make_sampler(8, 0, 1.0)


@pytest.fixture
def told(capsys, monkeypatch, tmp_path):
    """told(*arguments) runs the command: (status, output, error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def run(*arguments: str) -> tuple[int, str, str]:
        status = cli.run(["plan", *arguments])
        return (status, *capsys.readouterr())

    return run


def _row(output: str, name: str) -> list[float]:
    (line,) = (line for line in output.splitlines() if line.startswith(name))
    return [float(text.replace(",", "")) for text in re.findall(r"  ([\d.,]+)\b", line)]


@pytest.mark.parametrize("memory", [80, 141])
def test_qwen3_8b(told, memory):
    """Shapes by name where the checkpoint is not there, eight GPUs that are not there."""
    status, output, error = told(
        "--rollout", "--config", _QWEN, "--config.model.name=qwen3_8b", f"--memory-gb={memory}",
        "--config.rollout.slots=512",
    )  # fmt: skip
    assert (status, error) == (0, "")
    assert f"8 devices of {memory}.00 GiB" in output
    assert "fp8_blockwise *" in output
    weights, state, work = (_row(output, n) for n in ("weights", "train state", "workspace"))
    # 6.95e9 numbers in linear layers and 1.24e9 in tables, of bf16 in either case.
    assert weights == pytest.approx([9.44e9 / _GIB, 16.38e9 / _GIB], rel=0.002)
    assert state == pytest.approx([12 * 8.19e9 / 8 / _GIB] * 2, rel=0.002)
    # 36 layers of 8 heads, k and v: 128 bytes and a scale, or 128 numbers of bf16.
    assert _row(output, "KV of a token") == [36 * 16 * 132 / 1024, 36 * 16 * 256 / 1024]
    for column, room in enumerate(_row(output, "pages that fit")):
        left = 0.92 * memory - weights[column] - state[column] - work[column]
        assert room * _row(output, "a page")[column] * 1024 == pytest.approx(left * _GIB, rel=0.01)
        assert _row(output, "slots of 4608")[column] == (room - 4) // 72
        assert _row(output, "slots of 2304")[column] == (room - 4) // 36
    fitting = min(64 * 72 + 4, _row(output, "pages that fit")[0])
    assert f"64 slots and {fitting:.0f} pages a device" in output


def test_static_batching_is_told_the_best_slots(told):
    """As many as fit at half the length, no more than a step has samples."""
    name = "--config.model.name=qwen3_8b"
    for memory, slots in ((80, 512), (30, None)):
        status, output, _ = told("--rollout", "--config", _QWEN, name, f"--memory-gb={memory}")
        assert status == 0
        best = int(re.search(r"rollout\.slots=(\d+)", output)[1])
        assert best == (slots or 8 * _row(output, "slots of 2304")[0])
    status, output, error = told("--rollout", "--config", _QWEN, name, "--memory-gb=22")
    assert status == 2
    assert "pages that fit" in output
    assert re.fullmatch(r"error: beside [^\n]* raise mesh\.fsdp\n", error)


def test_tiny_config_and_other_recipes(told):
    """The config's own recipe stands first, and beside it what it is not."""
    status, output, _ = told("--rollout", "--config", _TINY, "--devices=4")
    assert status == 0
    assert "4 devices" in output and "data 4" in output
    assert "32 samples" in output
    status, output, _ = told("--rollout", "--config", _TINY, "--config.precision.rollout=f32")
    assert status == 0
    assert re.search(r"f32 \* +fp8_blockwise +bf16", output)


def test_experts_and_latents(told):
    found = plan_config(
        load_config(str(_ROOT / "configs" / "moonlight_16b.py"),
                    ["--config.model.name=moonlight_16b_a3b"]),
        80 * _GIB,
    )  # fmt: skip
    latent = found.own.page / models.PAGE / preset("moonlight_16b_a3b").num_hidden_layers
    assert latent == 512 + 4 + 2 * 64


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["fp8rl plan --rollout --config FILE"]),
        (["--config", _TINY], ["fp8rl plan --rollout --config FILE"]),
        (["--rollout"], ["name a config"]),
        (["--rollout", "--config", _TINY, "--memory-gb=0"], ["--memory-gb is 0.0", "such as 80"]),
        (["--rollout", "--config", _TINY, "--memory-gb=nan"], ["--memory-gb is nan"]),
        (["--rollout", "--config", _TINY, "--memory-gb=much"], ["--memory-gb", "much"]),
        (["--rollout", "--config", _TINY, "--devices=0"], ["--devices is 0", "at least 1"]),
        (["--rollout", "--config", _TINY, "--devices=3"], ["does not divide", "3 devices"]),
        (["--rollout", "--config", _QWEN, "--devices=3"], ["--config.model.name=qwen3_8b"]),
        (["--rollout", "--config", _TINY, "now"], ["'now' is not understood"]),
        (["--rollout", "--config", _TINY, "--config.mesh.tensor=2"], ["mesh.tensor is 2"]),
        (
            ["--rollout", "--config", _TINY, "--config.rollout.slots=8",
             "--config.rollout.pages=99999", "--memory-gb=1"],
            ["rollout.pages is 99999", "or 0"],
        ),
    ],
)  # fmt: skip
def test_refused(told, arguments, words):
    status, _, error = told(*arguments)
    assert status == 2
    assert re.fullmatch(r"error: [^\n]+\n", error), error
    for word in words:
        assert word in error
