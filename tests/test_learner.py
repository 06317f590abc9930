"""The train step's arithmetic: what it learns from, and that micro-batches are one batch."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from balance_steps import COEFFICIENT, MODEL, TAPS, balance_batch
from balance_steps import run as balance_gradients
from devices import run_script
from random_model import initial_params
from small_models import NARROW

from fp8rl_jax import learner, models
from fp8rl_jax.batch import Batch, make_batch
from fp8rl_jax.quant import get_recipe

_MODEL = dataclasses.replace(NARROW, num_hidden_layers=1)
_ROWS, _TOKENS, _RESPONSE = 8, 16, 6
_SGD = optax.sgd(0.05)


@functools.cache
def _step(micro_batches: int):
    forward_pass = learner.ForwardPass(_MODEL, get_recipe("f32"))
    gradients = learner.GradientProgram(forward_pass, micro_batches=micro_batches)
    return learner.make_train_step(gradients, _SGD)


def _batch() -> Batch:
    """Responses of 1 to 6 tokens: no two micro-batches have the same number of tokens."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 64, (_ROWS, _TOKENS)).astype(np.int32)
    prompts = rng.integers(3, _TOKENS - _RESPONSE, _ROWS).astype(np.int32)
    lengths = np.array([6, 6, 5, 6, 2, 3, 1, 1])
    targets = np.stack([t[n : n + _RESPONSE] for t, n in zip(tokens, prompts, strict=True)])
    mask = (np.arange(_RESPONSE) < lengths[:, None]).astype(np.float32)
    batch = make_batch(
        tokens=tokens,
        prompt_lengths=prompts,
        targets=targets,
        mask=mask,
        temperature=np.ones(_ROWS, np.float32),
        advantages=rng.standard_normal(_ROWS).astype(np.float32),
    )
    # On-policy: nothing is clipped.
    return dataclasses.replace(batch, old_logprobs=np.asarray(_run(1, batch)[1]) * mask)


def _run(micro_batches: int, batch: Batch, params=None):
    """(parameters after one step, log-probabilities before it, metrics)."""
    params = initial_params(_MODEL) if params is None else jax.tree.map(jnp.asarray, params)
    state = learner.new_state(params, _SGD, np.zeros(2, np.uint32), "f32")
    rope = tuple(jnp.asarray(t) for t in models.rope_tables(_MODEL, _TOKENS))
    state, logp, metrics = _step(micro_batches)(state, batch, rope)
    return jax.device_get((state.params, logp, metrics))


@pytest.fixture(scope="module")
def batch() -> Batch:
    return _batch()


def test_micro_batches_are_one_batch(batch):
    """The same parameters after an update, though the parts have other numbers of tokens."""
    whole, parts = _run(1, batch), _run(4, batch)
    np.testing.assert_array_equal(whole[1], parts[1])
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(parts[2][name], whole[2][name], rtol=1e-5, err_msg=name)
    for name, values in whole[2]["tokens"].items():
        np.testing.assert_allclose(parts[2]["tokens"][name], values, rtol=1e-5, err_msg=name)
    before = initial_params(_MODEL)
    for start, one, other in zip(*map(jax.tree.leaves, (before, whole[0], parts[0])), strict=True):
        largest = np.abs(one - start).max()
        assert largest > 1e-6
        np.testing.assert_allclose(other - start, one - start, atol=1e-4 * largest)


def test_an_update_that_is_not_finite_changes_nothing(batch):
    """The state before the step comes back, and the metrics say so."""
    advantages = batch.advantages.copy()
    advantages[3] = np.nan
    params, _, metrics = _run(1, dataclasses.replace(batch, advantages=advantages))
    assert not metrics["good"]
    jax.tree.map(np.testing.assert_array_equal, params, initial_params(_MODEL))


def test_an_update_without_a_token_changes_nothing(batch):
    """Not even the optimiser's state: momentum would move the weights without a gradient."""
    params, _, metrics = _run(1, dataclasses.replace(batch, weights=0 * batch.weights))
    assert metrics["good"] and metrics["loss"] == 0
    jax.tree.map(np.testing.assert_array_equal, params, initial_params(_MODEL))


def test_an_update_follows_the_advantages(batch):
    """The responses that were better than their group become likelier, the others less likely."""
    signs = np.where(np.arange(_ROWS) % 2, 1, -1).astype(np.float32)
    signed = dataclasses.replace(batch, advantages=signs[:, None] * batch.mask)
    params, before, _ = _run(1, signed)
    after = _run(1, signed, params)[1]
    gain = ((after - before) * batch.mask).sum(1) * signs
    assert gain[batch.mask.sum(1) >= 5].min() > 0 and gain.sum() > 0


def _balance(taps: dict[str, np.ndarray]):
    """(loss, its gradient by the last router's kernel, tokens of each expert), token by token in
    float64, from what the routers read, computed and chose."""
    batch = balance_batch({})
    lengths = batch.prompt_lengths + batch.mask.sum(1).astype(int)
    rows, logits, chosen = (taps[name] for name in TAPS)
    layers, experts = len(logits), MODEL.num_experts
    tokens = [(row, place) for row, length in enumerate(lengths) for place in range(length)]
    loss, counts = 0.0, np.zeros((layers, experts), int)
    for layer in range(layers):
        share, mean = np.zeros(experts), np.zeros(experts)
        for at in tokens:
            weights = np.exp(logits[layer][at].astype(np.float64))
            mean += weights / weights.sum() / len(tokens)
            for expert in chosen[layer][at]:
                counts[layer, expert] += 1
                share[expert] += 1 / len(tokens)
        loss += experts / MODEL.num_experts_per_tok * (share @ mean) / layers
    kernel = np.zeros((MODEL.hidden_size, experts))
    for at in tokens:  # d(share . p) / d logits = p * (share - share . p)
        weights = np.exp(logits[-1][at].astype(np.float64))
        p = weights / weights.sum()
        slope = p * (share - share @ p) / len(tokens)
        kernel += np.outer(rows[-1][at], slope)
    return loss, COEFFICIENT * experts / MODEL.num_experts_per_tok / layers * kernel, counts


def test_experts_are_balanced_over_the_whole_update():
    """The loss of four micro-batches whose loads differ, and its gradient, are those of all
    tokens at once."""
    grads, metrics = balance_gradients(1, 4, {}, TAPS)
    loss, kernel, counts = _balance(metrics["taps"])
    np.testing.assert_array_equal(metrics["expert_tokens"], counts)
    assert metrics["router_aux_loss"] == pytest.approx(loss, rel=1e-6)
    found = grads["layers"]["router"]["kernel"][-1]
    np.testing.assert_allclose(found, kernel, rtol=0, atol=1e-6 * np.abs(kernel).max())


@pytest.mark.slow
def test_the_balance_depends_on_no_division(tmp_path):
    """1, 2, 4 and 8 micro-batches, 1, 2 and 4 devices, and a replayed choice."""
    cases = [[1, 1, 0], [1, 2, 0], [1, 4, 0], [1, 8, 0], [2, 1, 0], [4, 2, 0], [4, 1, 0], [1, 4, 1]]
    run_script(4, "balance_steps.py", str(tmp_path / "found.npz"), json.dumps(cases))
    found = np.load(tmp_path / "found.npz")
    for name in [name for name in found if name.startswith("0")]:
        for number in range(1, len(cases)):
            other = found[f"{number}{name[1:]}"]
            bound = 1e-6 * np.abs(found[name]).max()
            np.testing.assert_allclose(other, found[name], rtol=0, atol=bound, err_msg=name)
