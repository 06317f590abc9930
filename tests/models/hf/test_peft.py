"""Adapters in PEFT's format: names and shapes, there and back, PEFT's own files, refusals."""

from __future__ import annotations

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from hf_checkpoints import CONFIGS, params_of
from marks import slow
from safetensors.numpy import load_file, save_file

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.models import hf
from fp8rl_jax.models.hf.peft import check_adapter, load_adapter, save_adapter
from fp8rl_jax.models.lora import Adapted, merged, new_adapters

_RANK, _ALPHA = 3, 6.0


def _adapters(name: str, modules=("*",)):
    """Of CONFIGS[name], with B too random."""
    key = jax.random.key(0, impl="threefry2x32")
    own = new_adapters(params_of(name), _RANK, modules, key)
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: 0.1 * rng.standard_normal(x.shape).astype(np.float32), own)


def _saved(directory, name: str, modules=("*",)):
    adapters = _adapters(name, modules)
    save_adapter(directory, CONFIGS[name], adapters, alpha=_ALPHA, base="the/base")
    return adapters


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_there_and_back(name, tmp_path):
    config, adapters = CONFIGS[name], _saved(tmp_path / "own", name)
    check_adapter(str(tmp_path / "own"), config, adapters, _RANK, _ALPHA)
    found = load_adapter(str(tmp_path / "own"), config, adapters)
    jax.tree.map(np.testing.assert_array_equal, found, adapters)
    about = json.loads((tmp_path / "own" / "adapter_config.json").read_text())
    assert (about["r"], about["lora_alpha"], about["base_model_name_or_path"]) == (3, 6, "the/base")
    assert {"q_proj", "down_proj"} <= set(about["target_modules"])


def test_names_and_shapes(tmp_path):
    """Written out by hand; a dense layer lies before the experts."""
    adapters = _saved(tmp_path / "own", "qwen3_moe")
    found, at = load_file(tmp_path / "own" / "adapter_model.safetensors"), "base_model.model.model."
    a = adapters["dense_layers"]["gate_proj"]["lora_a"]
    np.testing.assert_array_equal(found[f"{at}layers.0.mlp.gate_proj.lora_A.weight"], a[0].T)
    b = adapters["layers"]["experts"]["down_proj"]["lora_b"]
    name = f"{at}layers.2.mlp.experts.5.down_proj.lora_B.weight"
    np.testing.assert_array_equal(found[name], b[1, 5].T)
    b = adapters["layers"]["o_proj"]["lora_b"]
    np.testing.assert_array_equal(found[f"{at}layers.1.self_attn.o_proj.lora_B.weight"], b[0].T)
    assert len(found) == 2 * sum(
        np.prod(leaf.shape[:-2]) for leaf in jax.tree.leaves(adapters) if leaf.shape[-1] == _RANK
    )


def test_bf16_is_read(tmp_path):
    config, adapters = CONFIGS["qwen3"], _saved(tmp_path / "own", "qwen3", ("q_proj",))
    file = tmp_path / "own" / "adapter_model.safetensors"
    save_file({n: x.astype(ml_dtypes.bfloat16) for n, x in load_file(file).items()}, file)
    check_adapter(str(tmp_path / "own"), config, adapters, _RANK, _ALPHA)
    found = load_adapter(str(tmp_path / "own"), config, adapters)
    rounded = jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32), adapters)
    jax.tree.map(np.testing.assert_array_equal, found, rounded)


_CHANGES = {
    "rank": ({"r": 8}, ["r = 8", "lora.rank is 3", "write lora.rank=8"]),
    "alpha": ({"lora_alpha": 16}, ["lora_alpha = 16", "lora.alpha is 6", "write lora.alpha=16"]),
    "dora": ({"use_dora": True}, ["use_dora", "plain LoRA"]),
    "rslora": ({"use_rslora": True}, ["use_rslora"]),
    "kind": ({"peft_type": "IA3"}, ["peft_type", "IA3"]),
    "biases": ({"bias": "all"}, ["bias"]),
    "ranks that differ": ({"rank_pattern": {"q_proj": 4}}, ["rank_pattern"]),
    "no rank": ({"r": None}, ["no field r"]),
}


