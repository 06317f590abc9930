"""Published models by name: their shapes, from the config.json that each was released with."""

from __future__ import annotations

from functools import partial

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.models.config import ModelConfig

# Arguments in order: vocabulary, hidden size, width of the MLP, layers, query heads, key and value
# heads, width of a head. Latent attention uses neither of the last two.
_qwen2 = partial(ModelConfig, qk_norm=False, qkv_bias=True, rope_theta=1e6)
_qwen3 = partial(ModelConfig, 151_936, num_key_value_heads=8, head_dim=128, rope_theta=1e6)
_qwen3_moe = partial(_qwen3, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8)
_llama = partial(ModelConfig, qk_norm=False, rms_norm_eps=1e-5)
_gemma3 = partial(
    ModelConfig,
    sandwich_norms=True,
    unit_offset_norms=True,
    hidden_act="gelu_pytorch_tanh",
    scale_embeddings=True,
    tie_word_embeddings=True,
    query_pre_attn_scalar=256,
    sliding_window_pattern=6,
    rope_theta=1e6,
    rope_local_base_freq=1e4,
)
_gemma3_small = partial(_gemma3, 262_144, sliding_window=512)
_gemma3_large = partial(  # its vocabulary has tokens of images, too
    _gemma3, 262_208, sliding_window=1024, rope_type="linear", rope_factor=8.0
)
_latent = partial(
    ModelConfig, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
)
_deepseek = partial(_latent, qk_norm=False, rope_interleave=True, scoring_func="sigmoid")
_glm4p5 = partial(
    ModelConfig,
    151_552,
    num_attention_heads=96,
    num_key_value_heads=8,
    head_dim=128,
    qkv_bias=True,
    partial_rotary_factor=0.5,
    rope_theta=1e6,
    rms_norm_eps=1e-5,
    scoring_func="sigmoid",
    num_experts_per_tok=8,
    n_shared_experts=1,
)
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
_yarn = partial(_deepseek, rope_type="yarn", rope_original_max_position_embeddings=4096)
_deepseek_671b = partial(
    _yarn,
    num_experts_per_tok=8,
    moe_intermediate_size=2048,
    n_shared_experts=1,
    q_lora_rank=1536,
    rope_mscale=1.0,
    rope_mscale_all_dim=1.0,
)
PRESETS: dict[str, ModelConfig] = {
    "qwen2p5_0p5b": _qwen2(151_936, 896, 4864, 24, 14, 2, 64, tie_word_embeddings=True),
    "qwen2p5_1p5b": _qwen2(151_936, 1536, 8960, 28, 12, 2, 128, tie_word_embeddings=True),
    "qwen2p5_3b": _qwen2(151_936, 2048, 11_008, 36, 16, 2, 128, tie_word_embeddings=True),
    "qwen2p5_7b": _qwen2(152_064, 3584, 18_944, 28, 28, 4, 128),
    "qwen2p5_14b": _qwen2(152_064, 5120, 13_824, 48, 40, 8, 128),
    "qwen2p5_32b": _qwen2(152_064, 5120, 27_648, 64, 40, 8, 128),
    "qwen2p5_72b": _qwen2(152_064, 8192, 29_568, 80, 64, 8, 128),
    "qwen3_0p6b": _qwen3(1024, 3072, 28, 16, tie_word_embeddings=True),
    "qwen3_1p7b": _qwen3(2048, 6144, 28, 16, tie_word_embeddings=True),
    "qwen3_4b": _qwen3(2560, 9728, 36, 32, tie_word_embeddings=True),
    "qwen3_8b": _qwen3(4096, 12_288, 36, 32),
    "qwen3_14b": _qwen3(5120, 17_408, 40, 40),
    "qwen3_32b": _qwen3(5120, 25_600, 64, 64),
    "qwen3_30b_a3b": _qwen3_moe(2048, 6144, 48, 32, moe_intermediate_size=768),
    "qwen3_235b_a22b": _qwen3_moe(4096, 12_288, 94, 64, moe_intermediate_size=1536),
    "llama3p1_8b": _llama(
        *(128_256, 4096, 14_336, 32, 32, 8, 128),
        rope_theta=5e5,
        rope_type="llama3",
        rope_factor=8.0,
    ),
    "llama3p2_1b": _llama(
        *(128_256, 2048, 8192, 16, 32, 8, 64),
        rope_theta=5e5,
        rope_type="llama3",
        rope_factor=32.0,
        tie_word_embeddings=True,
    ),
    "llama3p2_3b": _llama(
        *(128_256, 3072, 8192, 28, 24, 8, 128),
        rope_theta=5e5,
        rope_type="llama3",
        rope_factor=32.0,
        tie_word_embeddings=True,
    ),
    "mistral_7b": _llama(*(32_768, 4096, 14_336, 32, 32, 8, 128), rope_theta=1e6),
    "mistral_7b_v0p1": _llama(*(32_000, 4096, 14_336, 32, 32, 8, 128), sliding_window=4096),
    "gemma3_270m": _gemma3_small(640, 2048, 18, 4, 1, 256),
    "gemma3_1b": _gemma3_small(1152, 6912, 26, 4, 1, 256),
    "gemma3_4b": _gemma3_large(2560, 10_240, 34, 8, 4, 256),
    "gemma3_12b": _gemma3_large(3840, 15_360, 48, 16, 8, 256),
    "gemma3_27b": _gemma3_large(5376, 21_504, 62, 32, 16, 128, query_pre_attn_scalar=168),
    "smollm2_135m": _llama(
        *(49_152, 576, 1536, 30, 9, 3, 64), rope_theta=1e5, tie_word_embeddings=True
    ),
    "moonlight_16b_a3b": _deepseek(
        *(163_840, 2048, 11_264, 27, 16, 16, 64),
        rope_theta=50_000.0,
        rms_norm_eps=1e-5,
        num_experts=64,
        num_experts_per_tok=6,
        moe_intermediate_size=1408,
        n_shared_experts=2,
        first_k_dense_replace=1,
        routed_scaling_factor=2.446,
    ),
    "glm4p5_air": _glm4p5(
        *(4096, 10_944, 46),
        qk_norm=False,
        num_experts=128,
        moe_intermediate_size=1408,
        first_k_dense_replace=1,
    ),
    "glm4p5": _glm4p5(
        *(5120, 12_288, 92),
        num_experts=160,
        moe_intermediate_size=1536,
        first_k_dense_replace=3,
        routed_scaling_factor=2.5,
    ),
    "gpt_oss_20b": _gpt_oss(num_hidden_layers=24, num_experts=32),
    "gpt_oss_120b": _gpt_oss(num_hidden_layers=36, num_experts=128),
    "deepseek_v3": _deepseek_671b(
        *(129_280, 7168, 18_432, 61, 128, 128, 64),
        num_experts=256,
        n_group=8,
        topk_group=4,
        first_k_dense_replace=3,
        routed_scaling_factor=2.5,
        rope_factor=40.0,
    ),
    "kimi_k2": _deepseek_671b(
        *(163_840, 7168, 18_432, 61, 64, 64, 64),
        num_experts=384,
        first_k_dense_replace=1,
        routed_scaling_factor=2.827,
        rope_theta=50_000.0,
        rope_factor=32.0,
        rope_beta_fast=1.0,
    ),
}


def preset(name: str) -> ModelConfig:
    """Returns the shapes of a published model.

    Raises:
      UserError: no such name.
    """
    if name not in PRESETS:
        raise UserError(f"there is no model {name!r}; write one of {', '.join(PRESETS)}")
    return PRESETS[name]
