"""What loading takes beyond its result: a few slices, not another copy of the model."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[3]


def _measure(*arguments: str) -> dict[str, float]:
    """Megabytes that docs/scripts/load_memory.py prints."""
    if not pathlib.Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak of resident memory is read from Linux's /proc")
    path = os.pathsep.join([str(_ROOT), *(p for p in sys.path if p)])
    done = subprocess.run(
        [sys.executable, str(_ROOT / "docs" / "scripts" / "load_memory.py"), *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.removesuffix(" MB\n"))


@pytest.mark.slow
def test_beyond_the_result(tmp_path):
    """Compiling included, less than a third of a small model's float32 parameters."""
    found = _measure("0.25", "bf16")
    assert found["result"] > 400
    assert found["peak_beyond_result"] < found["result"] / 3


@pytest.mark.slow
@pytest.mark.parametrize(("stored", "dtype"), [("bf16", "fp8"), ("fp8", "float32")])
def test_two_gigabytes(stored, dtype):
    """The largest tensor and a constant."""
    found = _measure("2", stored, dtype)
    assert found["files"] > 1700
    assert found["peak_beyond_result"] < found["largest_tensor"] + 100
