"""GLM-4.5 (arXiv:2508.06471): heads of which a half is rotated, with DeepSeek-V3's experts.

Both published models have biases of queries, keys and values, the larger one QK-norm too.
"""

from functools import partial

from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.families.deepseek import EXPERTS, OPTIONS, ROUTER, read_experts
from fp8rl_jax.models.families.family import Family, Json, write_names
from fp8rl_jax.models.families.fields import Fields

_SHARE = "partial_rotary_factor"


def _one_share(fields: Fields) -> Fields:
    """transformers 5 has the share of rotated features among the rotary settings."""
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.part(name)
        if rope is not None and rope.values.get(_SHARE) is not None:
            settings = {key: value for key, value in rope.values.items() if key != _SHARE}
            fields = fields.with_values(**{name: settings, _SHARE: rope.values[_SHARE]})
    return fields


def _written(config: ModelConfig) -> Json:
    return write_names(config, EXPERTS) | {"num_nextn_predict_layers": 0}


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

GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    is_like=lambda config: config.num_experts > 0 and config.scoring_func == "sigmoid",
    mark="num_experts",
    rules={"scoring_func": "sigmoid"},
    options=OPTIONS,
    names={
        "qkv_bias": ("attention_bias", False),
        "qk_norm": ("use_qk_norm", False),
        _SHARE: (_SHARE, 0.5),
    },
    absent={
        "num_key_value_heads": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-5,
    },
    supported=ROUTER,
    normalise=_one_share,
    read=read_experts,
    write=_written,
    presets={
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
    },
)
