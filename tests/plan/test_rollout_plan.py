"""The plan of a rollout's memory: counted against real arrays, estimated against the compiler."""

from __future__ import annotations

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import pytest
from marks import slow
from planned import mesh_of, resolved_as
from random_model import initial_params
from small_models import DENSE, EXPERTS, LATENT

from fp8rl_jax import models
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.config import load_config
from fp8rl_jax.models.presets import preset
from fp8rl_jax.plan.bytes import page_bytes, state_bytes
from fp8rl_jax.plan.rollout import RolloutPlan, plan_rollout, sampler_bytes, workspace_bytes
from fp8rl_jax.quant import get_recipe
from fp8rl_jax.rollout import Batching, ContinuousSampler, Loop, Requests, SamplerConfig, make_refit
from fp8rl_jax.sharding import abstract_mesh
from fp8rl_jax.training import engine, runtime

_TINY = str(pathlib.Path(__file__).resolve().parents[2] / "configs" / "tiny_arithmetic.py")
_TIED = dataclasses.replace(DENSE, tie_word_embeddings=True)
_SETTINGS = SamplerConfig(64, 4, (1,), 0)
_GIB = 2**30


def _nbytes(tree) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def _loop(model, recipe: str, **changes) -> Loop:
    return Loop(model, dataclasses.replace(get_recipe(recipe), **changes), _SETTINGS)


@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        (DENSE, "fp8"),
        slow(DENSE, "bf16"),
        (DENSE, "f32"),
        slow(DENSE, "fp8_delayed"),
        slow(_TIED, "fp8"),
        (EXPERTS, "fp8"),
        (LATENT, "fp8"),
        slow(LATENT, "bf16"),
    ],
    ids=["fp8", "bf16", "f32", "delayed", "tied", "experts", "latent", "latent bf16"],
)
def test_counts_are_those_of_real_arrays(model, recipe):
    """Weights as refit makes them, pages as the sampler allocates them, masters and moments."""
    named = get_recipe(recipe)
    params = initial_params(model)
    scaling = exact_jit(lambda p: models.init_scaling(p, named))(params)
    weights = make_refit(named)(params, scaling)[0]
    one = mesh_of()
    assert sampler_bytes(_loop(model, recipe, kernels="triton"), named, one) == _nbytes(weights)
    prepared = ContinuousSampler(model, recipe, _SETTINGS, Batching(2, 8))._prepare(weights)
    made = 0 if prepared is weights else _nbytes(prepared)
    assert sampler_bytes(_loop(model, recipe), named, one) == _nbytes(weights) + made
    assert (made > 0) == (recipe != "f32")
    cache = models.init_paged_cache(model, named, 5, jnp.zeros((1, 1), jnp.int32))
    assert 5 * page_bytes(model, named) == _nbytes(cache.runs)
    for copies, fields in (
        (3, {}),
        (4, {"algo": {"kl_coef": 0.1}}),
        (1, {"learner": {"offload": "moments"}}),
    ):
        resolved = resolved_as(model, named, **fields)
        assert state_bytes(resolved, one).on_device == copies * _nbytes(params) + _nbytes(scaling)
    if model.num_experts:
        experts = sum(_nbytes(x["layers"]["experts"]) for x in (weights, prepared.weights))
        found = sampler_bytes(_loop(model, recipe), named, mesh_of(expert=2))
        assert found == _nbytes(weights) + made - experts // 2


def _compiled_workspace(model, recipe: str, slots: int) -> int:
    """Temporary bytes of the sampler's program, as XLA:CPU planned them."""
    prompts, length = 4, 64
    sampler = ContinuousSampler(model, recipe, _SETTINGS, Batching(slots, 40))
    count, named = prompts * _SETTINGS.group_size, get_recipe(recipe)

    def arguments():
        params = models.init_params(model, jax.random.key(0, impl="threefry2x32"))
        rope = models.rope_tables(model, length + _SETTINGS.max_new_tokens)
        ids = jnp.zeros(count, jnp.int32)
        requests = Requests(
            jnp.ones(prompts, jnp.int32),
            jax.random.key(1, impl="threefry2x32"),
            ids,
            jnp.ones(count),
            ids,
            tuple(map(jnp.asarray, rope)),
        )
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
)
def test_workspace_is_an_upper_estimate(model, slots):
    """Never below the compiler's figure, and not far above it."""
    found = workspace_bytes(_loop(model, "fp8"), slots, 64) / _compiled_workspace(
        model, "fp8", slots
    )
    assert 1 <= found <= 4, found


