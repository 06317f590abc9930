"""Published models by name: their sizes are the published ones."""

from __future__ import annotations

import pytest
from known_families import KNOWN, PARAMETERS

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.models.families import FAMILIES
from fp8rl_jax.models.params import parameter_counts
from fp8rl_jax.models.presets import PRESETS, preset


def test_every_family_and_preset_is_compared():
    assert set(KNOWN) == {family.model_type for family in FAMILIES}
    assert set(PARAMETERS) == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_counts(name):
    """Within the last digit that was published, or 3% where that was rounded to a slogan."""
    total, active, without_tables = PARAMETERS[name]
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
    with pytest.raises(UserError, match="there is no model 'qwen4'; write one of llama3p1_8b"):
        preset("qwen4")
