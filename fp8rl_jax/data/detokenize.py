"""Decodes tokens that arrive one by one; returns text as soon as it is final.

A token may end within a UTF-8 character, and its text may depend on the token before it (a word's
leading space). So the last decoded tokens (context) and the pending ones are decoded together, and
the text that the pending ones add is returned once it is final.

The `tokenizers` library's `DecodeStream` drops pending text at the end, and with byte fallback
(SentencePiece) raises or repeats text. With byte fallback one bad byte turns its whole run of byte
tokens into U+FFFD, so no text of a run is final before the run ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """An incremental decoder of one response.

    The joined texts of `push` and `finish` equal the decoding of all tokens at once (except what a
    decoder rewrites in earlier text, as WordPiece does before punctuation).
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        is_end: Callable[[int], bool],
        is_byte: Callable[[int], bool] = lambda token: False,
    ):
        """Args:
        decode: function from tokens, without an end token, to text.
        is_end: whether a token ends the text; that token and later ones are not decoded.
        is_byte: whether a token is a byte of byte fallback.
        """
        self._decode = decode
        self._is_end = is_end
        self._is_byte = is_byte
        self._all: list[int] = []
        self._context: list[int] = []
        self._waiting: list[int] = []
        self._given = ""
        self._ended = False

    def push(self, tokens: Iterable[int]) -> str:
        """Decodes tokens; returns the text that is final now, '' within a character."""
        return "".join(self._push(int(token)) for token in tokens)

    def _push(self, token: int) -> str:
        self._ended = self._ended or self._is_end(token)
        if self._ended:
            return ""
        self._all.append(token)
        self._waiting.append(token)
        if self._is_byte(token) or not self._decode([token]):
            return ""  # the run may continue after a token without text
        before = self._decode(self._context)
        text = self._decode(self._context + self._waiting)
        if text.endswith(_REPLACEMENT) or not text.startswith(before) or text == before:
            return ""
        self._context = self._waiting
        self._waiting = []
        new = text[len(before) :]
        self._given += new
        return new

    def finish(self) -> str:
        """Returns the rest of the text, after the last token."""
        whole = self._decode(self._all)
        rest = whole[len(self._given) :]
        self._given = whole
        self._ended = True
        return rest
