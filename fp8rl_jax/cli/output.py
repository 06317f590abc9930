"""Standard output that may go away: a run outlives the terminal or the pipe that it talks to."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from typing import TextIO


class _Outlived(io.TextIOBase):
    """A text stream that goes on as nothing, with a word on standard error, once it can no longer
    be written."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        self._call(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._call(self._stream.flush)

    def _call(self, function: Callable, *arguments: str) -> None:
        try:
            function(*arguments)
        except OSError as error:
            silence(self._stream)
            with contextlib.suppress(OSError):
                print(
                    f"standard output is gone ({error.strerror}); the run goes on", file=sys.stderr
                )

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    @property
    def encoding(self) -> str:
        return self._stream.encoding


@contextlib.contextmanager
def keep_talking() -> Iterator[None]:
    """Within it nothing ends because standard output cannot be written."""
    with contextlib.redirect_stdout(_Outlived(sys.stdout)):
        yield
        sys.stdout.flush()


def is_gone(stream: TextIO) -> bool:
    """Whether a stream can no longer be written: an empty line is tried."""
    try:
        stream.write("\n")
        stream.flush()
    except OSError:
        return True
    return False


def silence(stream: TextIO) -> None:
    """What is written to a stream from here on, and what it still holds, goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
