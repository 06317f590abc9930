"""Parameters of experts: initialisation, the three forms, states per expert, storage on a mesh."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from oracles import decoder_oracle, quant_oracle
from random_model import quantized

from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.models import (
    ModelConfig,
    Tokens,
    checksum,
    forward,
    init_params,
    init_probes,
    init_scaling,
    param_shapes,
    param_shardings,
    quantize_params,
    rope_tables,
    trainable_params,
    update_scaling,
    weight_health,
)
from fp8rl_jax.quant import BoundWeight, QArray, get_recipe
from fp8rl_jax.sharding import MESH_AXES

_NAMES = ("gate_proj", "up_proj", "down_proj")
# Experts of 160 x 136: several blocks of 128, the last ones partial.
_MODEL = ModelConfig(
    vocab_size=50,
    hidden_size=160,
    intermediate_size=1,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=136,
)
_LENGTH = 20


@functools.cache
def _params():
    return decoder_oracle.random_params(param_shapes(_MODEL), 0)


def _inputs():
    tokens = np.random.default_rng(0).integers(0, _MODEL.vocab_size, (2, _LENGTH))
    return tokens.astype(np.int32), rope_tables(_MODEL, _LENGTH)


@functools.cache
def _refit(recipe):
    """Weights, checksum and health, in one program."""

    def run(params):
        weights = quantize_params(params, recipe, init_scaling(params, recipe))
        return weights, checksum(weights), weight_health(params, weights, recipe)

    return exact_jit(run)(_params())


@pytest.mark.slow
def test_init_params():
    """Shapes, and standard deviations by the fan-in of one expert; no two experts alike."""
    init = jax.jit(functools.partial(init_params, _MODEL))
    layers = init(jax.random.key(0, impl="unsafe_rbg"))["layers"]
    residual = 1 / np.sqrt(2 * 2)
    expected = {
        "gate_proj": ((2, 4, 160, 136), 1 / np.sqrt(160)),
        "up_proj": ((2, 4, 160, 136), 1 / np.sqrt(160)),
        "down_proj": ((2, 4, 136, 160), residual / np.sqrt(136)),
    }
    assert set(layers["experts"]) == set(expected) and not set(layers) & set(expected)
    for name, (shape, deviation) in expected.items():
        kernel = np.asarray(layers["experts"][name]["kernel"])
        assert kernel.shape == shape and kernel.dtype == np.float32
        for expert in kernel.reshape(8, -1):
            assert expert.std() == pytest.approx(deviation, rel=0.03)
        assert len({float(expert[0]) for expert in kernel.reshape(8, -1)}) == 8
    router = np.asarray(layers["router"]["kernel"])
    assert router.shape == (2, 160, 4)
    assert router.std() == pytest.approx(1 / np.sqrt(160), rel=0.1)


@pytest.mark.parametrize("recipe", ["fp8", "bf16"])
def test_the_router_is_float32_in_every_form(recipe):
    weights = _refit(recipe)[0]
    router = weights["layers"]["router"]["kernel"]
    assert router.dtype == jnp.float32
    np.testing.assert_array_equal(router, _params()["layers"]["router"]["kernel"])
    assert trainable_params(_params(), weights, recipe)["layers"]["router"]["kernel"].shape == (
        2,
        160,
        4,
    )


def test_each_expert_has_blocks_of_its_own():
    """The oracle's bytes and scales of every expert alone."""
    for name in _NAMES:
        weight = _refit("fp8")[0]["layers"]["experts"][name]["kernel"]
        assert isinstance(weight, QArray)
        rounded = _params()["layers"]["experts"][name]["kernel"].astype(ml_dtypes.bfloat16)
        for place in np.ndindex(2, 4):
            codes, scale = quant_oracle.quantize_blocks(
                rounded[place].astype(np.float32), (128, 128)
            )
            np.testing.assert_array_equal(np.asarray(weight.qvalue[place]).view(np.uint8), codes)
            np.testing.assert_array_equal(np.asarray(weight.scale[place]), scale)


def test_modules_and_layers_in_bf16():
    """Patterns name the experts' matrices as they name those of a dense layer."""
    recipe = dataclasses.replace(get_recipe("fp8"), bf16_modules=("down_*",), first_layers=1)
    weights = quantized(_params(), recipe)
    for name in _NAMES:
        first = weights["layers_first"]["experts"][name]["kernel"]
        assert first.dtype == jnp.bfloat16 and first.shape[:2] == (1, 4)
        last = weights["layers"]["experts"][name]["kernel"]
        assert isinstance(last, QArray) == (name != "down_proj")


@functools.cache
def _train_step(recipe):
    """(logits, gradients by masters, gradients by probes) as the learner computes them."""

    def step(params, tokens, rope):
        scaling = init_scaling(params, recipe)
        weights = quantize_params(params, recipe, scaling)

        def loss(params, probes):
            paired = trainable_params(params, weights, recipe, scaling, probes)
            logits = forward(paired, Tokens.of(tokens, rope), _MODEL, recipe).logits
            logp = jax.nn.log_softmax(logits[:, :-1])
            return -jnp.take_along_axis(logp, tokens[:, 1:, None], -1).mean(), logits

        probes = init_probes(params, recipe, True)
        (grads, seen), logits = jax.grad(loss, (0, 1), has_aux=True)(params, probes)
        return logits, grads, seen, update_scaling(params, recipe, scaling, seen)

    return jax.device_get(exact_jit(step)(_params(), *_inputs()))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8", "f32"])
