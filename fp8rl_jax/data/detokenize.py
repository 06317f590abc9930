"""Text of tokens that come one by one, printed as soon as it cannot change any more.

A token may end in the middle of a UTF-8 character, and the text of a token may depend on the one
before it (a word's leading space). So a window of tokens is decoded: those whose text was given
last, as context, and those that wait. What they add is given once it is settled.

The library's own `DecodeStream` is not used: it never gives what waits at the end, and with byte
fallback (SentencePiece) it raises or repeats text. There a run of byte tokens is one unit: a bad
byte turns all of the run into U+FFFD, so nothing of it is settled before it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Incremental decoding of one response.

    The texts that `push` and `finish` return, joined, are the decoding of all tokens at once.
    (Where a decoder rewrites earlier text, such as WordPiece's clean-up before punctuation, they
    may differ by that.)
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        is_end: Callable[[int], bool],
        is_byte: Callable[[int], bool] = lambda token: False,
    ):
        """Args:
        decode: text of tokens without an end token.
        is_end: whether a token ends the text; neither it nor what follows is decoded.
        is_byte: whether a token is one byte of a run that is decoded as one.
        """
        self._decode, self._is_end, self._is_byte = decode, is_end, is_byte
        self._all: list[int] = []
        self._context: list[int] = []
        self._waiting: list[int] = []
        self._given = ""
        self._ended = False

    def push(self, tokens: Iterable[int]) -> str:
        """The text that these tokens settle; '' while a character is incomplete."""
        return "".join(self._push(int(token)) for token in tokens)

    def _push(self, token: int) -> str:
        self._ended = self._ended or self._is_end(token)
        if self._ended:
            return ""
        self._all.append(token)
        self._waiting.append(token)
        if self._is_byte(token) or not self._decode([token]):
            return ""  # the run may go on behind a token without text
        before = self._decode(self._context)
        text = self._decode(self._context + self._waiting)
        if text.endswith(_REPLACEMENT) or not text.startswith(before) or text == before:
            return ""
        self._context, self._waiting = self._waiting, []
        new = text[len(before) :]
        self._given += new
        return new

    def finish(self) -> str:
        """What is left of the text once there are no more tokens."""
        whole = self._decode(self._all)
        rest = whole[len(self._given) :]
        self._given, self._ended = whole, True
        return rest
