"""ModelConfig <-> the config.json of Hugging Face's Qwen2, Qwen3, Qwen3-MoE, Llama, Mistral,
Gemma 3 (text), DeepSeek-V3, GLM-4.5 and gpt-oss.

A model type implies rules that ModelConfig spells out as fields (QK-norm, sigmoid router, latent
attention), so reading adds the rules of the type, and writing finds the type whose rules a
ModelConfig follows. Fields that ask for something unsupported are refused by name; fields without
effect on the forward pass (dropout, token ids, initialisation) are ignored.

Kimi-K2's 'kimi_k2' is DeepSeek-V3's model under another name, 'mistral' without a window Llama's;
they are written as 'deepseek_v3' and 'llama'. Rotary embeddings: rope_json.py.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.kernels.arrays import SWIGLU_ALPHA, SWIGLU_LIMIT
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.hf.fields import Fields
from fp8rl_jax.models.hf.rope_json import KINDS, TAKE_ONE_OUT, read_rope, rope_json
from fp8rl_jax.models.stacks import ALL, layer_windows

# Model type -> its class in transformers.
ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
_ALIASES = {"kimi_k2": "deepseek_v3"}
# Fields that config.json and ModelConfig share, with their defaults; None: required.
_SHARED = {
    "vocab_size": None,
    "hidden_size": None,
    "intermediate_size": None,
    "num_hidden_layers": None,
    "num_attention_heads": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_QWEN3_EXPERTS = {
    "num_experts": None,
    "num_experts_per_tok": None,
    "moe_intermediate_size": None,
    "norm_topk_prob": False,
}
_LATENT = {
    "q_lora_rank": 0,
    "kv_lora_rank": None,
    "qk_nope_head_dim": None,
    "qk_rope_head_dim": None,
    "v_head_dim": None,
    "rope_interleave": True,
}
_DEEPSEEK_EXPERTS = {
    "first_k_dense_replace": 0,
    "num_experts_per_tok": None,
    "moe_intermediate_size": None,
    "norm_topk_prob": True,
    "n_shared_experts": 0,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}
# transformers' defaults for absent fields, by model type, where they differ from those for null
# (the tables above) or between types.
_ABSENT: dict[str, dict[str, Any]] = {
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32},
    "qwen3_moe": {"num_key_value_heads": 4},
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "gemma3_text": {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10_000.0,
        "tie_word_embeddings": True,
    },
    "glm4_moe": {
        "num_key_value_heads": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-5,
    },
    "gpt_oss": {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        "attention_bias": True,
    },
    "deepseek_v3": {
        "q_lora_rank": 1536,
        "first_k_dense_replace": 3,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
    },
}
# The type of files of Gemma 3 with images, and sizes that its text models have unless stated.
IMAGES = "gemma3"
_GEMMA3_SIZES = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}
_TYPES = typing.get_type_hints(ModelConfig)
# Fields of a source's config.json that are not copied: other fields or files replace them.
_DROPPED = {
    "rope_parameters",
    "dtype",
    "auto_map",
    "quantization_config",
    "num_local_experts",
    "num_mtp_layers",
    "transformers_version",
    "_name_or_path",
    "qk_head_dim",
}
_ANY = object()
# Fields of ModelConfig that tell types apart, and where a type differs from most.
_RULES: dict[str, Any] = {
    "rope_interleave": False,
    "partial_rotary_factor": 1.0,
    "rope_local_base_freq": 0.0,
    "qk_norm": False,
    "qkv_bias": False,
    "query_pre_attn_scalar": 0,
    "sliding_window": 0,
    "sliding_window_pattern": 0,
    "sandwich_norms": False,
    "unit_offset_norms": False,
    "scale_embeddings": False,
    "hidden_act": "silu",
    "o_bias": False,
    "attention_sinks": False,
    "moe_bias": False,
}
_OWN_RULES: dict[str, dict[str, Any]] = {
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"qk_norm": True, "n_shared_experts": 0, "routed_scaling_factor": 1.0},
    "llama": {},
    "mistral": {"sliding_window": _ANY},
    "gemma3_text": {
        "qk_norm": True,
        "num_experts": 0,
        "sandwich_norms": True,
        "unit_offset_norms": True,
        "scale_embeddings": True,
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": _ANY,
        "sliding_window_pattern": _ANY,
        "rope_local_base_freq": _ANY,
        "query_pre_attn_scalar": _ANY,
    },
    "glm4_moe": {"qk_norm": _ANY, "qkv_bias": _ANY, "partial_rotary_factor": _ANY},
    "gpt_oss": {
        "qkv_bias": _ANY,
        "o_bias": _ANY,
        "attention_sinks": True,
        "moe_bias": True,
        "hidden_act": "clamped_swiglu",
        "sliding_window": _ANY,
        "sliding_window_pattern": _ANY,
        "norm_topk_prob": True,
        "n_shared_experts": 0,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
    },
    "deepseek_v3": {"rope_interleave": _ANY},
}
_SILU = "only silu is supported: take another model"
_NO_BIAS = (
    "only qwen2, glm4_moe and gpt_oss have biases of attention here, and no MLP has: take another "
    "model"
)
_WINDOWED = ("mistral", "gemma3_text", "gpt_oss")
_NO_WINDOW = f"sliding windows are supported in {', '.join(_WINDOWED)} alone: take one of these"
_GELU = "gelu_pytorch_tanh"
_EVERY_LAYER = "experts in every layer are supported, or in all but the first: take another model"


def text_fields(fields: Fields) -> Fields:
    """Returns the fields of the text model in a file of text and images (Gemma 3 from 4B); those of
    other files unchanged.

    Raises:
      UserError: the file has no text model.
    """
    if fields.values.get("model_type") != IMAGES:
        return fields
    part = fields.part("text_config")
    if part is None:
        raise fields.error("text_config", "take the file that the model was published with")
    outer = {n: x for n, x in fields.values.items() if n.endswith("token_id")}
    values = {**_GEMMA3_SIZES, **outer, **part.values, "model_type": "gemma3_text"}
    return Fields(values, part.where)


def family(fields: Fields) -> str:
    """Returns the model type of a config.json, a key of ARCHITECTURES.

    Raises:
      UserError: the type is unknown or missing.
    """
    name = str(fields.values.get("model_type"))
    name = _ALIASES.get(name, name)
    if name not in ARCHITECTURES:
        known = ", ".join([*ARCHITECTURES, *_ALIASES, IMAGES])
        raise fields.error("model_type", f"only {known} are supported: take a model of these")
    return name


def read_config(fields: Fields) -> ModelConfig:
    """Converts the fields of a config.json to a ModelConfig.

    Raises:
      UserError: a field is missing, wrong or unsupported; the message says what to do.
    """
    fields = text_fields(fields)
    kind, stated = family(fields), fields.values["model_type"]
    fields = Fields({**_ABSENT.get(stated, _ABSENT[kind]), **fields.values}, fields.where)
    fields.require_finite()
    _refuse_unsupported(fields, kind)
    values = _rules_of(kind) | _read(fields, _SHARED) | read_rope(fields, kind)
    values |= _read_windows(fields, kind, values["num_hidden_layers"])
    heads = values["num_attention_heads"]
    values["num_key_value_heads"] = fields.get("num_key_value_heads", int, heads)
    if kind == "glm4_moe":
        values["qkv_bias"] = fields.get("attention_bias", bool, False)
        values["qk_norm"] = fields.get("use_qk_norm", bool, False)
        values |= _read_deepseek_experts(fields)
    if kind == "deepseek_v3":
        values |= _read(fields, _LATENT) | _read_deepseek_experts(fields)
        values["head_dim"] = values["qk_rope_head_dim"]  # latent attention ignores it
    else:
        width = values["hidden_size"] // heads if kind != "qwen3" and heads > 0 else 128
        values["head_dim"] = fields.get("head_dim", int, width)
    if kind == "qwen3_moe":
        values |= _read_qwen3_experts(fields)
    if kind == "gemma3_text":
        values["query_pre_attn_scalar"] = fields.get("query_pre_attn_scalar", int)
    if kind == "gpt_oss":
        values["qkv_bias"] = values["o_bias"] = fields.get("attention_bias", bool)
        values |= _read_gpt_oss_experts(fields)
    try:
        return ModelConfig(**values)
    except UserError as error:
        raise UserError(f"{fields.where}: {error}") from None


def _read(fields: Fields, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields named in `defaults`, in the types of ModelConfig."""
    return {name: fields.get(name, _TYPES[name], value) for name, value in defaults.items()}


