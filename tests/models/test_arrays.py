"""The table of arrays against the modules that make them, and against trees of all forms."""

import dataclasses
import functools

import jax
import pytest
from jax.sharding import AbstractMesh

from fp8rl_jax import learner, models
from fp8rl_jax.models.arrays import (
    EXPERTS,
    GAIN,
    LAYER,
    LINEAR,
    MODEL,
    SCALE,
    array_in,
    array_of,
    is_matrix,
    role_of,
)
from fp8rl_jax.models.stacks import RUNS, layer_groups, path_of
from fp8rl_jax.quant import get_recipe, missing_scales
from fp8rl_jax.quant.kv import with_scales
from fp8rl_jax.sharding import MESH_AXES
from fp8rl_jax.training.optimizer import learning_rates, make_optimizer

# No two products of these are equal, so that no axis passes for another.
_SIZES = dict(
    vocab_size=72,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=14,
)
_LATENT = dict(kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=20)
_EXPERTS = dict(num_experts=6, moe_intermediate_size=52)
_FAMILIES = {
    "dense": {},
    "biased": {"qkv_bias": True, "qk_norm": False},
    "sandwich": {"sandwich_norms": True, "unit_offset_norms": True},
    "results_normed": {"sandwich_norms": True, "pre_norms": False, "qk_norm_by_head": False},
    "sunk": _EXPERTS | {"attention_sinks": True, "o_bias": True, "moe_bias": True},
    "tied": {"tie_word_embeddings": True, "qk_norm": False},
    "experts": _EXPERTS,
    "latent": _LATENT | {"qk_norm": False},
    "latent_of_queries": _LATENT
    | _EXPERTS
    | {
        "q_lora_rank": 12,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "scoring_func": "sigmoid",
    },
}


def _family(name: str) -> models.ModelConfig:
    return models.ModelConfig(**_SIZES, **_FAMILIES[name])


@pytest.mark.parametrize("name", _FAMILIES)
def test_modules_make_the_arrays_of_the_table(name):
    """Path, shape and dtype of what Flax initialises, and nothing besides."""
    config = _family(name)
    key = jax.random.key(0, impl="threefry2x32")
    made = jax.eval_shape(functools.partial(models.init_params, config), key)
    wanted = models.param_shapes(config)
    assert jax.tree.structure(wanted) == jax.tree.structure(made)
    for (keys, ours), theirs in zip(
        jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(made), strict=True
    ):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), path_of(keys)


def test_families_have_every_array():
    """No row is untested, and a row's role agrees with its shape."""
    seen = set()
    for name in _FAMILIES:
        for keys, leaf in jax.tree_util.tree_leaves_with_path(models.param_shapes(_family(name))):
            path = path_of(keys)
            stacked = path[0] in RUNS
            vectors = 1 + (array_of(path).axes == EXPERTS)  # one, or one of each expert
            assert is_matrix(path) == (leaf.ndim - stacked > vectors), path
            seen.add(array_of(path).path)
    assert seen == {array.path for array in (*MODEL, *LAYER)}


@pytest.mark.parametrize(
    "path",
    [
        ("layers", "up_proj", "bias"),
        ("down_proj", "bias"),
        ("layers", "bias"),
        ("bias",),
        ("other_experts", "down_proj", "kernel"),
        ("layers_middle", "down_proj", "kernel"),
        ("layers", "norm", "weights"),
    ],
)
def test_unknown_leaf_is_refused(path):
    for ask in (array_of, role_of, is_matrix):
        with pytest.raises(KeyError):
            ask(path)


def test_unknown_leaf_of_a_tree_is_refused():
    """Of every function that takes a tree of parameters: none passes it over."""
    params = models.param_shapes(_family("dense"))
    params["layers"]["up_proj"]["bias"] = jax.ShapeDtypeStruct((3, 40), "float32")
    mesh = AbstractMesh((1, 2, 1, 1), MESH_AXES)
    config = _family("dense")
    optimizer = make_optimizer(learning_rates(0.1, 0), 0.9, 0.99, 0.1, 1.0)
    for run in (
        lambda: models.param_shardings(mesh, params),
        lambda: models.weight_specs(params, config, get_recipe("fp8"), mesh),
        lambda: jax.eval_shape(lambda p: models.quantize_params(p, "fp8"), params),
        lambda: jax.eval_shape(lambda p: models.init_scaling(p, "fp8_delayed"), params),
        lambda: jax.eval_shape(lambda p: optimizer.update(p, optimizer.init(p), p), params),
    ):
        with pytest.raises(KeyError, match="bias"):
            run()


def test_runs_have_known_names():
    recipe = dataclasses.replace(get_recipe("fp8"), first_layers=2, last_layers=1)
    names = [run.name for run in layer_groups({"dense_layers": 3, "layers": 4}, recipe)]
    assert names == ["dense_layers_first", "dense_layers", "layers", "layers_last"]
    assert set(names) <= RUNS


@pytest.mark.parametrize("name", ["dense", "latent_of_queries"])
def test_what_belongs_to_a_parameter_is_stored_like_it(name):
    """A training state: moments as their masters; scaling states, KV scales, counts replicated."""
    config, recipe = _family(name), get_recipe("fp8_delayed")
    optimizer = make_optimizer(learning_rates(0.1, 0), 0.9, 0.99, 0.1, 1.0)
    state = jax.eval_shape(
        lambda p: learner.new_state(
            p,
            optimizer,
            jax.numpy.zeros(2, "uint32"),
            recipe,
            with_scales(models.init_scaling(p, recipe), missing_scales(3)),
        ),
        models.param_shapes(config),
    )
    assert state.scaling_state
    mesh = AbstractMesh((1, 2, 4, 2), MESH_AXES)
    found = models.param_shardings(mesh, state)
    alone = models.param_shardings(mesh, models.param_shapes(config))
    assert found.params == alone
    (adam, *_) = found.opt_state[1]
    assert adam.mu == alone
    assert adam.nu == alone
    others = dataclasses.replace(found, params=None, opt_state=None), adam.count
    assert all(not any(sharding.spec) for sharding in jax.tree.leaves(others))
    assert any(any(sharding.spec) for sharding in jax.tree.leaves(alone))


def test_rows_of_parts():
    """The parts of a quantised and of a trained weight have its row, and scales of keys one."""
    params = models.param_shapes(_family("dense"))
    scaling = with_scales({}, missing_scales(3))
    weights = jax.eval_shape(lambda p: models.quantize_params(p, "fp8", scaling), params)
    rows = [array_in(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(weights)]
    assert rows.count(array_of(("o_proj", "kernel"))) == 2
    roles = [row.role for row in rows if row]
    assert roles.count(SCALE) == 3
    assert {*roles} == {LINEAR, GAIN, SCALE, "table"}
