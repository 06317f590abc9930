"""Adapters in PEFT's format: names and shapes, there and back, refusals; and for every family, what
PEFT applies of our files, and its own files here."""

from __future__ import annotations

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from hf_checkpoints import CONFIGS, named, random_of, write
from marks import quick_if
from safetensors.numpy import load_file, save_file

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.models import param_shapes
from fp8rl_jax.models.hf.config_json import config_json
from fp8rl_jax.models.hf.peft import check_adapter, load_adapter, save_adapter
from fp8rl_jax.models.masters import new_adapters

_RANK, _ALPHA = 3, 6.0


def _random(config, modules=("*",), rank: int = _RANK):
    """Adapters with B too random."""
    key = jax.random.key(0, impl="threefry2x32")
    shapes = jax.eval_shape(lambda: new_adapters(param_shapes(config), rank, modules, key))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: 0.1 * rng.standard_normal(x.shape).astype(np.float32), shapes)


def _saved(directory, name: str, modules=("*",), base: str = "the/base"):
    adapters = _random(CONFIGS[name], modules)
    save_adapter(directory, CONFIGS[name], adapters, alpha=_ALPHA, base=base)
    return adapters


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "gpt_oss"])
def test_there_and_back(name, tmp_path):
    config, adapters = CONFIGS[name], _saved(tmp_path / "own", name)
    check_adapter(str(tmp_path / "own"), config, adapters, _RANK, _ALPHA)
    found = load_adapter(str(tmp_path / "own"), config, adapters)
    jax.tree.map(np.testing.assert_array_equal, found, adapters)
    about = json.loads((tmp_path / "own" / "adapter_config.json").read_text())
    assert (about["r"], about["lora_alpha"], about["base_model_name_or_path"]) == (3, 6, "the/base")
    assert "q_proj" in about["target_modules"]


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


def test_packed_experts(tmp_path):
    """gpt-oss, written out by hand: gate and up have rows of A, and columns of the layer, in
    turns."""
    experts = _saved(tmp_path / "own", "gpt_oss")["layers"]["experts"]
    tensors = load_file(tmp_path / "own" / "adapter_model.safetensors")
    name = "base_model.model.model.layers.2.mlp.experts.base_layer.lora_{}.weight"
    a = tensors[name.format("A")]
    b = tensors[name.format("B")]
    count = CONFIGS["gpt_oss"].num_experts
    for number, layer in enumerate(("gate_proj", "up_proj")):
        for expert in range(count):
            for j in range(_RANK):
                row = number * _RANK + j
                ours = experts[layer]["lora_a"][2, expert, :, j]
                np.testing.assert_array_equal(a[expert * 2 * _RANK + row], ours)
                ours = experts[layer]["lora_b"][2, expert, j]
                np.testing.assert_array_equal(b[number::2, row * count + expert], ours)
                assert not b[1 - number :: 2, row * count + expert].any()
    down = tensors[name.replace(".base_layer", "").format("B")]
    assert down.shape == (CONFIGS["gpt_oss"].hidden_size, _RANK * count)
    about = json.loads((tmp_path / "own" / "adapter_config.json").read_text())
    assert about["target_parameters"] == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    assert about["rank_pattern"] == {r".*\.gate_up_proj": 6}
    assert about["alpha_pattern"] == {r".*\.gate_up_proj": 12}


@pytest.mark.parametrize(
    ("base", "name", "revision"),
    [
        ("", None, None),
        ("checkpoints/mine", "checkpoints/mine", None),
        ("/cache/hub/models--acme--a.b-c/snapshots/0f9d", "acme/a.b-c", "0f9d"),
    ],
)
def test_the_base_is_named(base, name, revision, tmp_path):
    """A snapshot of Hugging Face's Hub by its repository, not by this machine's directory."""
    adapters = _random(CONFIGS["qwen3"], ("q_proj",))
    save_adapter(tmp_path / "own", CONFIGS["qwen3"], adapters, alpha=_ALPHA, base=base)
    about = json.loads((tmp_path / "own" / "adapter_config.json").read_text())
    assert (about["base_model_name_or_path"], about["revision"]) == (name, revision)


