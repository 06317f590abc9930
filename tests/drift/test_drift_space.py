"""Zero drift over its whole space: every pair of values of every factor, bit for bit."""

from __future__ import annotations

import dataclasses

import drift_space
import kv_formats
import numpy as np
import pytest
from drift_harness import run

from fp8rl_jax.quant import get_recipe

_SPACE = drift_space.choices()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(_SPACE)))
def test_space(number):
    """Pairs of everything: recipe, KV, experts, heads, widths, sampling, lengths, updates, ...
    Every fourth train step does not return its logits, which another program computes."""
    result = run(drift_space.case_of(_SPACE[number], tap_logits=number % 4 > 0))
    assert result.rollout_logp.size and np.isfinite(result.rollout_logp).all()
    assert result.checksum_ok
    assert result.differing() == (0, 0)


_FORMATS = list(kv_formats.RECIPES)
_BACKWARD = ("dequantized", "bf16")
# Every format under both other backward passes, of the first ten cases with a quantised recipe; and
# a format of each kind without quantised products.
_OTHERS = [
    (number, index % 5, index // 5)
    for index, number in enumerate(
        [n for n, choice in enumerate(_SPACE) if choice["recipe"] not in ("f32", "bf16")][:10]
    )
] + [(7, 0, 0), (0, 4, 0)]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "kv_format", "backward"), _OTHERS)
def test_formats_of_keys_and_values_and_backward_passes(number, kv_format, backward):
    """Cases of the space with K and V in other formats and another backward pass."""
    case = drift_space.case_of(_SPACE[number], tap_logits=True)
    recipe = kv_formats.with_formats(get_recipe(case.recipe), _FORMATS[kv_format])
    if recipe.quantized:
        recipe = dataclasses.replace(recipe, backward=_BACKWARD[backward])
    result = run(dataclasses.replace(case, recipe=recipe))
    assert np.isfinite(result.rollout_logp).all() and result.checksum_ok
    assert result.differing() == (0, 0)


def test_the_space_is_covered():
    """Every possible pair of values is in some case; few cases; the canary is among them."""
    covered = set().union(*(drift_space._pairs(choice) for choice in _SPACE))
    assert covered >= drift_space.all_pairs()
    assert len(_SPACE) <= 60
