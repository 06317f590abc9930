"""What a person reads while a study runs."""

from __future__ import annotations

import time
from collections.abc import Callable

Note = Callable[[str], None]

_SECONDS = 10.0  # between two lines about one part


class Progress:
    """Says after each cell of a study how many there are and how many are left."""

    def __init__(self, total: int, note: Note):
        self._total, self._note, self._done = total, note, 0

    def add(self, text: str) -> None:
        """One more is there; `text` names it."""
        self._done += 1
        left = self._total - self._done
        self._note(f"{text} is there; {self._done} of {self._total} cells, {left} left")


class Part:
    """Says how far a part of a cell is, and how long the rest takes, every ten seconds at most."""

    def __init__(self, name: str, total: int, note: Note):
        """`name` is of what is counted, as in "sequences scored"."""
        self._name, self._total, self._note = name, total, note
        self._started = self._last = time.perf_counter()

    def reach(self, done: int) -> None:
        """`done` of the total are there."""
        now = time.perf_counter()
        if now - self._last < _SECONDS:
            return
        self._last = now
        left = (now - self._started) / done * (self._total - done)
        self._note(f"  {self._name}: {done} of {self._total}, left {left:.0f} s")


def silent(text: str) -> None:
    """A `Note` that nobody reads."""