def test_gemma_needs_the_class_of_its_base(tmp_path):
    config = CONFIGS["gemma3"]
    with pytest.raises(UserError, match=r"names of its base's class, and .*moved is no"):
        save_adapter(
            tmp_path / "own", config, _random(config), alpha=_ALPHA, base=str(tmp_path / "moved")
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
    "no number": ({"lora_alpha": float("nan")}, ["lora_alpha is nan", "finite"]),
    "dora": ({"use_dora": True}, ["use_dora", "plain LoRA"]),
    "rslora": ({"use_rslora": True}, ["use_rslora"]),
    "kind": ({"peft_type": "IA3"}, ["peft_type", "IA3"]),
    "biases": ({"bias": "all"}, ["bias"]),
    "ranks that differ": ({"rank_pattern": {"q_proj": 4}}, ["rank_pattern"]),
    "no rank": ({"r": None}, ["no field r"]),
    "tokens": ({"trainable_token_indices": [1]}, ["trainable_token_indices", "plain LoRA"]),
    "a variant": ({"kasa_config": {"beta": 1.0}}, ["kasa_config", "remove the field"]),
    "unknown": ({"use_newlora": True}, ["adapter_config.json: use_newlora is True", "plain LoRA"]),
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


def test_fields_that_change_nothing_are_read(tmp_path):
    """Those of PEFT 0.21, of unsloth and of a later version, unless set."""
    adapters = _saved(tmp_path / "own", "qwen3")
    file = tmp_path / "own" / "adapter_config.json"
    more = {"auto_mapping": {"unsloth_fixed": True}, "peft_version": "0.21.2", "kasa_config": None}
    more |= {"megatron_core": "megatron.core", "qalora_group_size": 16, "loftq_config": {}}
    more |= {"exclude_modules": ["lm_head"], "use_newlora": False, "new_config": {}, "new_list": []}
    file.write_text(json.dumps(json.loads(file.read_text()) | more))
    check_adapter(str(tmp_path / "own"), CONFIGS["qwen3"], adapters, _RANK, _ALPHA)


def _edited(directory, change) -> None:
    """Changes the tensors of an adapter's file."""
    file = directory / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


_AT = "base_model.model.model.layers.1."
_EXTRA = {  # a tensor's name -> words of the refusal
    "base_model.model.model.vision_tower.encoder.layers.0.self_attn.q_proj": ["vision tower"],
    "base_model.model.model.embed_tokens": ["the embedding"],
    "base_model.model.lm_head": ["the output head"],
    _AT + "mlp.gate": ["the router"],
    _AT + "self_attn.kv_b_proj": ["by head"],
    _AT + "self_attn.k_proj": ["leaves k_proj out", "write lora.modules='k_proj,q_proj'"],
    _AT.replace("1", "9") + "self_attn.q_proj": ["3 layers"],
    _AT.replace("layers", "language_model.layers") + "self_attn.q_proj": ["no linear layer"],
    _AT + "self_attn.q_proj.default": ["before save_pretrained"],
}


@pytest.mark.parametrize(("name", "words"), _EXTRA.items(), ids=[*_EXTRA])
def test_the_first_tensor_without_a_place_is_named(name, words, tmp_path):
    """And one that does nothing needs none."""
    adapters = _saved(tmp_path / "own", "qwen3", ("q_proj",))
    matrix = np.ones((3, 3), np.float32)
    pair = {f"{name}.lora_A.weight": matrix, f"{name}.lora_B.weight": matrix}
    _edited(tmp_path / "own", lambda tensors: tensors.update(pair))
    with pytest.raises(UserError) as refusal:
        check_adapter(str(tmp_path / "own"), CONFIGS["qwen3"], adapters, _RANK, _ALPHA)
    for word in (f"{name}.lora_A.weight has no place", *words):
        assert word in str(refusal.value), refusal.value
    pair[f"{name}.lora_B.weight"] = 0 * matrix
    _edited(tmp_path / "own", lambda tensors: tensors.update(pair))
    if "k_proj" not in name:
        check_adapter(str(tmp_path / "own"), CONFIGS["qwen3"], adapters, _RANK, _ALPHA)


@pytest.mark.parametrize(("matrix", "value"), [("lora_A", np.nan), ("lora_B", -np.inf)])
def test_weights_are_finite(matrix, value, tmp_path):
    """The first that is not is named, as those of the base are."""
    adapters = _saved(tmp_path / "own", "qwen3", ("q_proj",))
    name = f"{_AT}self_attn.q_proj.{matrix}.weight"

    def spoil(tensors):
        tensors[name][0, :2] = tensors[name.replace("layers.1", "layers.2")][0] = value

    _edited(tmp_path / "own", spoil)
    words = rf"model\.safetensors: 2 of the \d+ elements of tensor {name} are NaN or infinite: take"
    with pytest.raises(UserError, match=words):
        check_adapter(str(tmp_path / "own"), CONFIGS["qwen3"], adapters, _RANK, _ALPHA)


@pytest.mark.parametrize("matrix", ["lora_A", "lora_B", ""])
def test_a_missing_tensor_is_named(matrix, tmp_path):
    adapters = _saved(tmp_path / "own", "qwen3", ("q_proj",))
    start = f"{_AT}self_attn.q_proj.{matrix}"

    def cut(tensors):
        for name in [name for name in tensors if name.startswith(start)]:
            del tensors[name]

    _edited(tmp_path / "own", cut)
    with pytest.raises(UserError, match=rf"has no {start}"):
        check_adapter(str(tmp_path / "own"), CONFIGS["qwen3"], adapters, _RANK, _ALPHA)


def test_gate_and_up_that_share_their_rank(tmp_path):
    """As PEFT trains them together: no adapter of half the rank holds them."""
    adapters = _saved(tmp_path / "own", "gpt_oss")

    def mix(tensors):
        tensors["base_model.model.model.layers.0.mlp.experts.base_layer.lora_B.weight"][:] = 1

    _edited(tmp_path / "own", mix)
    with pytest.raises(UserError, match=r"mixes .*: write lora\.rank=6 and lora\.alpha=12"):
        check_adapter(str(tmp_path / "own"), CONFIGS["gpt_oss"], adapters, _RANK, _ALPHA)
    wider = _random(CONFIGS["gpt_oss"], rank=2 * _RANK)
    check_adapter(str(tmp_path / "own"), CONFIGS["gpt_oss"], wider, 2 * _RANK, 2 * _ALPHA)


def test_names_of_older_transformers(tmp_path):
    """Gemma 3 with images, before transformers 4.52."""
    adapters = _saved(tmp_path / "own", "gemma3", ("q_proj",), base="")
    prefixes = "base_model.model.model.", "base_model.model.language_model.model."

    def rename(tensors):
        for name in list(tensors):
            tensors[name.replace(*prefixes)] = tensors.pop(name)

    _edited(tmp_path / "own", rename)
    check_adapter(str(tmp_path / "own"), CONFIGS["gemma3"], adapters, _RANK, _ALPHA)
    same = load_adapter(str(tmp_path / "own"), CONFIGS["gemma3"], adapters)
    jax.tree.map(np.testing.assert_array_equal, same, adapters)


def test_other_modules_and_models_are_refused(tmp_path):
    config, check = CONFIGS["qwen3"], check_adapter
    wanted = _saved(tmp_path / "own", "qwen3", ("q_proj", "v_proj"))
    with pytest.raises(UserError, match=r"write lora\.modules='q_proj,v_proj'"):
        check(str(tmp_path / "own"), config, _random(config), _RANK, _ALPHA)
    other = dataclasses.replace(config, head_dim=16)
    with pytest.raises(UserError, match=r"has the shape .* take an adapter of this model"):
        check(str(tmp_path / "own"), other, wanted, _RANK, _ALPHA)
    with pytest.raises(UserError, match=r"has no adapter_config\.json: name the directory"):
        check(str(tmp_path), config, wanted, _RANK, _ALPHA)
    with pytest.raises(UserError, match="exists already"):
        _saved(tmp_path / "own", "qwen3")


_FAMILIES = {name: CONFIGS[name] for name in CONFIGS if name not in ("qwen3_tied", "latent_fp8")}
_FAMILIES["qwen3_moe without dense layers"] = dataclasses.replace(
    CONFIGS["qwen3_moe"], first_k_dense_replace=0, num_experts=12
)
_FAMILIES["deepseek_v3 without experts"] = dataclasses.replace(
    CONFIGS["deepseek_v3"], num_experts=0, first_k_dense_replace=0, scoring_func="softmax"
)
_FAMILIES["gemma3 with images"] = CONFIGS["gemma3"]
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_TOKENS = np.random.default_rng(0).integers(0, 50, (2, 24))


@pytest.fixture
def oracle():
    reason = "PEFT is the published oracle (the extra 'oracles')"
    pytest.importorskip("torch", reason=reason)
    pytest.importorskip("transformers", minversion="5", reason=reason)
    return pytest.importorskip("peft", reason=reason)


def _written(directory, family: str, params):
    """A checkpoint of a family; with images, as transformers 5 names its tensors."""
    config = _FAMILIES[family]
    fields = {"pad_token_id": None} | config_json(config, "float32")
    tensors = named(config, params)
    if "images" in family:
        vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
        vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
        tokens = {"image_token_index": 59, "boi_token_index": 58, "eoi_token_index": 57}
        classes = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
        fields = {"text_config": fields, "vision_config": vision, "mm_tokens_per_image": 4}
        fields |= classes | tokens
        tensors = {
            name.replace("model.", "model.language_model.", 1): x for name, x in tensors.items()
        }
    return write(directory, fields, tensors)


def _model(directory):
    """transformers' model of a checkpoint."""
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def _logits(model) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor(_TOKENS)).logits.numpy()


