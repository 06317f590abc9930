"""Standard output that cannot be written, and signals that a run notes."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from fp8rl_jax.cli.interrupt import Interrupt
from fp8rl_jax.cli.output import keep_talking

_FP8RL = (sys.executable, "-m", "fp8rl_jax.cli")


def test_a_full_or_closed_output_is_no_traceback():
    """A command whose output is lost has failed: one sentence, or the status of a closed pipe."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*_FP8RL, "recipe", "list"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2
    assert done.stderr == "error: standard output cannot be written (No space left on device)\n"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*_FP8RL, "--help"], stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert done.returncode == 128 + signal.SIGPIPE and done.stderr == ""


_TALKER = """
import sys
from fp8rl_jax.cli.output import keep_talking
with keep_talking():
    for number in range(3):
        print(number, flush=True)
    open(sys.argv[1], "w").write("done")
"""


def test_a_run_outlives_its_output(tmp_path: pathlib.Path):
    """Printing goes on into nothing, with one word on standard error."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", _TALKER, str(tmp_path / "file")],
        stdout=write, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    os.close(write)
    assert done.returncode == 0 and (tmp_path / "file").read_text() == "done"
    assert done.stderr == "standard output is gone (Broken pipe); the run goes on\n"


def test_an_output_that_works_is_left_alone(capsys):
    with keep_talking():
        print("one")
    print("two")
    assert capsys.readouterr().out == "one\ntwo\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_noted(number):
    """After the first question; a handler that was there before is back afterwards."""
    before = signal.getsignal(number)
    with Interrupt() as stop:
        assert stop() is None
        signal.raise_signal(number)
        assert stop() == signal.Signals(number).name
    assert signal.getsignal(number) == before


_INTERRUPTED = """
import signal, sys
from fp8rl_jax.cli.interrupt import Interrupt
with Interrupt() as stop:
    if sys.argv[1] == "waits":
        stop()
    for _ in range(2):
        signal.raise_signal(getattr(signal, sys.argv[2]))
        print(stop(), flush=True)
"""


@pytest.mark.parametrize(
    ("waits", "name", "output"),
    [
        ("waits", "SIGINT", "SIGINT\n"),  # the second one
        ("waits", "SIGTERM", "SIGTERM\nSIGTERM\n"),
        ("", "SIGINT", ""),
        ("", "SIGHUP", ""),
    ],
)
def test_what_ends_a_process_at_once(waits, name, output):
    """Any signal before a run waits for them, and a second Ctrl-C; a second SIGTERM does not."""
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED, waits, name], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    ends = 0 if output.count(name) == 2 else -getattr(signal, name)
    assert (done.returncode, done.stdout, done.stderr) == (ends, output, "")


def test_an_ignored_signal_stays_ignored():
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupt() as stop:
            stop()
            signal.raise_signal(signal.SIGHUP)
            assert stop() is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
