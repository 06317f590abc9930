"""`launch/gpu_check.sh` as far as a CPU can: its files, its refusals, its whole programs."""

from __future__ import annotations

import base64
import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import types

import numpy as np
import pytest
import test_gpu_device as device
import test_gpu_headline as headline
import test_gpu_program as program

from fp8rl_jax.bench import kernels, rollout_ways
from fp8rl_jax.bench.rollout import Cell

pytest_plugins = ["pytester"]
_ROOT = pathlib.Path(__file__).resolve().parents[1]
_GPU = _ROOT / "tests" / "gpu"
# A topology as JAX 0.11.2 serialises it: of an H200 as `plan.h200` described it, one field apart
# (65,535 registers a block), which tells the two fields of registers apart.
_TOPOLOGY = base64.b64decode(
    "CKGBqurTvKjZOhIEY3VkYRoLTlZJRElBIEgyMDBK6QEKKHR5cGUuZ29vZ2xlYXBpcy5jb20veGxhLkdwdVRvcG9s"
    "b2d5UHJvdG8SvAEaC05WSURJQSBIMjAwIAEoATABQoIBCmkIgAgQIBiAgAMggKAOKIAQMIQBOIABQP////8HSP//"
    "A1D//wNYgICustmLAWCAgIAebaRw/T9wgIDAzbEEeICYDoIBBAgJGAKQAYCABJgB//8DygEGMTMuMC4wkgILTlZJ"
    "RElBIEgyMDAiBENVREE6C05WSURJQSBIMjAwQgIIDUoiChh4ODZfNjQtdW5rbm93bi1saW51eC1nbnUSBnpudmVy"
    "NQ=="
)
_SMALL = dataclasses.replace(program.DENSE, vocab_size=128, hidden_size=64, num_hidden_layers=1)


@pytest.mark.slow
def test_whole_programs_do_not_drift(record_property, capsys):
    """On a CPU the learner's log-probabilities are the sampler's, bit for bit."""
    sizes = {**program.SIZES, "prompts": 2, "new": 6}
    program.test_rollout_and_train_step("fp8", _SMALL, record_property, sizes)
    lines = capsys.readouterr().out.splitlines()
    assert {"kernels: reference", "drift_max: 0.0", "equal_frac: 1.0", "updated: True"} <= set(
        lines
    )


def test_drift_is_seen(record_property, monkeypatch):
    found = {"same_weights": True, "finite": True, "updated": True, "drift_max": 0.0}
    found["continuous_other_tokens"] = 0
    for name in ("drift_max", "continuous_other_tokens", "updated"):
        wrong = found | {name: not found[name]}
        monkeypatch.setattr(program, "measure", lambda *_, wrong=wrong: wrong)
        with pytest.raises(AssertionError):
            program.test_rollout_and_train_step("fp8", _SMALL, record_property)


def test_differing_bits():
    one, mask = np.float32([1, 2, 3]), np.array([True, True, False])
    assert program.differing_bits(one, one, mask) == 0
    assert program.differing_bits(one, np.nextafter(one, np.float32(0)), mask) > 1
    assert program.differing_bits(one, np.float32([1, 2, 4]), mask) == 0


@pytest.mark.slow
def test_long_rollout(monkeypatch, record_property, pytestconfig, capsys):
    """Both cases draw the tokens that long_tail says, and the text counts them."""
    monkeypatch.setattr(headline, "make_continuous", rollout_ways.make_static)
    monkeypatch.setattr(headline, "SECONDS", 60.0)
    headline.test_long_rollout(record_property, pytestconfig, _SMALL, Cell(4, 3, 16, 2))
    first, *rows = capsys.readouterr().out.splitlines()
    assert first.startswith("8 responses of 1 to 16 tokens to prompts of 3, 4 at a time")
    wanted = int(rollout_ways.long_tail(8, 16).sum())
    assert [row.split(" tokens")[0] for row in rows] == [f"{c}: {wanted}" for c in ("bf16", "fp8")]


def test_length_of_a_long_rollout():
    """Responses are halved until they fit, and never planned shorter than what was tried."""
    step = 0.01
    assert headline.longest(128 * step, 123.0, 4096) == 4096
    assert headline.longest(128 * step, 122.0, 4096) == 2048
    assert headline.longest(128 * step, 0.0, 4096) == 64


def test_device_of_a_topology():
    """Every field that `plan.h200` names is found again, and an unequal one is seen."""
    named = [r for r in device.compare(device.device_info(_TOPOLOGY)) if "field " not in r[0]]
    assert len(named) == 17
    unequal = [row for row in named if row[1] != row[2]]
    assert unequal == [("registers_per_block_limit", "65535", "65536")]


@pytest.mark.parametrize("data", [b"", b"\x08\x01", _TOPOLOGY[:40], b"\xff" * 5])
def test_other_bytes_are_no_topology(data):
    with pytest.raises(ValueError):
        device.device_info(data)


