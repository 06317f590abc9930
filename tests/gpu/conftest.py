"""The GPU tests' results as files, written anew after every test: the machine may be lost.

    python -m pytest -m gpu tests/gpu --out=DIR --seconds=500

writes gpu_check.md, failures first, and gpu_check.json, and begins no test after so many seconds.
Tests that only report (`gpu_checks.reports`) run last; if another was not run, nothing passes.

With --add a run continues the one whose results DIR has, of the same source, device and versions:
what held or failed there is kept and not repeated, so several short runs make a whole one. A part
passes if nothing has failed and all that it was to run has run.
"""

from __future__ import annotations

import collections
import json
import os
import pathlib
import re
import time
from collections.abc import Collection
from typing import Any

import pytest


def pytest_addoption(parser):
    parser.addoption("--out", metavar="DIR", help="write gpu_check.md and gpu_check.json there")
    parser.addoption("--add", action="store_true", help="continue the run whose results --out has")
    parser.addoption("--seconds", type=float, help="begin no GPU test after so many")


def pytest_configure(config):
    directory = config.getoption("out", None)
    if directory is None or hasattr(config, "workerinput"):  # one process reports for all
        return
    from fp8rl_jax.base.errors import UserError
    from fp8rl_jax.bench.kernels import require_gpu

    try:
        require_gpu("gpu_check")
        report = Report(pathlib.Path(directory), config.getoption("add"))
        report.write()
    except UserError as error:
        pytest.exit(str(error), returncode=2)
    except OSError as error:
        why = f"nothing can be written to --out={directory} ({error.strerror})"
        pytest.exit(f"gpu_check: {why}: name another directory", returncode=2)
    config.pluginmanager.register(report, "gpu_check")


def pytest_collection_modifyitems(items):
    def order(item) -> int:
        if item.get_closest_marker("first"):
            return 0
        return 1 + all(item.get_closest_marker(name) for name in ("gpu", "xfail"))

    items.sort(key=order)  # stable
    if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
        # pytest-xdist begins with an equal part of the list for each process: those that are first
        # begin each in another one.
        items[:] = [item for worker in reversed(range(workers)) for item in items[worker::workers]]


# Files without a test that decides.
_REPORTING = {"test_gpu_device.py", "test_gpu_headline.py", "test_gpu_step.py"}
_started = time.monotonic()


def _decided_before(config) -> Collection[str]:
    """Returns the tests that --add does not repeat, in the main process or in one of several."""
    if hasattr(config, "workerinput"):
        return config.workerinput.get("decided", ())
    report = config.pluginmanager.get_plugin("gpu_check")
    return report.decided if report else ()


def pytest_runtest_setup(item):
    if _name(item.nodeid) in _decided_before(item.config):
        pytest.skip("decided before")
    seconds = item.config.getoption("seconds", None)
    if seconds is not None and time.monotonic() - _started > seconds:
        pytest.skip("the time was up")


@pytest.fixture
def source():
    """Random operands: the same for a test, whichever others run."""
    from fp8rl_jax.bench.kernel_times import Source

    return Source()


@pytest.fixture(scope="session")
def ceilings():
    """What this device does at best."""
    from fp8rl_jax.bench import kernel_times

    return kernel_times.ceilings(kernel_times.Source())


def _hold(tests: list[dict[str, Any]]) -> bool:
    return all(test["verdict"] == "holds" for test in tests if test["decides"])


def _name(nodeid: str) -> str:
    return nodeid.partition("tests/gpu/")[2] or nodeid


