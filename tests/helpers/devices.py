"""Scripts in processes of their own, on virtual devices."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
_COMPILER = os.environ.get("XLA_FLAGS", "")  # conftest.py's
# Devices that share a busy machine's cores may come late to a collective operation.
_PATIENT = "".join(
    f" --xla_cpu_collective_{name}_timeout_seconds=1800"
    for name in ("call_warn_stuck", "call_terminate")
)


def run_script(devices: int, name: str, *arguments: str):
    """What a script of this folder prints last, as JSON, on so many virtual devices."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{_COMPILER} --xla_force_host_platform_device_count={devices}{_PATIENT}",
    }
    command = [sys.executable, str(HERE / name), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
