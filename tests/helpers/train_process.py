"""`fp8rl train` of tiny_config.py as a process of its own, to be killed and resumed."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time

from tiny_run import CONFIG, overrides

from fp8rl_jax.training.logs import read_jsonl

_TESTS = pathlib.Path(__file__).parents[1]


def start(directory: pathlib.Path, *more: str, cached: bool = True, **fields) -> subprocess.Popen:
    """Begins a run in `directory`; `cached` shares compiled programs with the other tests."""
    environment = {k: v for k, v in os.environ.items() if cached or "CACHE" not in k}
    environment["PYTHONPATH"] = os.pathsep.join([str(CONFIG.parent), *sys.path])  # its reward
    command = [sys.executable, "-m", "fp8rl_jax.cli", "train", "--config", str(CONFIG)]
    return subprocess.Popen(
        [*command, *overrides(directory, **fields), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=_TESTS.parent,
    )


def finish(process: subprocess.Popen, status: int = 0) -> str:
    """What the process printed; it ends with `status`."""
    output, _ = process.communicate(timeout=1800)
    assert process.returncode == status, output
    return output


def wait_for_records(process: subprocess.Popen, directory: pathlib.Path, log: str, count: int):
    """Returns as soon as `log` of the run has `count` records."""
    path = directory / "run" / f"{log}.jsonl"
    deadline = time.monotonic() + 1800
    while len(read_jsonl(path)) < count:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def kill_after_records(
    process: subprocess.Popen, directory: pathlib.Path, log: str, count: int
) -> None:
    """SIGKILL as soon as `log` of the run has `count` records."""
    wait_for_records(process, directory, log, count)
    process.kill()
    process.communicate()
