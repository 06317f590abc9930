"""The rotary embedding of a config.json, in both of its forms.

One is of transformers 4, one of transformers 5. Both are read. The first is written, because every
version of transformers and the inference engines read it::

    4:  "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, ...} or null
    5:  "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, ...}

DeepSeek writes "type" for "rope_type". Forms of one family are its own: families/gemma.py, glm.py,
gpt_oss.py.
"""

from __future__ import annotations

from typing import Any

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.models.config import ROPE_TYPES, ModelConfig
from fp8rl_jax.models.families.family import Family, Names, read_names, same, write_names
from fp8rl_jax.models.families.fields import TAKE_ONE_OUT, Fields

_ORIGINAL = "original_max_position_embeddings"
_STRETCHED: Names = {
    "rope_original_max_position_embeddings": (_ORIGINAL, None),
    "rope_factor": ("factor", None),
}
# Settings of each type; those of _OPTIONAL are written where they are not the default.
_SETTINGS: dict[str, Names] = {
    "default": {},
    "linear": {"rope_factor": ("factor", None)},
    "llama3": {
        **_STRETCHED,
        "rope_low_freq_factor": ("low_freq_factor", None),
        "rope_high_freq_factor": ("high_freq_factor", None),
    },
    "yarn": {
        **_STRETCHED,
        "rope_beta_fast": ("beta_fast", 32.0),
        "rope_beta_slow": ("beta_slow", 1.0),
        "rope_mscale": ("mscale", 0.0),
        "rope_mscale_all_dim": ("mscale_all_dim", 0.0),
        "rope_truncate": ("truncate", True),
    },
}
_OPTIONAL = {"rope_mscale", "rope_mscale_all_dim", "rope_truncate"}
# Further settings, with the values that change nothing; other values are refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_factor": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "truncate": (None, True),
}


def read_rope(fields: Fields, family: Family) -> dict[str, Any]:
    """Returns ModelConfig's rope_* fields, from either form, for a family."""
    parts = [fields.part(name) for name in ("rope_scaling", "rope_parameters")]
    stated = [("rope_theta", fields.values.get("rope_theta"))]
    stated += [item for part in parts if part for item in part.values.items()]
    values: dict[str, Any] = {}
    for name, value in stated:
        name = "rope_type" if name == "type" else name
        if value is not None and values.setdefault(name, value) != value:
            raise UserError(
                f"{fields.where}: {name} is {values[name]!r} in one place and {value!r} in another "
                f"(rope_scaling, rope_parameters): {TAKE_ONE_OUT}"
            )
    where = next((part.where for part in reversed(parts) if part), fields.where)
    rope = Fields(values, where)
    kind = values.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        raise rope.error(
            "rope_type", f"only {', '.join(ROPE_TYPES)} are supported: take another model"
        )
    names = same(rope_theta=family.rope_theta) | _SETTINGS[kind]
    known = {"rope_type", _ORIGINAL, *(theirs for theirs, _ in names.values())}
    for setting in sorted(set(values) - known):
        if values[setting] not in _NEUTRAL.get(setting, ()):
            raise rope.error(
                setting, f"this setting of rope_type {kind!r} is not supported: take another model"
            )
    ours = {"rope_type": kind} | read_names(rope, names)
    if ours.get("rope_mscale_all_dim") and "kv_lora_rank" not in family.names:
        raise rope.error(
            "mscale_all_dim",
            "a model without latent attention has no such temperature: take another model",
        )
    return ours


def rope_json(config: ModelConfig) -> dict[str, Any]:
    """Returns `rope_theta` and `rope_scaling` of a configuration, for config.json."""
    if config.rope_mscale_all_dim and config.rope_type == "yarn" and not config.latent:
        raise UserError(
            f"model.rope_mscale_all_dim is {config.rope_mscale_all_dim}: Hugging Face's models "
            "know it with latent attention alone; set it to 0"
        )
    scaling: dict[str, Any] | None = None
    if config.rope_type != "default":
        names = {
            ours: (theirs, default)
            for ours, (theirs, default) in _SETTINGS[config.rope_type].items()
            if ours not in _OPTIONAL or getattr(config, ours) != default
        }
        scaling = {"rope_type": config.rope_type} | write_names(config, names)
    return {"rope_theta": float(config.rope_theta), "rope_scaling": scaling}
