"""The gradient of an embedding table, in Triton's interpreter."""

import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow

pytest.importorskip("triton", reason="needs Triton: pip install 'fp8rl_jax[dev]'")

from fp8rl_jax.kernels.gpu import embedding


@pytest.mark.parametrize("dtype", [jnp.bfloat16, slow(jnp.float32)])
def test_rows_are_added_in_ascending_order(monkeypatch, interpreter, dtype):
    """Bitwise a loop over tokens; tokens far apart, many of one, and some outside the table."""
    monkeypatch.setattr(embedding, "triton_call", interpreter.triton_call)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 300, 70).astype(np.int32)
    tokens[10:50:4] = 7
    tokens[[41, 42]] = 7  # the last of 32 from the first one on, and the next
    tokens[[3, 69]] = 299
    tokens[[5, 60]] = -1, 300
    rows = jnp.asarray(rng.standard_normal((70, 130)) * 10 ** rng.uniform(-3, 3, (70, 1)), dtype)
    wanted = np.zeros((300, 130), np.float32)
    for token, row in zip(tokens, np.asarray(rows, np.float32), strict=True):
        if 0 <= token < 300:
            wanted[token] += row
    found = embedding.embedding_gradient(jnp.asarray(tokens), rows, 300)
    np.testing.assert_array_equal(np.asarray(found), wanted)
    backwards = embedding.embedding_gradient(jnp.asarray(tokens[::-1]), rows[::-1], 300)
    assert (np.asarray(backwards) != wanted).any(), "the order shows"
