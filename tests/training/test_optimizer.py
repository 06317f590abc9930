"""The learning rate by update."""

import numpy as np
import pytest

from fp8rl_jax.training.optimizer import make_optimizer


def _rates(warmup_steps: int, updates: int, **more) -> np.ndarray:
    _, schedule = make_optimizer(0.5, warmup_steps, 0.9, 0.99, 0.0, 1.0, **more)
    return np.array([float(schedule(update)) for update in range(updates)])


@pytest.mark.parametrize(
    ("warmup_steps", "expected"),
    [(0, [0.5, 0.5, 0.5]), (1, [0.5, 0.5, 0.5]), (4, [0.125, 0.25, 0.375, 0.5, 0.5])],
)
def test_warm_up_begins_above_0_and_ends_at_the_peak(warmup_steps, expected):
    np.testing.assert_allclose(_rates(warmup_steps, len(expected)), expected, rtol=1e-6)


def test_cosine_ends_at_its_share_of_the_peak():
    rates = _rates(2, 10, decay_steps=10, end_fraction=0.1)
    np.testing.assert_allclose(rates[:2], [0.25, 0.5], rtol=1e-6)
    assert (np.diff(rates[1:]) < 0).all()
    np.testing.assert_allclose(rates[-1], 0.05, rtol=1e-6)