def _refuse_unsupported(fields: Fields, kind: str) -> None:
    if kind == "gemma3_text":
        fields.require("hidden_activation", (_GELU,), f"only {_GELU} goes with this model type")
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            fields.require(
                name, (), "caps of scores and logits are not supported: take another model"
            )
        fields.require("use_bidirectional_attention", (False,), "only causal attention is here")
    else:
        fields.require("hidden_act", ("silu",), _SILU)
    fields.require("mlp_bias", (False,), _NO_BIAS)
    if kind not in ("glm4_moe", "gpt_oss"):
        fields.require("attention_bias", (False,), _NO_BIAS)
    if kind != "glm4_moe":
        fields.require("partial_rotary_factor", (1, 1.0), "only glm4_moe rotates parts of heads")
    fields.require("decoder_sparse_step", (1,), _EVERY_LAYER)
    fields.require("moe_layer_freq", (1,), _EVERY_LAYER)


def _read_windows(fields: Fields, kind: str, layers: int) -> dict[str, Any]:
    """Returns ModelConfig's fields of sliding windows."""
    types = fields.values.get("layer_types") or []
    if not isinstance(types, list) or any(kind not in KINDS for kind in types):
        raise fields.error("layer_types", f"write a list of {' and '.join(KINDS)}")
    if kind not in _WINDOWED:
        windows = fields.get("use_sliding_window", bool, False)
        if windows and fields.values.get("sliding_window") is not None:
            raise fields.error("use_sliding_window", _NO_WINDOW)
        if KINDS[1] in types:
            raise fields.error("layer_types", _NO_WINDOW)
        return {}
    window = fields.get("sliding_window", int, 0)
    every = 0 if kind == "mistral" else fields.get("sliding_window_pattern", int, 6)
    if types:
        if len(types) != layers:
            raise fields.error("layer_types", f"write one for each of the {layers} layers")
        every = types.index(KINDS[0]) + 1 if KINDS[0] in types else 0
        if types != [KINDS[not every or bool((i + 1) % every)] for i in range(layers)]:
            raise fields.error("layer_types", "only one layer in every n may be full_attention")
    if not window or every == 1:
        return {}
    found = {"sliding_window": window, "sliding_window_pattern": every}
    if kind == "gemma3_text":
        part = fields.part("rope_parameters")
        local = part.part(KINDS[1]) if part else None
        theta = local.get("rope_theta", float, 10_000.0) if local else None
        if local is not None:
            local.require("rope_type", ("default",), "only default goes with layers with a window")
        found["rope_local_base_freq"] = theta or fields.get("rope_local_base_freq", float)
    return found


