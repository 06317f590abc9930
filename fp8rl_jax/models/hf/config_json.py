"""ModelConfig <-> the config.json of Hugging Face's model types.

A model type implies rules that ModelConfig spells out as fields (QK-norm, sigmoid router, latent
attention): those of its `Family` (models/families). Reading adds the rules of the type, and writing
finds the type whose rules a ModelConfig follows. Fields that ask for something unsupported are
refused by name; fields without effect on the forward pass (dropout, token ids, initialisation) are
ignored. Rotary embeddings: rope_json.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.families import BY_TYPE, FAMILIES, nearest
from fp8rl_jax.models.families.family import (
    FULL,
    SHARED,
    WINDOWED,
    Family,
    Json,
    Values,
    read_names,
    same,
    write_names,
)
from fp8rl_jax.models.families.fields import EVERY_LAYER, Fields
from fp8rl_jax.models.hf.rope_json import read_rope, rope_json
from fp8rl_jax.models.stacks import ALL, layer_windows

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


def _types(is_one: Callable[[Family], bool]) -> str:
    return ", ".join(family.model_type for family in FAMILIES if is_one(family))


# Fields of any family, with the values that change nothing and what to say of others; a family that
# reads such a field as one of ModelConfig has its own values.
_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "mlp_bias": ((False,), "no MLP has biases here: take another model"),
    "attention_bias": (
        (False,),
        f"only {_types(lambda family: family.fixed.get('qkv_bias', True))} have biases of "
        "attention here: take another model",
    ),
    "partial_rotary_factor": (
        (1,),
        f"only {_types(lambda family: 'partial_rotary_factor' in family.names)} rotates parts of "
        "heads",
    ),
    "decoder_sparse_step": ((1,), EVERY_LAYER),
    "moe_layer_freq": ((1,), EVERY_LAYER),
}
_NO_WINDOW = (
    f"sliding windows are supported in {_types(lambda family: family.has_windows)} alone: take one "
    "of these"
)


def family_of_file(fields: Fields) -> Family:
    """Returns the family of a config.json.

    Raises:
      UserError: the type is unknown or missing.
    """
    name = str(fields.values.get("model_type"))
    if name not in BY_TYPE:
        raise fields.error(
            "model_type", f"only {', '.join(BY_TYPE)} are supported: take a model of these"
        )
    return BY_TYPE[name]


def read_config(fields: Fields) -> ModelConfig:
    """Converts the fields of a config.json to a ModelConfig.

    Raises:
      UserError: a field is missing, wrong or unsupported; the message says what to do.
    """
    family = family_of_file(fields)
    fields.require_finite()
    fields = family.normalise(fields)
    fields = Fields({**family.absent, **fields.values}, fields.where)
    _refuse_unsupported(fields, family)
    values = family.fixed | read_names(fields, SHARED) | read_rope(fields, family)
    values |= _read_windows(fields, family, values["num_hidden_layers"])
    heads = values["num_attention_heads"]
    width = family.head_dim or values["hidden_size"] // max(heads, 1)
    values |= read_names(fields, same(num_key_value_heads=heads, head_dim=width) | family.names)
    values |= family.read(fields, values)
    try:
        return ModelConfig(**values)
    except UserError as error:
        raise UserError(f"{fields.where}: {error}") from None


def _refuse_unsupported(fields: Fields, family: Family) -> None:
    activation, value = family.activation
    fields.require(activation, (value,), f"only {value} is supported: take another model")
    read = {theirs for theirs, _ in family.names.values()}
    neutral = {name: rule for name, rule in _NEUTRAL.items() if name not in read}
    for name, (values, why) in {**neutral, **family.supported}.items():
        fields.require(name, values, why)


def _read_windows(fields: Fields, family: Family, layers: int) -> Values:
    """Returns ModelConfig's fields of sliding windows."""
    types = fields.values.get("layer_types") or []
    if not isinstance(types, list) or any(kind not in (FULL, WINDOWED) for kind in types):
        raise fields.error("layer_types", f"write a list of {FULL} and {WINDOWED}")
    if not family.has_windows:
        windows = fields.get("use_sliding_window", bool, False)
        if windows and fields.values.get("sliding_window") is not None:
            raise fields.error("use_sliding_window", _NO_WINDOW)
        if WINDOWED in types:
            raise fields.error("layer_types", _NO_WINDOW)
        return {}
    every = 0
    if types:
        if len(types) != layers:
            raise fields.error("layer_types", f"write one for each of the {layers} layers")
        every = types.index(FULL) + 1 if FULL in types else 0
        if types != _kinds(layers, every):
            raise fields.error("layer_types", "only one layer in every n may be full_attention")
    elif "sliding_window_pattern" in family.absent:
        every = fields.get("sliding_window_pattern", int, 6)
    window = fields.get("sliding_window", int, 0)
    if not window or every == 1:
        return {}
    return {"sliding_window": window, "sliding_window_pattern": every}


def _kinds(layers: int, every: int) -> list[str]:
    """Returns the kinds of layers of which every n-th sees all tokens; with 0 none does."""
    return [FULL if every and i % every == 0 else WINDOWED for i in range(1, layers + 1)]


def family_of(config: ModelConfig) -> Family:
    """Returns the family whose rules a configuration follows.

    Raises:
      UserError: no family has these rules; the message names the field and the nearest type.
    """
    family = nearest(config)
    for name, value in {**family.fixed, **family.more_rules(config)}.items():
        if getattr(config, name) != value:
            raise UserError(
                f"model.{name} is {getattr(config, name)!r}, but Hugging Face's "
                f"{family.model_type!r}, the model type that is nearest, has {value!r} only: such "
                "a model cannot be saved in its format"
            )
    return family


def config_json(config: ModelConfig, dtype: str, further: Mapping[str, Any] | None = None) -> Json:
    """Returns the config.json of a model.

    Args:
      config: shapes.
      dtype: name of the tensors' type, 'bfloat16' or 'float32'.
      further: fields of a source's config.json; those of `config` override them.

    Raises:
      UserError: no model type has these rules.
    """
    family = family_of(config)
    activation, value = family.activation
    described: Json = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **write_names(config, SHARED | same(num_key_value_heads=None)),
        **({} if config.latent else {"head_dim": config.head_dim}),
        **rope_json(config),
        activation: value,
        "attention_bias": False,
        "torch_dtype": dtype,
        **write_names(config, family.names),
        **_windows_json(config, family),
        **family.write(config),
    }
    # ModelConfig has no context limit: this is a default for programs that need one.
    original = int(config.rope_original_max_position_embeddings * config.rope_factor)
    limit = original if config.rope_type in ("llama3", "yarn") else 32_768
    source = Fields(further or {}, "config.json")
    if source.values.get("model_type") is not None:
        source = family_of_file(source).normalise(source)
    kept = {name: value for name, value in source.values.items() if name not in _DROPPED}
    return {"max_position_embeddings": limit} | kept | described


def _windows_json(config: ModelConfig, family: Family) -> Json:
    """Returns the fields of sliding windows for config.json."""
    if not family.has_windows:
        return {}
    window = {"sliding_window": config.sliding_window or family.absent["sliding_window"]}
    if "sliding_window_pattern" not in family.absent:
        return window
    windows = layer_windows(config)
    shown = [False] * config.num_hidden_layers if windows is None else windows < ALL
    return window | {"layer_types": [WINDOWED if windowed else FULL for windowed in shown]}
