"""What may be cut over the mesh axis `tensor`: tests/test_sharding.py runs it on devices."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from jax.sharding import PartitionSpec

from fp8rl_jax import models
from fp8rl_jax.models.parallel import specs
from fp8rl_jax.quant import BoundWeight, Operand, QArray, get_recipe, static
from fp8rl_jax.sharding import abstract_mesh

_CONFIG = models.ModelConfig(320, 256, 512, 2, 4, 2, 64)
_FP8 = get_recipe("fp8")
_WHOLE, _COLUMNS = PartitionSpec(), PartitionSpec(None, None, "tensor")


@pytest.mark.parametrize(
    ("recipe", "unit"),
    [
        (get_recipe("f32"), 16),
        (get_recipe("bf16"), 16),
        (_FP8, 128),
        (get_recipe("fake"), 128),
        (get_recipe("mxfp8"), 32),
        (get_recipe("fp8_delayed"), 16),
        (get_recipe("fp8_tensorwise"), None),
        (dataclasses.replace(_FP8, weight=Operand(block=(128, 192))), 384),
        (dataclasses.replace(_FP8, gradient=Operand(block=(1, -1))), None),
        (dataclasses.replace(_FP8, gradient=Operand(block=(1, -1), policy=static(8.0))), 128),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_column_unit(recipe, unit):
    """A part holds whole blocks of weight and gradient; a scale read from all columns forbids."""
    assert specs.column_unit(recipe) == unit


def test_inputs_are_quantised_in_parts_only_by_whole_blocks():
    fits = specs.gathers_quantised
    assert fits(_FP8, 256) and not fits(_FP8, 192)
    assert fits(get_recipe("mxfp8"), 96) and not fits(get_recipe("mxfp8"), 48)
    assert fits(get_recipe("fp8_delayed"), 48)
    assert not fits(get_recipe("fp8_tensorwise"), 256)
    assert fits(get_recipe("f32"), 40)


@pytest.fixture(scope="module")
def params():
    return jax.eval_shape(
        lambda: models.init_params(_CONFIG, jax.random.key(0, impl="threefry2x32"))
    )


def _cut(specs) -> set[str]:
    """Names of the arrays that are cut."""
    leaves = jax.tree_util.tree_leaves_with_path(specs)
    return {
        jax.tree_util.keystr(path, simple=True, separator=".") for path, s in leaves if s != _WHOLE
    }


def _tensor(devices: int):
    return abstract_mesh({"data": 1, "fsdp": 1, "tensor": devices, "expert": 1})


def test_weights_whose_blocks_would_be_cut_stay_whole(params):
    """Keys have 128 columns: two devices would get half a block each."""
    weights = jax.eval_shape(lambda p: models.quantize_params(p, "fp8"), params)
    specs = models.weight_specs(weights, _CONFIG, _FP8, _tensor(2))
    assert jax.tree.structure(specs) == jax.tree.structure(weights)
    cut = {name.removesuffix(".kernel.qvalue") for name in _cut(specs) if name.endswith("qvalue")}
    linear = {f"layers.{name}" for name in ("o_proj", "gate_proj", "up_proj", "down_proj")}
    assert cut == linear | {"layers.self_attn.q_proj"}
    assert {name for name in _cut(specs) if "kernel" not in name} == {"lm_head"}
    gate = specs["layers"]["gate_proj"]["kernel"]
    assert gate.qvalue == gate.scale == _COLUMNS, "scales lie with their blocks"
    assert not _cut(models.weight_specs(weights, _CONFIG, _FP8, _tensor(1)))
    assert not _cut(models.weight_specs(weights, _CONFIG, _FP8, _tensor(3)))


def test_every_form_of_a_weight_is_cut_alike(params):
    """Masters, quantised weights, and both with states and probes."""
    recipe = get_recipe("fp8_delayed")

    def pair(params):
        scaling = models.init_scaling(params, recipe)
        weights = models.quantize_params(params, recipe, scaling)
        probes = models.init_probes(params, recipe, health=True)
        return models.trainable_params(params, weights, recipe, scaling, probes)

    paired = jax.eval_shape(pair, params)
    specs = models.weight_specs(paired, _CONFIG, recipe, _tensor(2))
    assert jax.tree.structure(specs) == jax.tree.structure(paired)
    gate = specs["layers"]["gate_proj"]["kernel"]
    assert isinstance(gate, BoundWeight) and isinstance(gate.value, QArray)
    assert gate.master == gate.value.qvalue.bits == _COLUMNS
    assert gate.value.scale == _WHOLE, "one scale for all columns"
    assert set(jax.tree.leaves((gate.scaling, gate.probe))) == {_WHOLE}
    plain = models.weight_specs(params, _CONFIG, recipe, _tensor(2))
    assert plain["layers"]["gate_proj"]["kernel"] == _COLUMNS


def test_each_run_of_layers_has_its_own_blocks(params):
    """Layers in bf16 may be cut where FP8 ones may not."""
    recipe = dataclasses.replace(_FP8, first_layers=1, bf16_modules=("v_*",))
    weights = jax.eval_shape(lambda p: models.quantize_params(p, recipe), params)
    specs = models.weight_specs(weights, _CONFIG, recipe, _tensor(2))
    assert specs["layers_first"]["self_attn"]["k_proj"]["kernel"] == _COLUMNS
    assert specs["layers"]["self_attn"]["k_proj"]["kernel"].qvalue == _WHOLE
    assert specs["layers"]["self_attn"]["v_proj"]["kernel"] == _COLUMNS


def test_heads_are_shared_when_both_kinds_divide():
    assert specs.splits_heads(_CONFIG, 2)
    assert not specs.splits_heads(_CONFIG, 4)  # two key heads
    assert not specs.splits_heads(_CONFIG, 1)
