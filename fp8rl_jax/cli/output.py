"""Standard streams that may be closed, go away, or not hold every character: a run outlives the
terminal, the pipe or the cron that it talks to."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from typing import TextIO


class _Outlived:
    """A text stream that goes on as nothing once it can no longer be written, with a word on
    standard error if `told`."""

    def __init__(self, stream: TextIO, told: bool):
        self._stream, self._told = stream, told

    def write(self, text: str) -> int:
        self._call(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._call(self._stream.flush)

    def _call(self, function: Callable, *arguments: str) -> None:
        try:
            function(*arguments)
        except (OSError, ValueError) as error:
            told, self._told = self._told, False
            if isinstance(error, OSError):
                silence(self._stream)
            elif not self._stream.closed:
                raise
            if told and sys.stderr is not None:  # else print() would come back here
                reason = error.strerror if isinstance(error, OSError) else "it was closed"
                with contextlib.suppress(OSError, ValueError):
                    print(f"standard output is gone ({reason}); the run goes on", file=sys.stderr)

    def __getattr__(self, name: str):
        return getattr(self._stream, name)


def prepare_streams() -> None:
    """Makes the standard streams of this process ones that can be used: those that were closed at
    its start are nothing, characters that an output cannot hold are replaced, and standard error
    may go away. A file that the process opens never takes the number of one of them."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            assert opened == number
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    sys.stderr = _Outlived(sys.stderr, told=False)


@contextlib.contextmanager
def keep_talking() -> Iterator[None]:
    """Within it nothing ends because standard output cannot be written."""
    stream = _Outlived(sys.stdout, told=True)
    with contextlib.redirect_stdout(stream):
        yield
        stream.flush()


def flush(stream: TextIO | None) -> None:
    """Hands over what a stream still holds, unless somebody's code has closed or removed it."""
    if stream is not None and not stream.closed:
        stream.flush()


def is_gone(stream: TextIO | None) -> bool:
    """Whether a stream can no longer be written: an empty line is tried. One that somebody's code
    has closed or removed does not count."""
    if stream is None or stream.closed:
        return False
    try:
        stream.write("\n")
        stream.flush()
    except OSError:
        return True
    return False


def silence(stream: TextIO) -> None:
    """What is written to a stream from here on, and what it still holds, goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != stream.fileno():  # which was free, if somebody's code has closed it
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
