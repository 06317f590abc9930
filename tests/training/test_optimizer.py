"""The learning rate by update, and what weight decay changes."""

import types

import jax
import numpy as np
import optax
import pytest

from fp8rl_jax.batch import make_batch
from fp8rl_jax.models import init_params
from fp8rl_jax.models.arrays import is_matrix
from fp8rl_jax.models.presets import preset
from fp8rl_jax.models.stacks import path_of
from fp8rl_jax.training.learn import learn
from fp8rl_jax.training.optimizer import learning_rates, make_optimizer, updates_made


def _rates(warmup_steps: int, updates: int, **more) -> np.ndarray:
    schedule = learning_rates(0.5, warmup_steps, **more)
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


_VECTORS = {"weight", "e_score_correction_bias"}  # gains of norms; a sigmoid router's correction


@pytest.mark.parametrize("name", ["qwen3_30b_a3b", "deepseek_v3"])
def test_decay_is_on_every_matrix_of_a_family_and_on_nothing_else(name):
    shapes = jax.eval_shape(
        lambda: init_params(preset(name), jax.random.key(0, impl="threefry2x32"))
    )
    for keys, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        path = path_of(keys)
        stacked = path[0] in ("layers", "dense_layers")
        assert is_matrix(path) == (leaf.ndim - stacked >= 2), path
        assert is_matrix(path) == (path[-1] not in _VECTORS), path


def _updated(gradients: float, decay: float, updates: int = 3) -> dict[str, np.ndarray]:
    """A layer's parameters after some updates, by the names of their last part."""
    rng = np.random.default_rng(0)
    router = {"kernel": rng.standard_normal((2, 6, 4)), "e_score_correction_bias": -np.ones((2, 4))}
    params = {"layers": {"router": router, "norm": {"weight": rng.standard_normal((2, 6))}}}
    params = jax.tree.map(lambda x: x.astype(np.float32), params)
    optimizer = make_optimizer(learning_rates(0.1, 0), 0.9, 0.99, decay, 1e6)

    @jax.jit
    def step(params, state):
        grads = jax.tree.map(lambda x: gradients * (x + 1), params)  # of -1 none
        changes, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, changes), state

    state = optimizer.init(params)
    for _ in range(updates):
        params, state = step(params, state)
    assert updates_made(state) == updates
    return {k[-1].key: np.asarray(x) for k, x in jax.tree_util.tree_leaves_with_path(params)}


def test_what_has_no_gradient_keeps_its_bits():
    """A router's correction, however large the decay; gains of norms move by their gradient."""
    plain, decayed, still = _updated(0.3, 0.0), _updated(0.3, 5.0), _updated(0.0, 5.0)
    for values in (plain, decayed, still):
        np.testing.assert_array_equal(values["e_score_correction_bias"], -1.0)
    np.testing.assert_array_equal(decayed["weight"], plain["weight"])
    np.testing.assert_allclose(still["kernel"], _updated(0.0, 0.0)["kernel"] * 0.5**3, rtol=1e-6)
    assert np.abs(decayed["kernel"] - plain["kernel"]).max() > 0.1


@pytest.mark.parametrize("skipped", [0, 2])
def test_the_logged_rate_is_that_of_the_update(skipped):
    """Steps that made no update have not advanced the warm-up, so the next one's rate is theirs."""
    optimizer = make_optimizer(learning_rates(0.1, 8), 0.9, 0.99, 0.0, 1.0)
    state = types.SimpleNamespace(opt_state=optimizer.init({}))
    counts, rates = [True] + skipped * [False] + [True], []

    def update(state, part, train_step):
        if counts[len(rates)]:
            state = types.SimpleNamespace(opt_state=optimizer.update({}, state.opt_state, {})[1])
        return state, part.mask, {"good": True}

    ones = np.ones((2, 3), np.int32)
    batch = make_batch(ones, ones[:, 0], ones[:, :2], ones[:, :2], np.ones(2, np.float32))
    engine = types.SimpleNamespace(update=update, rl_optimizer=optimizer)
    algorithm = types.SimpleNamespace(minibatches=1, epochs=1)
    for _ in counts:
        state, made = learn(engine, algorithm, state, batch)
        rates.append(made.learning_rate)
    np.testing.assert_allclose(rates, [0.1 / 8] + (1 + skipped) * [0.2 / 8], rtol=1e-6)
