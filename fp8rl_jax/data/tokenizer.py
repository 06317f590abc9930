"""Tokenizers: text <-> token ids, with the ids that the sampler needs."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable
from typing import Protocol

from fp8rl_jax.errors import UserError


class Tokenizer(Protocol):
    """What the rest of the program asks of a tokenizer."""

    vocab_size: int
    pad_id: int
    bos_id: int
    eos_id: int

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Iterable[int]) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255, then pad, begin and end of sequence. Nothing to download."""

    pad_id, bos_id, eos_id = 256, 257, 258
    vocab_size = 259

    def encode(self, text: str) -> list[int]:
        return list(text.encode(errors="surrogateescape"))

    def decode(self, ids: Iterable[int]) -> str:
        """Text up to the first special token; bytes that are no UTF-8 become U+FFFD."""
        out = bytearray()
        for token in ids:
            if token > 255:
                break
            out.append(int(token))
        return out.decode(errors="replace")


class FileTokenizer:
    """A `tokenizer.json` of the tokenizers library."""

    def __init__(self, path: str, bos: str, eos: str, pad: str):
        from tokenizers import Tokenizer as Reader  # slow to import, used with a file only

        if not pathlib.Path(path).is_file():
            raise UserError(f"data.tokenizer: {path} is no file; write 'byte' or a tokenizer.json")
        try:
            self._reader = Reader.from_file(path)
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"data.tokenizer: {path} is no tokenizer.json ({error})") from None
        self.vocab_size = max(self._reader.get_vocab().values()) + 1  # ids may have gaps
        self.bos_id, self.eos_id, self.pad_id = (self._id(t, path) for t in (bos, eos, pad))

    def _id(self, token: str, path: str) -> int:
        found = self._reader.token_to_id(token)
        if found is None:
            raise UserError(f"data.tokenizer: {path} has no token {token!r}; name one that it has")
        return found

    def encode(self, text: str) -> list[int]:
        return self._reader.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        out = []
        for token in ids:
            if token in (self.eos_id, self.pad_id):
                break
            out.append(int(token))
        return self._reader.decode(out)


def load_tokenizer(config) -> Tokenizer:
    """The tokenizer that `config.data` names: 'byte', or the path of a tokenizer.json."""
    if config.tokenizer == "byte":
        return ByteTokenizer()
    return FileTokenizer(config.tokenizer, config.bos_token, config.eos_token, config.pad_token)
