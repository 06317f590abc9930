"""FSDP on eight virtual devices gives the log-probabilities of one device, bit for bit."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

HERE = pathlib.Path(__file__).parent


def _run(
    devices: int, mesh: dict[str, int], recipe: str, micro_batches: int = 1, *fields: str
) -> dict:
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    command = [sys.executable, str(HERE / "sharded_steps.py"), json.dumps(mesh), recipe]
    command += [str(micro_batches), *fields]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("recipe", ["fp8", pytest.param("f32", marks=pytest.mark.slow)])
def test_fsdp_equals_one_device(recipe):
    """Two RL steps on each mesh from the same parameters."""
    one = _run(1, {"data": 1, "fsdp": 1, "tensor": 1}, recipe)
    assert one["drift"] == 0.0 and one["sharded_leaves"] == 0
    meshes = [{"data": 1, "fsdp": 8, "tensor": 1}]
    for mesh in meshes:
        many = _run(8, mesh, recipe)
        assert many["devices"] == 8
        assert many["sharded_leaves"] == 9, "every matrix must really lie in parts"
        assert many["drift"] == 0.0
        assert many["tokens"] == one["tokens"]
        assert many["logp"] == one["logp"], "first step: same bits"
        np.testing.assert_allclose(many["loss"], one["loss"], rtol=1e-6)
        np.testing.assert_allclose(many["grad_norm"], one["grad_norm"], rtol=1e-4)


def test_delayed_scaling_sees_every_device():
    """Amaxes are of the whole batch on 8 devices, and after 2 micro-batches, as on one device."""
    one = _run(1, {"data": 1, "fsdp": 1, "tensor": 1}, "fp8_delayed")
    many = _run(8, {"data": 2, "fsdp": 4, "tensor": 1}, "fp8_delayed", micro_batches=2)
    assert one["drift"] == many["drift"] == 0.0
    assert many["logp"] == one["logp"]
    assert set(one["scaling"]) == set(many["scaling"]) and len(one["scaling"]) == 3 * 7
    for name, amax in one["scaling"].items():
        assert all(value > 0 for value in amax), name
        if name.endswith("gradient"):  # gradients make no bitwise promise
            np.testing.assert_allclose(many["scaling"][name], amax, rtol=0.1)
        else:
            assert many["scaling"][name] == amax, name


@pytest.mark.slow
def test_data_parallel_and_micro_batches():
    """Rows over data x fsdp, gradients over two micro-batches."""
    one = _run(1, {"data": 1, "fsdp": 1, "tensor": 1}, "f32")
    many = _run(8, {"data": 2, "fsdp": 4, "tensor": 1}, "f32", micro_batches=2)
    assert many["drift"] == 0.0
    assert many["logp"] == one["logp"]
    np.testing.assert_allclose(many["loss"], one["loss"], rtol=1e-6)


_EXPERTS = ("model.num_experts=8", "model.moe_intermediate_size=64")


@pytest.mark.parametrize(
    "recipe,micro_batches",
    [("f32", 1), pytest.param("fp8_delayed", 2, marks=pytest.mark.slow)],
)
def test_experts_on_a_mesh_equal_one_device(recipe, micro_batches):
    """Every device sorts its own rows into its own tiles; experts lie in parts."""
    one = _run(1, {"data": 1, "fsdp": 1, "expert": 1}, recipe, micro_batches, *_EXPERTS)
    many = _run(8, {"data": 1, "fsdp": 2, "expert": 4}, recipe, micro_batches, *_EXPERTS)
    assert one["drift"] == many["drift"] == 0.0
    assert many["sharded_leaves"] == 10, "every matrix and the router"
    assert many["tokens"] == one["tokens"] and many["logp"] == one["logp"]
    np.testing.assert_allclose(many["loss"], one["loss"], rtol=1e-6)
    np.testing.assert_allclose(many["grad_norm"], one["grad_norm"], rtol=1e-2)
    for name, amax in one["scaling"].items():
        if name.endswith("gradient"):  # gradients make no bitwise promise
            np.testing.assert_allclose(many["scaling"][name], amax, rtol=0.1)
        else:
            assert many["scaling"][name] == amax, name
