"""Zero drift over its whole space: every pair of values of every factor, bit for bit."""

from __future__ import annotations

import dataclasses

import drift_space
import kv_formats
import numpy as np
import pytest
from drift_harness import run

from fp8rl_jax.quant import get_recipe


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(drift_space.choices())))
def test_space(number):
    """Pairs of everything: recipe, KV, experts, heads, widths, sampling, lengths, updates, ..."""
    result = run(drift_space.case_of(drift_space.choices()[number]))
    assert result.rollout_logp.size and np.isfinite(result.rollout_logp).all()
    assert result.checksum_ok
    assert result.differing() == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(30))
def test_formats_of_keys_and_values_and_backward_passes(number):
    """The first cases of the space with K and V in other formats and another backward pass."""
    case = drift_space.case_of(drift_space.choices()[number])
    formats = list(kv_formats.RECIPES)
    recipe = kv_formats.with_formats(get_recipe(case.recipe), formats[number % len(formats)])
    if recipe.quantized:
        recipe = dataclasses.replace(recipe, backward=("dequantized", "bf16")[number // 5 % 2])
    result = run(dataclasses.replace(case, recipe=recipe))
    assert np.isfinite(result.rollout_logp).all() and result.checksum_ok
    assert result.differing() == (0, 0)


def test_the_space_is_covered():
    """Every possible pair of values is in some case; few cases; the canary is among them."""
    covered = set().union(*(drift_space._pairs(choice) for choice in drift_space.choices()))
    assert covered >= drift_space.all_pairs()
    assert len(drift_space.choices()) <= 60
