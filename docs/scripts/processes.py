"""Compares one process with two devices with two processes of one device each.

    JAX_PLATFORMS=cpu python docs/scripts/processes.py CONFIG --config.mesh.data=2

Both forms run the same training and take turns: a step of one, then the same step of the other.
Figures are medians of the steps. CPU seconds are those of all processes of a form, without their
reward workers. The host's part of a step is its time outside the compiled programs: text, rewards,
records, and communication between the hosts.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from fp8rl_jax.base import processes
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.bench.table import record_table

_COMPILING = 3  # turns that are not counted: the start, the first step, and one more
_MANY = 64  # number of processes for which the bytes of the gathers are computed
_LONG = 1_000_000


def on_cpu_devices(count: int) -> dict[str, str]:
    """Returns the environment for a child process in which JAX has `count` CPU devices."""
    flags = os.environ.get("XLA_FLAGS", "")
    flags = f"{flags} --xla_force_host_platform_device_count={count}"
    return dict(os.environ, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")


class _Form:
    """Starts `count` processes of `devices` devices, which train together, and times their steps.

    Args:
      arguments: arguments of `fp8rl train` that give the configuration.
      count, devices: number of processes, and of devices of each.
      folder: directory for the run's files.
    """

    def __init__(self, arguments: Sequence[str], count: int, devices: int, folder: pathlib.Path):
        self.name = f"{count} x {devices}"
        self._errors = [folder / f"errors{number}.txt" for number in range(count)]
        variables = on_cpu_devices(devices)
        if count > 1:
            with socket.socket() as free:
                free.bind(("localhost", 0))
                port = free.getsockname()[1]
            variables |= {"FP8RL_COORDINATOR": f"localhost:{port}", "FP8RL_PROCESSES": str(count)}
        run_dir = f"--config.run.dir={folder / 'run'}"
        command = [sys.executable, __file__, "--worker", *arguments, run_dir]
        self._processes = []
        for number, errors in enumerate(self._errors):
            own = {"FP8RL_PROCESS_ID": str(number)} if count > 1 else {}
            with open(errors, "wb") as file:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=file,
                    env=variables | own,
                )
            self._processes.append(process)
        self.steps: list[dict[str, float]] = []

    def step(self) -> None:
        """Lets all processes make one step, and records its times.

        Raises:
          UserError: process 0 has ended; the message has the last line of an error output.
        """
        for process in self._processes:
            assert process.stdin
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(b"\n")
                process.stdin.flush()
        output = self._processes[0].stdout
        assert output
        line = output.readline()
        if not line:
            self.end()
            texts = (errors.read_text(errors="replace").strip() for errors in self._errors)
            said = next(filter(None, texts), "").splitlines()
            raise UserError(
                f"processes x devices of {self.name} ended: "
                + (said[-1] if said else "nothing was said")
            )
        self.steps.append(json.loads(line))

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def median(self, name: str) -> float:
        return statistics.median(step[name] for step in self.steps[_COMPILING:])


def bench(
    arguments: Sequence[str], count: int, pairs: int, note: Callable[[str], None]
) -> list[_Form]:
    """Runs both forms in turns, and returns them with their times.

    Args:
      arguments: arguments of `fp8rl train` that give the configuration.
      count: number of processes, and of devices in all.
      pairs: number of timed steps of each form.
      note: called with lines of progress.

    Raises:
      UserError: a form cannot run.
    """
    with (
        tempfile.TemporaryDirectory(prefix="fp8rl-bench-") as root,
        contextlib.ExitStack() as stack,
    ):
        forms = []
        for number, (own, devices) in enumerate(((1, count), (count, 1))):
            folder = pathlib.Path(root) / str(number)
            folder.mkdir()
            forms.append(_Form(arguments, own, devices, folder))
            stack.callback(forms[-1].end)
        note("both forms compile")
        for turn in range(_COMPILING + pairs):
            for form in forms if turn % 2 else forms[::-1]:
                form.step()
            if turn >= _COMPILING:
                note(f"pair {turn - _COMPILING + 1} of {pairs}")
        return forms


_COLUMNS = {
    "processes x devices": "{name}",
    "CPU s": "{cpu:.3f}",
    "ratio": "{ratio:.3f}",
    "wall s": "{wall:.3f}",
    "host's part s": "{host:.3f}",
    "gathers": "{gathers:.0f}",
    "KiB": "{kib:.1f}",
}


def format_table(forms: list[_Form]) -> str:
    """Returns the table, and a line with the bytes that gathers of many processes would take."""
    first = forms[0].median("cpu")
    records = []
    for form in forms:
        found = {name: form.median(name) for name in form.steps[0]}
        found |= {"ratio": found["cpu"] / first, "kib": found["bytes"] / 1024}
        records.append({"name": form.name, **found})
    each = found["kib"]
    return "\n".join(
        (
            *record_table(_COLUMNS, records),
            "medians of a step; gathers: of values from all processes, KiB that each tells the "
            "others",
            f"with {_MANY} processes and as many rows in each, a process would receive "
            f"{_MANY - 1} x {each:.1f} = {(_MANY - 1) * each:.0f} KiB",
            "platform cpu",
        )
    )


class _Clock:
    """Measures the steps of one process; its `turn` is the `stop` of `train`.

    Attributes:
      gathers: all-gathers of host values so far.
      sent: bytes that this process has sent to each of the other processes in them.
    """

    def __init__(self) -> None:
        self.gathers = 0
        self.sent = 0
        self._out = open(os.dup(1), "w", encoding="utf-8")  # noqa: SIM115
        os.dup2(2, 1)  # what the run prints is not a report
        self._in_programs = 0.0
        self._begun: dict[str, float] | None = None

    def timed(self, program: Callable) -> Callable:
        """Wraps a compiled program so that its time is counted as such."""

        def run(*arguments, **options):
            begin = time.perf_counter()
            found = jax.block_until_ready(program(*arguments, **options))
            self._in_programs += time.perf_counter() - begin
            return found

        return run

    def counted(self, gather: Callable) -> Callable:
        """Wraps `process_allgather` so that its calls and bytes are counted."""

        def run(value, **options):
            gathered = gather(value, **options)
            self.gathers += 1
            self.sent += np.asarray(gathered).nbytes // jax.process_count()
            return gathered

        return run

    def _now(self) -> dict[str, float]:
        wall = time.perf_counter()
        return {
            "cpu": time.process_time(),
            "wall": wall,
            "host": wall - self._in_programs,
            "gathers": self.gathers,
            "bytes": self.sent,
        }

    def turn(self) -> None:
        """Reports the step that has ended, and waits for a line on standard input."""
        if self._begun is not None:
            now = self._now()
            spent = {name: value - self._begun[name] for name, value in now.items()}
            everyone = processes.exchange(spent)
            total = everyone[0] | {"cpu": sum(each["cpu"] for each in everyone)}
            if processes.first():
                print(json.dumps(total), file=self._out, flush=True)
        sys.stdin.readline()
        self._begun = self._now()


_PROGRAMS = ("refit", "score", "calibrate")


def _worker(arguments: list[str]) -> None:
    """Runs one process of a form: trains one step at each turn."""
    clock = _Clock()
    processes.join()
    multihost_utils.process_allgather = clock.counted(multihost_utils.process_allgather)
    from fp8rl_jax import train as training
    from fp8rl_jax.config import load_config
    from fp8rl_jax.training.runtime import Runtime

    path, *overrides = arguments
    config = load_config(path, overrides)
    config.run.steps = config.run.checkpoint_every = config.eval.every = _LONG
    config.run.loggers, config.run.cache_dir = "", str(pathlib.Path(config.run.dir) / "cache")
    config.sft.steps, config.precision.self_check = 0, False
    make = training.make_runtime

    def make_timed(config, with_questions: bool = True) -> Runtime:
        runtime = make(config, with_questions)
        engine = runtime.engine
        programs = vars(engine)  # where cached properties are kept
        for name in ("sampler", "eval_sampler", *(f"compiled_{n}" for n in _PROGRAMS)):
            programs[name] = clock.timed(getattr(engine, name))
        plain = engine.train_step
        programs["train_step"] = lambda *more, **options: clock.timed(plain(*more, **options))
        return runtime

    training.make_runtime = make_timed
    training.train(config, stop=clock.turn)


def main(arguments: list[str]) -> None:
    note = functools.partial(print, file=sys.stderr, flush=True)
    print(format_table(bench(arguments, 2, 10, note)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        _worker(sys.argv[2:])
    else:
        main(sys.argv[1:])
