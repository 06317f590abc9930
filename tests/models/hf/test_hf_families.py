"""Every family against Hugging Face transformers: gradients, greedy decoding, padding, bf16.

`pip install transformers torch` (the extra `oracles`); skipped without them. That checkpoints go
both ways is in test_hf_transformers.py.
"""

from __future__ import annotations

import family_oracle
import numpy as np
import pytest
from hf_checkpoints import CONFIGS

from fp8rl_jax.models import layers, transformer

_REASON = "transformers' models are the published oracle (the extra 'oracles')"
_every = pytest.mark.parametrize("name", family_oracle.NAMES)


@pytest.fixture(autouse=True)
def _oracles():
    pytest.importorskip("torch", reason=_REASON)
    pytest.importorskip("transformers", minversion="5", reason=_REASON)


@_every
def test_gradient_of_every_parameter(name):
    errors = family_oracle.gradient_errors(name)
    assert len(errors) > 20
    assert max(errors.values()) < 1e-4, errors


@_every
def test_greedy_tokens_are_theirs(name):
    np.testing.assert_array_equal(*family_oracle.greedy(name))


@_every
def test_padded_batch(name):
    """Lengths 1 to 40, beyond the context where stretched frequencies begin to act."""
    assert family_oracle.padded_error(name) < 1e-4


@_every
def test_bf16(name):
    """Rounding noise; with experts, rounding also moves some tokens to another expert."""
    error = family_oracle.bf16_error(name)
    assert 1e-4 < error < (0.15 if CONFIGS[name].num_experts else 0.03)


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_a_window_left_out_is_seen(name, monkeypatch):
    windows = transformer.layer_windows
    monkeypatch.setattr(
        transformer, "layer_windows", lambda config: np.maximum(windows(config), 2**20)
    )
    assert family_oracle.padded_error(name) > 0.01


def test_a_bias_left_out_is_seen(monkeypatch):
    monkeypatch.setattr(layers, "_plus_bias", lambda recipe, parallel, y, bias: y)
    assert family_oracle.padded_error("qwen2") > 0.01
