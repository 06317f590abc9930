"""An engine is one of several: another may sample in its place, on devices of its own."""

from __future__ import annotations

import numpy as np
import pytest
from devices import run_script

from fp8rl_jax.training.engine import Prompts


def test_numbers_of_samples():
    """Samples are numbered by prompt, from the first number of each on."""
    temperature = np.ones(6, np.float32)
    tokens, lengths = np.zeros((2, 4), np.int32), np.ones(2, np.int32)
    prompts = Prompts.numbered(tokens, lengths, None, temperature, first=12)
    assert prompts.sample_ids.tolist() == [12, 13, 14, 15, 16, 17]
    chosen = Prompts(tokens, lengths, None, temperature, np.array([9, 3]))
    assert chosen.sample_ids.tolist() == [9, 10, 11, 3, 4, 5]


@pytest.mark.slow
def test_two_engines_beside_each_other(tmp_path):
    """RL steps whose rollouts another engine draws, on another device, have the bits of one."""
    found = run_script(2, "two_engines.py", str(tmp_path / "run"))
    assert found["sampled"] == found["version"] == 2
    assert found["differ"] == 0 and found["drift"] == [0.0] * 4
    assert found["rewards"][0] == found["rewards"][1] and min(found["rewards"][0]) > 0
    assert found["moved"] > 0