_SUITE = """
import pytest
def reports(test): return pytest.mark.gpu(pytest.mark.xfail(strict=False)(test))
@reports
def test_measures(): print("12 us")
@reports
def test_drifts(): assert 0, "a difference"
def test_holds(record_property):
    record_property("rows", 3)
    print("all well")
"""
_FAILS = "def test_breaks():\n    print('row 3')\n    raise ValueError('no luck')\n"


@pytest.fixture
def check(pytester, monkeypatch):
    """Runs pytest on a suite with the hook of tests/gpu, on what it takes for a GPU."""
    monkeypatch.setattr(kernels, "require_gpu", lambda command: None)
    monkeypatch.delenv("PYTEST_XDIST_WORKER_COUNT", raising=False)  # of this test's own process
    pytester.makeconftest((_ROOT / "tests" / "gpu" / "conftest.py").read_text())

    def run(suite: str, *options: str):
        pytester.makepyfile(suite)
        return pytester.runpytest_inprocess("--out=out", *options)

    return run


def test_files(check):
    """Failures first, then the machine, every test and its lines; only some tests decide."""
    done = check(_SUITE)
    assert done.ret == 0
    found = json.loads(pathlib.Path("out/gpu_check.json").read_text())
    assert found["ok"] and found["environment"]["platform"] == "cpu"
    verdicts = {t["name"].split("::")[1]: t["verdict"] for t in found["tests"]}
    assert list(verdicts.items()) == [
        ("test_holds", "holds"),
        ("test_measures", "reported"),
        ("test_drifts", "reported: does not hold"),
    ]
    counts = "holds: 1, reported: 1, reported: does not hold: 1"
    assert counts in pathlib.Path("out/gpu_check.md").read_text()
    assert found["tests"][0]["data"] == [["rows", 3]]
    text = pathlib.Path("out/gpu_check.md").read_text()
    assert "Nothing failed." in text and "all well" in text and "a difference" in text
    assert text.splitlines()[0].startswith("# GPU check: cpu, 20")
    assert "commit them as docs/gpu_results/20" in str(done.stdout) and "12 us" in str(done.stdout)
    assert {path.name for path in pathlib.Path("out").iterdir()} == {
        "gpu_check.json",
        "gpu_check.md",
    }

    assert check(_SUITE + _FAILS).ret == 1
    text = pathlib.Path("out/gpu_check.md").read_text()
    failed = text.index("test_breaks: FAILED: ValueError: no luck")
    assert text.index("## Failures") < failed < text.index("- platform: cpu")
    assert "row 3" in text


def test_files_after_every_test(check):
    """Both are whole while a later test runs."""
    check(_FAILS + "def test_later(): assert 'row 3' in open('out/gpu_check.md').read()\n")
    found = json.loads(pathlib.Path("out/gpu_check.json").read_text())
    assert [test["verdict"] for test in found["tests"]] == ["FAILED", "holds"]


def test_without_time_it_does_not_pass(check):
    """A test that decides and was not begun; those that report may be left out."""
    assert check(_SUITE, "--seconds=-1").ret == 1
    text = pathlib.Path("out/gpu_check.md").read_text()
    assert "test_holds: not run: Skipped: the time was up" in text
    assert text.count("test_measures: not run") == 1 and "test_measures: not run, 0.0 s" in text
    assert check(_SUITE, "--seconds=-1", "-k", "measures").ret == 0


def test_a_run_is_continued(check):
    """What was decided is not repeated, what was not run is; a failure stays, and results of
    another source are not touched."""
    fails_once = "def test_fails(): assert __import__('os').path.exists('again')\n"
    assert check(_SUITE + fails_once, "-k", "fails").ret == 1
    assert check(_SUITE + fails_once, "--add", "--seconds=-1", "-k", "holds").ret == 1
    assert check(_SUITE, "--seconds=-1", "-k", "holds").ret == 1
    assert check(_SUITE, "--add", "-k", "measures").ret == 0
    assert not json.loads(pathlib.Path("out/gpu_check.json").read_text())["ok"]
    assert check(_SUITE + fails_once, "-k", "fails").ret == 1
    pathlib.Path("again").touch()
    for _ in range(2):
        assert check(_SUITE + fails_once, "--add").ret == 1
    path = pathlib.Path("out/gpu_check.json")
    found = json.loads(path.read_text())
    verdicts = {t["name"].split("::")[1]: t["verdict"] for t in found["tests"]}
    assert len(found["tests"]) == 4 and verdicts["test_fails"] == "FAILED"
    assert verdicts["test_holds"] == "holds" and verdicts["test_measures"] == "reported"
    path.write_text(json.dumps(found | {"stack": {"source": "another"}}))
    assert "has results of another source" in str(check(_SUITE, "--add").stderr)
    assert json.loads(path.read_text())["tests"] == found["tests"]


