"""The worker processes of this program: calls of rewards go in, results come in their order.

There are at most as many workers as cores that this process may use. They start when there is work
for them, stay for later calls, and end with the process (`reward_worker` says how). Each is served
by a thread, which takes some of the waiting calls at a time: many while many wait, one at the end.
"""

from __future__ import annotations

import atexit
import collections
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Sequence
from typing import NamedTuple

from fp8rl_jax.base.errors import RewardError
from fp8rl_jax.envs.reward_call import Failure
from fp8rl_jax.envs.reward_process import EXIT, TIME_LIMIT, WorkerProcess
from fp8rl_jax.envs.reward_worker import STALE, Calls, Limits

_MOST_CALLS = 64  # that a thread takes at a time
_END_SECONDS = 3.0  # for all workers, when the process ends


class Task(NamedTuple):
    """What is called: a reward or its `extract`; the digest of its source; the limits."""

    reward: str
    extract: bool
    digest: str
    limits: Limits


class _Call(NamedTuple):
    task: Task
    arguments: bytes
    future: concurrent.futures.Future


class Pool:
    """Worker processes; see `shared_pool`."""

    def __init__(self, size: int):
        self._size = size
        self._waiting: collections.deque[_Call] = collections.deque()
        self._changed = threading.Condition()
        self._servers: list[_Server] = []
        self._idle = 0
        self._closed = False
        self._life = os.pipe()  # its writing end closes when this process ends

    def submit(
        self, task: Task, arguments: Sequence[bytes]
    ) -> list[concurrent.futures.Future[float | str | Failure | None]]:
        """A future for each call; `arguments` are those of `reward_worker.Calls`.

        The result of a future is what was returned, or a Failure; it raises RewardError if no
        worker can be started, or none can load the reward.
        """
        calls = [_Call(task, content, concurrent.futures.Future()) for content in arguments]
        with self._changed:
            self._waiting.extend(calls)
            wanted = len(self._waiting) - self._idle
            for _ in range(min(wanted, self._size - len(self._servers))):
                self._servers.append(_Server(self, self._life[0]))
                self._servers[-1].start()
            self._changed.notify(len(calls))
        return [call.future for call in calls]

    def take(self) -> list[_Call]:
        """Calls of one task, as soon as there are any; [] when the pool is closed."""
        with self._changed:
            self._idle += 1
            while not (self._closed or self._has_waiting()):
                self._changed.wait()
            self._idle -= 1
            if self._closed:
                return []
            count = min(max(1, len(self._waiting) // (2 * self._size)), _MOST_CALLS)
            task, taken = self._waiting[0].task, list[_Call]()
            while len(taken) < count and self._waiting and self._waiting[0].task == task:
                taken.append(self._waiting.popleft())
            return taken

    def _has_waiting(self) -> bool:
        """Whether calls wait, those aside that nobody waits for any more."""
        while self._waiting and self._waiting[0].future.cancelled():
            self._waiting.popleft()
        return bool(self._waiting)

    def give_back(self, calls: Sequence[_Call]) -> None:
        """Calls that were taken and not made."""
        with self._changed:
            self._waiting.extendleft(reversed(calls))
            self._changed.notify(len(calls))

    def close(self) -> None:
        """Ends all workers; calls that wait are not made."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            servers = list(self._servers)
        for server in servers:
            server.stop()
        for server in servers:
            server.join(_END_SECONDS / len(servers))

    def forget(self) -> None:
        """In a forked process: the workers are its parent's, and end with that."""
        for number in self._life:
            os.close(number)


class _Server(threading.Thread):
    """Gives calls of a pool to one worker, and replaces it when it ends."""

    def __init__(self, pool: Pool, life: int):
        super().__init__(name="rewards", daemon=True)
        self._pool, self._life = pool, life
        self._worker: WorkerProcess | None = None
        self._calls: list[_Call] = []  # that this server has taken and not given back

    def run(self) -> None:
        while calls := self._pool.take():
            self._calls = calls
            try:
                self._serve(calls)
            except Exception as error:  # whoever waits for the results gets it
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
        """Makes calls of one task; those behind one that ended the worker go back to the pool."""
        worker = self._asked(calls)
        for index, call in enumerate(calls):
            if not call.future.set_running_or_notify_cancel():
                worker.close()  # it has begun what nobody waits for
                self._pool.give_back(calls[index + 1 :])
                return
            is_first = not worker.calls
            result = worker.answer()
            if worker.ended:
                self._calls = [call]
                self._pool.give_back(calls[index + 1 :])
                assert isinstance(result, Failure)
                if not (is_first or result.kind in (TIME_LIMIT, EXIT)):
                    # Perhaps what earlier calls left behind, such as memory, was the cause.
                    result = self._asked([call]).answer()
            call.future.set_result(result)
            if worker.ended:
                return

    def _asked(self, calls: list[_Call]) -> WorkerProcess:
        """A worker that has been sent calls of one task."""
        task = calls[0].task
        worker = self._loaded(task)
        worker.begin(Calls(task.reward, task.extract, [call.arguments for call in calls]))
        return worker

    def _loaded(self, task: Task) -> WorkerProcess:
        """A worker that has the task's reward."""
        worker = self._worker
        if worker is not None and not worker.ended and worker.limits == task.limits:
            found = worker.load(task.reward, task.digest)
            if found is None:
                return worker
        if worker is not None:
            worker.close()
        try:
            self._worker = worker = WorkerProcess(task.limits, self._life)
        except OSError as error:
            raise RewardError(
                f"no worker process can be started for the reward {task.reward!r} ({error}): allow "
                "more processes or memory"
            ) from None
        found = worker.load(task.reward, task.digest)
        if found == STALE:
            raise RewardError(
                f"the module of the reward {task.reward!r} has changed since this run read it: "
                "start again, with --resume"
            )
        if isinstance(found, Failure):
            raise RewardError(
                f"the reward {task.reward!r} cannot be loaded in a worker process ({found.text}); "
                "its module must be one that another program can import, with env.reward_memory_gb "
                f"of memory\n{found.traceback}".rstrip()
            )
        return worker


_pool: Pool | None = None
_lock = threading.Lock()


def shared_pool() -> Pool:
    """The one pool of this process."""
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
    _pool, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
