"""Loads the tokenizer that a configuration names."""

from __future__ import annotations

import os
import pathlib

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.data.pretrained import FILES, PretrainedTokenizer
from fp8rl_jax.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer


def tokenizer_path(name: str, checkpoint: str = "") -> str:
    """Returns `name` (`data.tokenizer`), with 'checkpoint' replaced by `model.checkpoint`.

    Raises:
      UserError: the name is 'checkpoint', and `model.checkpoint` is empty.
    """
    if name != "checkpoint":
        return name
    if not checkpoint:
        raise UserError(
            "data.tokenizer is 'checkpoint' and model.checkpoint is empty: name a directory there, "
            "or write data.tokenizer='byte'"
        )
    return checkpoint


def load_tokenizer(config, checkpoint: str = "") -> Tokenizer:
    """Loads the tokenizer that the section `data` names.

    Args:
      config: the section `data`; its `tokenizer` is 'byte', the path of a tokenizer.json, a Hugging
        Face directory, or 'checkpoint'.
      checkpoint: `model.checkpoint`.

    Raises:
      UserError: the tokenizer cannot be read.
    """
    path = tokenizer_path(config.tokenizer, checkpoint)
    if path == "byte":
        return ByteTokenizer()
    if os.path.isdir(path):
        return PretrainedTokenizer(path)
    return FileTokenizer(path, config.bos_token, config.eos_token, config.pad_token)


def tokenizer_files(name: str, checkpoint: str = "") -> list[pathlib.Path]:
    """Returns the files that `load_tokenizer` reads."""
    path = tokenizer_path(name, checkpoint)
    if path == "byte":
        return []
    if not os.path.isdir(path):
        return [pathlib.Path(path)]
    return [file for file in (pathlib.Path(path) / f for f in FILES) if file.is_file()]
