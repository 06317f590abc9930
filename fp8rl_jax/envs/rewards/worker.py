"""The program of a worker process, which `pool` starts: it calls a user's function.

A worker reads requests from a connection and answers each call separately, so that the run knows
which call did not return. It does not import JAX, unless a user's module does.

A worker ends with the process that started it. If idle, it sees the end of the connection. In a
call, a thread sees the end of a pipe and kills the worker with the processes that the call started.
If the call never releases the GIL, so that the thread cannot run, a timer of faulthandler, which
does not need the GIL, ends the worker within the time limit plus two `_TICK`. Not covered: a worker
stopped by a signal, or blocked in the kernel for ever (by a file server that is gone).
"""

from __future__ import annotations

import faulthandler
import hashlib
import importlib
import os
import pickle
import random
import resource
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import IO, Any, NamedTuple

from fp8rl_jax.base.resource_limits import limit
from fp8rl_jax.envs.rewards.call import Failure, attempt, failure_of
from fp8rl_jax.envs.rewards.channel import Channel
from fp8rl_jax.envs.rewards.terms import BUILT_IN, Term, load_rewards, module_file
from fp8rl_jax.envs.step_calls import load_step

_TICK = 5.0  # seconds


class Load(NamedTuple):
    """A request to import a term's function; the answer is None, STALE or a Failure.

    Attributes:
      role: `Term.role`.
      name: 'module:function', or the name of a built-in reward.
      digest: hash of its module's source, from `Term`.
      path, directory: `sys.path` and the current directory, to find the module.
    """

    role: str
    name: str
    digest: str
    path: list[str]
    directory: str


class Calls(NamedTuple):
    """A request for calls of a term, or of its `extract`; the worker answers each call.

    Attributes:
      role, name: those of a loaded term.
      extract: whether to call its `extract`.
      arguments: pickled arguments of each call: a `Response`, a `StepCall`, or (response,) for
        `extract`.
    """

    role: str
    name: str
    extract: bool
    arguments: list[bytes]


STALE = "stale"  # the worker has imported another source of the module


def main(connection_number: int, life: int, dump_number: int, limits: list, token: str) -> None:
    """Serves requests until the connection ends.

    Args:
      connection_number: file descriptor of the connection.
      life: file descriptor of a pipe that ends when the process that started this one ends.
      dump_number: file descriptor for the traceback of a call that ends this process.
      limits: the fields of a `Limits`.
      token: token of the channel, in hexadecimal digits.
    """
    for number in (connection_number, life, dump_number):
        os.set_inheritable(number, False)  # a reward's child processes must not hold them
    channel = Channel(socket.socket(fileno=connection_number), bytes.fromhex(token))
    seconds, memory = limits
    limit(resource.RLIMIT_CORE, 0)  # a crash writes no core file
    if memory:
        limit(resource.RLIMIT_DATA, memory)
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the run
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which children inherit
    dump = os.fdopen(dump_number, "w")
    faulthandler.enable(dump, all_threads=False)
    threading.Thread(target=_watch, args=(life, seconds, dump), daemon=True).start()
    terms: dict[tuple[str, str], Term] = {}
    while True:
        try:
            for answer in _answers(pickle.loads(channel.receive()), terms):
                channel.send(pickle.dumps(answer))
                if isinstance(answer, Failure) and answer.kind == "MemoryError":
                    return  # see WorkerProcess.answer
        except (EOFError, OSError):  # the run has ended
            return


def _watch(life: int, seconds: float, dump: IO) -> None:
    """Waits for the end of the pipe `life`; then kills this process and those that it started."""
    poll = select.poll()
    poll.register(life, select.POLLIN)
    ended: list = []
    while not ended:
        # This timer is reset in each iteration, so it fires only if this thread cannot run.
        faulthandler.dump_traceback_later(seconds + 2 * _TICK, exit=True, file=dump)
        ended = poll.poll(_TICK * 1000)
    os.killpg(0, signal.SIGKILL)


def _answers(request: Load | Calls, terms: dict[tuple[str, str], Term]):
    if isinstance(request, Load):
        yield _load(request, terms)
        return
    for arguments in request.arguments:
        yield _call(terms[request.role, request.name], request.extract, arguments)


def _load(request: Load, terms: dict[tuple[str, str], Term]) -> Failure | str | None:
    key = (request.role, request.name)
    if key not in terms:
        try:
            sys.path[:] = request.path
            os.chdir(request.directory)
            importlib.invalidate_caches()
            if request.name in BUILT_IN and BUILT_IN[request.name].imports:
                importlib.import_module(BUILT_IN[request.name].imports)
            if request.role == "reward":
                (terms[key],) = load_rewards(request.name)
            else:
                terms[key] = load_step(request.name, request.role)
        except BaseException as error:
            return failure_of(error, "")
    return None if terms[key].digest == request.digest else STALE


def _call(term: Term, extract: bool, arguments: bytes) -> Any:
    """Calls a term, or its `extract`; returns the result."""
    try:
        about = pickle.loads(arguments)
    except BaseException as error:  # a class of the row is not found here
        return failure_of(error, "")
    function: Any = term.function
    file = module_file(term.name)
    if not extract:
        return _seeded(lambda: term.form.call(function, about, file), about[:2])
    answer = _seeded(lambda: attempt(function.extract, about, {}, file), about)
    if answer is None or isinstance(answer, (str, Failure)):
        return answer
    return attempt(str, (answer,), {}, file)


def _seeded(call: Callable[[], Any], texts: Sequence[str | bytes]) -> Any:
    """Calls with the random generators of Python, and of numpy if loaded, seeded from texts, so
    that the result does not depend on earlier calls."""
    content = "\0".join(x.hex() if isinstance(x, bytes) else x for x in texts).encode(
        "utf-8", "surrogatepass"
    )
    number = int.from_bytes(hashlib.sha256(content).digest()[:4])
    while True:
        random.seed(number)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(number)
        value = call()
        if numpy or not sys.modules.get("numpy"):  # else the call imported it unseeded
            return value
