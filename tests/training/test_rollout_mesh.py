"""Devices for rollouts alone: the run of the learner's devices, whoever samples."""

from __future__ import annotations

import pytest
import train_process
from tiny_run import CONFIG, reproducible

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.processes import on_cpu_devices
from fp8rl_jax.config import load_config
from fp8rl_jax.training.logs import read_jsonl
from fp8rl_jax.training.runtime import make_runtime

_FIELDS = {
    "run.steps": 4,
    "run.check_every": 1,
    "sft.steps": 2,
    "sft.evaluations": 1,
    "eval.every": 2,
    "optimizer.learning_rate": 1e-2,
    "optimizer.warmup_steps": 0,
}


def _run(directory, devices: int, monkeypatch, *more: str, **fields) -> None:
    for name, value in on_cpu_devices(devices).items():
        monkeypatch.setenv(name, value)
    given = {name.replace("__", "."): value for name, value in fields.items()}
    train_process.finish(train_process.start(directory, *more, **_FIELDS | given))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("learners", "samplers", "fields"),
    [
        (1, 1, {"rollout__ahead": 1}),
        (1, 2, {}),
        (2, 2, {"rollout__ahead": 2}),
        (2, 2, {"rollout__ahead": 1, "rollout__slots": 8, "rollout__most_versions": 2}),
    ],
)
def test_it_is_the_run_without_them(learners, samplers, fields, tmp_path, monkeypatch):
    """Samples, losses, evaluations, drift: the records of a run whose devices do both, bit for
    bit. With `slots` devices have queues of their own, so the rollout has as many there."""
    _run(tmp_path / "shared", learners, monkeypatch, **fields)
    count = learners + samplers
    _run(tmp_path / "own", count, monkeypatch, mesh__rollout=samplers, **fields)
    assert reproducible(tmp_path / "own") == reproducible(tmp_path / "shared")
    records = read_jsonl(tmp_path / "own/run/metrics.jsonl")
    assert max(r.get("train_rollout_logprob_abs_diff_max", 0.0) for r in records) == 0.0
    assert all(record["refit_checksum_ok"] for record in records)


@pytest.mark.slow
def test_killed_and_resumed(tmp_path, monkeypatch):
    fields = {"rollout__ahead": 1, "mesh__rollout": 1}
    _run(tmp_path / "whole", 2, monkeypatch, **fields)
    given = _FIELDS | {"rollout.ahead": 1, "mesh.rollout": 1, "run.checkpoint_every": 1}
    process = train_process.start(tmp_path / "killed", **given)
    train_process.kill_after_records(process, tmp_path / "killed", "metrics", 2)
    train_process.finish(train_process.start(tmp_path / "killed", "--resume", **given))
    assert reproducible(tmp_path / "killed") == reproducible(tmp_path / "whole")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (["rollout=9"], "mesh.rollout is 9, which leaves the learner none of"),
        (["rollout=-1"], "mesh.rollout"),
    ],
)
def test_bad_input(fields, message, tmp_path):
    arguments = [f"--config.run.dir={tmp_path / 'run'}", *(f"--config.mesh.{f}" for f in fields)]
    with pytest.raises(UserError, match=message):
        make_runtime(load_config(str(CONFIG), arguments))
