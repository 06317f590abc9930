"""States of scaling policies in the train step: what updates them, how often, and from what."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from random_model import initial_params, quantized

from fp8rl_jax import learner, models
from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.batch import Batch, make_batch
from fp8rl_jax.quant import get_recipe

_MODEL = models.ModelConfig(259, 64, 96, 2, 2, 1, 32)
_RECIPE = get_recipe("fp8_delayed")
_SGD = optax.sgd(0.5)
_OPERANDS = ("weight", "activation", "gradient")


def _batch(rows: int = 8, scale: float = 1.0) -> Batch:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, (rows, 24)).astype(np.int32)
    lengths = rng.integers(3, 12, rows).astype(np.int32)
    targets = np.stack([t[n : n + 8] for t, n in zip(tokens, lengths, strict=True)])
    zeros = np.zeros(targets.shape, np.float32)
    return make_batch(
        tokens=tokens,
        prompt_lengths=lengths,
        targets=targets,
        mask=zeros + 1,
        temperature=np.ones(rows, np.float32),
        advantages=scale * rng.standard_normal(rows).astype(np.float32),
    )


@functools.cache
def _step(micro_batches: int = 1, remat: str = "none"):
    forward_pass = learner.ForwardPass(_MODEL, get_recipe(_RECIPE), remat=remat)
    gradients = learner.GradientProgram(forward_pass, micro_batches=micro_batches)
    return learner.make_train_step(gradients, _SGD)


_init_scaling = exact_jit(lambda params: models.init_scaling(params, _RECIPE))


def _state() -> learner.TrainState:
    params = initial_params(_MODEL)
    scaling = _init_scaling(params)
    return learner.new_state(params, _SGD, np.zeros(2, np.uint32), _RECIPE, scaling)


def _rope():
    return tuple(jnp.asarray(t) for t in models.rope_tables(_MODEL, 24))


def _host(state):
    """A copy that survives donation."""
    return jax.tree.map(np.array, state)


def _amaxes(scaling_state) -> dict[str, np.ndarray]:
    """{site.operand: the newest entry of the history, (L,)}."""
    return {
        f"{site}.{operand}": getattr(states, operand).state["history"][:, 0, 0, 0]
        for site, states in scaling_state.items()
        for operand in _OPERANDS
    }


def test_weights_are_known_before_the_first_step():
    """A first rollout does not run on weights quantised with a scale of 1."""
    state = _host(_state())
    assert set(state.scaling_state) == {
        f"layers.{name}"
        for name in (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
        )
    }
    kernel = np.asarray(
        jnp.asarray(state.params["layers"]["up_proj"]["kernel"]).astype(jnp.bfloat16), np.float32
    )
    states = state.scaling_state["layers.up_proj"]
    np.testing.assert_array_equal(states.weight.state["amax"][:, 0, 0], np.abs(kernel).max((1, 2)))
    assert not states.activation.state["history"].any()
    assert not states.gradient.state["history"].any()


def test_history_of_three_steps():
    """Each step pushes one amax per operand and site; the next step's scale is the maximum."""
    state, seen = _state(), []
    for step in range(3):
        state, _, metrics = _step()(state, _batch(scale=100.0), _rope())
        assert bool(metrics["good"])
        seen.append(_amaxes(_host(state.scaling_state)))
        for site, states in _host(state.scaling_state).items():
            for operand in _OPERANDS:
                history = getattr(states, operand).state["history"][:, :, 0, 0]
                pushed = np.stack([s[f"{site}.{operand}"] for s in seen[::-1]], axis=1)
                np.testing.assert_array_equal(history[:, : step + 1], pushed)
                older = step + 1 + (operand == "weight")  # weights were seen once at the start
                assert not history[:, older:].any()
                np.testing.assert_array_equal(
                    getattr(states, operand).state["amax"][:, 0, 0], history.max(1)
                )
                assert not getattr(states, operand).age.any()
    assert all((s > 0).all() for step in seen for s in step.values())
    assert (seen[0]["layers.up_proj.weight"] != seen[2]["layers.up_proj.weight"]).any()


@pytest.mark.slow  # micro-batches without states: tests/test_learner.py
@pytest.mark.parametrize("micro_batches,remat", [(4, "none"), (1, "full"), (2, "full")])
def test_one_update_whatever_the_parts(micro_batches, remat):
    """Micro-batches and remat: the amaxes of the whole batch, once."""
    whole, _, _ = _step()(_state(), _batch(), _rope())
    parts, _, _ = _step(micro_batches, remat)(_state(), _batch(), _rope())
    ours, theirs = _amaxes(_host(parts.scaling_state)), _amaxes(_host(whole.scaling_state))
    for name, amax in theirs.items():
        if name.endswith("gradient"):  # gradients make no bitwise promise
            np.testing.assert_allclose(ours[name], amax, rtol=0.05)
        else:
            np.testing.assert_array_equal(ours[name], amax)
    for states in _host(parts.scaling_state).values():
        assert not states.activation.state["history"][:, 1:].any(), "pushed once"


def test_the_step_quantises_with_what_was_known_before_it():
    """Log-probabilities of a step depend on the states it got, not on what it observes."""
    start = _host(_state())
    state, first, _ = _step()(jax.tree.map(jnp.asarray, start), _batch(), _rope())
    moved = dataclasses.replace(
        jax.tree.map(jnp.asarray, start), scaling_state=jax.tree.map(jnp.copy, state.scaling_state)
    )
    _, second, _ = _step()(moved, _batch(), _rope())
    again = _step()(jax.tree.map(jnp.asarray, start), _batch(), _rope())[1]
    np.testing.assert_array_equal(first, again)
    assert (np.asarray(first) != np.asarray(second)).mean() > 0.5


def test_a_bad_step_changes_nothing():
    """Loss NaN: the states of the policies are those before the step, like all the rest."""
    start = _host(_state())
    batch = _batch()
    batch = dataclasses.replace(batch, weights=np.full_like(batch.weights, np.nan))
    state, _, metrics = _step()(jax.tree.map(jnp.asarray, start), batch, _rope())
    assert not bool(metrics["good"])
    for before, after in zip(jax.tree.leaves(start), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(before, after)


def test_zero_gradients_age():
    """No gradient: its scale stays and its age grows; weights and activations stay fresh."""
    state = _state()
    for _ in range(2):
        state, _, _ = _step()(state, _batch(scale=0.0), _rope())
    for states in _host(state.scaling_state).values():
        assert (states.gradient.age == 2).all() and not states.gradient.state["amax"].any()
        assert not states.activation.age.any() and not states.weight.age.any()


def test_states_follow_first_and_last_layers():
    """Layers in bf16 have no states; the others keep theirs."""
    recipe = dataclasses.replace(_RECIPE, last_layers=1, bf16_modules=("down_proj",))
    params = initial_params(_MODEL)
    scaling = exact_jit(lambda p: models.init_scaling(p, recipe))(params)
    assert len(scaling) == 6 and "layers.down_proj" not in scaling
    assert scaling["layers.up_proj"].weight.age.shape == (1,)
    weights = quantized(params, recipe)
    assert weights["layers"]["up_proj"]["kernel"].value.qvalue.shape == (1, 64, 96)
    assert weights["layers_last"]["up_proj"]["kernel"].dtype == jnp.bfloat16
