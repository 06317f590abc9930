"""A pool of worker processes that call rewards.

There are at most as many workers as cores that this process may use. They start when there is work,
stay for later calls, and end with this process (`worker` says how). A thread for each worker takes
waiting calls in batches; the fewer calls wait, the smaller the batches.

A worker is a new program in a session of its own, so that Ctrl-C does not reach it and it can be
ended together with the processes that a reward started. It is not forked, since a fork of a process
that runs JAX may hang; the main program is not imported.
"""

from __future__ import annotations

import atexit
import collections
import concurrent.futures
import contextlib
import fcntl
import inspect
import json
import linecache
import os
import pickle
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import NamedTuple

from fp8rl_jax.base.errors import RewardError
from fp8rl_jax.envs.rewards.call import Failure, attempt
from fp8rl_jax.envs.rewards.channel import TOKEN_BYTES, Channel, ForeignBytes
from fp8rl_jax.envs.rewards.form import Form
from fp8rl_jax.envs.rewards.printed import Printed
from fp8rl_jax.envs.rewards.terms import Limits, Term, module_file
from fp8rl_jax.envs.rewards.worker import STALE, Calls, Load, main

_PROGRAM = (
    "import json, sys; path, *settings = json.loads(sys.argv[1]); sys.path[:] = path; "
    "from fp8rl_jax.envs.rewards.worker import main; main(*settings)"
)
_LOAD_SECONDS = 600.0  # for a process to start and import a user's module
_SEND_SECONDS = 60.0  # for an idle worker to accept a request
_DUMP_SECONDS = 1.0  # for the traceback of a call that takes too long
_PRINT_SECONDS = 0.2  # for the last of what a worker has printed
_END_SECONDS = 1.0  # for a worker to end without a signal
_MOST_DUMP = 2**20  # bytes of a traceback
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# The library's files in every traceback.
_OURS = [inspect.getfile(attempt), inspect.getfile(Form), inspect.getfile(main), "<string>"]
# Kinds of failures.
TIME_LIMIT = "time limit"
EXIT = "exit"
FOREIGN = "foreign bytes"
_MOST_CALLS = 64  # in a batch
_CLOSE_SECONDS = 3.0  # for all workers, when this process ends


class _Call(NamedTuple):
    task: tuple[Term, bool]  # a reward, and whether its `extract` is called
    arguments: bytes
    future: concurrent.futures.Future


