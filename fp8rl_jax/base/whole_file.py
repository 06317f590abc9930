"""Atomic writes: after a kill or on a full disk a file is complete, or unchanged."""

from __future__ import annotations

import os
import pathlib
import socket


def write_whole(path: pathlib.Path, content: bytes | str) -> None:
    """Writes a file under a temporary name and renames it; text as UTF-8, lone surrogates as '?'.

    The temporary name holds host and process, so that several processes may write the same file;
    the last one wins.

    Raises:
      OSError: the file cannot be written; the old one stays.
    """
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    if isinstance(content, str):
        content = content.encode("utf-8", errors="replace")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
