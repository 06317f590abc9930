"""`fp8rl compare`: its intervals against scipy's, and policies on the same draws."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from scipy.stats import bootstrap

from fp8rl_jax import cli
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.policy.compare import compare, difference

_IMPORT = "--allow-import=dense_reward"


def _gaps(seeds: int, questions: int = 400, shift: float = 0.03) -> np.ndarray:
    """Differences with deviations of 0.02 between seeds and 0.4 between questions."""
    rng = np.random.default_rng(1)
    of_seeds = rng.normal(shift, 0.02, (seeds, 1))
    return of_seeds + rng.normal(0, 0.4, (seeds, questions))


def test_interval_of_one_seed_is_scipys():
    gaps = _gaps(1)
    found = difference(gaps)
    theirs = bootstrap((gaps[0],), np.mean, method="percentile", rng=np.random.default_rng(2))
    interval = theirs.confidence_interval
    assert found.value == pytest.approx(gaps.mean())
    assert found[1:3] == pytest.approx([interval.low, interval.high], abs=0.003)
    assert found.seeds == 0


def test_interval_of_several_seeds_covers():
    """Of 60 experiments with 8 seeds that differ, about 93% cover the mean; by questions
    alone about half would."""
    rng = np.random.default_rng(3)
    covered = alone = 0
    for _ in range(60):
        gaps = 0.03 + rng.normal(0, 0.06, (8, 1)) + rng.normal(0, 0.2, (8, 25))
        found = difference(gaps)
        covered += found.low <= 0.03 <= found.high
        few = difference(gaps.mean(axis=0, keepdims=True))
        alone += few.low <= 0.03 <= few.high
    assert 50 <= covered <= 59 and alone < covered - 8, (covered, alone)


def test_seeds_to_see_a_difference():
    """((1.96 + 0.84) * deviation / difference) ** 2, of pairs; nan is left out."""
    of_seeds = np.array([0.01, 0.03, 0.05])
    gaps = np.repeat(of_seeds[:, None], 5, axis=1)
    gaps[1, 2] = np.nan
    assert difference(gaps).seeds == np.ceil((2.8016 * 0.02 / 0.03) ** 2)
    assert difference(np.zeros((3, 4))) == (0, 0, 0, 0)
    with pytest.raises(UserError, match="no question was scored"):
        difference(np.full((2, 3), np.nan))


def test_unequal_numbers_of_runs():
    with pytest.raises(UserError, match="settings have 2, 1 runs: runs are compared in pairs"):
        compare([["a", "b"], ["c"]], {}, (), print)


@pytest.mark.slow
def test_command(tiny_run, tmp_path, capsys):
    """A run is equal to its copy at every question; an older checkpoint is not."""
    run, other = tiny_run[0] / "run", tmp_path / "other"
    shutil.copytree(run, other)
    command = ["compare", str(run), str(other), "--questions=32", "--samples=3", _IMPORT]
    assert cli.run([*command, f"--out={tmp_path / 'out'}"]) == 0
    first, second = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert first["accuracy"] == second["accuracy"] and first["questions"] == 32
    zero = {"value": 0, "low": 0, "high": 0, "seeds": 0}
    assert second["difference"] == {"greedy": zero, "sampled": zero}
    assert "<img" in (tmp_path / "out" / "compare.html").read_text()
    assert "32 questions, 3 sampled answers to each" in capsys.readouterr().out
    shutil.rmtree(other / "checkpoints" / "14")
    assert cli.run(command) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "sampled   " in line][-1:]
    assert "+0.0000" not in row
