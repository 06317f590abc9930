"""What the probe of this machine's products relies on is what it has tested."""

import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.kernels.reference import probe
from fp8rl_jax.kernels.reference.matmul import block_matmul


def test_what_steps_give_is_tested():
    """A library that is wrong at four rows of 48 columns, a size that the first sizes lack: steps
    of four rows, which they lead to, are given up for those that avoid it."""
    first = [(rows, 64, 256) for rows in range(1, 41)]

    def test(sizes):
        of_rows = {(m, n) for m, _, n in sizes if m % 4}
        return [*of_rows, *((m, n) for m, _, n in sizes if (m, n) == (4, 48))]

    found = probe.steps_that_hold(test(first))
    assert (found.row_step, found.few_rows) == (4, 2)
    steps = probe._steps(test, first, [64])
    assert (steps.rows(1), steps.columns(48)) != (4, 48) and steps.row_step % 4 == 0


@pytest.mark.parametrize(
    ("depth", "columns", "dtype"),
    [(48, 48, jnp.bfloat16), (136, 50, jnp.bfloat16), (40, 272, jnp.bfloat16), (128, 4096, "f4")],
)
def test_few_rows_of_odd_sizes(depth, columns, dtype):
    """Depths that are no multiple of an instruction's, and wide float32: as among many rows."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, depth)).astype(dtype)
    w = rng.standard_normal((depth, columns)).astype(dtype)
    multiply = exact_jit(lambda x, w: block_matmul(x, w, way=probe.cpu_way()))
    whole = np.asarray(multiply(x, w))
    for rows in (1, 2, 3, 4, 5, 7, 17):
        np.testing.assert_array_equal(np.asarray(multiply(x[:rows], w)), whole[:rows])
