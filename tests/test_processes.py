"""Several processes of one run, on this machine, against one process with as many devices.

The quick test compares all records and the checkpoint of a small run; the slow ones end runs in
every way, and each must end as docs/multihost.md says.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from tiny_run import CONFIG, overrides, reproducible

from fp8rl_jax import processes
from fp8rl_jax.errors import UserError

_ROOT = pathlib.Path(__file__).parents[1]
_SMALL = {
    "mesh.data": 2, "env.reward": "dense_reward:share_of_even_bytes", "sft.steps": 0,
    "run.steps": 1, "run.checkpoint_every": 1, "model.num_hidden_layers": 1,
    "model.hidden_size": 64, "model.intermediate_size": 128, "precision.self_check": False,
    "precision.rollout": "f32", "precision.learner": "f32",
}  # fmt: skip


def _train(root: pathlib.Path, count: int, devices: int, *more: str, **fields) -> subprocess.Popen:
    """`fp8rl train` as `count` processes with so many devices each."""
    given = overrides(root, **{name.replace("__", "."): v for name, v in (_SMALL | fields).items()})
    command = [sys.executable, "-m", "fp8rl_jax.cli", "train", "--config", str(CONFIG), *given]
    launch = ["bash", str(_ROOT / "launch" / "multihost.sh"), str(count), "--devices", str(devices)]
    return subprocess.Popen(
        [*launch, *command, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(CONFIG.parent)}, cwd=root,
    )  # fmt: skip


def _finished(process: subprocess.Popen, status: int = 0) -> str:
    """Waits; the text on standard error."""
    _, error = process.communicate(timeout=900)
    assert process.returncode == status, error[-3000:]
    return error


def _checksums(root: pathlib.Path) -> dict[str, int]:
    found = (root / "run" / "checkpoints").glob("*/meta/metadata")
    return {path.parts[-3]: json.loads(path.read_text())["checksum"] for path in found}


def test_two_processes_are_one(tmp_path):
    """Every record, times aside, and the states: two processes of one device, one of two."""
    roots = [tmp_path / "two", tmp_path / "one"]
    for root, (count, devices) in zip(roots, ((2, 1), (1, 2)), strict=True):
        root.mkdir()
        _finished(_train(root, count, devices))
    two, one = map(reproducible, roots)
    assert two == one
    assert all(r["grad_norm"] > 0.1 for r in two["metrics"])  # the reward has a gradient
    assert {r["train_rollout_logprob_abs_diff_max"] for r in two["metrics"]} == {0.0}
    assert _checksums(roots[0]) == _checksums(roots[1]) != {}


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"FP8RL_PROCESSES": ""}, "FP8RL_COORDINATOR, FP8RL_PROCESS_ID .* FP8RL_PROCESSES is not"),
        ({"FP8RL_COORDINATOR": "here"}, "FP8RL_COORDINATOR is 'here': write HOST:PORT"),
        ({"FP8RL_PROCESS_ID": "2"}, "'2': write a number of processes, and one from 0"),
        ({"FP8RL_PROCESSES": "two"}, "FP8RL_PROCESSES is 'two'"),
    ],
)
def test_environment_that_cannot_be(variables, words, monkeypatch):
    good = {"FP8RL_COORDINATOR": "a:1", "FP8RL_PROCESSES": "2", "FP8RL_PROCESS_ID": "0"}
    for name, value in (good | variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=words):
        processes.asked()


def _step(root: pathlib.Path, step: int, process: subprocess.Popen) -> None:
    """Waits until a run has logged an RL step."""
    log = root / "run" / "metrics.jsonl"
    while process.poll() is None:
        if log.exists() and len(log.read_text().splitlines()) >= step:
            return
        time.sleep(0.1)
    raise AssertionError(process.communicate()[1][-3000:])


def _pid(launcher: subprocess.Popen, number: int) -> int:
    """The process with this number, of those that a launcher has started."""
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            environment = (path / "environ").read_bytes().split(b"\0")
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if parent == launcher.pid and f"FP8RL_PROCESS_ID={number}".encode() in environment:
            return int(path.name)
    raise AssertionError(f"there is no process {number}")


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_signal_to_one_stops_all(number, tmp_path):
    """At the same step, with a checkpoint and status 75; resumed, the run is that of one piece."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for root in (whole, stopped):
        root.mkdir()
    _finished(_train(whole, 2, 1, run__steps=6))
    process = _train(stopped, 2, 1, run__steps=6)
    _step(stopped, 2, process)
    os.kill(_pid(process, number), signal.SIGTERM)
    _finished(process, 75)
    assert len(reproducible(stopped)["metrics"]) < 6
    _finished(_train(stopped, 2, 1, "--resume", run__steps=6))
    assert reproducible(stopped) == reproducible(whole)
    newest = max(map(int, _checksums(whole)))
    assert _checksums(stopped)[str(newest)] == _checksums(whole)[str(newest)]


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_killed_process_ends_the_others(number, tmp_path):
    process = _train(tmp_path, 2, 1, run__steps=200)
    _step(tmp_path, 1, process)
    other = _pid(process, 1 - number)
    os.kill(_pid(process, number), signal.SIGKILL)
    process.communicate(timeout=90)
    assert process.returncode != 0 and not os.path.exists(f"/proc/{other}")


@pytest.mark.slow
def test_an_error_in_one_process_is_said_once(tmp_path):
    """A reward that always fails in process 1: its sentence, its status, a checkpoint."""
    (tmp_path / "mine.py").write_text(
        "import os\n"
        "def reward(prompt, response, answer):\n"
        "    return 1 / 0 if os.environ['FP8RL_PROCESS_ID'] == '1' else 0.5\n"
        "def exits(prompt, response, answer):\n"
        "    raise SystemExit\n"
    )
    error = _finished(_train(tmp_path, 2, 1, env__reward="mine:exits"), 2)
    assert error.count("error: evaluation after rl step 0") == 1
    assert "all 64 calls of the reward 'mine:exits' failed" in error
    other = tmp_path / "half"
    other.mkdir()
    (other / "mine.py").write_text((tmp_path / "mine.py").read_text())
    _finished(_train(other, 2, 1, env__reward="mine:reward"))
    assert {r["reward_errors"] for r in reproducible(other)["metrics"]} == {8}  # of 16


@pytest.mark.slow
def test_unequal_processes_are_refused(tmp_path):
    """Another configuration in one process, as another version of a package would be."""
    (tmp_path / "unlike.py").write_text(
        "import os, tiny_config\n"
        "def get_config():\n"
        "    config = tiny_config.get_config()\n"
        "    config.run.seed = int(os.environ['FP8RL_PROCESS_ID'])\n"
        "    return config\n"
    )
    process = _train(tmp_path, 2, 1, "--config", str(tmp_path / "unlike.py"))
    error = _finished(process, 2)
    assert error.count("config.run.seed is '1' in process 1") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_command_of_one_process(tmp_path):
    command = [sys.executable, "-m", "fp8rl_jax.cli", "report", str(tmp_path)]
    launch = ["bash", str(_ROOT / "launch" / "multihost.sh"), "2", *command]
    done = subprocess.run(launch, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "fp8rl report runs in one process" in done.stderr
