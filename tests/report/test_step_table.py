"""docs/scripts/step_table.py: runs beside each other, and what they reach in equal time."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

from report_run import make_run, metrics_row

_SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "docs" / "scripts" / "step_table.py"


def _run(path: pathlib.Path, time_rollout: float, steps: int) -> pathlib.Path:
    rows = [metrics_row(step, time_rollout=time_rollout) for step in range(1, steps + 1)]
    compiled = {1: 30.0}
    for row in rows:
        row |= {"time_compile": compiled.get(row["step"], 0.0), "time_refit": 0.01}
        row["memory_peak"] = 20.0 + row["step"]
    return make_run(path, metrics=rows)


def _table(*arguments: pathlib.Path | str) -> subprocess.CompletedProcess:
    command = [sys.executable, _SCRIPT, *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_equal_time(tmp_path):
    """The slower run is read where the quicker one ended, and compiling does not count."""
    quick, slow = _run(tmp_path / "quick", 2.0, 12), _run(tmp_path / "slow", 4.0, 12)
    done = _table(quick, slow, f"--json={tmp_path / 'found.json'}")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert [f["seconds"] for f in found] == [42.0, 42.0]
    assert [f["steps_then"] for f in found] == [12, 7]
    assert [round(f["reward_then"], 6) for f in found] == [0.75, 0.4]
    assert [f["held_out_then"] for f in found] == [0.45, 0.35]
    assert [round(f["tokens_per_s_step"]) for f in found] == [171, 218]  # 600 / 3.5, 1200 / 5.5
    assert [f["memory_peak"] for f in found] == [32.0, 32.0] and found[0]["drift_max"] == 0
    assert len(found[1]["metrics"]) == 12 and found[1]["eval"]
    assert "quick: fp8_blockwise rollout, fp8_blockwise learner" in done.stdout
    assert "after 42.0 s without compiling" in done.stdout


def test_a_run_without_steps(tmp_path):
    """The others are shown, and the status says that it is not all."""
    done = _table(_run(tmp_path / "run", 2.0, 3), tmp_path / "none")
    assert done.returncode == 1 and "does not exist" in done.stdout and "run: " in done.stdout
    assert _table(tmp_path / "none").stderr.strip() == "no run has a step"
