"""What this machine cannot do: fast-math flags, devices that do not fit a mesh, a full disk."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import namedtuple

import pytest
from marks import slow
from refusals import (
    REFUSALS,
    NoRun,
    assert_words,
    begins,
    python,
    train_command,
    without_self_check,
)

from fp8rl_jax import train
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.config import checks, load_config

pytestmark = REFUSALS

# XLA flags.

_FAST = ["xla_cpu_enable_fast_math", "xla_gpu_enable_fast_min_max", "xla_cpu_enable_fast_min_max"]


_ON = ["=true", "=1", "=True", "", "= --xla_x=1", " --xla_x=false"]
_OFF = ["=false", "=0", "=False"]


@pytest.mark.parametrize(
    ("name", "value"), [(_FAST[0], on) for on in _ON] + [(name, "=true") for name in _FAST[1:]]
)
def test_fast_math_is_refused(name, value, refused_fields, monkeypatch):
    """In every spelling that switches it on, wherever it stands in XLA_FLAGS."""
    monkeypatch.setenv("XLA_FLAGS", f"--xla_force_host_platform_device_count=1 --{name}{value}")
    assert_words(refused_fields(), ["XLA_FLAGS", f"--{name}", "remove", "zero_drift='report'"])


@pytest.mark.parametrize(("name", "value"), list(zip(_FAST, _OFF, strict=True)))
def test_fast_math_switched_off_is_accepted(name, value, monkeypatch):
    """The flag may stand there if it says false, and other flags may always."""
    monkeypatch.setenv("XLA_FLAGS", f"--{name}{value} --xla_cpu_enable_fast_math_x=true")
    assert begins(*train_command())


def test_fast_math_is_accepted_without_the_promise(monkeypatch):
    """zero_drift='report' promises nothing, so nothing is refused."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert begins(*train_command("precision.zero_drift=report"))


# Meshes.


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("rollout.prompts_per_step=2", ["rollout.prompts_per_step = 2", "4 devices", "multiple"]),
        ("learner.gradient_accumulation_steps=4", ["micro-batch", "= 2", "4 devices"]),
        ("sft.batch_size=6", ["sft.batch_size = 6", "4 devices"]),
        ("eval.batch_size=2", ["eval.batch_size = 2", "4 devices"]),
    ],
)
def test_batches_that_do_not_divide_over_devices(field, words):
    """Each batch must give every device the same number of rows."""
    sizes = ["rollout.prompts_per_step=4", "eval.batch_size=4", "sft.batch_size=4"]
    good = load_config("tiny.py", [f"--config.{s}" for s in sizes])
    checks.check_mesh(good, 4, 4)
    bad = load_config("tiny.py", [f"--config.{s}" for s in (*sizes, field)])
    with pytest.raises(UserError) as error:
        checks.check_mesh(bad, 4, 4)
    assert_words(str(error.value), words)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (["mesh.fsdp=3"], ["mesh.fsdp", "3 places", "4 devices"]),
        slow(["mesh.expert=4", "mesh.data=1"], ["mesh.expert", "dense"]),
        slow(
            ["mesh.expert=4", "mesh.data=1", "model.num_experts=6"],
            ["mesh.expert is 4", "model.num_experts = 6"],
        ),
    ],
)
def test_mesh_of_four_devices(fields, words, tmp_path):
    """A real process with four devices refuses meshes that do not fit them or the model."""
    arguments = [
        "eval",
        *train_command("rollout.prompts_per_step=4", "eval.batch_size=4", *fields)[1:],
    ]
    flags = "--xla_force_host_platform_device_count=4"
    process = python(*arguments, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    assert process.returncode == 2, process.stderr
    assert re.fullmatch(r"fp8rl eval: [^\n]+\nerror: [^\n]+\n", process.stderr)
    assert_words(process.stderr, words)
    assert not (tmp_path / "run").exists()


# Room.


def test_too_little_room(refused_fields, monkeypatch, tmp_path):
    """The room that the checkpoints need is known before anything compiles."""
    usage = namedtuple("usage", "total used free")(10**9, 10**9 - 5000, 5000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert_words(refused_fields(), ["run.dir", "room", "MB"])
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "Run", NoRun)
    without_self_check(monkeypatch)
    assert begins(*train_command()), "after making room the same command does not start"


def test_write_that_finds_no_room(refused_fields, monkeypatch):
    """A full disk that shows when the first bytes are forced to it."""

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert_words(refused_fields(), ["run", "no room is left", "run.dir"])


def test_full_file_system(refused, tmp_path):
    """The same on a real file system of 64 kB."""
    (tmp_path / "small").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path / "small")]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root and the permission to mount")
    try:
        assert_words(refused(*train_command("run.dir=small/run")), ["small/run", "room", "run.dir"])
    finally:
        subprocess.run(["umount", str(tmp_path / "small")], check=True)