@pytest.mark.parametrize(("changes", "words"), _CHANGES.values(), ids=_CHANGES)
def test_other_adapters_are_refused(changes, words, tmp_path):
    adapters = _saved(tmp_path / "own", "qwen3")
    file = tmp_path / "own" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(UserError) as refusal:
        check_adapter(str(tmp_path / "own"), CONFIGS["qwen3"], adapters, _RANK, _ALPHA)
    assert "lora.checkpoint" in str(refusal.value) and "\n" not in str(refusal.value)
    for word in words:
        assert word in str(refusal.value), refusal.value


def test_other_modules_and_models_are_refused(tmp_path):
    config, check = CONFIGS["qwen3"], check_adapter
    wanted = _saved(tmp_path / "own", "qwen3", ("q_proj", "v_proj"))
    with pytest.raises(UserError, match=r"write lora\.modules='q_proj,v_proj'"):
        check(str(tmp_path / "own"), config, _adapters("qwen3"), _RANK, _ALPHA)
    other = jax.tree.map(lambda x: x[..., :-1], wanted)
    with pytest.raises(UserError, match=r"has the shape .* take an adapter of this model"):
        check(str(tmp_path / "own"), config, other, _RANK, _ALPHA)
    with pytest.raises(UserError, match=r"has no adapter_config\.json: name the directory"):
        check(str(tmp_path), config, wanted, _RANK, _ALPHA)
    with pytest.raises(UserError, match="exists already"):
        _saved(tmp_path / "own", "qwen3")


@pytest.fixture
def oracle():
    reason = "PEFT is the published oracle (the extra 'oracles')"
    pytest.importorskip("torch", reason=reason)
    pytest.importorskip("transformers", minversion="5", reason=reason)
    return pytest.importorskip("peft", reason=reason)


@pytest.mark.parametrize("name", ["qwen3", slow("llama")])
def test_peft_merges_the_same_weights(name, oracle, tmp_path):
    """Theirs of our files; the products differ in the order of their sums."""
    import transformers

    config, params = CONFIGS[name], params_of(name)
    hf.save(tmp_path / "base", config, params, dtype="float32")
    adapters = _saved(tmp_path / "adapter", name, ("[qv]_proj", "o_proj", "*_proj"))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = oracle.PeftModel.from_pretrained(model, tmp_path / "adapter").merge_and_unload()
    model.save_pretrained(tmp_path / "theirs")
    _, theirs = hf.load(tmp_path / "theirs")
    ours = merged(Adapted(params, adapters, _ALPHA / _RANK))
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), ours, dict(params))
    assert moved["layers"]["o_proj"]["kernel"] > 0.01
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-7), ours, theirs)


def test_an_adapter_of_peft_is_read(oracle, tmp_path):
    import torch
    import transformers

    config = CONFIGS["qwen3"]
    hf.save(tmp_path / "base", config, params_of("qwen3"), dtype="float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    wanted = oracle.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    model = oracle.get_peft_model(model, wanted)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "lora_B" in name:
                x.normal_()
    model.save_pretrained(tmp_path / "theirs")
    key = jax.random.key(0, impl="threefry2x32")
    shapes = new_adapters(params_of("qwen3"), 4, ("q_proj", "v_proj"), key)
    check_adapter(str(tmp_path / "theirs"), config, shapes, 4, 8.0)
    found = load_adapter(str(tmp_path / "theirs"), config, shapes)
    for layer, block in enumerate(model.base_model.model.model.layers):
        theirs = block.self_attn.v_proj.lora_B["default"].weight.detach().numpy()
        ours = found["layers"]["self_attn"]["v_proj"]["lora_b"][layer]
        np.testing.assert_array_equal(ours, theirs.T)
