"""Reads a model from the fields of the config, a published model's name, or a checkpoint.

`model.checkpoint` is a Hugging Face directory: config.json gives the shapes, safetensors the
initial parameters. `model.name` gives the shapes of a published model. Fields that contradict them
are refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from typing import Any

import ml_collections

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.json_file import read_json
from fp8rl_jax.base.paths import expanded, hub_download
from fp8rl_jax.config.fields import FIELDS
from fp8rl_jax.models import ModelConfig
from fp8rl_jax.models.families import BY_TYPE
from fp8rl_jax.models.presets import preset

_SOURCES = ("checkpoint", "name")
_OF_LOADING = ("check_finite",)  # fields that do not describe shapes


def pretrained_config(directory: str | pathlib.Path) -> dict[str, Any] | None:
    """Returns the config.json of a Hugging Face directory; None for any other directory."""
    try:
        content = read_json(pathlib.Path(directory) / "config.json")
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and "model_type" in content else None


def read_model(config: ml_collections.ConfigDict) -> tuple[ModelConfig, int | None]:
    """Returns the model's shapes, and the longest sequence that a checkpoint allows (else None).

    If the shapes are fields of the configuration, vocab_size is 1: the tokenizer decides it later.

    Raises:
      UserError: the section `model` contradicts itself, or what it names cannot be read.
    """
    fields = {k: v for k, v in config.model.to_dict().items() if k not in _OF_LOADING}
    checkpoint, name = (fields.pop(source) for source in _SOURCES)
    if not (checkpoint or name):
        family = BY_TYPE[fields.pop("family")]
        options = fields.pop("family_options")
        return family.of_sizes(fields | {"vocab_size": 1}, options), None
    if checkpoint and name:
        raise UserError(
            f"model.checkpoint is {checkpoint!r} and model.name {name!r}: the checkpoint has its "
            "own shapes, so leave the name out"
        )
    source = "checkpoint" if checkpoint else "name"
    for field, value in fields.items():
        if FIELDS["model"][field].is_set(value):
            raise UserError(
                f"model.{field} is {value!r}, and model.{source} = {checkpoint or name!r} has its "
                f"own shapes: leave model.{field} out"
            )
    if name:
        return preset(name), None
    described = _read_directory(checkpoint)
    has_tokenizer = os.path.isfile(os.path.join(checkpoint, "tokenizer.json"))
    if config.data.tokenizer == "byte" and has_tokenizer:
        raise UserError(
            f"data.tokenizer is 'byte', and model.checkpoint = {checkpoint!r} has a tokenizer of "
            "its own: set data.tokenizer='checkpoint'"
        )
    most = described.get("max_position_embeddings")
    from fp8rl_jax.models import hf  # reads files of other libraries: only when asked for

    return hf.read_config(checkpoint), most if isinstance(most, int) else None


def read_frozen_model(config: ml_collections.ConfigDict) -> ModelConfig | None:
    """Returns the shapes of `algo.teacher`, or None without one; UserError as for a checkpoint."""
    if not config.algo.teacher:
        return None
    _read_directory(config.algo.teacher, "algo.teacher")
    from fp8rl_jax.models import hf

    return hf.read_config(config.algo.teacher)


def _read_directory(checkpoint: str, field: str = "model.checkpoint") -> dict[str, Any]:
    """Reads the config.json of the directory that a field names, or raises UserError."""
    described = pretrained_config(expanded(checkpoint, field))
    if described is not None:
        return described
    if os.path.isdir(checkpoint):
        lacks = "has no config.json with a model_type; name the directory of a Hugging Face model"
    elif command := hub_download(checkpoint):
        lacks = f"is no directory; run {command}, and name that directory"
    else:
        lacks = (
            "is no directory; name one with the config.json and the safetensors of a Hugging Face "
            "model"
        )
    raise UserError(f"{field}: {pathlib.Path(checkpoint)} {lacks}")


def load_params(config: ml_collections.ConfigDict, shardings=None):
    """Loads `model.checkpoint`, laid out by `shardings`: as float32 parameters, or as the base of
    adapters.

    Raises:
      UserError: weights are missing, do not fit config.json, or are not finite.
    """
    from fp8rl_jax.models import hf

    return hf.load(
        config.model.checkpoint,
        dtype=config.lora.base if config.lora.rank else "f32",
        shardings=shardings,
        check_finite=config.model.check_finite,
    )[1]


def identity(checkpoint: str) -> str:
    """Returns a hash that changes with a checkpoint's content, without reading its weights.

    It covers the content of config.json, and every safetensors file's name, size and modification
    time. Weights that were trained further keep names, sizes and headers, so without the time a
    result cached for the old weights would serve the new ones. A copy of the same files has other
    times, which costs a second computation at worst.
    """
    path = pathlib.Path(checkpoint)
    files = [path / "config.json", *sorted(filter(os.path.exists, path.glob("*.safetensors*")))]
    parts: list[Any] = [hashlib.sha256(files[0].read_bytes()).hexdigest()]
    for file in files[1:]:
        stat = file.stat()
        parts.append([file.name, stat.st_size, stat.st_mtime_ns])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
