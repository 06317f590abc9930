"""Tokenizers: convert text <-> token ids, and hold the ids that begin prompts and end responses."""

from __future__ import annotations

import abc
import copy
import itertools
import os
import pathlib
import re
from collections.abc import Iterable
from typing import Any, Self

from fp8rl_jax.base.errors import UserError, refused, refused_by_system
from fp8rl_jax.base.json_file import read_bytes
from fp8rl_jax.data.chat import ChatTemplate
from fp8rl_jax.data.detokenize import Detokenizer

_LONGEST = 2**28  # bytes of a tokenizer.json; published ones have up to 40 million
_MOST_IDS = 2**31  # ids are int32
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer(abc.ABC):
    """The interface of a tokenizer.

    Attributes:
      vocab_size: largest id + 1; a model's vocabulary is at least this large.
      pad_id: id in masked slots.
      bos_id: id before a prompt; None if prompts begin without one.
      eos_id: id after a demonstration.
      eos_ids: ids that end a response; eos_id is the first.
      chat_template: the model's chat template, or None.
    """

    vocab_size: int
    pad_id: int
    bos_id: int | None
    eos_id: int
    eos_ids: tuple[int, ...]
    chat_template: ChatTemplate | None = None

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """Encodes a text; special tokens written in it become their ids."""

    @abc.abstractmethod
    def _text(self, ids: list[int]) -> str:
        """Decodes ids without an end token."""

    def _is_byte(self, token: int) -> bool:
        """Returns whether the id is a byte of byte fallback (see `Detokenizer`)."""
        return False

    def is_end(self, token: int) -> bool:
        """Returns whether a text ends at this id."""
        return token in self.eos_ids

    def first_added(self, text: str) -> tuple[int, str] | None:
        """Returns id and text of the first added token ('<|im_end|>') in a text, or None."""
        return None

    @property
    def added_tokens(self) -> dict[str, bool]:
        """The texts that `encode` makes one id each ('<|im_end|>'), and whether the token is
        special or ends a response."""
        return {}

    def ending_also(self, token: int) -> Self:
        """Returns a copy of the tokenizer with this id among `eos_ids`."""
        other = copy.copy(self)
        other.eos_ids = tuple(dict.fromkeys((*self.eos_ids, token)))
        return other

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes ids up to the first end token. Begin, padding and ids beyond the tokenizer's have
        no text; bytes that are not UTF-8 become U+FFFD."""
        return self._text([int(t) for t in itertools.takewhile(lambda t: not self.is_end(t), ids)])

    def detokenizer(self) -> Detokenizer:
        """Returns an incremental decoder for one response."""
        return Detokenizer(self._text, self.is_end, self._is_byte)


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0..255, then padding, begin and end of sequence. Needs no files."""

    pad_id = 256
    bos_id = 257
    eos_id = 258
    eos_ids = (258,)
    vocab_size = 259

    def encode(self, text: str) -> list[int]:
        return list(text.encode(errors="surrogateescape"))

    def is_end(self, token: int) -> bool:
        return token > 255

    def _text(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


class ReaderTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library.

    Special tokens such as '<think>' are decoded, so that a reward sees them; end tokens and
    `_textless` (begin and padding) are not.
    """

    _textless: frozenset[int] = frozenset()

    def __init__(self, reader: Any, where: str = "the tokenizer"):
        """Raises UserError if the reader fails, has no tokens, or has an id of `_MOST_IDS` or more.
        `where` names the file in messages."""
        self._reader = reader
        self._failing = f"data.tokenizer: {where} fails"
        with refused(self._failing):
            self.vocab_size = max(reader.get_vocab().values(), default=-1) + 1  # ids may have gaps
        if not 0 < self.vocab_size <= _MOST_IDS:
            raise UserError(
                f"data.tokenizer: {where} has ids up to {self.vocab_size - 1}; name one whose ids "
                f"lie between 0 and {_MOST_IDS - 1}"
            )

    def encode(self, text: str) -> list[int]:
        with refused(self._failing):
            return self._reader.encode(text, add_special_tokens=False).ids

    def first_added(self, text: str) -> tuple[int, str] | None:
        with refused(self._failing):
            added = self._reader.get_added_tokens_decoder()
        return next(((i, added[i].content) for i in self.encode(text) if i in added), None)

    @property
    def added_tokens(self) -> dict[str, bool]:
        with refused(self._failing):
            added = self._reader.get_added_tokens_decoder()
        return {t.content: t.special or i in self.eos_ids for i, t in added.items()}

    def _text(self, ids: list[int]) -> str:
        shown = [token for token in ids if token not in self._textless]
        with refused(self._failing):
            return self._reader.decode(shown, skip_special_tokens=False)

    def _is_byte(self, token: int) -> bool:
        text = self._reader.id_to_token(token)
        return text is not None and _BYTE.fullmatch(text) is not None


def read_reader(path: pathlib.Path):
    """Reads a tokenizer.json as a `tokenizers.Tokenizer`.

    Options that a file may hold from earlier use are switched off: truncation, padding, and BPE's
    dropout, which encodes a text differently each time.

    Raises:
      UserError: the file cannot be read.
    """
    from tokenizers import Tokenizer as Reader  # slow to import

    with refused_by_system(f"data.tokenizer: {path} cannot be read"):
        content = read_bytes(path, _LONGEST)
    with refused(f"data.tokenizer: {path} is no tokenizer.json"):
        reader = Reader.from_buffer(content)
        reader.no_truncation()
        reader.no_padding()
        if getattr(reader.model, "dropout", None) is not None:
            reader.model.dropout = None
    return reader


class FileTokenizer(ReaderTokenizer):
    """A tokenizer.json file, with special tokens that the configuration names."""

    def __init__(self, path: str, bos: str, eos: str, pad: str):
        if not os.path.isfile(path):
            raise UserError(
                f"data.tokenizer: {path} is no file; write 'byte', a tokenizer.json, or the "
                "directory of a Hugging Face model"
            )
        super().__init__(read_reader(pathlib.Path(path)), path)
        self.bos_id, self.eos_id, self.pad_id = (self._id(t, path) for t in (bos, eos, pad))
        self.eos_ids = (self.eos_id,)
        self._textless = frozenset((self.bos_id, self.pad_id))

    def _id(self, token: str, path: str) -> int:
        number = self._reader.token_to_id(token)
        if number is None:
            raise UserError(f"data.tokenizer: {path} has no token {token!r}; name one that it has")
        return number

    def is_end(self, token: int) -> bool:
        return token in (self.eos_id, self.pad_id)
