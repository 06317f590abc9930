"""Devices for rollouts alone: the run of the learner's devices, whoever samples."""

from __future__ import annotations

import os

import pytest
import train_process
from tiny_run import CONFIG, reproducible

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.config import load_config
from fp8rl_jax.plan.learner import plan_learner
from fp8rl_jax.plan.planned import read_planned
from fp8rl_jax.plan.rollout import plan_rollouts
from fp8rl_jax.sharding import abstract_meshes
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
_EXPERTS = {"model__num_experts": 4, "model__num_experts_per_tok": 2}
_EXPERTS |= {"model__moe_intermediate_size": 64, "model__num_hidden_layers": 1}


def _run(directory, devices: int, monkeypatch, *more: str, **fields) -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    flags = f"{flags} --xla_force_host_platform_device_count={devices}"
    monkeypatch.setenv("XLA_FLAGS", flags)
    given = {name.replace("__", "."): value for name, value in fields.items()}
    train_process.finish(train_process.start(directory, *more, **_FIELDS | given))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("learners", "samplers", "fields"),
    [
        (1, 2, {}),
        (2, 2, {"rollout__ahead": 2}),
        (2, 2, {"rollout__ahead": 1, "rollout__slots": 8, "rollout__most_versions": 2}),
        (2, 2, {"rollout__ahead": 1, "mesh__data": 1, "mesh__expert": 2, **_EXPERTS}),
        (2, 2, {"rollout__ahead": 1, "mesh__data": 1, "mesh__tensor": 2}),
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


def test_meshes_of_both():
    """Devices that need not exist: what `fp8rl plan` counts, and what is refused."""
    axes = {"data": -1, "fsdp": 2, "tensor": 1, "expert": 4}
    learner, rollout = abstract_meshes(axes | {"rollout": 8}, 24)
    assert learner.shape == {"data": 2, "fsdp": 2, "tensor": 1, "expert": 4}
    assert rollout is not None
    assert rollout.shape == {"data": 2, "fsdp": 1, "tensor": 1, "expert": 4}
    assert abstract_meshes(axes | {"rollout": 0}, 24)[1] is None
    with pytest.raises(UserError, match=r"rollout is 6, which mesh.tensor x mesh.expert = 4"):
        abstract_meshes(axes | {"rollout": 6}, 22)
    with pytest.raises(UserError, match=r"for 4 devices \(mesh.rollout has 4 others\)"):
        abstract_meshes(axes | {"data": 1, "rollout": 4}, 8)


def test_plans_of_both():
    """Samplers hold no train state, but weights of versions ahead; the learner no such weights."""
    fields = ("rollout.slots=16", "rollout.ahead=2", "mesh.fsdp=4")
    config = load_config(str(CONFIG), [f"--config.{field}" for field in fields])
    shared = read_planned(config, 4)
    config.mesh.rollout = 4
    own = read_planned(config, 8)
    assert (own.mesh.size, own.sampling.mesh.size, own.hosts) == (4, 4, 1)
    served = plan_rollouts(own.sampling)[0]
    assert served.train_state == 2 * plan_rollouts(shared)[0].weights
    kept = plan_learner(shared.resolved, shared.mesh).others
    assert plan_learner(own.resolved, own.mesh).others == kept - served.train_state