def _plan(**changes) -> RolloutPlan:
    sizes = dict(
        weights=2 * _GIB,
        train_state=_GIB,
        workspace=_GIB,
        page=2**20,
        memory=None,
        tokens=200,
        slots=8,
        sequences=8,
    )
    return RolloutPlan(**{**sizes, **changes})


def test_pages_follow_the_memory():
    """As many as the slots can fill; if these do not fit, as many as fit; else an error."""
    assert _plan().pages == _plan(memory=80 * _GIB).pages == _plan().wanted == 8 * 4 + 4
    for megabytes in (10, 20, 30):
        plan = _plan(memory=4 * _GIB + megabytes * 2**20 + 100)
        assert plan.pages == plan.fitting == megabytes
        assert plan.slots_of(200) == (megabytes - 4) // 4
        assert plan.slots_of(100) == (megabytes - 4) // 2
    least = models.least_pages(200)
    tight = _plan(memory=4 * _GIB + least * 2**20 + 100)
    assert tight.pages == least
    for memory in (tight.memory - 2**20, _GIB):
        with pytest.raises(UserError, match=r"rollout\.max_prompt_tokens.*rollout\.slots.*fsdp"):
            _ = _plan(memory=memory).pages
    assert _plan(memory=_GIB).fitting == _plan(memory=_GIB).slots_of(200) == 0


def test_train_state_is_sharded():
    """Sharded over fsdp where it divides; an axis of -1 has one device unless more are named."""
    axes = {"data": -1, "fsdp": 8, "tensor": 1, "expert": 1}
    resolved = resolved_as(preset("qwen3_8b"), get_recipe("fp8"))
    eighth = state_bytes(resolved, abstract_mesh(axes)).on_device
    whole = state_bytes(resolved, mesh_of()).on_device
    assert 1 <= eighth * 8 / whole < 1.01
    assert abstract_mesh(axes).size == 8
    assert abstract_mesh(axes, 32).shape["data"] == 4
    with pytest.raises(UserError, match="8 places for 12 devices"):
        abstract_mesh(axes | {"data": 1}, 12)


@pytest.fixture
def tiny():
    """A runtime with four slots."""
    fields = ("rollout.slots=4", "eval.questions=16", "env.train_questions=16", "sft.steps=0")
    config = load_config(_TINY, [f"--config.{field}" for field in fields])
    return runtime.make_runtime(config, with_questions=False)


def test_a_run_allocates_the_plan(tiny, monkeypatch):
    """`rollout.pages` 0 gives the sampler the plan's pages, a share to every device."""
    made, resolved = [], tiny.resolved
    monkeypatch.setattr(engine, "ContinuousSampler", lambda *a, **_: made.append(a[3]))
    for spare in (100, 5):
        bare = plan_rollout(resolved, tiny.mesh)
        used = bare.weights + bare.train_state + bare.workspace
        memory = used + spare * bare.page + 10
        monkeypatch.setattr(engine, "device_memory", lambda memory=memory: memory)
        tiny.engine.make_sampler(8, 0, 1.0)
        assert made[-1].pages == plan_rollout(resolved, tiny.mesh, memory).pages == min(spare, 8)
    many = mesh_of(data=2, fsdp=2)
    spread = dataclasses.replace(tiny, mesh=many)
    monkeypatch.setattr(engine, "device_memory", lambda: _GIB)
    assert spread.engine._batching().pages == 4 * plan_rollout(resolved, many, _GIB).pages == 4 * 5
    monkeypatch.setattr(engine, "device_memory", lambda: 2**20)
    with pytest.raises(UserError, match="a device, of which a run may fill"):
        tiny.engine.make_sampler(8, 0, 1.0)