class Report:
    """The two files of results in a directory: a plugin of pytest."""

    def __init__(self, directory: pathlib.Path, add: bool):
        from fp8rl_jax.base.errors import UserError
        from fp8rl_jax.bench.kernels import environment
        from fp8rl_jax.models import proven

        self.directory, self.start = directory, time.monotonic()
        self.environment, self.stack = environment(), proven.stack()
        self.tests: list[dict[str, Any]] = []
        self.kept = None
        if add and (before := directory / "gpu_check.json").exists():
            found = json.loads(before.read_text())
            if found.get("stack") != self.stack:
                why = f"--out={directory} has results of another source, device or versions"
                raise UserError(f"gpu_check: {why}: name another directory, or leave --add out")
            self.tests += found["tests"]
        self.decided = {t["name"] for t in self.tests if t["verdict"] in ("holds", "FAILED")}
        self.repeated = {t["name"] for t in self.tests} - self.decided  # if they are run again

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node) -> None:
        """Tells a process of pytest-xdist what is decided."""
        node.workerinput["decided"] = sorted(self.decided)

    def pytest_runtest_logreport(self, report) -> None:
        """Adds a test that ended, or that could not begin or end."""
        name = _name(report.nodeid)
        if (report.when != "call" and report.outcome == "passed") or name in self.decided:
            return
        decides = "xfail" not in report.keywords
        if report.skipped and not hasattr(report, "wasxfail"):
            verdict = "not run"
        elif decides:
            verdict = "holds" if report.passed else "FAILED"
        else:
            verdict = "reported" if report.passed else "reported: does not hold"
        lines, why = report.capstdout.splitlines(), report.longrepr
        if why is not None:
            crash = getattr(why, "reprcrash", None)
            lines.append(why[2] if isinstance(why, tuple) else crash.message if crash else str(why))
        if name in self.repeated:
            self.repeated.remove(name)
            self.tests = [test for test in self.tests if test["name"] != name]
        self.tests.append(
            {
                "name": name,
                "decides": decides,
                "verdict": verdict,
                "seconds": report.duration,
                "lines": lines,
                "data": report.user_properties,
                "traceback": "" if why is None or isinstance(why, tuple) else report.longreprtext,
            }
        )
        self.write()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session) -> None:
        mine = [test for test in self.tests if test["name"] not in self.repeated]
        if session.exitstatus == pytest.ExitCode.OK and not _hold(mine):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        succeeded = session.exitstatus == pytest.ExitCode.OK and self.ok
        if succeeded and self.is_whole(session.config):
            from fp8rl_jax.models import proven

            self.kept = proven.keep_proof(self.environment)

    def is_whole(self, config) -> bool:
        """Whether nothing that decides was left out: every file has tests that hold, and no option
        chose among them."""
        chosen = (config.option.keyword not in ("", "not speed"), config.option.markexpr != "gpu")
        left_out = (getattr(config.option, name, None) for name in ("deselect", "ignore", "lf"))
        files = {path.name for path in pathlib.Path(__file__).parent.glob("test_gpu_*.py")}
        held = {
            test["name"].partition("::")[0] for test in self.tests if test["verdict"] == "holds"
        }
        paths = [pathlib.Path(path).name for path in config.args]
        return paths == ["gpu"] and not any((*chosen, *left_out)) and files - _REPORTING <= held

    def pytest_terminal_summary(self, terminalreporter) -> None:
        terminalreporter.write(self.markdown())
        name = f"docs/gpu_results/{self.suggested_name}"
        terminalreporter.write_line(f"results: {self.directory}/gpu_check.md and gpu_check.json")
        if self.kept:
            kept = "precision.zero_drift='required' is accepted here from now on"
            terminalreporter.write_line(f"{kept} ({self.kept})")
        terminalreporter.write_line(f"to keep them, commit them as {name}.md and {name}.json")

    @property
    def ok(self) -> bool:
        """Whether every test that decides has run and holds."""
        return _hold(self.tests)

    @property
    def suggested_name(self) -> str:
        """Of the results' copies under docs/gpu_results/: date, chip, versions."""
        versions = self.environment["versions"]
        parts = [self.environment["date"][:10], self.environment["device"]]
        parts += [f"{n}-{versions[n]}" for n in ("jax", "triton", "jax-triton") if versions[n]]
        return re.sub(r"[^a-z0-9.]+", "_", "_".join(parts).lower()).strip("_")

    def markdown(self) -> str:
        """The readable result: failures first, then the machine, then every test's lines."""
        env = self.environment
        lines = [f"# GPU check: {env['device']}, {env['date'][:10]}", ""]
        failed = [t for t in self.tests if t["decides"] and t["verdict"] != "holds"]
        lines += ["## Failures", ""] if failed else ["Nothing failed."]
        for test in failed:
            text = " ".join("".join(test["lines"][-1:]).split())[:1000]
            lines.append(f"- {test['name']}: {test['verdict']}: {text}")
        facts = {k: v for k, v in env.items() if k != "versions"} | env["versions"]
        lines += ["", *(f"- {k}: {v or 'not installed'}" for k, v in facts.items()), ""]
        counts = collections.Counter(test["verdict"] for test in self.tests)
        lines.append(", ".join(f"{verdict}: {count}" for verdict, count in counts.items()))
        for test in self.tests:
            lines += ["", f"## {test['name']}: {test['verdict']}, {test['seconds']:.1f} s"]
            lines += ["", "```", *test["lines"], "```"] if test["lines"] else []
        return "\n".join(lines) + "\n"

    def write(self) -> None:
        """Both files, each whole."""
        import numpy as np

        self.directory.mkdir(parents=True, exist_ok=True)
        result = {
            "environment": self.environment,
            "stack": self.stack,
            "ok": self.ok,
            "name": self.suggested_name,
            "seconds": time.monotonic() - self.start,
            "tests": self.tests,
        }
        text = json.dumps(result, indent=1, default=np.generic.item) + "\n"
        for name, content in (("gpu_check.json", text), ("gpu_check.md", self.markdown())):
            beside = self.directory / f"{name}.new"
            beside.write_text(content)
            beside.replace(self.directory / name)