def _loaded(name: str, path: pathlib.Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("count", [1, 13, 67])
@pytest.mark.parametrize("workers", [2, 14])
def test_the_first_begin_in_processes_of_their_own(count, workers, monkeypatch):
    """pytest-xdist sends each process an equal part of the list, smaller parts first."""
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", str(workers))
    item = lambda n: types.SimpleNamespace(n=n, get_closest_marker=lambda name: False)
    items = [item(n) for n in range(count)]
    _loaded("gpu_conftest", _GPU / "conftest.py").pytest_collection_modifyitems(items)
    order = [item.n for item in items]
    assert sorted(order) == [*range(count)]
    sizes = [count // workers + (w >= workers - count % workers) for w in range(workers)]
    begun = [order[sum(sizes[:w])] for w in range(workers) if sizes[w]]
    assert sorted(begun) == [*range(min(count, workers))]


def test_a_part_proves_nothing():
    """Only all tests that decide, none chosen and none left out, prove zero drift on a machine."""
    conftest = _loaded("gpu_conftest", _GPU / "conftest.py")
    report = object.__new__(conftest.Report)
    files = {path.name for path in _GPU.glob("test_gpu_*.py")} - conftest._REPORTING
    held = [{"name": f"{name}::test", "verdict": "holds"} for name in files]

    def whole(tests=held, args=("tests/gpu",), keyword="", markexpr="gpu", **more) -> bool:
        report.tests = tests
        option = types.SimpleNamespace(keyword=keyword, markexpr=markexpr, **more)
        return report.is_whole(types.SimpleNamespace(option=option, args=list(args)))

    assert whole() and whole(keyword="not speed") and whole(deselect=None, ignore=[])
    assert not whole(tests=[]) and not whole(tests=held[1:])
    assert not whole(keyword="attention") and not whole(markexpr="gpu and slow")
    assert not whole(deselect=["x"]) and not whole(ignore=["x"]) and not whole(lf=True)
    assert not whole(args=["tests/gpu/test_gpu_norm.py"]) and not whole(args=["tests/gpu", "x"])
    assert not whole([{**test, "verdict": "not run"} for test in held])


@pytest.mark.parametrize("git", [False, True], ids=["copied without git", "git does not answer"])
def test_commit_that_git_does_not_tell(git, tmp_path, monkeypatch):
    shutil.copytree(_ROOT / "fp8rl_jax" / "base", tmp_path / "fp8rl_jax" / "base")
    if git:
        (tmp_path / ".git").write_text("damaged")
    file = tmp_path / "fp8rl_jax" / "base" / "version.py"
    version = _loaded("copied_version", file)
    assert version.commit() == ""
    monkeypatch.setenv("FP8RL_COMMIT", "1234567")
    assert version.commit() == "1234567"


def test_unwritable_directory(check):
    pathlib.Path("out").write_text("")
    assert "gpu_check: nothing can be written to --out=out" in str(check(_SUITE).stderr)


_BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names}:
            raise ImportError("not on a bare machine: " + name)
sys.meta_path.insert(0, Blocked())
"""
_ABSENT = (
    "grain",
    "hypothesis",
    "math_verify",
    "matplotlib",
    "ml_collections",
    "reasoning_gym",
    "tensorboardX",
    "tensorflow_datasets",
    "tokenizers",
)


def test_launch_script_on_a_bare_machine(tmp_path):
    """A copy with little but JAX installed: it refuses a CPU, and every test can be imported."""
    for name in ("fp8rl_jax", "kernels", "launch", "tests"):
        shutil.copytree(_ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(_ROOT / "setup.cfg", tmp_path)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(_BLOCKED.format(names=_ABSENT))
    environment = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = str(tmp_path / "site")
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"

    def launch(*arguments: str):
        command = ["bash", str(tmp_path / "launch" / "gpu_check.sh"), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    done = launch()
    assert done.returncode == 2 and "gpu_check: JAX finds no GPU here but 'cpu'" in done.stderr
    assert not (tmp_path / "runs").exists()
    # From here on it takes the CPU for a GPU.
    bench = tmp_path / "fp8rl_jax" / "bench" / "kernels.py"
    bench.write_text(bench.read_text() + "\n\ndef require_gpu(command): pass\n")
    done = launch()
    counts = [int(count) for count in re.findall(r"= (\d+) skipped, ", done.stdout)]
    assert done.returncode == 1 and len(counts) == 2, done.stdout + done.stderr
    assert counts[0] > 80 and counts[1] > 10, "those that compare, then those that time"
    found = json.loads((tmp_path / "runs" / "gpu_check" / "gpu_check.json").read_text())
    assert len(found["tests"]) == sum(counts) and not found["ok"]
    done = launch("--slow", "tests/gpu/test_gpu_headline.py", "--out=there")
    assert "1 skipped" in done.stdout and done.returncode == 0
    assert {p.name for p in (tmp_path / "there").iterdir()} == {"gpu_check.json", "gpu_check.md"}
