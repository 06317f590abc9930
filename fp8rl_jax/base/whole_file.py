"""Files that are there whole or not at all, also after a kill or on a full disk."""

from __future__ import annotations

import os
import pathlib
import socket


def write_whole(path: pathlib.Path, content: bytes | str) -> None:
    """Writes a file under another name and renames it; text as UTF-8, lone surrogates as '?'.

    The other name has host and process in it, so that two may write the same file: one wins.

    Raises:
      OSError: it cannot be written; what was there before stays.
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
