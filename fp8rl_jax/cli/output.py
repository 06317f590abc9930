"""Standard streams that may be closed, disappear, or lack a character: a run goes on when its
terminal or pipe is gone."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO


class _Outlived:
    """A text stream that drops text once writing fails; with `announce`, standard error says so."""

    def __init__(self, stream: TextIO, announce: bool):
        self._stream = stream
        self._announce = announce

    def write(self, text: str) -> int:
        self._call(self._stream.write, text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        self._call(self._stream.flush)

    def _call(self, function: Callable, *arguments: str) -> None:
        try:
            function(*arguments)
        except (OSError, ValueError) as error:
            announce = self._announce
            self._announce = False
            if isinstance(error, OSError):
                silence(self._stream)
            elif not self._stream.closed:
                raise
            if announce and sys.stderr is not None:  # else print() would come back here
                reason = error.strerror if isinstance(error, OSError) else "it was closed"
                with contextlib.suppress(OSError, ValueError):
                    print(f"standard output is gone ({reason}); the run goes on", file=sys.stderr)

    def __getattr__(self, name: str):
        return getattr(self._stream, name)


def prepare_streams() -> None:
    """Makes the standard streams usable: one that was closed at the start is /dev/null, characters
    that an output cannot encode are replaced, and standard error may disappear. No file that the
    process opens later gets the number of a standard stream."""
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
    sys.stderr = _Outlived(sys.stderr, announce=False)


@contextlib.contextmanager
def keep_talking() -> Iterator[None]:
    """Lets the program go on if standard output can no longer be written."""
    stream = _Outlived(sys.stdout, announce=True)
    with contextlib.redirect_stdout(stream):
        yield
        stream.flush()


def flush(stream: TextIO | None) -> None:
    """Flushes a stream that a user's function may have closed or removed."""
    if stream is not None and not stream.closed:
        stream.flush()


def is_gone(stream: TextIO | None) -> bool:
    """Returns whether writing an empty line fails; False if the stream is closed or removed."""
    if stream is None or stream.closed:
        return False
    try:
        stream.write("\n")
        stream.flush()
    except OSError:
        return True
    return False


def silence(stream: TextIO) -> None:
    """Redirects a stream, with what it still buffers, to /dev/null."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != stream.fileno():  # equal if the stream was closed: the number was free
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
