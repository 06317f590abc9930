"""Reports the progress of a study."""

from __future__ import annotations

import time
from collections.abc import Callable

Note = Callable[[str], None]

_SECONDS = 10.0  # between two lines about one cell


class Part:
    """Reports the progress of a cell's measurement and the time left, at most every ten seconds."""

    def __init__(self, name: str, total: int, note: Note):
        """`name` says what `total` counts, such as "sequences scored"."""
        self._name, self._total, self._note = name, total, note
        self._started = self._last = time.perf_counter()

    def reach(self, done: int) -> None:
        """Reports that `done` of the total are finished."""
        now = time.perf_counter()
        if now - self._last < _SECONDS:
            return
        self._last = now
        left = (now - self._started) / done * (self._total - done)
        self._note(f"  {self._name}: {done} of {self._total}, left {left:.0f} s")


def silent(text: str) -> None:
    """Ignores its text: a `Note` that does nothing."""
