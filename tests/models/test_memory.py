"""What is kept in memory: one byte per rollout weight, and little between forward and backward."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax import models
from fp8rl_jax.batch import make_batch
from fp8rl_jax.learner import ForwardPass, GradientProgram, make_train_step, new_state
from fp8rl_jax.quant import get_recipe, make_dot_general
from fp8rl_jax.training.optimizer import learning_rates, make_optimizer

_MODEL = models.ModelConfig(259, 256, 768, 4, 4, 2, 64)
_ROWS, _LENGTH = 3, 160


def _bytes(tree) -> int:
    return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def _params():
    return jax.eval_shape(
        lambda: models.init_params(_MODEL, jax.random.key(0, impl="threefry2x32"))
    )


def _weights(name: str):
    recipe = get_recipe(name)

    def quantise(params):
        return models.quantize_params(params, recipe, models.init_scaling(params, recipe))

    return jax.eval_shape(quantise, _params())


@pytest.mark.parametrize(
    "name,scale_bytes", [("fp8", 4 / 128**2), ("mxfp8", 4 / 32), ("fp8_delayed", 0.0)]
)
def test_rollout_weights_are_stored_once(name, scale_bytes):
    """One byte per weight of a linear layer plus its scales; no transposed or second copy."""
    layers = _weights(name)["layers"]
    count = sum(
        math.prod(leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(_params()["layers"])
        if path[-1].key == "kernel"
    )
    held = dict.fromkeys((1, 4), 0)
    for path, leaf in jax.tree_util.tree_leaves_with_path(layers):
        if not str(path[-1]).endswith("['weight']"):  # a norm's
            held[np.dtype(leaf.dtype).itemsize] += _bytes(leaf)
    assert held[1] == count
    scales = math.ceil(count * scale_bytes) + 7 * 4 * 4
    # Delayed activations: a history of 1024 amaxes, the effective one and an age per site.
    states = 7 * 4 * 4 * 1026 if name == "fp8_delayed" else 0
    assert states < held[4] <= scales + states
    assert _bytes(_weights("bf16")["layers"]) > 2 * count


def _residuals(name: str) -> list[jax.ShapeDtypeStruct]:
    """Everything that a learner's forward pass keeps for its backward pass."""
    recipe = get_recipe(name)
    rope = tuple(jnp.zeros((_LENGTH, 32)) for _ in range(2))

    def linearise(params, tokens):
        scaling = models.init_scaling(params, recipe)
        weights = models.quantize_params(params, recipe, scaling)

        def hidden(params):
            paired = models.trainable_params(params, weights, recipe, scaling)
            out = models.hidden_states(paired, models.Tokens.of(tokens, rope), _MODEL, recipe)
            return out.hidden

        return jax.vjp(hidden, params)[1]

    tokens = jax.ShapeDtypeStruct((_ROWS, _LENGTH), jnp.int32)
    return jax.tree.leaves(jax.eval_shape(linearise, _params(), tokens))


def _per_token_and_layer(name: str) -> float:
    """Bytes of activations kept, those with an entry per layer and token."""
    tokens = _ROWS * _LENGTH
    kept = [
        x
        for x in _residuals(name)
        if x.shape[:2] == (4, tokens) or x.shape[:3] == (4, _ROWS, _LENGTH)
    ]
    return _bytes(kept) / (4 * tokens)


def test_activations_kept_for_the_backward_pass():
    """docs/recipes.md's table: FP8 copies of the inputs of linear layers, bf16 of the others."""
    hidden, wide, heads, kv = 256, 768, 256, 128
    elementwise = 2 * (2 * hidden + 2 * wide + heads + kv)  # norms' inputs, gate and up, q, k
    linear = 3 * hidden + heads + 2 * hidden + wide  # q k v, o, gate up, down
    attention = 2 * heads + 2 * kv  # q in bf16; k and v as stored, a byte each
    scales = 2 * 2 * 4  # of k and v, per (token, kv head)
    assert _per_token_and_layer("fp8") == elementwise + linear + attention + scales
    assert _per_token_and_layer("bf16") == elementwise + 2 * linear + attention + 2 * kv
    large = [x for x in _residuals("fp8") if x.dtype == jnp.float32 and x.shape[:2] == (4, _ROWS)]
    assert all(x.ndim == 4 and x.shape[-1] == 2 for x in large), "scales of K and V alone"


@pytest.mark.parametrize("name", ["fp8", "fp8_tensorwise", "bf16"])
def test_a_linear_layer_keeps_its_input_once(name):
    """x in one byte an element, the weight's bytes, scales; no bf16 copy of either."""
    dot = make_dot_general(name)
    x = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((256, 384), jnp.float32)

    def linearise(x, w):
        return jax.vjp(lambda x, w: dot(x, w, (((1,), (0,)), ((), ()))), x, w)[1]

    kept = _bytes(jax.eval_shape(linearise, x, w))
    if name == "bf16":  # x in bf16, and the parameter itself
        assert kept == 2 * 512 * 256 + 4 * 256 * 384
    else:
        scales = 4 * (512 // 128 * 256 + 2 * 3) if name == "fp8" else 8
        assert kept == 512 * 256 + 256 * 384 + scales


def test_working_memory_of_a_train_step():
    """Gradients, clipped gradients and a few layers beside the state, in bytes a parameter. Copies
    of AdamW's moments would add 8; of the weights in float16 or padded in float32, 2 or 4."""
    model = models.ModelConfig(259, 320, 768, 8, 5, 5, 64)  # 320: blocks of 128 do not divide it
    optimizer = make_optimizer(learning_rates(1e-4, 1), 0.9, 0.99, 0.0, 1.0)
    params = jax.eval_shape(
        lambda: models.init_params(model, jax.random.key(0, impl="threefry2x32"))
    )
    key = np.zeros(2, np.uint32)
    state = jax.eval_shape(lambda params: new_state(params, optimizer, key, "fp8"), params)
    tokens, ones = np.zeros((2, 64), np.int32), np.ones(2, np.float32)
    lengths, mask = np.full(2, 32, np.int32), np.ones((2, 32), bool)
    batch = make_batch(tokens, lengths, tokens[:, 32:], mask, ones, ones)
    step = make_train_step(GradientProgram(ForwardPass(model, get_recipe("fp8"))), optimizer)
    rope = tuple(map(jnp.asarray, models.rope_tables(model, 64)))
    memory = step.lower(state, batch, rope).compile().memory_analysis()
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    assert 4 < memory.temp_size_in_bytes / count < 9