def _merged(directory, family: str, adapters, scale: float) -> np.ndarray:
    """transformers' logits of a checkpoint with the adapters' products added, as by `merged`."""
    leaves = dict(flatten_dict(random_of(_FAMILIES[family])))
    pairs = flatten_dict(adapters)
    for *layer, matrix in pairs:
        if matrix == "lora_a":
            product = np.matmul(pairs[*layer, "lora_a"], pairs[*layer, "lora_b"])
            leaves[*layer, "kernel"] = leaves[*layer, "kernel"] + scale * product
    return _logits(_model(_written(directory, family, unflatten_dict(leaves))))


def _assert_same_effect(one: np.ndarray, other: np.ndarray, base: np.ndarray) -> None:
    effect = np.abs(one - base).max()
    assert effect > 0.1 * np.abs(base).max()
    assert np.abs(one - other).max() <= 1e-5 * effect


_PARTS = [  # layers of which PEFT takes some together
    ("qwen3_moe", ("up_proj",)),
    ("qwen3_moe", ("down_proj", "q_proj")),
    ("deepseek_v3", ("gate_proj", "up_proj")),
    ("glm4_moe", ("gate_proj",)),
    ("gpt_oss", ("up_proj",)),
    ("gpt_oss", ("gate_proj", "up_proj", "v_proj")),
    ("gpt_oss", ("down_proj",)),
    ("gemma3 with images", ("q_proj", "down_proj")),
]


