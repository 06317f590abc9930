"""The rotary embedding of a config.json, in both of its forms.

One is of transformers 4, one of transformers 5. Both are read. The first is written, because every
version of transformers and the inference engines read it::

    4:  "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, ...} or null
    5:  "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, ...}

Gemma 3 has two embeddings: the second form holds an object for each kind of layer, "full_attention"
and "sliding_attention"; in the first `rope_local_base_freq` is the second one's base. DeepSeek
writes "type" for "rope_type".
"""

from __future__ import annotations

from typing import Any

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.models.config import ROPE_TYPES, ModelConfig
from fp8rl_jax.models.hf.fields import Fields

KINDS = ("full_attention", "sliding_attention")
TAKE_ONE_OUT = "take one of the two out"
_BASES = {"gemma3_text": 1e6, "gpt_oss": 150_000.0}  # where others have 10,000
_ORIGINAL = "original_max_position_embeddings"
# RoPE type -> {name in the file: (field of ModelConfig, default; None: required)}.
_SETTINGS: dict[str, dict[str, tuple[str, float | None]]] = {
    "default": {},
    "linear": {"factor": ("rope_factor", None)},
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
# Further RoPE settings, with the values that change nothing; other values are refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_factor": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "truncate": (None, True),
}
_NAMES = {"rope_type", "rope_theta", _ORIGINAL}
_TRUNCATE = "truncate"  # of YaRN
_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, _ORIGINAL: 4096, _TRUNCATE: False}  # unstated


def read_rope(fields: Fields, model: str) -> dict[str, Any]:
    """Returns ModelConfig's rope_* fields, from either form, for a model type."""
    parts = [fields.part(name) for name in ("rope_scaling", "rope_parameters")]
    if model == "gpt_oss" and not any(parts):
        parts[0] = Fields(_GPT_OSS_ROPE, f"{fields.where}: rope_scaling")
    nested = parts[1] if model == "gemma3_text" else None
    if nested and KINDS[0] in nested.values:
        parts[1] = nested.part(KINDS[0])
        fields = Fields({**fields.values, "rope_theta": None}, fields.where)
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
    partial = {}
    if model == "glm4_moe":
        share = values.pop("partial_rotary_factor", fields.values.get("partial_rotary_factor"))
        partial["partial_rotary_factor"] = 0.5 if share is None else share
        if partial["partial_rotary_factor"] not in (0.5, 1):
            raise UserError(
                f"{fields.where}: partial_rotary_factor is {share!r}: heads are rotated whole, or "
                "a half of each; take a model with 1 or 0.5"
            )
    where = next((part.where for part in reversed(parts) if part), fields.where)
    rope, kind = Fields(values, where), values.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        raise rope.error(
            "rope_type", f"only {', '.join(ROPE_TYPES)} are supported: take another model"
        )
    settings = _SETTINGS[kind]
    known = {*_NAMES, *settings, *([_TRUNCATE] if kind == "yarn" else [])}
    for setting in sorted(set(values) - known):
        if values[setting] not in _NEUTRAL.get(setting, ()):
            raise rope.error(
                setting, f"this setting of rope_type {kind!r} is not supported: take another model"
            )
    found: dict[str, Any] = {
        **partial,
        "rope_type": kind,
        "rope_theta": rope.get("rope_theta", float, _BASES.get(model, 10_000.0)),
        **{own: rope.get(theirs, float, default) for theirs, (own, default) in settings.items()},
    }
    if kind == "yarn":
        found["rope_truncate"] = rope.get(_TRUNCATE, bool, True)
    if kind in ("llama3", "yarn"):
        found["rope_original_max_position_embeddings"] = rope.get(_ORIGINAL, int)
    if found.get("rope_mscale_all_dim") and model != "deepseek_v3":
        raise rope.error(
            "mscale_all_dim",
            "a model without latent attention has no such temperature: take another model",
        )
    return found


def rope_json(config: ModelConfig) -> dict[str, Any]:
    """Returns `rope_theta` and `rope_scaling` of a configuration, for config.json."""
    scaling: dict[str, Any] | None = None
    if config.rope_type != "default":
        scaling = {"rope_type": config.rope_type}
        if config.rope_type != "linear":
            scaling[_ORIGINAL] = config.rope_original_max_position_embeddings
        for theirs, (own, default) in _SETTINGS[config.rope_type].items():
            value = float(getattr(config, own))
            if theirs.startswith("mscale") and value == default:
                continue
            scaling[theirs] = value
        if not config.rope_truncate:
            scaling[_TRUNCATE] = False
        if not config.latent and config.rope_mscale_all_dim:
            raise UserError(
                f"model.rope_mscale_all_dim is {config.rope_mscale_all_dim}: Hugging Face's models "
                "know it with latent attention alone; set it to 0"
            )
    return {"rope_theta": float(config.rope_theta), "rope_scaling": scaling}
