"""The routers of both families: choice, weights, groups, the balancing loss, and their load."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.models import ModelConfig, router
from fp8rl_jax.training.counters import load_metrics

_SIGMOID = ModelConfig(
    50,
    32,
    48,
    2,
    2,
    1,
    16,
    num_experts=12,
    num_experts_per_tok=3,
    scoring_func="sigmoid",
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
)
_SOFTMAX = dataclasses.replace(
    _SIGMOID, scoring_func="softmax", n_group=1, topk_group=1, routed_scaling_factor=1.0
)


def _draw(rows=40, seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((rows, 12)).astype(np.float32)
    return logits, rng.uniform(-0.5, 0.5, 12).astype(np.float32)


def _run(config, logits, bias):
    def run(logits, bias):
        chosen = router.select_experts(config, logits, bias)
        return chosen, router.routing_weights(config, logits, chosen)

    return (np.asarray(x) for x in exact_jit(run)(logits, bias))


def _deepseek(logits, bias, config):
    """Experts and weights of one token at a time, in float64, by the paper's equations 12 to 16."""
    experts, weights = [], []
    for row in np.float64(logits):
        affinity = 1 / (1 + np.exp(-row))
        score = affinity + bias
        groups = score.reshape(config.n_group, -1)
        value = np.sort(groups, axis=1)[:, -2:].sum(1)
        allowed = np.argsort(-value, kind="stable")[: config.topk_group]
        outside = [e for e in range(12) if e // groups.shape[1] not in allowed]
        score[outside] = -np.inf
        best = np.argsort(-score, kind="stable")[: config.num_experts_per_tok]
        gate = affinity[best]
        experts.append(best)
        weights.append(gate / gate.sum() * config.routed_scaling_factor)
    return np.array(experts), np.array(weights)


@pytest.mark.parametrize("groups,kept", [(4, 2), (4, 1), (1, 1), (6, 3)])
def test_sigmoid_router_is_the_papers(groups, kept):
    config = dataclasses.replace(_SIGMOID, n_group=groups, topk_group=kept)
    config = dataclasses.replace(config, num_experts_per_tok=2 if groups == 4 else 3)
    logits, bias = _draw()
    chosen, weights = _run(config, logits, bias)
    exact_chosen, exact_weights = _deepseek(logits, bias, config)
    np.testing.assert_array_equal(chosen, exact_chosen)
    np.testing.assert_allclose(weights, exact_weights, rtol=1e-6)


def test_the_correction_enters_the_choice_alone():
    """A large correction makes its expert everyone's first choice; its weight stays small."""
    logits, bias = _draw()
    config = dataclasses.replace(_SIGMOID, n_group=1, topk_group=1)
    bias[7] = 100
    logits[:, 7] = -5
    chosen, weights = _run(config, logits, bias)
    assert (chosen[:, 0] == 7).all()
    assert (weights[:, 0] < weights[:, 1]).all()
    np.testing.assert_allclose(weights.sum(1), config.routed_scaling_factor, rtol=1e-6)


@pytest.mark.parametrize("config", [_SIGMOID, _SOFTMAX], ids=["sigmoid", "softmax"])
def test_gradient_is_that_of_the_weights(config):
    """By central differences in float64, the choice held fixed; the correction gets none."""
    logits, bias = _draw(rows=5)
    cotangent = np.random.default_rng(1).standard_normal((5, 3))
    chosen, _ = _run(config, logits, bias)

    def objective(logits, bias):
        chosen = router.select_experts(config, logits, bias)
        return (router.routing_weights(config, logits, chosen) * cotangent).sum()

    grad, to_bias = jax.jit(jax.grad(objective, argnums=(0, 1)))(logits, bias)
    assert not np.asarray(to_bias).any()

    def exact(logits):
        p = 1 / (1 + np.exp(-logits))
        if config.scoring_func == "softmax":
            p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        w = np.take_along_axis(p, chosen, 1)
        return (w / w.sum(1, keepdims=True) * config.routed_scaling_factor * cotangent).sum()

    step, expected = 1e-5, np.zeros(logits.shape)
    for place in np.ndindex(*logits.shape):
        moved = np.zeros(logits.shape)
        moved[place] = step
        expected[place] = (exact(logits + moved) - exact(logits - moved)) / (2 * step)
    np.testing.assert_allclose(grad, expected, atol=2e-6)


@pytest.mark.parametrize("config", [_SIGMOID, _SOFTMAX], ids=["sigmoid", "softmax"])
def test_balancing_loss(config):
    """1 for a balanced router, near E / k for one that uses k experts, and its gradient helps."""
    even = np.full((1, 12), 10, np.int32)
    flat = jnp.full((1, 12), 40 / 12)  # of 40 tokens
    assert router.load_balance_loss(config, even, flat) == pytest.approx(1, abs=1e-6)
    uneven = np.zeros((1, 12), np.int32)
    uneven[0, :3] = 40
    sure = np.where(uneven > 0, 40 / 3, 0).astype(np.float32)
    assert router.load_balance_loss(config, uneven, sure) == pytest.approx(4, abs=1e-6)

    logits, valid = _draw()[0][None] + 3 * (np.arange(12) < 3), np.ones((1, 40), bool)

    @jax.jit
    def loss(logits):
        return router.load_balance_loss(
            config, uneven, router.sum_probability(config, logits, valid)[None]
        )

    moved = logits - 10 * np.asarray(jax.grad(loss)(logits))
    assert loss(moved) < loss(logits)


def test_probability_counts_valid_tokens_alone():
    logits, valid = _draw()[0][None], np.arange(40)[None] < 25
    with_padding = router.sum_probability(_SOFTMAX, logits, valid)
    np.testing.assert_allclose(
        with_padding, router.sum_probability(_SOFTMAX, logits[:, :25], valid[:, :25]), rtol=1e-6
    )
    assert float(with_padding.sum()) == pytest.approx(25, rel=1e-6)


def test_load_metrics():
    tokens = np.array([[10, 10, 10, 10], [40, 0, 0, 0], [20, 20, 0, 0]])
    metrics = load_metrics(tokens, 3)
    assert metrics.pop("expert_load_worst") == "layer 4 expert 0"
    assert metrics == pytest.approx(
        {
            "expert_load_max": 4.0,
            "expert_load_max_mean": (1 + 4 + 2) / 3,
            "expert_load_entropy": (1 + 0 + 0.5) / 3,
            "experts_unused_frac": 5 / 12,
        }
    )
    assert load_metrics(np.zeros((2, 4)), 0)["expert_load_max"] == 0
