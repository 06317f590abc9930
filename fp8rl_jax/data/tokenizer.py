"""Tokenizers: text <-> token ids, with the ids that the sampler needs."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable
from typing import Protocol

from fp8rl_jax.data.chat import ChatTemplate
from fp8rl_jax.data.detokenize import Detokenizer
from fp8rl_jax.data.pretrained import FILES, PretrainedTokenizer, ReaderTokenizer, read_reader
from fp8rl_jax.errors import UserError


class Tokenizer(Protocol):
    """What the rest of the program asks of a tokenizer.

    Attributes:
      vocab_size: largest id + 1; a model's vocabulary is at least this.
      pad_id: fills slots that no mask counts.
      bos_id: what a prompt begins with, None for nothing.
      eos_id: ends a demonstration.
      eos_ids: each ends a response; holds eos_id.
      chat_template: None if there is none.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def pad_id(self) -> int: ...
    @property
    def bos_id(self) -> int | None: ...
    @property
    def eos_id(self) -> int: ...
    @property
    def eos_ids(self) -> tuple[int, ...]: ...
    @property
    def chat_template(self) -> ChatTemplate | None: ...
    def encode(self, text: str) -> list[int]: ...
    def is_end(self, token: int) -> bool: ...
    def decode(self, ids: Iterable[int]) -> str: ...
    def detokenizer(self) -> Detokenizer: ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255, then pad, begin and end of sequence. Nothing to download."""

    pad_id, bos_id, eos_id = 256, 257, 258
    eos_ids = (258,)
    vocab_size = 259
    chat_template = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode(errors="surrogateescape"))

    def is_end(self, token: int) -> bool:
        return token > 255

    def decode(self, ids: Iterable[int]) -> str:
        """Text up to the first special token; bytes that are no UTF-8 become U+FFFD."""
        out = bytearray()
        for token in ids:
            if self.is_end(token):
                break
            out.append(int(token))
        return out.decode(errors="replace")

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self.decode, self.is_end)


class FileTokenizer(ReaderTokenizer):
    """A `tokenizer.json` of the tokenizers library, its special tokens named by the config."""

    chat_template = None

    def __init__(self, path: str, bos: str, eos: str, pad: str):
        if not pathlib.Path(path).is_file():
            raise UserError(
                f"data.tokenizer: {path} is no file; write 'byte', a tokenizer.json, or the "
                "directory of a Hugging Face model"
            )
        self._reader = read_reader(pathlib.Path(path))
        self.vocab_size = max(self._reader.get_vocab().values()) + 1  # ids may have gaps
        self.bos_id, self.eos_id, self.pad_id = (self._id(t, path) for t in (bos, eos, pad))
        self.eos_ids = (self.eos_id,)

    def _id(self, token: str, path: str) -> int:
        found = self._reader.token_to_id(token)
        if found is None:
            raise UserError(f"data.tokenizer: {path} has no token {token!r}; name one that it has")
        return found

    def is_end(self, token: int) -> bool:
        return token in (self.eos_id, self.pad_id)


def tokenizer_path(name: str, checkpoint: str = "") -> str:
    """What `data.tokenizer` names, with 'checkpoint' resolved to `model.checkpoint`.

    Raises:
      UserError: it says 'checkpoint' and there is none.
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
    """The tokenizer that `config.data` names.

    Args:
      config: the section `data`: 'byte', the path of a tokenizer.json, a Hugging Face directory,
        or 'checkpoint'.
      checkpoint: `model.checkpoint`.

    Raises:
      UserError: it cannot be read.
    """
    path = tokenizer_path(config.tokenizer, checkpoint)
    if path == "byte":
        return ByteTokenizer()
    if pathlib.Path(path).is_dir():
        return PretrainedTokenizer(path)
    return FileTokenizer(path, config.bos_token, config.eos_token, config.pad_token)


def tokenizer_files(name: str, checkpoint: str = "") -> list[pathlib.Path]:
    """The files that the tokenizer of `load_tokenizer` depends on."""
    path = tokenizer_path(name, checkpoint)
    if path == "byte":
        return []
    if not pathlib.Path(path).is_dir():
        return [pathlib.Path(path)]
    return [file for file in (pathlib.Path(path) / f for f in FILES) if file.is_file()]
