"""The log-probability: right against float64, and the same bits however the tokens are chunked."""

import dataclasses
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from marks import slow

from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.models import Draws, logprobs_of_logits, scaled_logits, token_logprobs
from fp8rl_jax.quant import get_recipe

_TEMPERATURES = np.float32([1.0, 0.5, 1.7])


@functools.cache
def _program(recipe):
    def logprobs(hidden, head, targets, temperature):
        draws = Draws(targets, jnp.broadcast_to(temperature[:, None], targets.shape))
        return token_logprobs(hidden, head, draws, get_recipe(recipe))

    return exact_jit(logprobs)


def _inputs(vocab, batch=3, length=5, width=40, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((batch, length, width)).astype(dtype)
    head = (rng.standard_normal((width, vocab)) / np.sqrt(width)).astype(np.float32)
    targets = rng.integers(0, vocab, (batch, length)).astype(np.int32)
    targets.flat[:2] = 0, vocab - 1  # both ends of the vocabulary
    return hidden, head, targets


def _by_float64(hidden, head, targets, temperature):
    """(logp, entropy) from the definition, token by token."""
    logp, entropy = np.empty(targets.shape), np.empty(targets.shape)
    for row, t in np.ndindex(*targets.shape):
        logits = np.asarray(hidden[row, t], np.float64) @ np.asarray(head, np.float64)
        logits = logits / float(temperature[row])
        shifted = logits - logits.max()
        everything = shifted - np.log(np.exp(shifted).sum())
        logp[row, t] = everything[targets[row, t]]
        entropy[row, t] = -(np.exp(everything) * everything).sum()
    return logp, entropy


@pytest.mark.parametrize("vocab", [37, *map(slow, (16, 130))])
def test_token_logprobs(vocab):
    """Log-softmax and entropy at three temperatures; vocabularies off any multiple of 16 too."""
    inputs = (*_inputs(vocab), _TEMPERATURES)
    for got, expected in zip(_program("f32")(*inputs), _by_float64(*inputs), strict=True):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, expected, atol=3e-6)


def test_token_logprobs_round_the_head_to_bf16():
    """Under bf16 and fp8 the operands are bf16, the sum float32: FP8 never touches the head. In
    float32 the head is not rounded."""
    hidden, head, targets = _inputs(37, dtype=jnp.bfloat16)
    got = _program("bf16")(hidden, head, targets, _TEMPERATURES)
    rounded = head.astype(jnp.bfloat16).astype(np.float32)
    expected = _by_float64(hidden.astype(np.float32), rounded, targets, _TEMPERATURES)
    for value, want in zip(got, expected, strict=True):
        np.testing.assert_allclose(value, want, atol=3e-6)
    unrounded = _by_float64(hidden.astype(np.float32), head, targets, _TEMPERATURES)
    assert np.abs(got[0] - unrounded[0]).max() > 1e-4  # the rounding is seen by this test
    for value, same in zip(_program("fp8")(hidden, head, targets, _TEMPERATURES), got, strict=True):
        np.testing.assert_array_equal(value, same)
    wide = dataclasses.replace(get_recipe("fp8"), head="float32")
    for value, want in zip(
        _program(wide)(hidden, head, targets, _TEMPERATURES), unrounded, strict=True
    ):
        np.testing.assert_allclose(value, want, atol=3e-6)


def test_temperature_zero_is_recorded_as_one():
    """Greedy decoding leaves the log-probability at temperature 1, bit for bit."""
    inputs = _inputs(37)
    greedy = _program("f32")(*inputs, np.float32([0.0, 0.0, 1.7]))
    plain = _program("f32")(*inputs, np.float32([1.0, 1.0, 1.7]))
    other = _program("f32")(*inputs, np.float32([0.9, 0.9, 1.7]))
    jax.tree.map(np.testing.assert_array_equal, greedy, plain)
    assert (np.asarray(greedy[0])[:2] != np.asarray(other[0])[:2]).all()


@pytest.mark.parametrize("recipe", ["f32", slow("bf16")])
def test_chunks_change_no_bit(recipe):
    """2 x 700 tokens (two chunks of 1024) equal each sequence by itself (one chunk of 700)."""
    dtype = np.float32 if recipe == "f32" else jnp.bfloat16
    hidden, head, targets = _inputs(37, batch=2, length=700, dtype=dtype)
    temperature = np.float32([0.7, 1.0])
    both = _program(recipe)(hidden, head, targets, temperature)
    for row in range(2):
        mine = slice(row, row + 1)
        alone = _program(recipe)(hidden[mine], head, targets[mine], temperature[mine])
        for whole, part in zip(both, alone, strict=True):
            np.testing.assert_array_equal(whole[mine], part)
    first = _program(recipe)(hidden[:1, :1], head, targets[:1, :1], temperature[:1])
    assert both[0][0, 0] == first[0][0, 0]  # and one token by itself, as in a decode step


