"""Moments in host memory: the update of the step that keeps them on the device."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from random_model import initial_params

from fp8rl_jax import learner, models, sharding
from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.batch import make_batch
from fp8rl_jax.quant import get_recipe
from fp8rl_jax.training.checkpoint import Checkpoints, state_checksum
from fp8rl_jax.training.offload import OffloadedStep, is_on_host, with_host_moments
from fp8rl_jax.training.optimizer import learning_rates, make_optimizer, updates_made

_OPTIMIZER = make_optimizer(learning_rates(1e-2, 3), 0.9, 0.95, 0.1, 0.5)
_MESH = sharding.make_mesh({"data": -1, "fsdp": 1, "tensor": 1, "expert": 1})


def _state():
    rng = np.random.default_rng(0)
    params = {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in (("lm_head", (6, 8)), ("weight", (5,)))
    }
    params = {"lm_head": params["lm_head"], "norm": {"weight": params["weight"]}}
    params = jax.tree.map(jnp.asarray, params)
    return learner.new_state(params, _OPTIMIZER, np.zeros(2, np.uint32), "f32")


def _gradients(state, batch, rope):
    """Of a norm above what is clipped, another in every step; the batch says whether it counts."""
    grads = jax.tree.map(lambda x: jnp.sin(3 * x) + rope, state.params)
    metrics = {"grad_norm": optax.tree.norm(grads)}
    return learner.Gradients(grads, batch.any(), state.scaling_state), batch * 2, metrics


@pytest.fixture
def step():
    """(offloaded step, its first state)."""
    state = _state()
    device = sharding.named(_MESH, jax.tree.map(lambda _: PartitionSpec(), state))
    whole = sharding.replicated(_MESH)
    offloaded = OffloadedStep(_gradients, _OPTIMIZER, (device, whole, whole))
    return offloaded, jax.device_put(state, with_host_moments(state, device))


def _one_program(state, batch, rope):
    found, *rest = _gradients(state, batch, rope)
    updates, opt_state = _OPTIMIZER.update(found.params, state.opt_state, state.params)
    new = dataclasses.replace(
        state, params=optax.apply_updates(state.params, updates), opt_state=opt_state
    )
    return learner.keep_if(found.changes, new, state), *rest


_assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-8)


def _places(state) -> list[bool]:
    assert not any(is_on_host(x) for x in jax.tree.leaves(state.params))
    return [is_on_host(x) for x in jax.tree.leaves(state.opt_state)]


def test_updates_are_those_of_one_program(step):
    """The clipping sees all gradients, counts advance once, matrices alone are decayed, and a step
    that does not count changes nothing; moments are in host memory before and after. Last bits
    may differ, as two programs fuse other operations."""
    offloaded, state = step
    one, reference = exact_jit(_one_program), _state()
    assert _places(state) == [x.ndim > 0 for x in jax.tree.leaves(state.opt_state)]
    for number, counts in enumerate([True, True, False, True]):
        batch, rope = jnp.full(4, counts), jnp.float32(number)
        state, logp, _ = offloaded(state, batch, rope)
        before = jax.device_get(reference)
        reference, expected, _ = one(reference, batch, rope)
        jax.tree.map(_assert_close, jax.device_get(state), reference)
        np.testing.assert_array_equal(logp, expected)
        assert (state_checksum(reference) == state_checksum(before)) == (not counts)
        assert _places(state) == [x.ndim > 0 for x in jax.tree.leaves(state.opt_state)]
    assert updates_made(state.opt_state) == 3


def test_checkpoints_do_not_ask_where_moments_are(step, tmp_path):
    """Written from the host and restored to the device, and back, under one checksum."""
    _, state = step
    on_device = jax.device_put(jax.device_get(state), sharding.replicated(_MESH))
    assert state_checksum(state) == state_checksum(on_device)
    checkpoints = Checkpoints(tmp_path, 2)
    for number, (written, like) in enumerate([(state, on_device), (on_device, state)]):
        checkpoints.save(number, written, {})
        found = checkpoints.restore(number, like)
        assert _places(found) == _places(like)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), jax.device_get(state))
    checkpoints.close()


@pytest.mark.slow
@pytest.mark.parametrize("weights", [np.nan, 0.0])
def test_a_step_that_does_not_count_keeps_the_scales(weights):
    """Neither loss nor norm is finite, or no token counts: states of scaling policies too are
    those before the step."""
    model = models.ModelConfig(96, 64, 128, 2, 4, 2, 16)
    params = initial_params(model)
    state = learner.new_state(params, _OPTIMIZER, np.zeros(2, np.uint32), "fp8_delayed")
    tokens, targets = np.ones((4, 24), np.int32), np.ones((4, 8), np.int32)
    batch = make_batch(tokens, np.full(4, 16, np.int32), targets, targets > 0, np.ones(4))
    forward_pass = learner.ForwardPass(model, get_recipe("fp8_delayed"))
    gradients = exact_jit(learner.GradientProgram(forward_pass))
    rope = tuple(map(jnp.asarray, models.rope_tables(model, 24)))
    found, *_ = gradients(state, batch, rope)
    assert state_checksum(found.scaling_state) != state_checksum(state.scaling_state)
    bad = dataclasses.replace(batch, weights=batch.weights * np.float32(weights))
    found, *_ = gradients(state, bad, rope)
    assert not found.changes
    assert state_checksum(found.scaling_state) == state_checksum(state.scaling_state)
