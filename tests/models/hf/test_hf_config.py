"""config.json: published files give the presets, both forms read alike, the rest is refused."""

from __future__ import annotations

import dataclasses

import pytest
from known_families import ABSENT, CONFIGS, PUBLISHED

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.models import ModelConfig
from fp8rl_jax.models.families.fields import Fields
from fp8rl_jax.models.hf.blockwise import quantisation_of
from fp8rl_jax.models.hf.config_json import config_json, family_of, read_config
from fp8rl_jax.models.presets import preset
from fp8rl_jax.models.stacks import ALL, layer_windows

_QWEN3 = PUBLISHED["qwen3_0p6b"]
_QWEN2 = PUBLISHED["qwen2p5_7b"]
_MISTRAL = PUBLISHED["mistral_7b"]
_GEMMA3 = PUBLISHED["gemma3_1b"]
_QWEN3_MOE = PUBLISHED["qwen3_30b_a3b"]
_LLAMA = PUBLISHED["llama3p1_8b"]
_DEEPSEEK = PUBLISHED["deepseek_v3"]
_GLM = PUBLISHED["glm4p5_air"]
_GPT_OSS = PUBLISHED["gpt_oss_20b"]
_PLAIN_ROPE = CONFIGS["qwen2"]


def _read(fields: dict) -> ModelConfig:
    return read_config(Fields(fields, "config.json"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_the_presets(name):
    assert _read(PUBLISHED[name]) == preset(name)


@pytest.mark.parametrize(
    "name", ["qwen2p5_7b", "qwen3_0p6b", "llama3p1_8b", "deepseek_v3", "gpt_oss_20b"]
)
def test_new_form_reads_alike(name):
    """transformers 5 gathers rotary settings in rope_parameters."""
    old = dict(PUBLISHED[name])
    settings = dict(old.pop("rope_scaling", None) or {"rope_type": "default"})
    settings["rope_type"] = settings.pop("type", settings.get("rope_type"))
    new = old | {"rope_parameters": settings | {"rope_theta": old["rope_theta"]}}
    del new["rope_theta"]
    assert _read(new) == preset(name)


def test_sizes_that_files_with_images_leave_out():
    """Gemma 3 4B's config.json, published with those of its text model that differ."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    published = {
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"hidden_size": 1152},
    }
    assert _read(published) == preset("gemma3_4b")
    with pytest.raises(UserError, match="text_config"):
        _read(published | {"text_config": None})
    written = config_json(preset("gemma3_4b"), "bfloat16", published | {"eos_token_id": [1, 106]})
    assert written["model_type"] == "gemma3_text" and written["eos_token_id"] == [1, 106]
    assert not {"text_config", "vision_config"} & set(written)


def test_new_form_of_partial_rotation():
    old = {n: x for n, x in _GLM.items() if not n.startswith(("rope", "partial"))}
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    assert _read(old | {"rope_parameters": rope}) == preset("glm4p5_air")


def test_new_form_of_two_bases():
    """transformers 5 has rotary settings for each kind of layer, and names each layer's kind."""
    old = {
        name: value
        for name, value in _GEMMA3.items()
        if not name.startswith("rope") and name != "sliding_window_pattern"
    }
    parts = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20_000},
    }
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    found = _read(old | {"rope_parameters": parts, "layer_types": (kinds * 5)[:26]})
    changed = {"rope_type": "linear", "rope_factor": 8.0, "rope_local_base_freq": 2e4}
    assert found == ModelConfig(**vars(preset("gemma3_1b")) | changed)


def test_layers_with_windows():
    """Gemma 3: every sixth layer sees all tokens; Mistral: none does."""
    windows = layer_windows(preset("gemma3_1b"))
    assert [i for i, window in enumerate(windows) if window == ALL] == [5, 11, 17, 23]
    assert set(windows) == {512, ALL}
    assert set(layer_windows(preset("mistral_7b_v0p1"))) == {4096}
    assert layer_windows(preset("mistral_7b")) is None


@pytest.mark.parametrize("name", [*CONFIGS, *PUBLISHED])
def test_round_trip(name):
    config = CONFIGS.get(name) or preset(name)
    assert _read(config_json(config, "bfloat16")) == config


def test_gpt_oss_without_yarn():
    """Of which null in its file would be YaRN, here as in transformers."""
    plain = dataclasses.replace(
        CONFIGS["gpt_oss"], **{n: getattr(_PLAIN_ROPE, n) for n in vars(_PLAIN_ROPE) if "rope" in n}
    )
    assert plain.rope_type == "default"
    assert _read(config_json(plain, "bfloat16")) == plain


