"""A worker process as the process that started it sees it: start, load a reward, call, end.

The worker runs `reward_worker`, in a session of its own, so that Ctrl-C at a terminal does not
reach it and it can be ended with the processes that a reward started. It is started as a new
program, not forked: a fork of a process that runs JAX may hang. The main program is not imported.
"""

from __future__ import annotations

import contextlib
import fcntl
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

from fp8rl_jax.envs import reward_call, reward_worker
from fp8rl_jax.envs.reward_call import Failure
from fp8rl_jax.envs.reward_channel import TOKEN_BYTES, Channel, ForeignBytes
from fp8rl_jax.envs.reward_worker import Calls, Limits, Load
from fp8rl_jax.envs.rewards import module_file

_PROGRAM = (
    "import json, sys; path, *settings = json.loads(sys.argv[1]); sys.path[:] = path; "
    "from fp8rl_jax.envs.reward_worker import main; main(*settings)"
)
_LOAD_SECONDS = 600.0  # for the start of a process and all that a user's module imports
_SEND_SECONDS = 60.0  # for a worker that has nothing to do to take a request
_DUMP_SECONDS = 1.0  # for the traceback of a call that takes too long
_END_SECONDS = 1.0  # for a worker that ends by itself
_MOST_DUMP = 2**20  # bytes of a traceback that are read
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_OURS = (reward_call.__file__, reward_worker.__file__, "<string>")  # in every traceback
TIME_LIMIT, EXIT, FOREIGN = "time limit", "exit", "foreign bytes"  # kinds of failures


class WorkerProcess:
    """A worker, and the requests to it. It is used by one thread.

    Attributes:
      limits: of its calls.
      calls: that it has answered.
      ended: whether it has ended, so that another must take its place.
    """

    def __init__(self, limits: Limits, life: int):
        """`life` is a pipe's reading end, whose writing end no other process holds.

        Raises:
          OSError: no process can be started.
        """
        self.limits, self.calls, self.ended = limits, 0, False
        ours, theirs = socket.socketpair()
        token = secrets.token_bytes(TOKEN_BYTES)
        self._channel = Channel(ours, token)
        self._dump = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `_end`
        self._file = ""
        path = [entry for entry in sys.path if isinstance(entry, str)]
        with contextlib.ExitStack() as stack:
            stack.callback(theirs.close)
            numbers = []
            for number in (theirs.fileno(), life, self._dump.fileno()):
                # Above those of standard input and output, which may be closed here.
                numbers.append(fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3))
                stack.callback(os.close, numbers[-1])
            settings = json.dumps([path, *numbers, limits, token.hex()])
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-u", "-c", _PROGRAM, settings],
                stdin=subprocess.DEVNULL, pass_fds=numbers, start_new_session=True,
                env=_environment(),
            )  # fmt: skip

    def load(self, reward: str, digest: str) -> Failure | str | None:
        """Imports a reward.

        Returns:
          None; `reward_worker.STALE` if the worker has imported other source than that of
          `digest`; a Failure, also where the worker had ended while it had nothing to do.
        """
        self._file = module_file(reward)
        path = [entry for entry in sys.path if isinstance(entry, str)]
        self._send(Load(reward, digest, path, os.getcwd()))
        return self._answer(_LOAD_SECONDS)

    def begin(self, calls: Calls) -> None:
        """Asks for calls of a reward that has been loaded; `answer` gives their results."""
        self._send(calls)

    def answer(self) -> float | str | Failure | None:
        """The result of the next call; after a Failure, see `ended`. A call for which the memory
        was too little ends the worker, since what it has left behind stays there."""
        found = self._answer(self.limits.seconds)
        self.calls += not self.ended
        if isinstance(found, Failure) and found.kind == "MemoryError":
            self.close()
        return found

    def close(self) -> None:
        """Ends the worker: at once if it is in a call, else by itself, as a program ends."""
        if self.ended:
            return
        self._channel.close()
        self._end()

    def kill(self) -> None:
        """Ends the worker at once; another thread may be waiting for its answer."""
        with contextlib.suppress(OSError):
            self._process.kill()

    def _send(self, request: Load | Calls) -> None:
        try:
            self._channel.send(pickle.dumps(request), _SEND_SECONDS)
        except TimeoutError:
            self.kill()
        except OSError:  # it has ended, which the next answer says
            pass

    def _answer(self, seconds: float):
        try:
            return pickle.loads(self._channel.receive(seconds))
        except TimeoutError:
            # faulthandler writes where the call is, also where Python's lock is not given back.
            with contextlib.suppress(OSError, EOFError):
                os.kill(self._process.pid, signal.SIGABRT)
                self._channel.receive(_DUMP_SECONDS)
            return self._end(TIME_LIMIT, seconds)
        except ForeignBytes:
            return self._end(FOREIGN)
        except (EOFError, OSError):
            return self._end()

    def _end(self, kind: str = "", after: float = 0.0) -> Failure:
        """Ends the worker, and says how it ended, or why it had to: `kind`, of a call that had
        taken `after` seconds."""
        self.ended = True
        if not kind:  # what it is about to end with is to be known
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
        with contextlib.suppress(OSError):  # the group, with all that the reward started
            os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait()
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
            kind, text = EXIT, f"its process ended with status {status}"
        return Failure(kind, text, *self._where(dump))

    def _where(self, dump: str) -> tuple[str, str]:
        """Place and traceback in what faulthandler wrote, which has the last call first."""
        frames = _FRAME.findall(dump)
        theirs = [frame for frame in frames if frame[0] not in _OURS]
        own = [frame for frame in frames if frame[0] == self._file] or theirs
        if not own:
            return "", ""
        lines = []
        for file, number, name in reversed(theirs):
            code = linecache.getline(file, int(number)).strip()
            lines.append(f'  File "{file}", line {number}, in {name}\n    {code}\n')
        file, number, name = own[0]
        return f"{file}, line {number}, in {name}", "".join(lines)


def _environment() -> dict[str, str]:
    """Of a worker: one thread, since there are as many workers as cores; the accelerator is the
    run's alone; and sets of texts have the same order in all."""
    defaults = dict.fromkeys(_THREADS, "1") | {"PYTHONHASHSEED": "0"}
    return defaults | dict(os.environ) | {"JAX_PLATFORMS": "cpu"}
