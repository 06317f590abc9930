"""What a user's own correction may return."""

from __future__ import annotations

import pytest
from helpers.tiny_run import CONFIG

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.config import load_config
from fp8rl_jax.config.resolve import resolve_config

_SOURCE = """
import numpy as np
def text(d, mask, advantages): return np.full(d.shape, "1"), mask
def nan(d, mask, advantages): return np.log(d) * 0, mask
def infinite(d, mask, advantages): return d + np.inf, mask
def complex_(d, mask, advantages): return d + 1j, mask
def objects(d, mask, advantages): return np.full(d.shape, 1.0, object), mask
def halves(d, mask, advantages): return np.full(d.shape, 0.5, np.float32), mask
def whole(d, mask, advantages): return np.ones(d.shape, int), mask
"""


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_weights_are_finite_real_numbers(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_corrections.py").write_text(_SOURCE)

    def resolved(name):
        fields = ["precision.zero_drift=report", f"algo.correction=my_corrections:{name}"]
        return resolve_config(load_config(str(CONFIG), [f"--config.{field}" for field in fields]))

    for name in ("text", "nan", "infinite", "complex_", "objects"):
        with pytest.raises(UserError, match="returns weights that are no finite real numbers"):
            resolved(name)
    for name in ("halves", "whole"):
        assert list(resolved(name).algorithm.corrections) == [f"my_corrections:{name}"]
