"""Copies what a worker process prints to the run's own output, up to a limit for each call.

The limit is kept outside of the worker, so that it holds for whatever writes there: a child process
or a library in C too. Nothing waits for the copying: a worker that prints faster than this process
reads is slowed down.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import IO

_log = logging.getLogger(__name__)
_MOST = 2**16  # bytes of a call
_PIECE = 2**16  # bytes
_silenced: set[str] = set()  # what printed more
_lock = threading.Lock()


class Printed(threading.Thread):
    """A thread that copies a worker's standard output or standard error until it ends."""

    def __init__(self, source: IO[bytes], target: int):
        """`source`: what the worker prints; `target`: a file descriptor of this process."""
        super().__init__(name="printed", daemon=True)
        self._source = source
        self._target = target
        self.begin("a worker")

    def begin(self, name: str) -> None:
        """Begins to count what a call prints. `name`: what messages call its function."""
        self._name = name
        self._left = _MOST

    def run(self) -> None:
        with self._source as source:
            while piece := os.read(source.fileno(), _PIECE):
                kept = b"" if self._name in _silenced else piece[: self._left]
                if len(kept) < len(piece):  # whole lines
                    kept = kept[: kept.rfind(b"\n") + 1]
                self._left -= len(kept)
                with contextlib.suppress(OSError):  # of a closed or a full output
                    os.write(self._target, kept)
                if len(kept) < len(piece):
                    _silence(self._name)


def _silence(name: str) -> None:
    with _lock:
        if name in _silenced:
            return
        _silenced.add(name)
    _log.warning(
        "%s prints more than %d KiB in a call; what it prints from here on is left out",
        name,
        _MOST // 2**10,
    )
