"""gpt-oss (arXiv:2508.10925).

Experts in every layer, windows in every other one, sinks of attention, biases of attention, router
and experts, a clamped activation, YaRN.
"""

from functools import partial

from fp8rl_jax.kernels.arrays import SWIGLU_ALPHA, SWIGLU_LIMIT
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.families.family import Family, Json, defaults
from fp8rl_jax.models.families.fields import Fields

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}


def _stated_rope(fields: Fields) -> Fields:
    """A file without rotary settings, or with null, means YaRN."""
    if any(fields.values.get(name) is not None for name in ("rope_scaling", "rope_parameters")):
        return fields
    return fields.with_values(rope_scaling=_YARN)


def _written(config: ModelConfig) -> Json:
    limits = {"swiglu_alpha": SWIGLU_ALPHA, "swiglu_limit": SWIGLU_LIMIT}
    if config.rope_type != "default":
        return limits
    return limits | {"rope_scaling": {"rope_type": "default"}}


_EXPERT, _PACKED = "mlp.experts.{}.", "mlp.experts."
_ALL, _EVEN, _ODD = slice(None), slice(0, None, 2), slice(1, None, 2)
_gpt_oss = partial(
    ModelConfig,
    *(201_088, 2880, 2880),
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    qk_norm=False,
    qkv_bias=True,
    o_bias=True,
    attention_sinks=True,
    sliding_window=128,
    sliding_window_pattern=2,
    hidden_act="clamped_swiglu",
    rope_theta=150_000.0,
    rope_type="yarn",
    rope_factor=32.0,
    rope_original_max_position_embeddings=4096,
    rope_truncate=False,
    rms_norm_eps=1e-5,
    num_experts_per_tok=4,
    moe_intermediate_size=2880,
    moe_bias=True,
)

GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    is_like=lambda config: config.moe_bias or config.attention_sinks,
    mark="num_experts",
    options=defaults("sliding_window", "sliding_window_pattern"),
    rules={
        "attention_sinks": True,
        "moe_bias": True,
        "hidden_act": "clamped_swiglu",
        "norm_topk_prob": True,
        "n_shared_experts": 0,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
    },
    names={
        "qkv_bias": ("attention_bias", None),
        "o_bias": ("attention_bias", None),
        "num_experts": ("num_local_experts", None),
        "num_experts_per_tok": ("num_experts_per_tok", 4),
        "moe_intermediate_size": ("intermediate_size", None),
    },
    absent={
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        "attention_bias": True,
    },
    supported={
        "swiglu_alpha": ((SWIGLU_ALPHA,), f"only {SWIGLU_ALPHA} is supported"),
        "swiglu_limit": ((SWIGLU_LIMIT,), f"only {SWIGLU_LIMIT} is supported"),
    },
    rope_theta=150_000.0,
    # Experts are packed: gate and up take the even and the odd columns of one tensor.
    tensors={
        "mlp.gate.weight": ("mlp.router.weight", None),
        "mlp.gate.bias": ("mlp.router.bias", None),
        _EXPERT + "gate_proj.weight": (_PACKED + "gate_up_proj", _EVEN),
        _EXPERT + "up_proj.weight": (_PACKED + "gate_up_proj", _ODD),
        _EXPERT + "down_proj.weight": (_PACKED + "down_proj", _ALL),
        _EXPERT + "gate_proj.bias": (_PACKED + "gate_up_proj_bias", _EVEN),
        _EXPERT + "up_proj.bias": (_PACKED + "gate_up_proj_bias", _ODD),
        _EXPERT + "down_proj.bias": (_PACKED + "down_proj_bias", _ALL),
    },
    normalise=_stated_rope,
    write=_written,
    more_rules=lambda config: {"o_bias": config.qkv_bias},
    presets={
        "gpt_oss_20b": _gpt_oss(num_hidden_layers=24, num_experts=32),
        "gpt_oss_120b": _gpt_oss(num_hidden_layers=36, num_experts=128),
    },
)