def test_dense_model_with_latent_attention():
    dense = ModelConfig(
        **vars(preset("moonlight_16b_a3b"))
        | dict(
            num_experts=0,
            first_k_dense_replace=0,
            n_shared_experts=0,
            num_experts_per_tok=2,
            moe_intermediate_size=128,
            routed_scaling_factor=1.0,
        )
    )
    assert _read(config_json(dense, "bfloat16")) == dense


def test_fields_of_a_source_are_kept():
    """Those of the tokenizer and the context; not those that another form stands for."""
    source = _LLAMA | dict(eos_token_id=[1, 2], rope_parameters={}, dtype="float32", vocab_size=1)
    written = config_json(preset("llama3p1_8b"), "bfloat16", source)
    assert written["eos_token_id"] == [1, 2] and written["max_position_embeddings"] == 131072
    assert written["vocab_size"] == 128256 and written["torch_dtype"] == "bfloat16"
    assert not {"rope_parameters", "dtype"} & set(written)


def _rope(**changes) -> dict:
    return {"rope_scaling": _LLAMA["rope_scaling"] | changes}


@pytest.mark.parametrize(
    ("fields", "changes", "words"),
    [
        (_LLAMA, {"model_type": "gemma2"}, ["model_type", "'gemma2'", "deepseek_v3"]),
        (_GEMMA3, {"layer_types": [{}]}, ["layer_types"]),
        (_LLAMA, {"model_type": None}, ["model_type", "None"]),
        (_LLAMA, {"model_type": ["llama"]}, ["model_type", "qwen3"]),
        (_LLAMA, {"attention_bias": True}, ["attention_bias", "True"]),
        (_LLAMA, {"mlp_bias": True}, ["mlp_bias", "True"]),
        (_LLAMA, {"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "silu"]),
        (_LLAMA, {"hidden_size": None}, ["no field hidden_size"]),
        (_LLAMA, {"hidden_size": "4096"}, ["hidden_size", "'4096'", "whole number"]),
        (_LLAMA, {"vocab_size": 0}, ["vocab_size", "from 1 to"]),
        (_LLAMA, {"num_attention_heads": 0}, ["num_attention_heads"]),
        (_LLAMA, {"head_dim": 258}, ["head_dim", "258", "256"]),
        (_LLAMA, {"rms_norm_eps": True}, ["rms_norm_eps", "number"]),
        (_LLAMA, {"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "true or false"]),
        (_LLAMA, {"rope_scaling": "llama3"}, ["rope_scaling", "object"]),
        (_LLAMA, _rope(rope_type="longrope"), ["rope_type", "'longrope'", "yarn"]),
        (_LLAMA, _rope(rope_type="default"), ["factor", "'default'"]),
        (_LLAMA, _rope(factor=None), ["no field factor"]),
        (_LLAMA, _rope(short_factor=[1.0]), ["short_factor"]),
        (_LLAMA, _rope(original_max_position_embeddings=None), ["original_max_position"]),
        (_LLAMA, {"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        (
            _LLAMA,
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            ["full_attention"],
        ),
        (
            _LLAMA,
            {"rope_scaling": _DEEPSEEK["rope_scaling"]},
            ["mscale_all_dim", "latent attention"],
        ),
        (
            _DEEPSEEK,
            {"rope_scaling": _DEEPSEEK["rope_scaling"] | {"attention_factor": 1.5}},
            ["attention_factor", "1.5"],
        ),
        (_LLAMA, _rope(truncate=False), ["truncate", "'llama3'"]),
        (_GPT_OSS, {"swiglu_limit": 10.0}, ["swiglu_limit", "7.0"]),
        (_GPT_OSS, {"swiglu_alpha": 1.0}, ["swiglu_alpha", "1.702"]),
        (_GPT_OSS, {"num_local_experts": None}, ["no field num_local_experts"]),
        (_QWEN3, {"use_sliding_window": True, "sliding_window": 4096}, ["use_sliding_window"]),
        (_QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types"]),
        (_QWEN2, {"use_sliding_window": True}, ["use_sliding_window"]),
        (_QWEN3, {"attention_bias": True}, ["attention_bias", "only qwen2, glm4_moe"]),
        (_LLAMA, {"layer_types": ["sliding_attention"] * 32}, ["layer_types", "mistral"]),
        (_GLM, {"partial_rotary_factor": 0.25}, ["partial_rotary_factor", "0.25", "0.5"]),
        (_QWEN3, {"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "glm4_moe"]),
        (_GEMMA3, {"final_logit_softcapping": 30.0}, ["final_logit_softcapping", "another model"]),
        (_GEMMA3, {"hidden_activation": "gelu"}, ["hidden_activation", "gelu_pytorch_tanh"]),
        (_GEMMA3, {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        (_GEMMA3, {"layer_types": ["full_attention"]}, ["layer_types", "26"]),
        (_GEMMA3, {"layer_types": ["linear_attention"]}, ["layer_types", "sliding_attention"]),
        (
            _GEMMA3,
            {"layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 24},
            ["layer_types", "one layer in every n"],
        ),
        (_QWEN3_MOE, {"mlp_only_layers": [1]}, ["mlp_only_layers", "[1]"]),
        (_QWEN3_MOE, {"decoder_sparse_step": 2}, ["decoder_sparse_step", "2"]),
        (_QWEN3_MOE, {"num_experts": None}, ["no field num_experts"]),
        (_DEEPSEEK, {"scoring_func": "softmax"}, ["scoring_func", "softmax", "sigmoid"]),
        (_DEEPSEEK, {"topk_method": "greedy"}, ["topk_method", "greedy"]),
        (_DEEPSEEK, {"moe_layer_freq": 2}, ["moe_layer_freq", "2"]),
        (_DEEPSEEK, {"kv_lora_rank": None}, ["kv_lora_rank"]),
        (_DEEPSEEK, {"n_routed_experts": None}, ["n_routed_experts"]),
        (_QWEN3_MOE, {"num_local_experts": 64}, ["num_experts", "128", "num_local_experts", "64"]),
        (_LLAMA, {"rope_parameters": {"factor": 4.0}}, ["factor", "8.0", "4.0"]),
        (_LLAMA, {"rope_parameters": {"rope_theta": 1e4}}, ["rope_theta", "500000.0", "10000.0"]),
        (_LLAMA, _rope(type="yarn"), ["rope_type", "'llama3'", "'yarn'"]),
    ],
)
def test_refused_by_name(fields, changes, words):
    with pytest.raises(UserError) as raised:
        _read(fields | changes)
    sentence = str(raised.value)
    assert sentence.startswith("config.json") and "\n" not in sentence
    for word in words:
        assert word in sentence, sentence


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"quant_method": "gptq"}, "gptq"),
        ({"fmt": "e5m2"}, "e5m2"),
        ({"activation_scheme": "static"}, "static"),
        ({"weight_block_size": None}, "weight_block_size"),
        ({"weight_block_size": [1, 128]}, "[1, 128]"),
    ],
)
def test_other_quantisation_is_refused(changes, word):
    quantisation = _DEEPSEEK["quantization_config"] | changes
    with pytest.raises(UserError, match="blockwise FP8") as raised:
        quantisation_of(Fields({"quantization_config": quantisation}, "config.json"))
    assert word in str(raised.value)


@pytest.mark.parametrize(
    ("name", "changes", "word"),
    [
        ("llama", {"rope_interleave": True}, "rope_interleave"),
        ("qwen3_moe", {"qk_norm": False}, "qk_norm"),
        ("qwen3_moe", {"n_shared_experts": 1}, "n_shared_experts"),
        ("moonlight", {"scoring_func": "softmax"}, "scoring_func"),
        ("qwen3", {"sliding_window": 8}, "sliding_window"),
        ("mistral", {"sliding_window_pattern": 2}, "sliding_window_pattern"),
        ("gemma3", {"unit_offset_norms": False}, "unit_offset_norms"),
        ("llama", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
        ("gpt_oss", {"attention_sinks": False}, "attention_sinks"),
        ("gpt_oss", {"o_bias": False}, "o_bias"),
        ("qwen3_moe", {"moe_bias": True}, "gpt_oss"),
    ],
)
def test_models_without_a_type_are_refused(name, changes, word):
    config = ModelConfig(**vars(CONFIGS[name]) | changes)
    with pytest.raises(UserError, match=word):
        family_of(config)


# Fields without which a file is refused: transformers would make another model of it, too.
_NEEDED = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "n_routed_experts",
)


@pytest.mark.parametrize("kind", ABSENT)
def test_absent_fields_have_the_types_defaults(kind):
    fields, absent = ABSENT[kind]
    config = _read({name: value for name, value in fields.items() if name in _NEEDED})
    assert {name: getattr(config, name) for name in absent} == absent
    for name in set(_NEEDED) & set(fields):
        with pytest.raises(UserError, match=name):
            _read({n: v for n, v in fields.items() if n != name})


def test_an_absent_window_is_mistrals():
    """Files of its first version have the window 4096, stated or not."""
    fields = {name: value for name, value in _MISTRAL.items() if name != "sliding_window"}
    assert _read(fields).sliding_window == 4096


def test_null_is_not_absent():
    """DeepSeek's files without a latent of queries say so by null."""
    assert _read(_DEEPSEEK | {"q_lora_rank": None}).q_lora_rank == 0
    assert _read(_QWEN3 | {"num_key_value_heads": None}).num_key_value_heads == 16
