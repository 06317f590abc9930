"""Adapters in the format of Hugging Face's PEFT: adapter_config.json and adapter_model.safetensors.

peft_tensors.py says which tensors are which adapters, and what PEFT applies of them; peft_file.py
checks a file that is read.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flax import traverse_util

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.paths import hub_repository
from fp8rl_jax.models.arrays import FACTORS
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.families import nearest
from fp8rl_jax.models.families.fields import read_fields
from fp8rl_jax.models.families.gemma import IMAGES
from fp8rl_jax.models.hf.config_json import family_of
from fp8rl_jax.models.hf.peft_file import CONFIG, WEIGHTS, AdapterFile
from fp8rl_jax.models.hf.peft_tensors import BESIDE_IMAGES, GATE_UP, PACKED, TEXT, Pair, pairs
from fp8rl_jax.models.hf.safetensors_file import Output, write_file
from fp8rl_jax.models.hf.writer import check_target, make_directory
from fp8rl_jax.models.stacks import Path


def save_adapter(
    path: str | pathlib.Path,
    config: ModelConfig,
    adapters: Any,
    *,
    alpha: float,
    base: str = "",
    add_files: Callable[[pathlib.Path], None] = lambda directory: None,
) -> pathlib.Path:
    """Writes adapters (`Adapted.adapters`) in float32.

    Args:
      path: the directory to make; it must not exist.
      config: shapes of the model.
      adapters: {'layers': {module: {'lora_a': (L, K, r), 'lora_b': (L, r, N)}}}.
      alpha: `lora.alpha`, the factor of the product times the rank.
      base: directory of the checkpoint that the adapters belong to; '' if there is none. The file
        names a snapshot of Hugging Face's Hub by its repository and revision.
      add_files: as in `Beside`.

    Returns:
      The directory.

    Raises:
      UserError: the directory exists or cannot be made, no model type has the rules of `config`, or
        the model is a Gemma 3 and the class of its base cannot be read.
    """
    target = pathlib.Path(path)
    check_target(target)
    family_of(config)  # without a class there is no base for PEFT
    leaves = traverse_util.flatten_dict(adapters)
    rank = _rank(leaves)
    adapted = _layers(leaves)
    packed = None
    if config.moe_bias:
        experts = {layer[-1] for layer in adapted if "experts" in layer}
        packed = [name for name, layers in PACKED.items() if experts.intersection(layers)]
    images = _has_images(config, base)
    written = list(pairs(config, adapted, BESIDE_IMAGES if images else TEXT, packed))
    about = _adapter_config(written, images, rank, alpha, base)

    def output(pair: Pair) -> Output:
        shapes = pair.shapes(pair.ranks(rank))
        dtype: np.dtype = np.dtype(np.float32)
        parts = {name: (shape, dtype) for name, shape in zip(pair.tensors, shapes, strict=True)}
        return Output(parts, lambda: pair.joined(leaves, rank))

    def fill(directory: pathlib.Path) -> None:
        (directory / CONFIG).write_text(json.dumps(about, indent=2) + "\n")
        write_file(directory / WEIGHTS, [output(pair) for pair in written])
        add_files(directory)

    return make_directory(target, fill)


def _adapter_config(
    written: list[Pair], images: bool, rank: int, alpha: float, base: str
) -> dict[str, Any]:
    """Returns the content of adapter_config.json."""
    name, revision = hub_repository(base) or (base, "")
    about: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name or None,
        "revision": revision or None,
        "r": rank,
        "lora_alpha": _number(alpha),
        "lora_dropout": 0.0,
        **_targets(written, images),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    if any(pair.ranks(rank) > rank for pair in written):
        about["rank_pattern"] = {GATE_UP: 2 * rank}
        about["alpha_pattern"] = {GATE_UP: _number(2 * alpha)}
    return about


def _has_images(config: ModelConfig, base: str) -> bool:
    """Returns whether a base is a Gemma 3 with images, in whose class layers have other names."""
    if not base or IMAGES not in nearest(config).aliases:
        return False
    try:
        return read_fields(pathlib.Path(base)).values.get("model_type") == IMAGES
    except UserError as error:
        raise UserError(
            f"an adapter of Gemma 3 has the names of its base's class, and {error}"
        ) from None


def _targets(written: list[Pair], images: bool) -> dict[str, list[str]]:
    """Returns the fields of adapter_config.json that say what PEFT applies.

    A layer is named by the last part of its name, which stands for all layers of that name; where
    others have it too (the vision tower's, and those in `target_parameters`) by more of it.
    """
    parameters = {pair.parameter for pair in written if pair.parameter}
    named = {pair.layers[0] for pair in written if pair.parameter}
    modules = set()
    for pair in written:
        if images:
            modules.add(pair.name.removeprefix("base_model.model."))
        elif not pair.parameter:
            modules.add(pair.module if pair.layers[0] in named else pair.layers[0])
    targets = {"target_modules": sorted(modules)}
    if parameters:
        targets["target_parameters"] = sorted(parameters)
    return targets


def _number(value: float) -> float:
    """Returns an int for a whole number."""
    return int(value) if value == int(value) else value


def _layers(leaves: Mapping[Path, Any]) -> set[Path]:
    """Returns the paths of the linear layers with adapters."""
    return {path[:-1] for path in leaves}


def _rank(leaves: Mapping[Path, Any]) -> int:
    """Returns the rank of adapters."""
    return next(leaf.shape[-1] for path, leaf in leaves.items() if path[-1] == FACTORS[0])


def check_adapter(path: str, config: ModelConfig, adapters: Any, rank: int, alpha: float) -> None:
    """Checks that the adapter in a directory is that of a configuration (`AdapterFile.check`).

    Args:
      path: the directory (`lora.checkpoint`).
      config: shapes of the model.
      adapters: shapes of the configuration's adapters.
      rank, alpha: `lora.rank`, `lora.alpha`.

    Raises:
      UserError: the files are missing or damaged, or are of another adapter; the message names the
        field to change, or the first tensor that has no place.
    """
    adapted = _layers(traverse_util.flatten_dict(adapters))
    AdapterFile(pathlib.Path(path), config).check(adapted, rank, alpha)


def load_adapter(path: str, config: ModelConfig, adapters: Any) -> Any:
    """Returns the adapters of a directory that `check_adapter` accepts, numpy float32.

    Args:
      path: the directory.
      config: shapes of the model.
      adapters: new adapters of the configuration. Where the file has a smaller rank, or nothing,
        their A stays beside a B of zeros.
    """
    leaves = {
        path: np.array(np.zeros(x.shape) if path[-1] == FACTORS[1] else x, np.float32)
        for path, x in traverse_util.flatten_dict(adapters).items()
    }
    file = AdapterFile(pathlib.Path(path), config)
    for pair in file.pairs(_layers(leaves)):
        if file.holds(pair):
            pair.spread(
                file.read(pair.tensors[0]), file.read(pair.tensors[1]), leaves, _rank(leaves)
            )
    return traverse_util.unflatten_dict(leaves)
