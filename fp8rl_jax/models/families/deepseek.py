"""DeepSeek-V3 (arXiv:2412.19437) and models of its architecture: Moonlight, Kimi-K2.

Latent attention, a sigmoid router with groups and corrections, shared experts, dense first layers.
"""

from functools import partial

from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.families.family import (
    Family,
    Json,
    Names,
    Values,
    defaults,
    read_names,
    same,
    write_names,
)
from fp8rl_jax.models.families.fields import Fields

EXPERTS: Names = {"num_experts": ("n_routed_experts", None)} | same(
    first_k_dense_replace=0,
    num_experts_per_tok=None,
    moe_intermediate_size=None,
    norm_topk_prob=True,
    n_shared_experts=0,
    n_group=1,
    topk_group=1,
    routed_scaling_factor=1.0,
)
OPTIONS: Values = {name: x for name, (_, x) in EXPERTS.items() if x is not None}
ROUTER = {
    "scoring_func": (("sigmoid",), "only sigmoid goes with this model type"),
    "topk_method": (("noaux_tc",), "only noaux_tc goes with this model type"),
}


def read_experts(fields: Fields, values: Values) -> Values:
    """Returns the fields of experts; none if all layers are dense."""
    if fields.get("first_k_dense_replace", int, 0) >= values["num_hidden_layers"]:
        return {}
    return read_names(fields, EXPERTS)


def _read(fields: Fields, values: Values) -> Values:
    # Latent attention ignores `head_dim`.
    return read_experts(fields, values) | {"head_dim": values["qk_rope_head_dim"]}


def _written(config: ModelConfig) -> Json:
    written: Json = {
        "q_lora_rank": config.q_lora_rank or None,
        "num_nextn_predict_layers": 0,  # modules for multi-token prediction are not written
    }
    if not config.num_experts:
        return written | {"first_k_dense_replace": config.num_hidden_layers}
    router = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    return written | write_names(config, EXPERTS) | router


_deepseek = partial(
    ModelConfig,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    qk_norm=False,
    rope_interleave=True,
    scoring_func="sigmoid",
)
_large = partial(
    _deepseek,
    rope_type="yarn",
    rope_original_max_position_embeddings=4096,
    num_experts_per_tok=8,
    moe_intermediate_size=2048,
    n_shared_experts=1,
    q_lora_rank=1536,
    rope_mscale=1.0,
    rope_mscale_all_dim=1.0,
)

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    aliases=("kimi_k2",),
    is_like=lambda config: config.latent,
    mark="kv_lora_rank",
    rules={"scoring_func": "sigmoid"},
    options={"kv_lora_rank": 512}
    | defaults("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    | OPTIONS,
    names=same(
        q_lora_rank=0,
        kv_lora_rank=None,
        qk_nope_head_dim=None,
        qk_rope_head_dim=None,
        v_head_dim=None,
        rope_interleave=True,
    ),
    absent={
        "q_lora_rank": 1536,
        "first_k_dense_replace": 3,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
    },
    supported=ROUTER,
    read=_read,
    write=_written,
    presets={  # the width of a head, the last number, has no effect
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
        "deepseek_v3": _large(
            *(129_280, 7168, 18_432, 61, 128, 128, 64),
            num_experts=256,
            n_group=8,
            topk_group=4,
            first_k_dense_replace=3,
            routed_scaling_factor=2.5,
            rope_factor=40.0,
        ),
        "kimi_k2": _large(
            *(163_840, 7168, 18_432, 61, 64, 64, 64),
            num_experts=384,
            first_k_dense_replace=1,
            routed_scaling_factor=2.827,
            rope_theta=50_000.0,
            rope_factor=32.0,
            rope_beta_fast=1.0,
        ),
    },
)
