"""The compiler option of the zero-drift promise does what it is for, on this jaxlib."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from fp8rl_jax.exact_jit import compiler_options, exact_jit

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="an option of XLA:CPU")


def _program(x, w):
    return jax.nn.relu(x @ w + 1) @ w.T


def test_no_ynn_fusions():
    """A plain jit of this program holds a YNNPACK fusion; exact_jit's does not."""
    assert compiler_options(), "jaxlib no longer knows the option: zero drift is not kept"
    arguments = (jnp.ones((64, 128)), jnp.ones((128, 256)))
    plain, exact = (
        make(_program).lower(*arguments).compile().as_text() for make in (jax.jit, exact_jit)
    )
    assert "__ynn_fusion" in plain, "the control: without it this test proves nothing"
    assert "__ynn_fusion" not in exact


def test_keywords_are_those_of_jit():
    assert exact_jit(lambda x, n: x * n, static_argnums=1)(jnp.ones(3), 2).tolist() == [2, 2, 2]
