"""Sums over a last axis have the written order, whatever stands beside a row and in the program."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.kernels import max_last, prevent_fma, sum_last, sum_rows


def _in_order(x: np.ndarray) -> np.float32:
    """One row, as kernels/arrays.py says it: slices, then rests of 16, then halves."""
    x = np.pad(x, (0, -len(x) % 16))
    rests = []
    while len(x) > 16:
        groups = len(x) // 16
        count = min(groups, 16)
        width = groups // count * 16
        rests += list(x[count * width :].reshape(-1, 16))
        total = x[:width]
        for i in range(1, count):
            total = total + x[i * width : (i + 1) * width]
        x = total
    for rest in rests:
        x = x + rest
    while len(x) > 1:
        x = x[: len(x) // 2] + x[len(x) // 2 :]
    return x[0]


@pytest.mark.parametrize("width", [5, 16, 64, 136, 259, 592, 8192])
def test_order(width):
    """Of a lone sum, and of one whose numbers are made in the same program."""
    x = np.random.default_rng(width).standard_normal((7, width)).astype(np.float32)
    want = np.array([_in_order(row) for row in x])
    np.testing.assert_array_equal(exact_jit(sum_last)(x), want)
    squares = np.array([_in_order(row * row) for row in x])
    found = exact_jit(lambda x: jnp.sqrt(sum_last(prevent_fma(x * x))))
    np.testing.assert_array_equal(found(x), np.sqrt(squares))
    np.testing.assert_array_equal(found(x[2:3]), np.sqrt(squares[2:3]))
    if width > 16:
        assert (want != x[:, ::-1].sum(-1, dtype=np.float32)).any(), "another order is seen"


def test_maximum_and_rows():
    x = np.random.default_rng(0).standard_normal((34, 48)).astype(np.float32)
    np.testing.assert_array_equal(exact_jit(max_last)(x), x.max(-1))
    np.testing.assert_allclose(exact_jit(sum_rows)(x), x.astype(np.float64).sum(0), rtol=1e-5)
