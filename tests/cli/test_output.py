"""Standard streams that cannot be used, limits of the system, and signals that a run notes."""

from __future__ import annotations

import dataclasses
import errno
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys

import pytest

from fp8rl_jax import cli
from fp8rl_jax.base.errors import limit_reached
from fp8rl_jax.cli import main
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
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert done.returncode == 0 and (tmp_path / "file").read_text() == "done"
    assert done.stderr == "standard output is gone (Broken pipe); the run goes on\n"


_CLOSER = """
import os, sys
from fp8rl_jax import cli
from fp8rl_jax.cli import main
from fp8rl_jax.cli.output import keep_talking
def run(words, starting):
    with keep_talking():
        original = sys.__stdout__
        exec(sys.argv[1])
        for number in range(3):
            print(number, flush=True)
    return 0
main.run = run
cli.entry()
"""


@pytest.mark.parametrize(
    "does",
    [
        "os.close(1); sys.stderr = None",
        "original.close(); os.close(2)",
        "original.close()",
        "sys.stdout = None; sys.stderr.close()",
    ],
)
def test_code_that_closes_streams(does):
    """Of a logger, or a loss: the run goes on, whatever is left to say it to."""
    done = subprocess.run(
        [sys.executable, "-c", _CLOSER, does], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("\n") <= 1


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
from fp8rl_jax import cli
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
        [sys.executable, "-c", _INTERRUPTED, waits, name],
        capture_output=True,
        text=True,
        check=False,
    )
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


_STREAMS = """
import os, sys
from fp8rl_jax.cli.output import prepare_streams
prepare_streams()
file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
assert file > 2, file  # else what libraries print would be in it
print("\\u2192 \\ufffd \\udcff", flush=True)
print("a note", file=sys.stderr, flush=True)
print(sys.stdin.read(), flush=True)
os.write(2, b"of a library")
"""


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)])
def test_streams_that_are_closed_at_the_start(closed, tmp_path):
    """As under cron, or by `>&-` and `2>&-`: they are nothing, and no file takes their number."""
    done = subprocess.run(
        [
            "bash",
            "-c",
            '"$0" -c "$1" "$2" ' + " ".join(f"{n}>&-" for n in closed),
            sys.executable,
            _STREAMS,
            str(tmp_path / "file"),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (done.stdout == b"") == (1 in closed) and (done.stderr == b"") == (2 in closed)
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.parametrize("encoding", ["ascii", "ascii:strict", "latin-1", "utf-8"])
def test_characters_that_an_output_cannot_hold(encoding, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _STREAMS, str(tmp_path / "file")],
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONIOENCODING": encoding},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == (b"? ? ?\n\n" if encoding != "utf-8" else "→ \ufffd ?\n\n".encode())


def test_standard_error_that_is_full_or_gone(tmp_path):
    """It is nothing from then on, without a word: there is nowhere to say it."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", _STREAMS, str(tmp_path / "file")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=full,
            check=False,
        )
    assert done.returncode == 0 and done.stdout


def test_a_command_without_standard_streams():
    command = '"$0" -m fp8rl_jax.cli recipe list >&- 2>&- <&-'
    assert subprocess.run(["bash", "-c", command, sys.executable], check=False).returncode == 0


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EMFILE, "x"), "too many files are open, and 99 may be"),
        (OSError(errno.EFBIG, "x"), "a file may have 99 bytes in this process"),
        (ExceptionGroup("all", [ValueError(), OSError(errno.ENFILE, "x")]), "too many files"),
        (OSError(errno.ENOENT, "x"), None),
        (ValueError("Too many open files"), None),
    ],
)
def test_limits_are_named(error, words, monkeypatch):
    """Also where a library has made another error of it."""
    monkeypatch.setattr(resource, "getrlimit", lambda what: (99, 99))
    outer = RuntimeError("of a library")
    outer.__context__ = error
    error.__context__ = outer  # causes in a ring
    found = limit_reached(outer)
    assert found is None if words is None else words in found


def test_a_file_that_is_too_large_for_its_file_system():
    assert limit_reached(OSError(errno.EFBIG, "x")) is None  # ulimit -f is unlimited


def test_too_few_open_files(monkeypatch, capsys):
    """A command with a config says so before it begins; elsewhere it is a sentence too."""
    monkeypatch.setattr(resource, "getrlimit", lambda what: (24, 24))
    assert cli.run(["train", "--config", "none.py"]) == 2
    assert "may open 24 files at a time (`ulimit -n`): allow 64" in capsys.readouterr().err

    def fail():
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("fp8rl_jax.quant.recipe_names", fail)
    assert cli.run(["recipe", "list"]) == 2
    assert capsys.readouterr().err == (
        "error: too many files are open, and 24 may be in this process (`ulimit -n`): raise that "
        "limit\n"
    )


@pytest.mark.parametrize("status", [0, None, 5, "words"])
def test_a_function_that_ends_the_process(status, monkeypatch, capsys):
    """SystemExit of the user's code in the middle of a command is no end of ours."""

    def ends(values):
        raise SystemExit(status)

    command = dataclasses.replace(main.COMMANDS["recipe list"], run=ends)
    monkeypatch.setitem(main.COMMANDS, "recipe list", command)
    assert cli.run(["recipe", "list"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("error: a function that the configuration")
    assert printed.err.count("\n") == 1 and "SystemExit" in printed.err


def test_a_command_says_at_once_what_it_does():
    """Each that takes longer than about a second, on standard error, before JAX is imported."""
    quick = {"recipe list", "recipe show", "algo list", "algo show", "completion"}
    assert {c.name for c in main.COMMANDS.values() if c.run and not c.starts} == quick
    script = (
        "import sys\nfrom fp8rl_jax.cli import main\n"
        "def starting(line):\n"
        "    print(line, 'jax' in sys.modules)\n    raise KeyboardInterrupt\n"
        "try:\n    main.run(['plan', 'nothing.py'], starting)\n"
        "except KeyboardInterrupt:\n    pass\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert re.fullmatch(r"fp8rl plan: [^\n]+ False\n", done.stdout), done
