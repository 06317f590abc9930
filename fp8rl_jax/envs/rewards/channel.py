"""Messages between a run and a worker process: whose they are, how long, and until when to wait.

A reward shares its process with the worker's end of the connection, and may write to it by mistake:
through a file descriptor of another library, or in a copy of the process that it has forked. So
every message begins with a token that only these two know, its number and its length.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time

TOKEN_BYTES = 16
_HEADER = struct.Struct(f"!{TOKEN_BYTES}sQQ")  # token, number of the message, bytes of it
_LONGEST = 2**30  # bytes
_PIECE = 2**18


class ForeignBytes(OSError):
    """What arrived was not written by the other end."""


class Channel:
    """One end of a connection; messages of each direction are numbered from 0 on.

    A copy of the process, made by a fork, ends when it uses the channel.
    """

    def __init__(self, end: socket.socket, token: bytes):
        self._end, self._token, self._process = end, token, os.getpid()
        self._sent = self._received = 0
        end.setblocking(False)

    def send(self, message: bytes, seconds: float | None = None) -> None:
        """Sends a message.

        Raises:
          TimeoutError: it is not taken within `seconds`.
          OSError: the other end is closed.
        """
        wait = self._waiter(select.POLLOUT, seconds)
        header = _HEADER.pack(self._token, self._sent, len(message))
        self._sent += 1
        for part in (header, message):
            rest = memoryview(part)
            while rest:
                wait()
                try:
                    rest = rest[self._end.send(rest[:_PIECE]) :]
                except BlockingIOError:
                    continue

    def receive(self, seconds: float | None = None) -> bytes:
        """The next message.

        Raises:
          TimeoutError: it is not there within `seconds`.
          ForeignBytes: something else has arrived.
          EOFError, OSError: the other end is closed.
        """
        wait = self._waiter(select.POLLIN, seconds)
        header = self._read(_HEADER.size, wait, self._token)
        token, number, size = _HEADER.unpack(header)
        if (token, number) != (self._token, self._received) or size > _LONGEST:
            raise ForeignBytes
        self._received += 1
        return self._read(size, wait)

    def close(self) -> None:
        self._end.close()

    def _read(self, size: int, wait, beginning: bytes = b"") -> bytes:
        """`size` bytes, of which the first ones must be `beginning`."""
        content = bytearray()
        while len(content) < size:
            wait()
            try:
                piece = self._end.recv(min(size - len(content), _PIECE))
            except BlockingIOError:
                continue
            if not piece:
                raise EOFError
            content += piece
            if not content.startswith(beginning[: len(content)]):
                raise ForeignBytes
        return bytes(content)

    def _waiter(self, event: int, seconds: float | None):
        """A function that waits until the connection is ready; all its calls have `seconds`."""
        if os.getpid() != self._process:
            os._exit(0)
        deadline = None if seconds is None else time.monotonic() + seconds
        poll = select.poll()
        poll.register(self._end, event)

        def wait() -> None:
            left = None if deadline is None else max(deadline - time.monotonic(), 0) * 1000
            if not poll.poll(left):
                raise TimeoutError

        return wait
