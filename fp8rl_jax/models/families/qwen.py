"""Qwen2 and Qwen2.5 (arXiv:2412.15115), Qwen3 and Qwen3-MoE (arXiv:2505.09388).

Qwen2 has biases of queries, keys and values; Qwen3 norms every query and key head instead.
Qwen3-MoE has a softmax router and experts in the place of every MLP, or of all but the first.
"""

from functools import partial

from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.families.family import Family, Json, Values, defaults, same
from fp8rl_jax.models.families.fields import EVERY_LAYER, TAKE_ONE_OUT, Fields

_qwen2 = partial(ModelConfig, qk_norm=False, qkv_bias=True, rope_theta=1e6)
_qwen2_tied = partial(_qwen2, 151_936, tie_word_embeddings=True)
_qwen3 = partial(ModelConfig, 151_936, num_key_value_heads=8, head_dim=128, rope_theta=1e6)
_qwen3_tied = partial(_qwen3, tie_word_embeddings=True)
_qwen3_moe = partial(_qwen3, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8)

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    is_like=lambda config: config.qkv_bias,
    rules={"qkv_bias": True},
    absent={"num_key_value_heads": 32},
    presets={
        "qwen2p5_0p5b": _qwen2_tied(896, 4864, 24, 14, 2, 64),
        "qwen2p5_1p5b": _qwen2_tied(1536, 8960, 28, 12, 2, 128),
        "qwen2p5_3b": _qwen2_tied(2048, 11_008, 36, 16, 2, 128),
        "qwen2p5_7b": _qwen2(152_064, 3584, 18_944, 28, 28, 4, 128),
        "qwen2p5_14b": _qwen2(152_064, 5120, 13_824, 48, 40, 8, 128),
        "qwen2p5_32b": _qwen2(152_064, 5120, 27_648, 64, 40, 8, 128),
        "qwen2p5_72b": _qwen2(152_064, 8192, 29_568, 80, 64, 8, 128),
    },
)
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    is_like=lambda config: config.qk_norm,
    rules={"qk_norm": True},
    absent={"num_key_value_heads": 32},
    head_dim=128,
    presets={
        "qwen3_0p6b": _qwen3_tied(1024, 3072, 28, 16),
        "qwen3_1p7b": _qwen3_tied(2048, 6144, 28, 16),
        "qwen3_4b": _qwen3_tied(2560, 9728, 36, 32),
        "qwen3_8b": _qwen3(4096, 12_288, 36, 32),
        "qwen3_14b": _qwen3(5120, 17_408, 40, 40),
        "qwen3_32b": _qwen3(5120, 25_600, 64, 64),
    },
)


def _one_number_of_experts(fields: Fields) -> Fields:
    """transformers 5 calls it num_local_experts."""
    count = fields.values.get("num_local_experts")
    if count is None:
        return fields
    fields.require("num_experts", (count,), f"num_local_experts is {count!r}: {TAKE_ONE_OUT}")
    return fields.with_values(num_experts=count)


def _dense_layers(fields: Fields, values: Values) -> Values:
    dense = fields.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or dense != list(range(len(dense))):
        raise fields.error("mlp_only_layers", EVERY_LAYER)
    return {"first_k_dense_replace": len(dense)}


def _written(config: ModelConfig) -> Json:
    return {"decoder_sparse_step": 1, "mlp_only_layers": list(range(config.dense_layers))}


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    is_like=lambda config: config.num_experts > 0,
    mark="num_experts",
    options=defaults("norm_topk_prob", "first_k_dense_replace", "scoring_func"),
    rules={"qk_norm": True, "n_shared_experts": 0, "routed_scaling_factor": 1.0},
    names=same(
        num_experts=None, num_experts_per_tok=None, moe_intermediate_size=None, norm_topk_prob=False
    ),
    absent={"num_key_value_heads": 4},
    presets={
        "qwen3_30b_a3b": _qwen3_moe(2048, 6144, 48, 32, moe_intermediate_size=768),
        "qwen3_235b_a22b": _qwen3_moe(4096, 12_288, 94, 64, moe_intermediate_size=1536),
    },
    normalise=_one_number_of_experts,
    read=_dense_layers,
    write=_written,
)
