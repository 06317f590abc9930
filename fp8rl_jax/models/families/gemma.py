"""Gemma 3 (arXiv:2503.19786), its text model.

Windows but for every sixth layer, a rotary base for each kind of layer, norms on both sides of
attention and MLP that multiply by 1 + weight, GELU, scaled embeddings.
"""

from functools import partial

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.families.family import FULL, WINDOWED, Family, Json, Values, defaults, same
from fp8rl_jax.models.families.fields import Fields

# The type of files of text and images (from 4B), and sizes that their text models have unless
# stated.
IMAGES = "gemma3"
_SIZES = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}
_RULES: Values = {
    "qk_norm": True,
    "sandwich_norms": True,
    "unit_offset_norms": True,
    "scale_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
}
_NO_CAPS = (), "caps of scores and logits are not supported: take another model"


def _of_text(fields: Fields) -> Fields:
    """Returns the text model's fields, of a file of text and images, too."""
    if fields.values["model_type"] != IMAGES:
        return fields
    part = fields.part("text_config")
    if part is None:
        raise fields.error("text_config", "take the file that the model was published with")
    tokens = {name: x for name, x in fields.values.items() if name.endswith("token_id")}
    return Fields({**_SIZES, **tokens, **part.values, "model_type": "gemma3_text"}, part.where)


def _normalise(fields: Fields) -> Fields:
    """transformers 5 has rotary settings for each kind of layer."""
    fields = _of_text(fields)
    kinds = fields.part("rope_parameters")
    local = kinds.part(WINDOWED) if kinds else None
    if kinds and FULL in kinds.values:
        fields = fields.with_values(rope_parameters=kinds.values[FULL], rope_theta=None)
    if local is None:
        return fields
    local.require("rope_type", ("default",), "only default goes with layers with a window")
    return fields.with_values(rope_local_base_freq=local.get("rope_theta", float, 10_000.0))


def _read(fields: Fields, values: Values) -> Values:
    if "sliding_window" not in values:
        return {}
    return {"rope_local_base_freq": fields.get("rope_local_base_freq", float)}


def _written(config: ModelConfig) -> Json:
    return {
        "query_pre_attn_scalar": config.query_pre_attn_scalar or config.head_dim,
        "rope_local_base_freq": config.rope_local_base_freq or config.rope_theta,
    }


def _more_rules(config: ModelConfig) -> Values:
    if not config.rope_local_base_freq and config.rope_type != "default":
        raise UserError(
            "model.rope_local_base_freq is 0, and Hugging Face's 'gemma3_text' never scales the "
            "base of layers with a window: such a model cannot be saved in its format"
        )
    return {}


_gemma3 = partial(
    ModelConfig,
    **_RULES,
    tie_word_embeddings=True,
    query_pre_attn_scalar=256,
    sliding_window_pattern=6,
    rope_theta=1e6,
    rope_local_base_freq=1e4,
)
_small = partial(_gemma3, 262_144, sliding_window=512)
_large = partial(  # its vocabulary has tokens of images, too
    _gemma3, 262_208, sliding_window=1024, rope_type="linear", rope_factor=8.0
)

GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    aliases=(IMAGES,),
    is_like=lambda config: config.sandwich_norms,
    mark="sliding_window",
    options={"sliding_window": 4096} | defaults("sliding_window_pattern", "query_pre_attn_scalar"),
    rules=_RULES | {"num_experts": 0},
    names=same(query_pre_attn_scalar=None),
    absent={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10_000.0,
        "tie_word_embeddings": True,
    },
    supported={
        "attn_logit_softcapping": _NO_CAPS,
        "final_logit_softcapping": _NO_CAPS,
        "use_bidirectional_attention": ((False,), "only causal attention is here"),
    },
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    rope_theta=1e6,
    normalise=_normalise,
    read=_read,
    write=_written,
    more_rules=_more_rules,
    presets={
        "gemma3_270m": _small(640, 2048, 18, 4, 1, 256),
        "gemma3_1b": _small(1152, 6912, 26, 4, 1, 256),
        "gemma3_4b": _large(2560, 10_240, 34, 8, 4, 256),
        "gemma3_12b": _large(3840, 15_360, 48, 16, 8, 256),
        "gemma3_27b": _large(5376, 21_504, 62, 32, 16, 128, query_pre_attn_scalar=168),
    },
)
