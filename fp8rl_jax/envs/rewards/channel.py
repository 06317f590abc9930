"""Sends messages between a run and a worker process: authenticated, numbered, with time limits.

A reward runs in the process of the worker and may write to the connection by mistake: through a
wrong file descriptor, or in a fork of the process. So every message begins with a secret token, its
number and its length.
"""

from __future__ import annotations

import os
import socket
import struct
import time

TOKEN_BYTES = 16
_HEADER = struct.Struct(f"!{TOKEN_BYTES}sQQ")  # token, message's number, its bytes
_LONGEST = 2**30  # bytes
_PIECE = 2**18
_LEAST_SECONDS = 1e-3  # a timeout of 0 would not wait for bytes that are on their way


class ForeignBytes(OSError):
    """The channel received bytes that its other end did not write."""


class Channel:
    """One end of a connection; the messages in each direction are numbered from 0.

    A fork of the process ends when it uses the channel.
    """

    def __init__(self, end: socket.socket, token: bytes):
        self._end = end
        self._token = token
        self._process = os.getpid()
        self._sent = self._received = 0

    def send(self, message: bytes, seconds: float | None = None) -> None:
        """Sends a message.

        Raises:
          TimeoutError: the other end does not accept it within `seconds`.
          OSError: the other end is closed.
        """
        self._end_fork()
        header = _HEADER.pack(self._token, self._sent, len(message))
        self._sent += 1
        self._end.settimeout(seconds)
        self._end.sendall(header + message)

    def receive(self, seconds: float | None = None) -> bytes:
        """Receives the next message.

        Raises:
          TimeoutError: it has not arrived within `seconds`.
          ForeignBytes: the bytes are no message of the other end.
          EOFError, OSError: the other end is closed.
        """
        self._end_fork()
        deadline = None if seconds is None else time.monotonic() + seconds
        token, number, size = _HEADER.unpack(self._read(_HEADER.size, deadline, self._token))
        if (token, number) != (self._token, self._received) or size > _LONGEST:
            raise ForeignBytes
        self._received += 1
        return self._read(size, deadline)

    def close(self) -> None:
        self._end.close()

    def _read(self, size: int, deadline: float | None, beginning: bytes = b"") -> bytes:
        """Receives `size` bytes, which must start with `beginning`."""
        content = bytearray()
        while len(content) < size:
            left = None if deadline is None else max(deadline - time.monotonic(), _LEAST_SECONDS)
            self._end.settimeout(left)
            piece = self._end.recv(min(size - len(content), _PIECE))
            if not piece:
                raise EOFError
            content += piece
            if not content.startswith(beginning[: len(content)]):
                raise ForeignBytes
        return bytes(content)

    def _end_fork(self) -> None:
        if os.getpid() != self._process:
            os._exit(0)
