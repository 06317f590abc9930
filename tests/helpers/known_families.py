"""What tests know of every family of models, by its model type: one entry of KNOWN each.

Tests of checkpoints, of config.json, of published sizes and of drift take their cases from here.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from fp8rl_jax.models import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Known:
    """What tests know of a family.

    Attributes:
      small: {name: a small model for tests of checkpoints, and against transformers}.
      drift: {name: fields that tell the family from Qwen3 in tests of drift}.
      published: {preset: the fields of its published config.json that bear on the shapes, and some
        that do not}.
      parameters: {preset: (total, active or None, tables left out or None) in billions, as the
        model's own card and report state them, and the decimals that they give}.
      absent: {model type: (a file, fields of the ModelConfig that transformers 5.24 makes of it
        without those that it can do without)}.
    """

    small: dict[str, ModelConfig]
    drift: dict[str, dict[str, Any]]
    published: dict[str, dict[str, Any]]
    parameters: dict[str, tuple[float, float | None, float | None]]
    absent: dict[str, tuple[dict[str, Any], dict[str, Any]]]


_SIZES = dict(
    vocab_size=60,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    rms_norm_eps=1e-5,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
)
_EXPERTS = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32)
_SMALL_DEEPSEEK = _SIZES | dict(
    num_key_value_heads=4,
    head_dim=8,
    qk_norm=False,
    scoring_func="sigmoid",
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    rope_interleave=True,
    n_shared_experts=2,
    first_k_dense_replace=1,
    routed_scaling_factor=1.5,
    **_EXPERTS,
)
_LATENT = dict(
    kv_lora_rank=136,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=24,
    qk_norm=False,
    rope_interleave=True,
    scoring_func="sigmoid",
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    n_shared_experts=1,
    first_k_dense_replace=1,
    num_experts=8,
    rope_type="yarn",
    rope_factor=4.0,
    rope_original_max_position_embeddings=16,
    rope_mscale=1.0,
    rope_mscale_all_dim=1.0,
)
_QWEN3 = json.loads("""{
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "attention_bias": false,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072,
    "max_position_embeddings": 40960, "max_window_layers": 28, "num_attention_heads": 16,
    "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
    "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_sliding_window": false,
    "vocab_size": 151936
}""")
_QWEN2 = json.loads("""{
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu",
    "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 32768,
    "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 131072, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
    "use_sliding_window": false, "vocab_size": 152064
}""")
_MISTRAL = json.loads("""{
    "model_type": "mistral", "architectures": ["MistralForCausalLM"], "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": null,
    "tie_word_embeddings": false, "torch_dtype": "bfloat16", "vocab_size": 32768
}""")
_GEMMA3 = json.loads("""{
    "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "attention_bias": false,
    "attn_logit_softcapping": null, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
    "final_logit_softcapping": null, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152, "intermediate_size": 6912, "max_position_embeddings": 32768,
    "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
    "rope_scaling": null, "rope_theta": 1000000, "sliding_window": 512,
    "sliding_window_pattern": 6, "torch_dtype": "bfloat16", "vocab_size": 262144
}""")
_QWEN3_MOE = _QWEN3 | json.loads("""{
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
    "max_window_layers": 48, "num_attention_heads": 32, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "rope_theta": 1000000.0, "tie_word_embeddings": false,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 768,
    "norm_topk_prob": true, "num_experts": 128, "num_experts_per_tok": 8
}""")
_LLAMA = json.loads("""{
    "model_type": "llama", "attention_bias": false, "hidden_act": "silu", "hidden_size": 4096,
    "mlp_bias": false, "intermediate_size": 14336, "max_position_embeddings": 131072,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3"}, "rope_theta": 500000.0, "tie_word_embeddings": false,
    "vocab_size": 128256
}""")
_SMOLLM2 = _LLAMA | json.loads("""{
    "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
    "num_hidden_layers": 30, "num_key_value_heads": 3, "rope_scaling": null, "rope_theta": 100000,
    "tie_word_embeddings": true, "vocab_size": 49152, "rope_interleaved": false
}""")
_DEEPSEEK = json.loads("""{
    "model_type": "deepseek_v3", "attention_bias": false, "first_k_dense_replace": 3,
    "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true,
    "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"},
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": false,
    "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
    "weight_block_size": [128, 128]}
}""")
_MOONLIGHT = _DEEPSEEK | json.loads("""{
    "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 11264,
    "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
    "num_key_value_heads": 16, "num_nextn_predict_layers": 0, "q_lora_rank": null,
    "rms_norm_eps": 1e-05, "rope_theta": 50000.0, "rope_scaling": null,
    "routed_scaling_factor": 2.446, "topk_group": 1, "vocab_size": 163840
}""")
_GLM = json.loads("""{
    "model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "attention_bias": true,
    "eos_token_id": [151329, 151336, 151338], "first_k_dense_replace": 1, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 10944,
    "max_position_embeddings": 131072, "moe_intermediate_size": 1408, "n_group": 1,
    "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": true,
    "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46,
    "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 1000000,
    "routed_scaling_factor": 1.0, "tie_word_embeddings": false, "topk_group": 1,
    "use_qk_norm": false, "vocab_size": 151552
}""")
_GPT_OSS = json.loads("""{
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "attention_bias": true,
    "attention_dropout": 0.0, "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64,
    "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "intermediate_size": 2880, "max_position_embeddings": 131072, "num_attention_heads": 64,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
    "num_local_experts": 32, "pad_token_id": 199999,
    "quantization_config": {"modules_to_not_convert": ["model.embed_tokens", "lm_head"],
    "quant_method": "mxfp4"}, "rms_norm_eps": 1e-05, "rope_scaling": {"beta_fast": 32.0,
    "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
    "rope_type": "yarn", "truncate": false}, "rope_theta": 150000, "router_aux_loss_coef": 0.9,
    "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": false,
    "vocab_size": 201088
}""")
_GPT_OSS["layer_types"] = ["sliding_attention", "full_attention"] * 12
_OLMO2 = json.loads("""{
    "model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "attention_bias": false,
    "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
    "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "pad_token_id": 100277, "rms_norm_eps": 1e-06,
    "rope_scaling": null, "rope_theta": 500000, "tie_word_embeddings": false,
    "vocab_size": 100352
}""")
_RESULTS_NORMED = {"sandwich_norms": True, "pre_norms": False, "qk_norm_by_head": False}
_KIMI = _DEEPSEEK | json.loads("""{
    "model_type": "kimi_k2", "first_k_dense_replace": 1, "n_group": 1, "n_routed_experts": 384,
    "num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
    "rope_theta": 50000.0, "rope_scaling": {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0,
    "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
    "type": "yarn"}, "routed_scaling_factor": 2.827, "topk_group": 1, "vocab_size": 163840
}""")

KNOWN: dict[str, Known] = {
    "qwen2": Known(
        small={"qwen2": ModelConfig(**_SIZES | dict(qk_norm=False, qkv_bias=True, head_dim=16))},
        drift={"qwen2": dict(qk_norm=False, qkv_bias=True)},
        published={"qwen2p5_7b": _QWEN2},
        parameters={
            "qwen2p5_0p5b": (0.49, None, 0.36),
            "qwen2p5_1p5b": (1.54, None, 1.31),
            "qwen2p5_3b": (3.09, None, 2.77),
            "qwen2p5_7b": (7.61, None, 6.53),
            "qwen2p5_14b": (14.7, None, 13.1),
            "qwen2p5_32b": (32.5, None, 31.0),
            "qwen2p5_72b": (72.7, None, 70.0),
        },
        absent={
            "qwen2": (
                _QWEN2 | dict(num_attention_heads=32, hidden_size=4096),
                {
                    "num_key_value_heads": 32,
                    "head_dim": 128,
                    "qkv_bias": True,
                    "rms_norm_eps": 1e-6,
                    "tie_word_embeddings": False,
                    "rope_theta": 10_000.0,
                    "rope_type": "default",
                },
            )
        },
    ),
    "qwen3": Known(
        small={
            "qwen3": ModelConfig(**_SIZES, rope_theta=1e6),
            "qwen3_tied": ModelConfig(**_SIZES, tie_word_embeddings=True),
        },
        drift={"qwen3": {}},
        published={"qwen3_0p6b": _QWEN3},
        parameters={
            "qwen3_0p6b": (0.6, None, 0.44),
            "qwen3_1p7b": (1.7, None, 1.4),
            "qwen3_4b": (4.0, None, 3.6),
            "qwen3_8b": (8.2, None, 6.95),
            "qwen3_14b": (14.8, None, 13.2),
            "qwen3_32b": (32.8, None, 31.2),
        },
        absent={
            "qwen3": (
                _QWEN3 | dict(num_attention_heads=32),
                {
                    "num_key_value_heads": 32,
                    "head_dim": 128,
                    "rms_norm_eps": 1e-6,
                    "tie_word_embeddings": False,
                    "rope_theta": 10_000.0,
                    "rope_type": "default",
                },
            )
        },
    ),
    "qwen3_moe": Known(
        # mlp_only_layers: [0]
        small={"qwen3_moe": ModelConfig(**_SIZES, **_EXPERTS, first_k_dense_replace=1)},
        drift={},
        published={"qwen3_30b_a3b": _QWEN3_MOE},
        parameters={"qwen3_30b_a3b": (30.5, 3.3, 29.9), "qwen3_235b_a22b": (235, 22, 234)},
        absent={
            "qwen3_moe": (
                _QWEN3_MOE,
                {
                    "num_key_value_heads": 4,
                    "head_dim": 64,
                    "rms_norm_eps": 1e-6,
                    "tie_word_embeddings": False,
                    "rope_theta": 10_000.0,
                    "norm_topk_prob": False,
                    "first_k_dense_replace": 0,
                },
            )
        },
    ),
    "llama": Known(
        small={
            "llama": ModelConfig(
                **_SIZES
                | dict(
                    qk_norm=False,
                    rope_type="llama3",
                    rope_factor=8.0,
                    rope_original_max_position_embeddings=16,
                )
            )
        },
        drift={
            "llama": dict(
                qk_norm=False,
                rope_type="llama3",
                rope_factor=8.0,
                rope_original_max_position_embeddings=16,
            )
        },
        published={"llama3p1_8b": _LLAMA, "smollm2_135m": _SMOLLM2},
        parameters={
            "llama3p1_8b": (8.03, None, None),
            "llama3p2_1b": (1.236, None, None),
            "llama3p2_3b": (3.213, None, None),
            "smollm2_135m": (0.1345, None, None),
        },
        absent={
            "llama": (
                _LLAMA,
                {
                    "num_key_value_heads": 32,
                    "head_dim": 128,
                    "rms_norm_eps": 1e-6,
                    "tie_word_embeddings": False,
                    "rope_theta": 10_000.0,
                    "rope_type": "default",
                },
            )
        },
    ),
    "mistral": Known(
        small={"mistral": ModelConfig(**_SIZES | dict(qk_norm=False, sliding_window=9))},
        drift={"mistral": dict(qk_norm=False, sliding_window=11)},
        published={
            "mistral_7b": _MISTRAL,
            "mistral_7b_v0p1": _MISTRAL
            | {"sliding_window": 4096, "vocab_size": 32_000, "rope_theta": 10_000.0},
        },
        parameters={"mistral_7b": (7.25, None, None), "mistral_7b_v0p1": (7.24, None, None)},
        absent={
            "mistral": (
                _MISTRAL,
                {
                    "num_key_value_heads": 8,
                    "head_dim": 128,
                    "sliding_window": 4096,
                    "rms_norm_eps": 1e-6,
                    "rope_theta": 10_000.0,
                },
            )
        },
    ),
    "gemma3_text": Known(
        small={
            "gemma3": ModelConfig(
                **_SIZES
                | dict(
                    num_hidden_layers=4,
                    head_dim=24,
                    hidden_act="gelu_pytorch_tanh",
                    sandwich_norms=True,
                    unit_offset_norms=True,
                    scale_embeddings=True,
                    tie_word_embeddings=True,
                    query_pre_attn_scalar=17,
                    sliding_window=9,
                    sliding_window_pattern=3,
                    rope_theta=1e6,
                    rope_local_base_freq=1e4,
                    rope_type="linear",
                    rope_factor=8.0,
                )
            )
        },
        drift={
            "gemma3": dict(
                hidden_act="gelu_pytorch_tanh",
                sandwich_norms=True,
                unit_offset_norms=True,
                scale_embeddings=True,
                sliding_window=11,
                sliding_window_pattern=2,
                rope_local_base_freq=1e3,
            )
        },
        published={"gemma3_1b": _GEMMA3},
        parameters={  # the last column: arXiv:2503.19786, table 1
            "gemma3_270m": (0.268, None, 0.1),
            "gemma3_1b": (1.0, None, 0.698),
            "gemma3_4b": (3.88, None, 3.209),
            "gemma3_12b": (11.77, None, 10.759),
            "gemma3_27b": (27.0, None, 25.6),
        },
        absent={
            "gemma3_text": (
                _GEMMA3,
                {
                    "num_key_value_heads": 4,
                    "head_dim": 256,
                    "query_pre_attn_scalar": 256,
                    "sliding_window": 4096,
                    "sliding_window_pattern": 6,
                    "rope_local_base_freq": 10_000.0,
                    "rms_norm_eps": 1e-6,
                    "tie_word_embeddings": True,
                    "rope_theta": 1e6,
                    "rope_type": "default",
                },
            )
        },
    ),
    "olmo2": Known(
        small={"olmo2": ModelConfig(**_SIZES | _RESULTS_NORMED | dict(head_dim=16))},
        drift={"olmo2": _RESULTS_NORMED},
        published={"olmo2_7b": _OLMO2},
        parameters={
            "olmo2_1b": (1.48, None, None),
            "olmo2_7b": (7.3, None, None),
            "olmo2_13b": (13.7, None, None),
            "olmo2_32b": (32.2, None, None),
        },
        absent={
            "olmo2": (
                _OLMO2,
                {
                    "num_key_value_heads": 32,
                    "head_dim": 128,
                    "rms_norm_eps": 1e-5,
                    "tie_word_embeddings": False,
                    "rope_theta": 10_000.0,
                    "rope_type": "default",
                },
            )
        },
    ),
    "deepseek_v3": Known(
        small={
            "deepseek_v3": ModelConfig(
                **_SMALL_DEEPSEEK
                | dict(
                    q_lora_rank=48,
                    n_group=4,
                    topk_group=2,
                    rope_type="yarn",
                    rope_factor=4.0,
                    rope_original_max_position_embeddings=32,
                    rope_mscale=0.7,
                    rope_mscale_all_dim=1.0,
                )
            ),
            "moonlight": ModelConfig(**_SMALL_DEEPSEEK),
            # Heads end where blocks of 128 do, so that FP8 bytes can be kept.
            "latent_fp8": ModelConfig(
                **_SMALL_DEEPSEEK
                | dict(
                    hidden_size=136,
                    num_hidden_layers=2,
                    first_k_dense_replace=0,
                    num_attention_heads=2,
                    num_key_value_heads=2,
                    qk_nope_head_dim=128,
                    v_head_dim=128,
                    kv_lora_rank=40,
                    q_lora_rank=24,
                )
            ),
        },
        drift={
            "deepseek": {**_LATENT, "q_lora_rank": 40},
            "wide deepseek": {
                **_LATENT,
                "q_lora_rank": 200,
                "kv_lora_rank": 512,
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
                "v_head_dim": 128,
            },
            "moonlight": {**_LATENT, "n_group": 1, "topk_group": 1, "n_shared_experts": 2},
        },
        published={"deepseek_v3": _DEEPSEEK, "moonlight_16b_a3b": _MOONLIGHT, "kimi_k2": _KIMI},
        parameters={
            "moonlight_16b_a3b": (16, None, 15.29),
            "deepseek_v3": (671, 37, None),
            "kimi_k2": (1000, 32, None),
        },
        absent={
            "deepseek_v3": (
                _DEEPSEEK,
                {
                    "q_lora_rank": 1536,
                    "rope_interleave": True,
                    "first_k_dense_replace": 3,
                    "norm_topk_prob": True,
                    "n_shared_experts": 1,
                    "n_group": 8,
                    "topk_group": 4,
                    "routed_scaling_factor": 2.5,
                    "rms_norm_eps": 1e-6,
                    "rope_theta": 10_000.0,
                    "tie_word_embeddings": False,
                    "rope_type": "default",
                },
            ),
            "kimi_k2": (
                _KIMI,
                {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "q_lora_rank": 1536},
            ),
        },
    ),
    "glm4_moe": Known(
        small={
            "glm4_moe": ModelConfig(
                **_SIZES
                | _EXPERTS
                | dict(
                    qkv_bias=True,
                    partial_rotary_factor=0.5,
                    scoring_func="sigmoid",
                    n_shared_experts=1,
                    first_k_dense_replace=1,
                    routed_scaling_factor=1.5,
                    n_group=4,
                    topk_group=2,
                )
            )
        },
        drift={
            "glm": dict(
                qkv_bias=True, partial_rotary_factor=0.5, scoring_func="sigmoid", n_shared_experts=1
            )
        },
        published={
            "glm4p5_air": _GLM,
            "glm4p5": _GLM
            | {
                "first_k_dense_replace": 3,
                "hidden_size": 5120,
                "intermediate_size": 12_288,
                "moe_intermediate_size": 1536,
                "n_routed_experts": 160,
                "num_hidden_layers": 92,
                "routed_scaling_factor": 2.5,
                "use_qk_norm": True,
            },
        },
        parameters={"glm4p5_air": (106, None, None), "glm4p5": (355, None, None)},
        absent={
            "glm4_moe": (
                _GLM | dict(num_attention_heads=32),
                {
                    "num_key_value_heads": 8,
                    "qkv_bias": False,
                    "qk_norm": False,
                    "partial_rotary_factor": 0.5,
                    "first_k_dense_replace": 1,
                    "n_shared_experts": 1,
                    "norm_topk_prob": True,
                    "n_group": 1,
                    "topk_group": 1,
                    "routed_scaling_factor": 1.0,
                    "rms_norm_eps": 1e-5,
                    "tie_word_embeddings": False,
                    "rope_theta": 10_000.0,
                },
            )
        },
    ),
    "gpt_oss": Known(
        small={
            "gpt_oss": ModelConfig(
                **_SIZES
                | _EXPERTS
                | dict(
                    num_hidden_layers=4,
                    intermediate_size=32,
                    qk_norm=False,
                    qkv_bias=True,
                    o_bias=True,
                    attention_sinks=True,
                    moe_bias=True,
                    hidden_act="clamped_swiglu",
                    sliding_window=9,
                    sliding_window_pattern=2,
                    rope_type="yarn",
                    rope_factor=32.0,
                    rope_original_max_position_embeddings=32,
                    rope_truncate=False,
                )
            )
        },
        drift={
            "gpt-oss": dict(
                qk_norm=False,
                qkv_bias=True,
                o_bias=True,
                attention_sinks=True,
                moe_bias=True,
                hidden_act="clamped_swiglu",
                sliding_window=11,
                sliding_window_pattern=2,
                rope_type="yarn",
                rope_factor=4.0,
                rope_original_max_position_embeddings=16,
                rope_truncate=False,
            )
        },
        published={
            "gpt_oss_20b": _GPT_OSS,
            "gpt_oss_120b": {n: x for n, x in _GPT_OSS.items() if n != "layer_types"}
            | {"num_hidden_layers": 36, "num_local_experts": 128},
        },
        # arXiv:2508.10925, table 1.
        parameters={"gpt_oss_20b": (20.91, None, 19.75), "gpt_oss_120b": (116.83, None, 115.67)},
        absent={
            "gpt_oss": (
                {n: x for n, x in _GPT_OSS.items() if n != "num_experts_per_tok"},
                {
                    "num_key_value_heads": 8,
                    "head_dim": 64,
                    "num_experts_per_tok": 4,
                    "qkv_bias": True,
                    "o_bias": True,
                    "sliding_window": 128,
                    "sliding_window_pattern": 2,
                    "rms_norm_eps": 1e-5,
                    "rope_theta": 150_000.0,
                    "rope_type": "yarn",
                    "rope_factor": 32.0,
                    "rope_truncate": False,
                    "tie_word_embeddings": False,
                },
            )
        },
    ),
}


def _all(name: str) -> dict[str, Any]:
    return {key: x for known in KNOWN.values() for key, x in getattr(known, name).items()}


CONFIGS: dict[str, ModelConfig] = _all("small")
FAMILIES: dict[str, dict[str, Any]] = _all("drift")
PUBLISHED: dict[str, dict[str, Any]] = _all("published")
PARAMETERS: dict[str, tuple[float, float | None, float | None]] = _all("parameters")
ABSENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = _all("absent")
