"""One process at a time writes to a run directory, with flock and without it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import pytest

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.training import lock
from fp8rl_jax.training.lock import RunLock

_HOLDER = """
import errno, fcntl, os, pathlib, sys, time
if sys.argv[2] == "heartbeat":
    def flock(*arguments):
        raise OSError(errno.ENOLCK, "no locks available")
    fcntl.flock = flock
from fp8rl_jax.training.lock import RunLock
with RunLock(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(1000)
"""


@pytest.fixture(params=["flock", "heartbeat"])
def mode(request, monkeypatch) -> str:
    if request.param == "heartbeat":

        def flock(*arguments):
            raise OSError(errno.ENOLCK, "no locks available")

        monkeypatch.setattr(fcntl, "flock", flock)
    return request.param


@pytest.fixture
def holder(mode, tmp_path):
    """A process that holds the lock of tmp_path."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(tmp_path), mode], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_process_is_refused_until_the_first_is_dead(holder, tmp_path):
    """The sentence names the process. SIGKILL leaves the file, and the lock is free."""
    with pytest.raises(UserError, match=rf"in use by process {holder.pid} on .*, since 20"):
        RunLock(tmp_path).__enter__()
    holder.kill()
    holder.wait()
    assert (tmp_path / "lock").exists()
    with RunLock(tmp_path) as held:
        held.check()
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    assert not (tmp_path / "lock").exists()


def test_two_runs_of_one_process(tmp_path):
    """A second train() of a notebook is refused as another process is."""
    with RunLock(tmp_path), pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
        RunLock(tmp_path).__enter__()


def test_a_lock_that_is_lost_is_noticed(mode, tmp_path):
    """The directory is moved away, or another process has taken over."""
    directory = tmp_path / "run"
    directory.mkdir()
    with RunLock(directory) as held:
        (directory / "lock").rename(directory / "another")
        shutil.copy(directory / "another", directory / "lock")
        if mode == "heartbeat":
            (directory / "lock").write_text('{"host": "elsewhere", "pid": 1}')
        with pytest.raises(UserError, match="another process's now"):
            held.check()
        shutil.rmtree(directory)
        with pytest.raises(UserError, match="was removed"):
            held.check()


def test_a_renamed_directory_is_named(tmp_path):
    """Under the old name there is nothing to continue."""
    (tmp_path / "run").mkdir()
    with RunLock(tmp_path / "run") as held:
        (tmp_path / "run").rename(tmp_path / "new")
        advice = f"--resume --config.run.dir='{tmp_path}/new'"
        with pytest.raises(UserError, match=f"is called {tmp_path}/new now: .*{advice}"):
            held.check()


def _heartbeat(directory: pathlib.Path, age: float, **owner) -> None:
    path = directory / "lock"
    path.write_text(json.dumps({"host": "elsewhere", "pid": 1, "since": "2026", **owner}))
    os.utime(path, (time.time() - age,) * 2)


@pytest.mark.parametrize("mode", ["heartbeat"], indirect=True)
def test_locks_of_other_hosts(mode, tmp_path):
    """One whose heart beat a minute ago is held; one that is silent for long is taken."""
    _heartbeat(tmp_path, 60)
    with pytest.raises(UserError, match="process 1 on elsewhere, since 2026"):
        RunLock(tmp_path).__enter__()
    _heartbeat(tmp_path, 1000)
    with RunLock(tmp_path) as held:
        held.check()


@pytest.mark.parametrize("mode", ["heartbeat"], indirect=True)
def test_the_heart_beats(mode, tmp_path, monkeypatch):
    """While the lock is held its file stays young."""
    monkeypatch.setattr(lock, "_HEARTBEAT", 0.05)
    with RunLock(tmp_path):
        os.utime(tmp_path / "lock", (0, 0))
        deadline = time.monotonic() + 30
        while (tmp_path / "lock").stat().st_mtime == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize("content", [b"", b"{", b'{"host": "elsewh'])
def test_a_lock_that_was_not_finished(mode, tmp_path, content):
    """It holds nothing up."""
    (tmp_path / "lock").write_bytes(content)
    with RunLock(tmp_path) as held:
        held.check()


@pytest.mark.parametrize(
    "content",
    [
        b"[]",
        b"\xff",
        b'{"pid": "x"}',
        b'{"host": "db", "user": "me"}',
        b"precious\n",
        b'{"host": ' + b" " * 2000,
        b'{"host": {}, precious',
        b"\n",
    ],
)
def test_a_file_of_somebody(mode, tmp_path, content):
    """A regular file of that name which is no lock is named, and keeps its content."""
    (tmp_path / "lock").write_bytes(content)
    with pytest.raises(UserError, match=r"lock cannot be taken as a lock \(its content is no lock"):
        RunLock(tmp_path).__enter__()
    assert (tmp_path / "lock").read_bytes() == content


@pytest.mark.parametrize("kind", ["link", "dangling", "fifo", "directory", "device"])
def test_what_is_no_file_of_ours(kind, mode, tmp_path):
    """A link is not followed, nothing is waited for, and the sentence says what is there."""
    path, victim = tmp_path / "lock", tmp_path / "victim"
    victim.write_text("precious")
    if kind == "link":
        path.symlink_to(victim)
    elif kind == "dangling":
        path.symlink_to(tmp_path / "new")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/full")
    words = {"fifo": "no regular file", "directory": "is a directory"}.get(kind, "symbolic link")
    with pytest.raises(UserError, match=f"lock cannot be taken as a lock .*{words}"):
        RunLock(tmp_path).__enter__()
    assert victim.read_text() == "precious" and not (tmp_path / "new").exists()


def test_a_lock_that_may_not_be_opened(tmp_path, monkeypatch):
    """Of another user."""

    def refuse(*arguments):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UserError, match=r"lock \(Permission denied\): if no run uses"):
        RunLock(tmp_path).__enter__()


def test_a_second_name_of_another_file(mode, tmp_path):
    """A hard link: the lock gets a file of its own, the other one keeps its content."""
    (tmp_path / "victim").write_text("precious")
    os.link(tmp_path / "victim", tmp_path / "lock")
    with RunLock(tmp_path) as held:
        held.check()
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    assert (tmp_path / "victim").read_text() == "precious"
