"""Rotary embeddings in a config.json, in the form of transformers 4 and that of transformers 5.

::

    4:  "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, ...} or null
    5:  "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, ...}

DeepSeek writes "type" for "rope_type". `rope_fields` reads either; `rope_json` writes the first,
which every version of transformers and the inference engines read.
"""

from __future__ import annotations

from typing import Any

from fp8rl_jax.errors import UserError
from fp8rl_jax.models.config import ROPE_TYPES, ModelConfig
from fp8rl_jax.models.hf.fields import Fields

_ORIGINAL = "original_max_position_embeddings"
# Of each type: name in the file -> (field of ModelConfig, value where the file has none).
_SETTINGS: dict[str, dict[str, tuple[str, float | None]]] = {
    "default": {},
    "llama3": {
        "factor": ("rope_factor", None),
        "low_freq_factor": ("rope_low_freq_factor", None),
        "high_freq_factor": ("rope_high_freq_factor", None),
    },
    "yarn": {
        "factor": ("rope_factor", None),
        "beta_fast": ("rope_beta_fast", 32.0),
        "beta_slow": ("rope_beta_slow", 1.0),
        "mscale": ("rope_mscale", 0.0),
        "mscale_all_dim": ("rope_mscale_all_dim", 0.0),
    },
}
# Settings that are understood where they change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_factor": (None,),
    "truncate": (None, True),
    "partial_rotary_factor": (None, 1, 1.0),
}
_NAMES = {"rope_type", "type", "rope_theta"}


def rope_fields(fields: Fields, latent: bool) -> dict[str, Any]:
    """The rope_* fields of ModelConfig that a config.json gives.

    Args:
      fields: of the config.json.
      latent: whether the model type has latent attention.

    Raises:
      UserError: a type or a setting that is not supported, or one that is missing.
    """
    parts = [fields.part(name) for name in ("rope_scaling", "rope_parameters")]
    values = {name: value for part in parts if part for name, value in part.values.items()}
    theta = values.get("rope_theta", fields.values.get("rope_theta"))
    where = next((part.where for part in reversed(parts) if part), fields.where)
    rope = Fields({**values, "rope_theta": theta}, where)
    kind = values.get("rope_type", values.get("type", "default"))
    name = "type" if "rope_type" not in values and "type" in values else "rope_type"
    if kind not in ROPE_TYPES:
        raise rope.error(name, f"only {', '.join(ROPE_TYPES)} are supported: take another model")
    settings = _SETTINGS[kind]
    original = {_ORIGINAL} if kind != "default" else set()
    for setting in sorted(set(values) - _NAMES - set(settings) - original):
        if kind == "default" and setting == _ORIGINAL:
            continue  # of no effect there
        if values[setting] not in _NEUTRAL.get(setting, ()):
            raise rope.error(
                setting, f"this setting of rope_type {kind!r} is not supported: take another model"
            )
    found: dict[str, Any] = {
        "rope_type": kind,
        "rope_theta": rope.get("rope_theta", float, 10_000.0),
        **{own: rope.get(theirs, float, default) for theirs, (own, default) in settings.items()},
    }
    if kind != "default":
        found["rope_original_max_position_embeddings"] = rope.get(_ORIGINAL, int)
    if found.get("rope_mscale_all_dim") and not latent:
        raise rope.error(
            "mscale_all_dim",
            "a model without latent attention has no such temperature: take another model",
        )
    return found


def rope_json(config: ModelConfig) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of a configuration.

    Raises:
      UserError: no model type has such settings.
    """
    scaling: dict[str, Any] | None = None
    if config.rope_type != "default":
        scaling = {
            "rope_type": config.rope_type,
            _ORIGINAL: config.rope_original_max_position_embeddings,
        }
        for theirs, (own, default) in _SETTINGS[config.rope_type].items():
            value = float(getattr(config, own))
            if theirs.startswith("mscale") and value == default:
                continue
            scaling[theirs] = value
        if not config.latent and config.rope_mscale_all_dim:
            raise UserError(
                f"model.rope_mscale_all_dim is {config.rope_mscale_all_dim}: Hugging Face's models "
                "know it with latent attention alone; set it to 0"
            )
    return {"rope_theta": float(config.rope_theta), "rope_scaling": scaling}


def default_max_positions(config: ModelConfig) -> int:
    """`max_position_embeddings` where nothing says otherwise: rotary embeddings have no limit."""
    if config.rope_type == "default":
        return 32_768
    return int(config.rope_original_max_position_embeddings * config.rope_factor)
