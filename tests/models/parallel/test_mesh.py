"""The mesh is an argument: two at a time, and none that only JAX's context names."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from devices import run_script
from random_model import initial_params
from small_models import NARROW

from fp8rl_jax import models


def test_two_meshes_at_a_time():
    """Four devices sample, over rows and columns; four others score it, over rows, in another
    thread. Both have the bits of one device."""
    found = run_script(8, "two_meshes.py")
    assert found["size"] > 1 and found["cut"] > 0 and found["stored"] > 0
    assert found["tokens"] == found["rollout"] == found["learner"] == 0


def test_a_mesh_of_the_context_is_refused():
    """Over its devices XLA would cut products, and bits would change without a word."""
    params, tokens = initial_params(NARROW), jnp.zeros((2, 4), jnp.int32)
    mesh = jax.sharding.AbstractMesh((2,), ("fsdp",))

    def run(parallel):
        return jax.eval_shape(
            lambda p: (
                models.forward(p, models.Tokens.of(tokens), NARROW, "fp8", parallel=parallel).logits
            ),
            params,
        )

    with jax.sharding.use_abstract_mesh(mesh):
        with pytest.raises(ValueError, match=r"pass parallel=Parallel.on\(mesh\)"):
            run(models.ONE_DEVICE)
        assert run(models.Parallel.on(mesh)).shape == (2, 4, 64)
