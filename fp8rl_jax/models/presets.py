"""Published models by name: their shapes, from the config.json that each was released with."""

from __future__ import annotations

from typing import Any

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.models.config import ModelConfig

_QWEN3 = dict(
    vocab_size=151_936, head_dim=128, num_key_value_heads=8, rope_theta=1e6, rms_norm_eps=1e-6
)
_QWEN3_MOE = {**_QWEN3, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8}
_LLAMA = dict(qk_norm=False, rms_norm_eps=1e-5)
# num_key_value_heads and head_dim have no part in latent attention: those of the released files.
_DEEPSEEK = dict(
    head_dim=64,
    rope_interleave=True,
    scoring_func="sigmoid",
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    qk_norm=False,
)
_DEEPSEEK_671B = dict(
    hidden_size=7168,
    intermediate_size=18_432,
    num_hidden_layers=61,
    q_lora_rank=1536,
    num_experts_per_tok=8,
    moe_intermediate_size=2048,
    n_shared_experts=1,
    rms_norm_eps=1e-6,
    rope_type="yarn",
    rope_original_max_position_embeddings=4096,
    rope_mscale=1.0,
    rope_mscale_all_dim=1.0,
    **_DEEPSEEK,
)


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, **others: Any) -> dict:
    return dict(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        **others,
    )


PRESETS: dict[str, dict[str, Any]] = {
    "qwen3_0p6b": {**_QWEN3, **_sizes(1024, 3072, 28, 16, tie_word_embeddings=True)},
    "qwen3_1p7b": {**_QWEN3, **_sizes(2048, 6144, 28, 16, tie_word_embeddings=True)},
    "qwen3_4b": {**_QWEN3, **_sizes(2560, 9728, 36, 32, tie_word_embeddings=True)},
    "qwen3_8b": {**_QWEN3, **_sizes(4096, 12_288, 36, 32)},
    "qwen3_14b": {**_QWEN3, **_sizes(5120, 17_408, 40, 40)},
    "qwen3_32b": {**_QWEN3, **_sizes(5120, 25_600, 64, 64)},
    "qwen3_30b_a3b": {**_QWEN3_MOE, **_sizes(2048, 6144, 48, 32, moe_intermediate_size=768)},
    "qwen3_235b_a22b": {**_QWEN3_MOE, **_sizes(4096, 12_288, 94, 64, moe_intermediate_size=1536)},
    "llama3p1_8b": {
        **_LLAMA,
        **_sizes(4096, 14_336, 32, 32, num_key_value_heads=8, head_dim=128),
        "vocab_size": 128_256,
        "rope_theta": 500_000.0,
        "rope_type": "llama3",
        "rope_factor": 8.0,
    },
    "smollm2_135m": {
        **_LLAMA,
        **_sizes(576, 1536, 30, 9, num_key_value_heads=3, head_dim=64),
        "vocab_size": 49_152,
        "rope_theta": 100_000.0,
        "tie_word_embeddings": True,
    },
    "moonlight_16b_a3b": {
        **_DEEPSEEK,
        **_sizes(2048, 11_264, 27, 16, num_key_value_heads=16),
        "vocab_size": 163_840,
        "rope_theta": 50_000.0,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.446,
    },
    "deepseek_v3": {
        **_DEEPSEEK_671B,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "vocab_size": 129_280,
        "num_experts": 256,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "rope_factor": 40.0,
    },
    "kimi_k2": {
        **_DEEPSEEK_671B,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "vocab_size": 163_840,
        "num_experts": 384,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.827,
        "rope_theta": 50_000.0,
        "rope_factor": 32.0,
        "rope_beta_fast": 1.0,
    },
}


def preset(name: str) -> ModelConfig:
    """The shapes of a published model.

    Raises:
      UserError: no such name.
    """
    if name not in PRESETS:
        raise UserError(f"there is no model {name!r}; write one of {', '.join(PRESETS)}")
    return ModelConfig(**PRESETS[name])
