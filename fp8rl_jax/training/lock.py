"""A lock on a run directory: one process writes there at a time.

The file `lock` names the process that holds it. Where the file system has flock, the kernel frees
the lock when its process ends, for whatever reason. Elsewhere the process touches the file every
`_HEARTBEAT` seconds; a lock counts as left behind when its process on this host is gone, or, from
another host, when the file is older than `_DEAD_AFTER` seconds by the file system's clock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import socket
import tempfile
import threading
import time
from typing import Any

from fp8rl_jax.base import processes
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.json_file import parse_json, read_json
from fp8rl_jax.base.paths import open_regular
from fp8rl_jax.base.whole_file import write_whole

_NAME = "lock"
_BEGINNING = b'{"host": '  # of the content
_LONGEST = 1000
_HEARTBEAT = 15.0
_DEAD_AFTER = 120.0
_NO_FLOCK = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)


class RunLock:
    """A context manager that locks a directory; in a run of several processes the first one locks.

    Raises (on entering):
      UserError: another process holds the lock, or the file of that name is no lock.
    """

    def __init__(self, directory: pathlib.Path):
        self._path = directory / _NAME
        self._ended = threading.Event()
        self._file: int | None = None

    def __enter__(self) -> RunLock:
        if not processes.first():
            return self
        while True:
            try:
                self._file = open_regular(self._path, os.O_RDWR | os.O_CREAT)
            except OSError as error:
                raise self._not_ours(error) from None
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._file)
                raise self._held() from None
            except OSError as error:
                os.close(self._file)
                self._file = None
                if error.errno not in _NO_FLOCK:
                    raise self._not_ours(error) from None
                self._enter_by_heartbeat()
                return self
            if _same_file(self._file, self._path):  # its holder may have removed it meanwhile
                if os.fstat(self._file).st_nlink == 1:
                    break
                self._path.unlink()  # a hard link to some other file, which must not be emptied
            os.close(self._file)
        if not _is_lock(os.pread(self._file, _LONGEST, 0)):
            os.close(self._file)
            raise self._not_ours(OSError("its content is no lock's"))
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, _owner(), 0)
        return self

    def _enter_by_heartbeat(self) -> None:
        content = self._path.read_bytes()
        if self._path.stat().st_nlink == 1 and not _is_lock(content):
            raise self._not_ours(OSError("its content is no lock's"))
        owner = _read(self._path)
        if owner and not _is_own(owner) and not self._is_left_behind(owner):
            raise self._held()
        write_whole(self._path, _owner())
        time.sleep(0.5)  # if two processes take over a lock left behind, the later one gets it
        self.check()
        threading.Thread(target=self._beat, daemon=True).start()

    def _is_left_behind(self, owner: dict[str, Any]) -> bool:
        if owner.get("host") == socket.gethostname():
            return not _is_alive(owner)
        with tempfile.TemporaryFile(dir=self._path.parent) as now:
            age = os.fstat(now.fileno()).st_mtime - self._path.stat().st_mtime
        return age > _DEAD_AFTER

    def _beat(self) -> None:
        while not self._ended.wait(_HEARTBEAT):
            with contextlib.suppress(OSError):
                if _is_own(_read(self._path)):
                    os.utime(self._path)

    def check(self) -> None:
        """Raises UserError if the lock was lost: the directory was removed, or another process took
        the lock while this one was suspended."""
        if not processes.first():
            return
        if not (
            _is_own(_read(self._path)) if self._file is None else _same_file(self._file, self._path)
        ):
            renamed = "" if self._file is None else _directory_of(self._file)
            if renamed and renamed != os.path.realpath(self._path.parent):
                raise UserError(
                    f"run.dir: {self._path.parent} is called {renamed} now: this run stops, and "
                    f"goes on from its newest checkpoint with --resume --config.run.dir={renamed!r}"
                )
            raise UserError(
                f"run.dir: {self._path.parent} was removed, or is another process's now: this run "
                "stops without writing there; continue it with --resume, if it is there"
            )

    def _not_ours(self, error: OSError) -> UserError:
        return UserError(
            f"run.dir: {self._path} cannot be taken as a lock ({error.strerror or error}): if no "
            "run uses that directory, move it away, or choose another --config.run.dir"
        )

    def _held(self) -> UserError:
        by = "another process"
        if owner := _read(self._path):
            by = f"process {owner.get('pid')} on {owner.get('host')}, since {owner.get('since')}"
        return UserError(
            f"run.dir: {self._path.parent} is in use by {by}: wait until it has ended, or choose "
            "another --config.run.dir"
        )

    def __exit__(self, *exc) -> None:
        self._ended.set()
        if not processes.first():
            return
        with contextlib.suppress(UserError, OSError):
            self.check()
            self._path.unlink()
        if self._file is not None:
            os.close(self._file)


def _owner() -> bytes:
    """Returns the content of a lock that this process holds."""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "start": _start(os.getpid())}
    return json.dumps(owner | {"since": since}).encode()


def _is_lock(content: bytes) -> bool:
    """Returns whether a file may be emptied: it is empty, or has a lock's content or its start."""
    if content[: len(_BEGINNING)] != _BEGINNING[: len(content)]:
        return False
    try:
        return {"host", "pid"} <= {*parse_json(content)}
    except ValueError:
        return b"}" not in content and len(content) < _LONGEST


def _read(path: pathlib.Path) -> dict[str, Any]:
    try:
        owner = read_json(path)
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _same_file(file: int, path: pathlib.Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except OSError:
        return False


def _directory_of(file: int) -> str:
    """Returns where the directory of an open file is now; '' if it is gone, or not known."""
    try:
        path = os.readlink(f"/proc/self/fd/{file}")
    except OSError:
        return ""
    return os.path.dirname(path) if _same_file(file, pathlib.Path(path)) else ""


def _start(pid: object) -> str:
    """Returns a process's start time in ticks since boot; '' if this host has no such process."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _is_alive(owner: dict[str, Any]) -> bool:
    """Returns whether the owner, a process of this host, still runs under its pid."""
    return bool(owner.get("start")) and _start(owner.get("pid")) == owner["start"]


def _is_own(owner: dict[str, Any]) -> bool:
    here = owner.get("host") == socket.gethostname()
    return here and owner.get("pid") == os.getpid() and _is_alive(owner)