def test_three_forms_give_the_same_bits(recipe):
    """Raw masters, rollout weights, and masters paired with weights under a gradient."""
    program = exact_jit(
        lambda params, tokens, rope: forward(params, Tokens.of(tokens, rope), _MODEL, recipe).logits
    )
    rollout = program(_refit(recipe)[0], *_inputs())
    assert np.isfinite(rollout).all() and np.std(rollout) > 0.1
    np.testing.assert_array_equal(program(_params(), *_inputs()), rollout)
    np.testing.assert_array_equal(_train_step(recipe)[0], rollout)


@pytest.mark.slow  # and equal to a dense loop: tests/models/test_moe.py
@pytest.mark.parametrize("recipe", ["fp8", "f32"])
def test_gradients_reach_every_expert(recipe):
    layers = _train_step(recipe)[1]["layers"]
    for kernel in (layers["router"]["kernel"], *(layers["experts"][n]["kernel"] for n in _NAMES)):
        assert kernel.dtype == np.float32 and np.isfinite(kernel).all()
        assert (np.abs(kernel).max((-2, -1)) > 1e-6).all()


def test_the_checksum_sees_one_bit():
    """Of one scale of one expert, and of the router."""
    weights, base, _ = _refit("fp8")
    leaves, structure = jax.tree.flatten(weights)
    program = jax.jit(checksum)
    paths = [str(path) for path, _ in jax.tree_util.tree_leaves_with_path(weights)]
    changed = 0
    for index, path in enumerate(paths):
        if "experts" in path or "router" in path:
            other = np.array(leaves[index])
            other.reshape(-1).view(np.uint8)[-1] ^= 1
            flipped = [other if i == index else x for i, x in enumerate(leaves)]
            assert int(program(jax.tree.unflatten(structure, flipped))) != int(base)
            changed += 1
    assert changed == 3 * 2 + 1


@pytest.mark.slow
def test_health_counts_every_expert():
    """Weights by the refit; activations and gradients by probes, k rows a token and padding."""
    health = _refit("fp8")[2]
    seen = _train_step("fp8")[2]
    for name in _NAMES:
        site = f"layers.experts.{name}"
        assert health[site]["elements"].shape == (2, 4)
        assert (np.asarray(health[site]["elements"]) == 160 * 136).all()
        counts = seen[site].activation.counts
        assert counts.shape == (2, 4, 4)
        depth = 136 if name == "down_proj" else 160
        rows = counts[..., 3].sum(1) / depth
        assert (rows >= 2 * _LENGTH * 2).all(), "every token at two experts"


# States of scaling policies.


@pytest.mark.slow
def test_every_expert_has_states_of_its_own():
    """Delayed scaling: an expert's weights have their own amax, and so have its rows."""
    states = jax.device_get(init_scaling(_params(), "fp8_delayed"))
    weights = quantize_params(_params(), "fp8_delayed", states)
    _, _, seen, after = _train_step("fp8_delayed")
    for name in _NAMES:
        site = f"layers.experts.{name}"
        master = _params()["layers"]["experts"][name]["kernel"].astype(ml_dtypes.bfloat16)
        largest = np.abs(master.astype(np.float32)).max((2, 3))
        np.testing.assert_array_equal(states[site].weight.state["amax"][..., 0, 0], largest)
        bound = weights["layers"]["experts"][name]["kernel"]
        assert isinstance(bound, BoundWeight)
        assert bound.scaling.activation.age.shape == (2, 4)
        observed = seen[site].activation.amax
        assert observed.shape == (2, 4, 1, 1) and len(np.unique(observed)) > 4
        history = after[site].activation.state["history"]
        np.testing.assert_array_equal(history[:, :, 0], observed)
        assert not after[site].activation.age.any()


def test_an_expert_without_tokens_grows_old():
    """Its scale stays and its age tells; the others' start anew."""
    recipe, name = get_recipe("fp8_delayed"), "layers.experts.up_proj"
    states = exact_jit(lambda p: init_scaling(p, recipe))(_params())
    seen = exact_jit(lambda p: init_probes(p, recipe, False))(_params())
    amax = seen[name].activation.amax.at[:, :3].set(2.0)
    operand = dataclasses.replace(seen[name].activation, amax=amax)
    seen = {**seen, name: dataclasses.replace(seen[name], activation=operand)}
    update = exact_jit(lambda p, states, seen: update_scaling(p, recipe, states, seen))
    after = update(_params(), states, seen)[name].activation
    np.testing.assert_array_equal(after.age, [[0, 0, 0, 1]] * 2)
    np.testing.assert_array_equal(after.state["amax"][:, :3, 0, 0], 2.0)
    before = states[name].activation.state["amax"]
    np.testing.assert_array_equal(after.state["amax"][:, 3], before[:, 3])


# Storage.


def test_storage_on_a_mesh():
    """Whole experts over `expert` and `fsdp`, or `expert` alone; the router over `fsdp`."""
    mesh = AbstractMesh((1, 2, 1, 2), MESH_AXES)
    specs = jax.tree.map(lambda s: tuple(s.spec), param_shardings(mesh, _params()))["layers"]
    assert specs["experts"]["gate_proj"]["kernel"] == (None, ("expert", "fsdp"))
    assert specs["experts"]["down_proj"]["kernel"] == (None, ("expert", "fsdp"))
    eight = param_shardings(AbstractMesh((1, 2, 1, 4), MESH_AXES), _params())["layers"]["experts"]
    assert tuple(eight["up_proj"]["kernel"].spec) in ((None, "expert"), (None, ("expert",)))
    assert specs["router"]["kernel"] == (None, "fsdp")
    assert specs["o_proj"]["kernel"] == (None, "fsdp", "tensor")
    odd = AbstractMesh((1, 1, 1, 3), MESH_AXES)
    whole = param_shardings(odd, _params())["layers"]["experts"]["up_proj"]["kernel"]
    assert whole.is_fully_replicated, "three devices do not divide four experts"
