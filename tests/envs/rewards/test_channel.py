"""A worker's connection, when a reward writes to it, reads it, closes it, or forks."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import sys
import time

import pytest

from fp8rl_jax.envs.rewards import channel
from fp8rl_jax.envs.rewards.call import Failure
from fp8rl_jax.envs.rewards.channel import Channel, ForeignBytes
from fp8rl_jax.envs.rewards.form import Response
from fp8rl_jax.envs.rewards.pool import EXIT, FOREIGN, TIME_LIMIT, WorkerProcess
from fp8rl_jax.envs.rewards.terms import Limits, load_rewards
from fp8rl_jax.envs.rewards.worker import Calls

_SOURCE = r"""
import os, socket, stat, struct, threading, time

def sockets():
    found = []
    for number in range(3, 64):
        try:
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                found.append(number)
        except OSError:
            pass
    return found

WRITES = {
    "text": b"Loading weights...\n", "one byte": b"\0", "a length": struct.pack("!i", 2**30),
    "negative": struct.pack("!iQ", -1, 2**60), "zeros": bytes(100), "much": b"x" * 10**6,
}

def act(prompt, response, answer):
    if response in WRITES:
        for number in sockets():
            os.set_blocking(number, True)
            os.write(number, WRITES[response])
    if response == "late":
        threading.Timer(0.05, lambda: [os.write(n, b"late") for n in sockets()]).start()
    if response == "fork":
        if os.fork() == 0:
            return -1.0
        time.sleep(0.1)
    if response == "fork and raise":
        if os.fork() == 0:
            raise SystemExit
        time.sleep(0.1)
    if response == "close":
        for number in sockets():
            os.close(number)
    if response == "read":
        for number in sockets():
            os.set_blocking(number, True)
            os.read(number, 10)
    if response.startswith("sleep"):
        time.sleep(0.2)
    return float(len(response))
"""


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """start(seconds) -> a worker that has the reward above."""
    directory = tmp_path_factory.mktemp("rewards")
    (directory / "foreign_rewards.py").write_text(_SOURCE)
    sys.path.insert(0, str(directory))
    (term,) = load_rewards("foreign_rewards:act")
    life, writing_end = os.pipe()
    workers = []

    def run(seconds: float) -> WorkerProcess:
        workers.append(WorkerProcess(Limits(seconds, 0), life))
        assert workers[-1].load(term) is None
        return workers[-1]

    yield run
    for worker in workers:
        worker.close()
    os.close(life)
    os.close(writing_end)
    sys.path.remove(str(directory))
    sys.modules.pop("foreign_rewards")


def _begin(worker: WorkerProcess, *responses: str) -> None:
    calls = [pickle.dumps(Response("q", response, "a", {})) for response in responses]
    worker.begin(Calls("reward", "foreign_rewards:act", False, calls))


@pytest.mark.parametrize("what", ["text", "one byte", "a length", "negative", "zeros", "much"])
def test_a_reward_that_writes_to_the_connection(what, start):
    """The call has failed at once, with what happened; the worker does not go on."""
    worker, begin = start(20.0), time.monotonic()
    _begin(worker, "abc", what, "abcd")
    assert worker.answer() == 3.0
    failure = worker.answer()
    assert isinstance(failure, Failure) and failure.kind == FOREIGN and worker.ended
    assert "a file descriptor that is not its own" in failure.text
    assert time.monotonic() - begin < 10


def test_a_thread_that_writes_later(start):
    """What follows is refused, whichever call it meets."""
    worker = start(20.0)
    _begin(worker, "late", "sleep", "abc")
    assert worker.answer() == 4.0
    failure = worker.answer()
    assert isinstance(failure, Failure) and failure.kind == FOREIGN


@pytest.mark.parametrize("what", ["fork", "fork and raise"])
def test_a_copy_of_the_worker_answers_nothing(what, start):
    """Each call has one answer, its own."""
    worker = start(20.0)
    _begin(worker, what, "ab", "abc")
    assert [worker.answer() for _ in range(3)] == [len(what), 2.0, 3.0]
    _begin(worker, "abcd")
    assert worker.answer() == 4.0


def test_a_connection_that_is_closed_or_read(start):
    worker = start(20.0)
    _begin(worker, "close")
    assert worker.answer().kind == EXIT and worker.ended
    worker = start(1.0)
    _begin(worker, "read")  # nothing is there to read
    assert worker.answer().kind == TIME_LIMIT and worker.ended


def _pair(token: bytes = b"t" * 16) -> tuple[Channel, Channel, socket.socket]:
    ours, theirs = socket.socketpair()
    return Channel(ours, token), Channel(theirs, token), theirs


def test_messages_of_any_length():
    ours, theirs, _ = _pair()
    for message in (b"", b"x", bytes(range(256)) * 100):
        ours.send(message, 5)
        assert theirs.receive(5) == message
    with pytest.raises(TimeoutError):
        ours.send(b"x" * 10**7, 0.05)  # nobody takes it
    theirs.close()
    with pytest.raises(OSError):
        ours.send(b"x", 5)


@pytest.mark.parametrize(
    "content",
    [
        b"x",
        b"tttx",
        struct.pack("!16sQQ", b"u" * 16, 0, 1) + b"x",
        struct.pack("!16sQQ", b"t" * 16, 1, 1) + b"x",  # another number
        struct.pack("!16sQQ", b"t" * 16, 0, 2**40),
    ],
)
def test_what_is_no_message(content):
    """Noticed as soon as it differs; only what may still become a message is waited for."""
    ours, _, end = _pair()
    end.send(content)
    with pytest.raises(ForeignBytes):
        ours.receive(5)


@pytest.mark.parametrize("content", [b"", b"ttt", struct.pack("!16sQQ", b"t" * 16, 0, 5) + b"ab"])
def test_a_message_that_never_ends(content):
    ours, _, end = _pair()
    end.send(content)
    with pytest.raises(TimeoutError):
        ours.receive(0.05)
    end.close()
    with pytest.raises(EOFError):
        ours.receive(5)


def test_a_length_is_bounded():
    assert channel._LONGEST <= 2**30