def _plain_logprobs(hidden, head, targets, temperature):
    logits = hidden @ head / temperature[:, None, None]
    return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]


@pytest.mark.parametrize("length", [slow(5), 400])
def test_gradients(length):
    """Of hidden states and head, within one chunk and over two, against jax.nn.log_softmax."""
    hidden, head, targets = _inputs(37, length=length)
    weight = np.random.default_rng(1).standard_normal(targets.shape).astype(np.float32)

    def of(function):
        loss = lambda h, w: (function(h, w) * weight).sum()
        return jax.jit(jax.grad(loss, (0, 1)))(hidden, head)

    draws = Draws(targets, np.broadcast_to(_TEMPERATURES[:, None], targets.shape))
    ours = of(lambda h, w: token_logprobs(h, w, draws, get_recipe("f32"))[0])
    plain = of(lambda h, w: _plain_logprobs(h, w, targets, _TEMPERATURES))
    for got, expected in zip(ours, plain, strict=True):
        scale = np.abs(expected).max()
        np.testing.assert_allclose(got, expected, atol=3e-6 * scale)


# The rule on logits.

_of_logits = exact_jit(
    lambda logits, temperature, targets: logprobs_of_logits(
        scaled_logits(logits, temperature), targets
    )
)


def test_entropy_of_known_distributions():
    """log V nats for equal logits, 0 for a certain token."""
    logits = np.zeros((2, 21), np.float32)
    logits[1, 3] = 1e4
    logp, entropy, _ = _of_logits(logits, np.ones(2, np.float32), np.int32([5, 3]))
    np.testing.assert_allclose(entropy, [np.log(21), 0], rtol=1e-6)
    np.testing.assert_allclose(logp, [-np.log(21), 0], rtol=1e-6)


def test_entropy_carries_no_gradient():
    """It is for the log only, also where its derivative is not zero."""
    logits = np.random.default_rng(0).standard_normal((2, 21)).astype(np.float32)
    targets = jnp.int32([5, 3])
    total = lambda x: logprobs_of_logits(scaled_logits(x, jnp.ones(2)), targets)[1].sum()
    np.testing.assert_array_equal(jax.jit(jax.grad(total))(logits), 0)


def test_far_apart_logits_stay_finite():
    """A token whose probability underflows has its true log-probability and a finite gradient."""
    logits = np.zeros((1, 21), np.float32)
    logits[0, :2] = -3e4, 3e4
    one = np.ones(1, np.float32)
    logp, entropy, _ = _of_logits(logits, one, np.int32([0]))
    assert float(logp[0]) == -6e4 and float(entropy[0]) == 0
    loss = lambda x: logprobs_of_logits(scaled_logits(x, one), jnp.int32([0]))[0].sum()
    expected = np.zeros((1, 21))
    expected[0, :2] = 1, -1
    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(logits), expected)


def test_nan_logits_show():
    """A NaN in one row makes that row NaN and no other."""
    logits = np.zeros((2, 21), np.float32)
    logits[0, 7] = np.nan
    logp, *_ = _of_logits(logits, np.ones(2, np.float32), np.int32([1, 1]))
    assert np.isnan(logp[0]) and np.isfinite(logp[1])


@hypothesis.settings(deadline=None, max_examples=40)
@hypothesis.given(
    st.lists(st.floats(-50, 50, width=32), min_size=21, max_size=21), st.floats(0.25, 4.0, width=32)
)
def test_probabilities_add_up_to_one(logits, temperature):
    """Over the 21 tokens of a row, padding columns excluded; and entropy = -sum p log p."""
    rows = np.tile(np.float32(logits), (21, 1))
    targets = np.arange(21, dtype=np.int32)
    logp, entropy, _ = _of_logits(rows, np.full(21, temperature, np.float32), targets)
    logp = np.asarray(logp, np.float64)
    assert np.exp(logp).sum() == pytest.approx(1, abs=2e-5)
    assert (logp <= 1e-6).all()
    np.testing.assert_allclose(entropy, -(np.exp(logp) * logp).sum(), atol=1e-4)