def _read_qwen3_experts(fields: Fields) -> dict[str, Any]:
    dense = fields.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or dense != list(range(len(dense))):
        raise fields.error("mlp_only_layers", _EVERY_LAYER)
    other = fields.values.get("num_local_experts")
    if other is not None:
        fields.require("num_experts", (other,), f"num_local_experts is {other!r}: {TAKE_ONE_OUT}")
    return _read(fields, _QWEN3_EXPERTS | {"num_experts": other}) | {
        "first_k_dense_replace": len(dense)
    }


def _read_gpt_oss_experts(fields: Fields) -> dict[str, Any]:
    fields.require("swiglu_alpha", (SWIGLU_ALPHA,), f"only {SWIGLU_ALPHA} is supported")
    fields.require("swiglu_limit", (SWIGLU_LIMIT,), f"only {SWIGLU_LIMIT} is supported")
    return {
        "num_experts": fields.get("num_local_experts", int),
        "num_experts_per_tok": fields.get("num_experts_per_tok", int, 4),
        "moe_intermediate_size": fields.get("intermediate_size", int),
    }


def _read_deepseek_experts(fields: Fields) -> dict[str, Any]:
    fields.require("scoring_func", ("sigmoid",), "only sigmoid goes with this model type")
    fields.require("topk_method", ("noaux_tc",), "only noaux_tc goes with this model type")
    if fields.get("first_k_dense_replace", int, 0) >= fields.get("num_hidden_layers", int):
        return {}
    if fields.values.get("n_routed_experts") is None:
        raise fields.error("n_routed_experts", "write the number of routed experts")
    experts = fields.get("n_routed_experts", int)
    return _read(fields, _DEEPSEEK_EXPERTS) | {"scoring_func": "sigmoid", "num_experts": experts}


def _rules_of(kind: str) -> dict[str, Any]:
    """Returns the fields of ModelConfig that every model of a type has alike."""
    rules = _RULES | _OWN_RULES[kind]
    return {name: value for name, value in rules.items() if value is not _ANY}


def _nearest(config: ModelConfig) -> str:
    if config.latent:
        return "deepseek_v3"
    if config.sandwich_norms:
        return "gemma3_text"
    if config.moe_bias or config.attention_sinks:
        return "gpt_oss"
    if config.num_experts:
        return "glm4_moe" if config.scoring_func == "sigmoid" else "qwen3_moe"
    if config.qk_norm:
        return "qwen3"
    if config.qkv_bias:
        return "qwen2"
    return "mistral" if config.sliding_window else "llama"