@pytest.mark.parametrize(
    ("family", "modules"),
    quick_if(
        lambda case: case in [("deepseek_v3", ("*",)), ("gemma3 with images", ("*",))],
        [(family, ("*",)) for family in _FAMILIES] + _PARTS,
    ),
)
def test_peft_applies_what_we_write(family, modules, oracle, tmp_path):
    """With the effect of our merged weights; and we read its copy of our file."""
    config = _FAMILIES[family]
    adapters = _random(config, modules)
    base = _written(tmp_path / "base", family, random_of(config))
    save_adapter(tmp_path / "ours", config, adapters, alpha=_ALPHA, base=str(base))
    model = _model(base)
    plain = _logits(model)
    model = oracle.PeftModel.from_pretrained(model, tmp_path / "ours")
    want = _merged(tmp_path / "merged", family, adapters, _ALPHA / _RANK)
    _assert_same_effect(want, _logits(model), plain)
    if modules == ("*",):
        model.save_pretrained(tmp_path / "theirs")
        check_adapter(str(tmp_path / "theirs"), config, adapters, _RANK, _ALPHA)
        copy = load_adapter(str(tmp_path / "theirs"), config, adapters)
        jax.tree.map(np.testing.assert_array_equal, copy, adapters)


_NAMED = [f"{at}{name}.weight" for at in ("mlp.", "shared_experts.") for name in _MLP]
_PACKED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
_DENSE = [*_ATTENTION, *_MLP]
# Family -> (what PEFT makes an adapter of it with, lora.modules, the rank that holds it).
_OF_PEFT: dict[str, tuple] = {
    "qwen2": ({"target_modules": _DENSE}, ["*"], 4),
    "qwen3": ({"target_modules": "all-linear"}, ["*"], 4),
    "llama": ({"target_modules": ["q_proj", "v_proj"]}, ["[qv]_proj"], 4),
    "mistral": ({"target_modules": _DENSE}, ["*"], 4),
    "gemma3": ({"target_modules": "all-linear"}, ["*"], 4),
    "gemma3 with images": ({"target_modules": r".*language_model\..*_proj"}, ["*"], 4),
    "qwen3_moe": ({"target_modules": _DENSE, "target_parameters": _NAMED[:3]}, ["*"], 8),
    "qwen3_moe without dense layers": ({"target_modules": _DENSE}, ["*"], 8),
    "glm4_moe": (
        {"target_modules": ["q_proj"], "target_parameters": _PACKED + _NAMED},
        ["q_proj", *_MLP],
        4,
    ),
    "deepseek_v3": ({"target_modules": [*_LATENT, *_MLP], "target_parameters": _NAMED}, ["*"], 8),
    "deepseek_v3 without experts": ({"target_modules": _LATENT}, _LATENT, 4),
    # Without `target_parameters` PEFT gives dense layers and shared experts no adapters.
    "moonlight": ({"target_modules": ["o_proj", *_MLP]}, ["o_proj", *_MLP], 8),
    "gpt_oss": ({"target_modules": "all-linear", "target_parameters": _PACKED}, ["*"], 4),
}


@pytest.mark.parametrize("family", quick_if(lambda name: name == "deepseek_v3", _OF_PEFT))
def test_an_adapter_of_peft_is_read(family, oracle, tmp_path):
    """With the effect that PEFT gives it, every element of B random."""
    import torch

    config = _FAMILIES[family]
    options, modules, rank = _OF_PEFT[family]
    model = _model(_written(tmp_path / "base", family, random_of(config)))
    plain = _logits(model)
    options = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **options}
    model = oracle.get_peft_model(model, oracle.LoraConfig(**options)).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "lora_B" in name:
                x.normal_(0, 0.3)
    model.save_pretrained(tmp_path / "theirs")
    new = _random(config, modules, rank)
    check_adapter(str(tmp_path / "theirs"), config, new, rank, 2.0 * rank)
    adapters = load_adapter(str(tmp_path / "theirs"), config, new)
    ours = _merged(tmp_path / "merged", family, adapters, 2.0)
    _assert_same_effect(_logits(model), ours, plain)
