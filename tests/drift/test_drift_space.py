"""Zero drift over its whole space: every pair of values of every factor, bit for bit."""

from __future__ import annotations

import drift_space
import numpy as np
import pytest
from drift_harness import run


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(drift_space.choices())))
def test_space(number):
    """Pairs of everything: recipe, KV, experts, heads, widths, sampling, lengths, updates, ..."""
    result = run(drift_space.case_of(drift_space.choices()[number]))
    assert result.rollout_logp.size and np.isfinite(result.rollout_logp).all()
    assert result.checksum_ok
    assert result.differing() == (0, 0)


def test_the_space_is_covered():
    """Every possible pair of values is in some case; few cases; the canary is among them."""
    covered = set().union(*(drift_space._pairs(choice) for choice in drift_space.choices()))
    assert covered >= drift_space.all_pairs()
    assert len(drift_space.choices()) <= 60