def family_of(config: ModelConfig) -> str:
    """Returns the model type whose rules a configuration follows.

    Raises:
      UserError: no type has these rules; the message names the field and the nearest type.
    """
    kind = _nearest(config)
    rules = _rules_of(kind)
    if kind == "deepseek_v3" and config.num_experts:
        rules["scoring_func"] = "sigmoid"
    if kind == "gemma3_text" and not config.rope_local_base_freq and config.rope_type != "default":
        raise UserError(
            "model.rope_local_base_freq is 0, and Hugging Face's 'gemma3_text' never scales the "
            "base of layers with a window: such a model cannot be saved in its format"
        )
    if kind == "gpt_oss" and config.o_bias != config.qkv_bias:
        rules["o_bias"] = config.qkv_bias
    for name, value in rules.items():
        if getattr(config, name) != value:
            raise UserError(
                f"model.{name} is {getattr(config, name)!r}, but Hugging Face's {kind!r}, the "
                f"model type that is nearest, has {value!r} only: such a model cannot be saved in "
                "its format"
            )
    return kind


def config_json(
    config: ModelConfig, dtype: str, others: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns the config.json of a model.

    Args:
      config: shapes.
      dtype: name of the tensors' type, 'bfloat16' or 'float32'.
      others: further fields, from a source's config.json; `config` overrides them.

    Raises:
      UserError: no model type has these rules.
    """
    kind = family_of(config)
    names = [*_SHARED, "num_key_value_heads"]
    own: dict[str, Any] = {"architectures": [ARCHITECTURES[kind]], "model_type": kind}
    if kind == "deepseek_v3":
        names += _LATENT
        # Modules for multi-token prediction are not written.
        own["num_nextn_predict_layers"] = 0
        if config.num_experts:
            names += [*_DEEPSEEK_EXPERTS, "scoring_func"]
            own |= {"n_routed_experts": config.num_experts, "topk_method": "noaux_tc"}
        else:
            own["first_k_dense_replace"] = config.num_hidden_layers
    else:
        names.append("head_dim")
    if kind == "glm4_moe":
        names += _DEEPSEEK_EXPERTS
        own |= {
            "n_routed_experts": config.num_experts,
            "use_qk_norm": config.qk_norm,
            "partial_rotary_factor": config.partial_rotary_factor,
            "num_nextn_predict_layers": 0,
        }
    if kind == "qwen3_moe":
        names += _QWEN3_EXPERTS
        own |= {"decoder_sparse_step": 1, "mlp_only_layers": list(range(config.dense_layers))}
    own |= {name: getattr(config, name) for name in names} | rope_json(config)
    if own.get("q_lora_rank") == 0:
        own["q_lora_rank"] = None
    own |= {"hidden_act": config.hidden_act, "attention_bias": False, "torch_dtype": dtype}
    if kind == "glm4_moe":
        own["attention_bias"] = config.qkv_bias
    if kind == "mistral":
        own["sliding_window"] = config.sliding_window
    if kind in ("gemma3_text", "gpt_oss"):
        windows = layer_windows(config)
        shown = [False] * config.num_hidden_layers if windows is None else windows < ALL
        own |= {
            "sliding_window": config.sliding_window or _ABSENT[kind]["sliding_window"],
            "layer_types": [KINDS[int(windowed)] for windowed in shown],
        }
    if kind == "gpt_oss":
        own |= {
            "rope_scaling": own["rope_scaling"] or {"rope_type": "default"},  # null means YaRN
            "hidden_act": "silu",
            "attention_bias": config.qkv_bias,
            "num_local_experts": config.num_experts,
            "num_experts_per_tok": config.num_experts_per_tok,
            "intermediate_size": config.moe_intermediate_size,
            "swiglu_alpha": SWIGLU_ALPHA,
            "swiglu_limit": SWIGLU_LIMIT,
        }
    if kind == "gemma3_text":
        own |= {
            "hidden_activation": own.pop("hidden_act"),
            "query_pre_attn_scalar": config.query_pre_attn_scalar or config.head_dim,
            "rope_local_base_freq": config.rope_local_base_freq or config.rope_theta,
        }
    # ModelConfig has no context limit: this is a default for programs that need one.
    original = int(config.rope_original_max_position_embeddings * config.rope_factor)
    limit = original if config.rope_type in ("llama3", "yarn") else 32_768
    defaults = {"max_position_embeddings": limit}
    source = text_fields(Fields(others or {}, "config.json")).values
    kept = {name: value for name, value in source.items() if name not in _DROPPED}
    return defaults | kept | own