class Pool:
    """Worker processes, and the queue of calls for them; see `shared_pool`."""

    def __init__(self, size: int):
        self._size = size
        self._waiting: collections.deque[_Call] = collections.deque()
        self._changed = threading.Condition()
        self._servers: list[_Server] = []
        self._idle = 0
        self._closed = False
        self._life = os.pipe()  # its writing end closes when this process ends

    def submit(
        self, term: Term, extract: bool, arguments: Sequence[bytes]
    ) -> list[concurrent.futures.Future]:
        """Queues calls of a term, or of its `extract`; `arguments` as in `worker.Calls`.

        Returns a future for each call. Its result is the value or a Failure; it raises RewardError
        if no worker can be started, or none can load the reward.
        """
        task = term, extract
        calls = [_Call(task, content, concurrent.futures.Future()) for content in arguments]
        with self._changed:
            self._waiting.extend(calls)
            for _ in range(min(len(self._waiting) - self._idle, self._size - len(self._servers))):
                self._servers.append(_Server(self, self._life[0]))
                self._servers[-1].start()
            self._changed.notify(len(calls))
        return [call.future for call in calls]

    def take(self) -> list[_Call]:
        """Waits for calls; takes some of one task from the queue, [] when the pool is closed."""
        with self._changed:
            self._idle += 1
            while not self._closed:
                while self._waiting and self._waiting[0].future.cancelled():
                    self._waiting.popleft()  # no caller waits for it
                if self._waiting:
                    break
                self._changed.wait()
            self._idle -= 1
            if self._closed:
                return []
            count = min(max(1, len(self._waiting) // (2 * self._size)), _MOST_CALLS)
            task = self._waiting[0].task
            taken: list[_Call] = []
            while len(taken) < count and self._waiting and self._waiting[0].task == task:
                taken.append(self._waiting.popleft())
            return taken

    def give_back(self, calls: Sequence[_Call]) -> None:
        """Returns calls that were not made to the front of the queue."""
        with self._changed:
            self._waiting.extendleft(reversed(calls))
            self._changed.notify(len(calls))

    def close(self) -> None:
        """Ends all workers; waiting calls are not made."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            servers = list(self._servers)
        for server in servers:
            server.stop()
        for server in servers:
            server.join(_CLOSE_SECONDS / len(servers))

    def forget(self) -> None:
        """Closes the pipe in a forked process, since the workers belong to the parent."""
        for number in self._life:
            os.close(number)


class _Server(threading.Thread):
    """A thread that sends calls to one worker, and replaces the worker when it ends."""

    def __init__(self, pool: Pool, life: int):
        super().__init__(name="rewards", daemon=True)
        self._pool = pool
        self._life = life
        self._worker: WorkerProcess | None = None
        self._calls: list[_Call] = []  # taken and not given back

    def run(self) -> None:
        while calls := self._pool.take():
            self._calls = calls
            try:
                self._serve(calls)
            except Exception as error:  # raised where the results are read
                for call in self._calls:
                    with contextlib.suppress(concurrent.futures.InvalidStateError):
                        call.future.set_exception(error)
            self._calls = []
        if self._worker is not None:
            self._worker.close()

    def stop(self) -> None:
        """Ends the worker at once if it is in a call; `run` ends it otherwise."""
        if self._calls and self._worker is not None:
            self._worker.kill()

    def _serve(self, calls: list[_Call]) -> None:
        """Makes calls of one task; if one ends the worker, the rest goes back to the pool."""
        worker = self._asked(calls)
        for index, call in enumerate(calls):
            if not call.future.set_running_or_notify_cancel():
                worker.close()  # it is running a cancelled call
                self._pool.give_back(calls[index + 1 :])
                return
            is_first = not worker.calls
            result = worker.answer()
            if worker.ended:
                self._calls = [call]
                self._pool.give_back(calls[index + 1 :])
                assert isinstance(result, Failure)
                if not (is_first or result.kind in (TIME_LIMIT, EXIT)):
                    # The cause may be what earlier calls left behind, such as memory.
                    result = self._asked([call]).answer()
            call.future.set_result(result)
            if worker.ended:
                return

    def _asked(self, calls: list[_Call]) -> WorkerProcess:
        """Sends calls of one task to a worker; returns the worker."""
        term, extract = calls[0].task
        worker = self._loaded(term)
        worker.begin(Calls(term.role, term.name, extract, [call.arguments for call in calls]))
        return worker

    def _loaded(self, term: Term) -> WorkerProcess:
        """Returns a worker that has loaded a reward, a new one if necessary."""
        worker = self._worker
        if (
            worker is not None
            and not worker.ended
            and worker.limits == term.limits
            and worker.load(term) is None
        ):
            return worker
        if worker is not None:
            worker.close()
        try:
            self._worker = worker = WorkerProcess(term.limits, self._life)
        except OSError as error:
            raise RewardError(
                f"no worker process can be started for {term.said} ({error}): allow more "
                "processes or memory"
            ) from None
        refusal = worker.load(term)
        if refusal == STALE:
            raise RewardError(
                f"the module of {term.said} has changed since this run read it: start again, with "
                "--resume"
            )
        if isinstance(refusal, Failure):
            raise RewardError(
                f"{term.said} cannot be loaded in a worker process ({refusal.text}); its module "
                "must be one that another program can import, with env.reward_memory_gb of memory\n"
                f"{refusal.traceback}".rstrip()
            )
        return worker


class WorkerProcess:
    """A worker process: start, load a reward, call, end. Used by one thread.

    Attributes:
      limits: time and memory limits of its calls.
      calls: number of answered calls.
      ended: whether the process has ended and must be replaced.
    """

    def __init__(self, limits: Limits, life: int):
        """Starts a worker. `life`: reading end of a pipe whose writing end only this process holds.

        Raises:
          OSError: no process can be started.
        """
        self.limits = limits
        self.calls = 0
        self.ended = False
        ours, theirs = socket.socketpair()
        token = secrets.token_bytes(TOKEN_BYTES)
        self._channel = Channel(ours, token)
        self._dump = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `_end`
        self._file = self._said = ""
        path = [entry for entry in sys.path if isinstance(entry, str)]
        # One thread, since there is a worker for each core; no accelerator; and a fixed hash seed,
        # so that sets of texts have the same order in all workers.
        environment = {
            **dict.fromkeys(_THREADS, "1"),
            "PYTHONHASHSEED": "0",
            **os.environ,
            "JAX_PLATFORMS": "cpu",
        }
        with contextlib.ExitStack() as stack:
            stack.callback(theirs.close)
            numbers = []
            for number in (theirs.fileno(), life, self._dump.fileno()):
                # Above the standard descriptors, which may be closed here.
                numbers.append(fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3))
                stack.callback(os.close, numbers[-1])
            settings = json.dumps([path, *numbers, limits, token.hex()])
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-u", "-c", _PROGRAM, settings],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=numbers,
                start_new_session=True,
                env=environment,
            )
        assert self._process.stdout and self._process.stderr
        self._printed = [Printed(self._process.stdout, 1), Printed(self._process.stderr, 2)]
        for printed in self._printed:
            printed.start()

    def load(self, term: Term) -> Failure | str | None:
        """Makes the worker import a term's function.

        Returns:
          None on success; `worker.STALE` if the worker has imported another source than that of
          `term.digest`; a Failure if the import failed, or the worker ended while it was idle.
        """
        self._file = module_file(term.name)
        self._said = term.said
        self.begin(
            Load(
                role=term.role,
                name=term.name,
                digest=term.digest,
                path=[entry for entry in sys.path if isinstance(entry, str)],
                directory=os.getcwd(),
            )
        )
        return self._answer(_LOAD_SECONDS)

    def begin(self, request: Load | Calls) -> None:
        """Sends a request; `answer` returns the result of each call of a loaded reward."""
        try:
            self._channel.send(pickle.dumps(request), _SEND_SECONDS)
        except TimeoutError:
            self.kill()
        except OSError:  # it has ended; the next answer says so
            pass

    def answer(self) -> float | str | Failure | None:
        """Waits for the next call's result; after a Failure, see `ended`. A MemoryError ends the
        worker, to free what the call has left behind."""
        result = self._answer(self.limits.seconds)
        self.calls += not self.ended
        if isinstance(result, Failure) and result.kind == "MemoryError":
            self.close()
        return result

    def close(self) -> None:
        """Ends the worker: closes its channel, and kills it if it goes on for `_END_SECONDS`."""
        if self.ended:
            return
        self._channel.close()
        self._end()

    def kill(self) -> None:
        """Ends the worker at once; another thread may be waiting for its answer."""
        with contextlib.suppress(OSError):
            self._process.kill()

    def _answer(self, seconds: float):
        for printed in self._printed:
            printed.begin(self._said)
        try:
            return pickle.loads(self._channel.receive(seconds))
        except TimeoutError:
            # faulthandler writes the traceback even if the call holds the GIL.
            with contextlib.suppress(OSError, EOFError):
                os.kill(self._process.pid, signal.SIGABRT)
                self._channel.receive(_DUMP_SECONDS)
            return self._end(TIME_LIMIT, seconds)
        except ForeignBytes:
            return self._end(FOREIGN)
        except (EOFError, OSError):
            return self._end()

    def _end(self, kind: str = "", after: float = 0.0) -> Failure:
        """Ends the worker and returns the Failure. `kind` says why the pool ends it, '' if it ended
        without that; `after` is the time limit in seconds."""
        self.ended = True
        if not kind:  # wait for the status with which it ended
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
        with contextlib.suppress(OSError):  # the group, with the processes of the reward
            os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait()
        for printed in self._printed:
            printed.join(_PRINT_SECONDS)
        self._channel.close()
        self._dump.seek(0)
        dump = self._dump.read(_MOST_DUMP).decode(errors="replace")
        self._dump.close()
        if kind == TIME_LIMIT:
            text = f"it took longer than env.reward_timeout = {after:g} s"
        elif kind == FOREIGN:
            text = "it wrote to a file descriptor that is not its own, over which results are sent"
        elif status < 0:
            kind = f"signal {-status}"
            text = f"its process was ended by {signal.strsignal(-status) or kind} ({kind})"
        else:
            kind = EXIT
            text = f"its process ended with status {status}"
        place, frames = self._where(dump)
        return Failure(kind, text, place, frames)

    def _where(self, dump: str) -> tuple[str, str]:
        """Returns place and traceback by faulthandler's dump, which begins with the last call."""
        frames = _FRAME.findall(dump)
        theirs = [frame for frame in frames if frame[0] not in _OURS]
        of_term = [frame for frame in frames if frame[0] == self._file] or theirs
        if not of_term:
            return "", ""
        lines = (
            f'  File "{file}", line {number}, in {name}\n'
            f"    {linecache.getline(file, int(number)).strip()}\n"
            for file, number, name in reversed(theirs)
        )
        file, number, name = of_term[0]
        return f"{file}, line {number}, in {name}", "".join(lines)


_pool: Pool | None = None
_lock = threading.Lock()


def shared_pool() -> Pool:
    """Returns the pool of this process, which the first call makes."""
    global _pool
    with _lock:
        if _pool is None:
            affinity = getattr(os, "sched_getaffinity", None)
            _pool = Pool(len(affinity(0)) if affinity else os.cpu_count() or 1)
            atexit.register(_pool.close)
        return _pool


def _forget() -> None:
    global _pool, _lock
    if _pool is not None:
        atexit.unregister(_pool.close)
        _pool.forget()
    _pool = None
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget)
