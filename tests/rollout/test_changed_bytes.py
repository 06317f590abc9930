"""How much of the sampler's FP8 weights a step changes."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from random_model import initial_params, quantized
from small_models import UNEVEN

from fp8rl_jax.rollout.refit import changed_bytes, sampled_bytes


@pytest.mark.parametrize(("recipe", "bound"), [("fp8", 1), ("fp8_delayed", 1), ("bf16", 0)])
def test_share_of_bytes(recipe, bound):
    """Against a count in numpy, of a step that moves a tenth of the numbers."""
    params = initial_params(UNEVEN)
    rng = np.random.default_rng(0)
    moved = jax.tree.map(
        lambda x: np.where(rng.random(x.shape) < 0.1, np.asarray(x) * 1.2, x), params
    )
    before, after = (sampled_bytes(quantized(p, recipe)) for p in (params, moved))
    assert len(before) == 7 * bound
    if not bound:
        return
    found = [np.asarray(x) for x in before], [np.asarray(x) for x in after]
    assert all(x.dtype == np.uint8 and x.shape[-2] <= 128 for x in found[0])
    changed = sum((x != y).sum() for x, y in zip(*found, strict=True))
    share = changed / sum(x.size for x in found[0])
    assert 0.05 < share < 0.5
    assert float(changed_bytes(before, after)) == pytest.approx(share, rel=1e-6)
    assert float(changed_bytes(before, before)) == 0
