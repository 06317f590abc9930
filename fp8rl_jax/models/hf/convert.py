"""Conversion of a checkpoint to another number format: `fp8rl convert SRC DST --dtype bf16|fp8`.

Writes weights and config.json, and copies the tokenizer's files.
"""

from __future__ import annotations

import functools
import os
import pathlib
import shutil

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.models.families.fields import read_fields
from fp8rl_jax.models.hf.config_json import read_config
from fp8rl_jax.models.hf.loader import dtype_name, load
from fp8rl_jax.models.hf.writer import Beside, check_target, check_type, save

COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "tiktoken.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
    "generation_config.json",
)


def convert(
    source: str | pathlib.Path, target: str | pathlib.Path, dtype: str, max_shard_gb: float = 5.0
) -> pathlib.Path:
    """Writes a copy of a checkpoint with its linear layers in another type.

    Args:
      source: directory of a checkpoint.
      target: the directory to make, outside `source`.
      dtype: 'bf16' or 'fp8'. FP8 tensors of the source keep their bytes under 'fp8'.
      max_shard_gb: as for `save`.

    Returns:
      The directory.

    Raises:
      UserError: `target` is inside `source`, or as in `load` and `save`.
    """
    path = pathlib.Path(source)
    target = pathlib.Path(target)
    check_target(target, max_shard_gb)
    if pathlib.Path(os.path.realpath(target)).is_relative_to(os.path.realpath(path)):
        raise UserError(
            f"{target} is within {path}, which is only read: name a directory beside it"
        )
    name = dtype_name(dtype)
    fields = read_fields(path)
    check_type(read_config(fields), name)
    config, params = load(path, dtype=name)
    return save(
        target,
        config,
        params,
        dtype=dtype,
        max_shard_gb=max_shard_gb,
        beside=Beside(fields.values, functools.partial(copy_tokenizer, path)),
    )


def copy_tokenizer(source: pathlib.Path, directory: pathlib.Path) -> None:
    """Copies those of the files `COPIED` that a checkpoint has."""
    for name in COPIED:
        if os.path.isfile(source / name):
            (directory / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, directory / name)
