"""Shared by all tests: --slow and --part, a CPU backend, and patience with a busy machine."""

from __future__ import annotations

import atexit
import collections
import json
import os
import pathlib
import shutil
import signal
import tempfile
import time

import pytest

_started = time.monotonic()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    if config.option.markexpr.startswith("gpu"):  # where there may be little but JAX and pytest
        return
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Programs that tests start and signal inherit what `nohup` and a shell's & have ignored.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # LLVM gets a program in one piece instead of 32, each for a thread of its own: the same code
    # for less work in all, and two processes keep two cores busy.
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_parallel_codegen_split_count=1")
    # Programs that several tests and their subprocesses share are compiled once a session. The slow
    # tests of killed runs switch this off: they must be killed while compiling too.
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        cache = tempfile.mkdtemp(prefix="fp8rl-test-xla-")
        atexit.register(shutil.rmtree, cache, ignore_errors=True)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.5"

    import hypothesis

    too_slow = hypothesis.HealthCheck.too_slow  # that is about the machine, not the test
    hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=[too_slow])
    hypothesis.settings.load_profile("busy")


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")
    parser.addoption("--part", metavar="K/N", help="run the K-th of N parts of the files alone")


def _files_of_part(text: str, items) -> set[pathlib.Path]:
    """Whole files, dealt out by their slow tests; those of tests/ itself run whole programs."""
    part, _, count = text.partition("/")
    if not (part.isdecimal() and count.isdecimal() and 1 <= int(part) <= int(count)):
        raise pytest.UsageError(f"--part is {text}; write --part=1/3 for the first of three parts")
    here = pathlib.Path(__file__).parent
    cost = collections.Counter({item.path: 1 for item in items})
    for item in items:
        if item.get_closest_marker("slow"):
            cost[item.path] += 20 if item.path.parent == here else 1
    parts: list[list[pathlib.Path]] = [[] for _ in range(int(count))]
    for path in sorted(cost, key=lambda path: (-cost[path], str(path))):
        min(parts, key=lambda files: sum(cost[file] for file in files)).append(path)
    return set(parts[int(part) - 1])


def pytest_terminal_summary(terminalreporter, config):
    """Names the kind of CPU: what the tests of zero drift show, they show of that kind."""
    if terminalreporter.stats.get("passed") and not config.option.markexpr.startswith("gpu"):
        from kind_of_cpu import kind_of_cpu

        terminalreporter.write_line(f"CPU: {kind_of_cpu()}")
    if part := config.getoption("--part"):
        minutes = (time.monotonic() - _started) / 60
        terminalreporter.write_line(f"part {part} took {minutes:.0f} minutes")


def pytest_collection_modifyitems(config, items):
    import jax

    if part := config.getoption("--part"):
        files = _files_of_part(part, items)
        config.hook.pytest_deselected(items=[item for item in items if item.path not in files])
        items[:] = [item for item in items if item.path in files]

    on_gpu = jax.default_backend() == "gpu"
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="takes minutes; run with --slow"))
        if item.get_closest_marker("gpu") and not on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def _own_programs(monkeypatch):
    """A command reports the programs that it found in the cache, not those of other tests."""
    from fp8rl_jax.base import compilation_cache

    monkeypatch.setattr(compilation_cache, "_counts", {"wanted": 0, "found": 0})


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """A run of helpers/tiny_config.py that nothing interrupted, once for all processes of pytest.

    (directory with `run` and `cache`, how often each program of its RL phase was compiled)
    """
    import filelock

    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    counts = base / "tiny_run.json"
    with filelock.FileLock(base / "tiny_run.lock"):
        if not counts.exists():
            from tiny_run import overrides, train_counting

            outcome, compiled = train_counting(overrides(base / "tiny_run"))
            assert outcome.finished and outcome.report.exists()
            counts.write_text(json.dumps(compiled))
    return base / "tiny_run", json.loads(counts.read_text())


@pytest.fixture(scope="session")
def interpreter():
    """Triton's interpreter in the place of `triton_call` (tests/kernels/gpu/interpreter.py)."""
    pytest.importorskip("triton", reason="needs Triton: pip install 'fp8rl_jax[dev]'")
    from interpreter import Interpreter

    interpreter = Interpreter()
    yield interpreter
    interpreter.close()
