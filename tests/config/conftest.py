"""Fixtures of the tests named test_bad_*: what a user gets wrong costs one sentence.

`refused` asserts how a command is refused: exit status 2, one sentence on standard error, nothing
compiled, nothing written.
"""

from __future__ import annotations

import gc
import pathlib
import re
import sys

import jax
import pytest
from refusals import CONFIG, NoRun, train_command, without_self_check

from fp8rl_jax import cli, train
from fp8rl_jax.kernels.reference.probe import cpu_way


@pytest.fixture(scope="module")
def count_compilations():
    """The compilations of this module so far, in a list that grows."""
    compiled: list[str] = []

    def note(event: str, duration: float, **details) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    cpu_way()  # tries this CPU's products, once a machine
    jax.monitoring.register_event_duration_secs_listener(note)
    yield compiled
    jax.monitoring.unregister_event_duration_listener(note)
    gc.collect()  # failed reads of orbax complain when they are collected: here, not later


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty current directory with `tiny.py`; runs end where they would begin, without the
    self-check, which compiles the programs of a step."""
    (tmp_path / "tiny.py").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setattr(train, "Run", NoRun)
    without_self_check(monkeypatch)


def _files(directory: pathlib.Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.fixture
def refused(count_compilations, place, capsys, tmp_path):
    """refused(*arguments) runs a command, checks the manner of its refusal, gives the sentence."""

    def run(*arguments: str) -> str:
        files, compiled = _files(tmp_path), len(count_compilations)
        capsys.readouterr()
        status = cli.run(arguments)
        output, error = capsys.readouterr()
        assert status == 2
        assert output == ""
        assert re.fullmatch(r"error: [^\n]+\n", error), f"not one sentence: {error!r}"
        assert count_compilations[compiled:] == [], "something was compiled first"
        assert _files(tmp_path) == files, "files were written or changed"
        return error

    return run


@pytest.fixture
def refused_fields(refused):
    """refused_fields('rollout.top_p=2', ...) trains with tiny.py and these overrides."""
    return lambda *fields: refused(*train_command(*fields))
