"""Makes the configuration for a directory of a run or of a released model.

A run has saved its configuration. A Hugging Face directory gets the defaults, with the model's
shapes, tokenizer and sampling settings. `config.run.dir` is the directory.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Collection

import ml_collections

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.config import default_config
from fp8rl_jax.config.model_source import pretrained_config
from fp8rl_jax.data.pretrained import read_number, read_object
from fp8rl_jax.training.run_directory import run_config

_NEW_TOKENS = 256


def directory_config(
    directory: str, permitted: Collection[str] = (), needed: Collection[str] = ("precision",)
) -> ml_collections.ConfigDict:
    """Returns the configuration for the directory of a run or of a Hugging Face model.

    `permitted` and `needed` are passed to `run_config`.

    Raises:
      UserError: the directory is neither.
    """
    path = pathlib.Path(directory)
    released = pretrained_config(path)
    if released is not None:
        config = _released_config(directory, released)
    elif os.path.lexists(path / "config.json"):
        config = run_config(path, permitted, needed)
    else:
        raise UserError(
            f"--checkpoint: {directory} holds no config.json: name the directory of a run, or of a "
            "Hugging Face model"
        )
    config.run.dir = directory
    return config


def _released_config(directory: str, released: dict) -> ml_collections.ConfigDict:
    path = pathlib.Path(directory)
    config = default_config()
    config.model.checkpoint = directory
    config.data.tokenizer = "checkpoint"
    config.sft.steps = 0
    most = released.get("max_position_embeddings")
    known = most if isinstance(most, int) else 2 * _NEW_TOKENS
    config.rollout.max_new_tokens = max(min(_NEW_TOKENS, known // 2), 1)
    config.rollout.max_prompt_tokens = 2  # the minimum; `load_policy` sets it for the prompts
    file = path / "generation_config.json"
    settings = read_object(file)
    if settings.get("do_sample"):
        for name in ("top_k", "top_p"):
            value = read_number(file, settings, name)
            if value is not None:
                config.rollout[name] = type(config.rollout[name])(value)
    return config


def is_released(config: ml_collections.ConfigDict) -> bool:
    """Returns whether `run.dir` is a Hugging Face directory; False for the directory of a run,
    even of one that started from a released model."""
    return pretrained_config(config.run.dir) is not None


def usual_temperature(config: ml_collections.ConfigDict) -> float:
    """Returns the default temperature: `rollout.temperature` for a run; for a Hugging Face model
    that of its generation_config.json, or greedy (0) without do_sample."""
    if not is_released(config):
        return config.rollout.temperature
    file = pathlib.Path(config.model.checkpoint) / "generation_config.json"
    settings = read_object(file)
    if not settings.get("do_sample"):
        return 0.0
    value = read_number(file, settings, "temperature")
    return 1.0 if value is None else float(value)
