"""Published models by name: their sizes are the published ones."""

from __future__ import annotations

import pytest

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.models.params import parameter_counts
from fp8rl_jax.models.presets import PRESETS, preset

# (total, active or None, tables left out or None) in billions, as the models' own cards and
# reports state them, and the decimals that they give.
_PUBLISHED = {
    "qwen2p5_0p5b": (0.49, None, 0.36),
    "qwen2p5_1p5b": (1.54, None, 1.31),
    "qwen2p5_3b": (3.09, None, 2.77),
    "qwen2p5_7b": (7.61, None, 6.53),
    "qwen2p5_14b": (14.7, None, 13.1),
    "qwen2p5_32b": (32.5, None, 31.0),
    "qwen2p5_72b": (72.7, None, 70.0),
    "qwen3_0p6b": (0.6, None, 0.44),
    "qwen3_1p7b": (1.7, None, 1.4),
    "qwen3_4b": (4.0, None, 3.6),
    "qwen3_8b": (8.2, None, 6.95),
    "qwen3_14b": (14.8, None, 13.2),
    "qwen3_32b": (32.8, None, 31.2),
    "qwen3_30b_a3b": (30.5, 3.3, 29.9),
    "qwen3_235b_a22b": (235, 22, 234),
    "llama3p1_8b": (8.03, None, None),
    "llama3p2_1b": (1.236, None, None),
    "llama3p2_3b": (3.213, None, None),
    "mistral_7b": (7.25, None, None),
    "mistral_7b_v0p1": (7.24, None, None),
    # The last column: arXiv:2503.19786, table 1.
    "gemma3_270m": (0.268, None, 0.1),
    "gemma3_1b": (1.0, None, 0.698),
    "gemma3_4b": (3.88, None, 3.209),
    "gemma3_12b": (11.77, None, 10.759),
    "gemma3_27b": (27.0, None, 25.6),
    "smollm2_135m": (0.1345, None, None),
    "moonlight_16b_a3b": (16, None, 15.29),
    "glm4p5_air": (106, None, None),
    "glm4p5": (355, None, None),
    # arXiv:2508.10925, table 1: active ones without the embedding.
    "gpt_oss_20b": (20.91, None, 19.75),
    "gpt_oss_120b": (116.83, None, 115.67),
    "deepseek_v3": (671, 37, None),
    "kimi_k2": (1000, 32, None),
}


def test_every_preset_is_compared():
    assert set(_PUBLISHED) == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_counts(name):
    """Within the last digit that was published, or 3% where that was rounded to a slogan."""
    total, active, without_tables = _PUBLISHED[name]
    counts = parameter_counts(preset(name))
    assert counts.total / 1e9 == pytest.approx(total, rel=0.03)
    if active:
        assert counts.active / 1e9 == pytest.approx(active, rel=0.03)
    if without_tables:
        assert (counts.total - counts.tables) / 1e9 == pytest.approx(without_tables, rel=0.01)


@pytest.mark.parametrize(
    ("name", "published", "within"),
    [("moonlight_16b_a3b", 2.24, 0.005), ("glm4p5_air", 12, 0.5), ("glm4p5", 32, 0.5)],
)
def test_a_token_uses_as_many_as_published(name, published, within):
    """Tables left out, as the models' cards count."""
    counts = parameter_counts(preset(name))
    assert (counts.active - counts.tables) / 1e9 == pytest.approx(published, abs=within)


@pytest.mark.parametrize(("name", "published"), [("gpt_oss_20b", 3.61), ("gpt_oss_120b", 5.13)])
def test_a_token_uses_as_many_and_the_output_head(name, published):
    counts = parameter_counts(preset(name))
    assert (counts.active - counts.tables / 2) / 1e9 == pytest.approx(published, abs=0.005)


def test_no_such_model():
    with pytest.raises(UserError, match="there is no model 'qwen4'; write one of qwen2p5_0p5b"):
        preset("qwen4")
