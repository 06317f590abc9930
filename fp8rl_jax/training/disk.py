"""Room on the disk for a run's checkpoints, asked before it begins."""

from __future__ import annotations

import errno
import os
import pathlib
import shutil
import tempfile

from fp8rl_jax.errors import UserError

_FULL = (errno.ENOSPC, errno.EDQUOT)
# What a write may meet that the user can fix; any other OSError is ours.
WRITE_ERRORS = (*_FULL, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ENAMETOOLONG)


def check_room(directory: pathlib.Path, bytes_needed: int, field: str = "run.dir") -> None:
    """Raises UserError if `directory` cannot be made, written, or has too little room."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise no_room(directory, error, field) from None
    free = shutil.disk_usage(directory).free
    if free < bytes_needed:
        raise UserError(
            f"{field}: {directory} has {free / 1e6:.0f} MB of room and the checkpoints need "
            f"{bytes_needed / 1e6:.0f} MB; free some, or set {field} elsewhere"
        )


def no_room(directory: pathlib.Path, error: OSError, field: str = "run.dir") -> UserError:
    """The sentence for a write that failed."""
    full = error.errno in _FULL
    reason = "no room is left" if full else error.strerror or str(error)
    return UserError(
        f"{field}: cannot write in {directory}: {reason}; free some room, or set {field} elsewhere"
    )
