"""Layers with derivatives of their own: against automatic differentiation, and under shard_map."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_model import initial_params

from fp8rl_jax import models
from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.models.activations import gated_activation
from fp8rl_jax.models.layers import rms_norm
from fp8rl_jax.models.parallel.mesh import ONE_DEVICE
from fp8rl_jax.models.rope import apply_rope
from fp8rl_jax.quant import get_recipe

_F32 = get_recipe("f32")


def _normal(*shape, seed=0, scale=1.0):
    return jnp.asarray(scale * np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def _plain_norm(x, weight):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def _plain_rope(x, cos, sin):
    half = x.shape[-1] // 2
    turned = jnp.concatenate([-x[..., half:], x[..., :half]], -1)
    cos, sin = (jnp.concatenate([t, t], -1)[:, :, None] for t in (cos, sin))
    return x * cos + turned * sin


def _plain_clamped(gate, up):
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1.0)


_GELU = "gelu_pytorch_tanh"
_ANGLE = np.random.default_rng(5).uniform(0, 6, (2, 7, 16)).astype(np.float32)
_CASES = {
    "norm": (
        lambda x, w: rms_norm(_F32, 1e-6, False, ONE_DEVICE, x, w).value,
        _plain_norm,
        (_normal(3, 5, 32, scale=2.0), _normal(32, seed=1)),
    ),
    "rope": (
        lambda x: apply_rope(_F32, x, jnp.cos(_ANGLE), jnp.sin(_ANGLE)),
        lambda x: _plain_rope(x, jnp.cos(_ANGLE), jnp.sin(_ANGLE)),
        (_normal(2, 7, 4, 32),),
    ),
    "gated": (
        lambda gate, up: gated_activation(_F32, "silu", False, gate, up).value,
        lambda gate, up: jax.nn.silu(gate) * up,
        (_normal(4, 33, scale=5.0), _normal(4, 33, seed=2)),
    ),
    "gelu": (
        lambda gate, up: gated_activation(_F32, _GELU, False, gate, up).value,
        lambda gate, up: jax.nn.gelu(gate, approximate=True) * up,
        (_normal(4, 33, scale=3.0), _normal(4, 33, seed=2)),
    ),
    "clamped": (
        lambda gate, up: gated_activation(_F32, "clamped_swiglu", False, gate, up).value,
        lambda gate, up: _plain_clamped(gate, up),
        (_normal(4, 33, scale=9.0), _normal(4, 33, seed=2, scale=9.0)),
    ),
}


@pytest.mark.parametrize("ours,plain,arguments", _CASES.values(), ids=_CASES)
def test_value_and_gradients(ours, plain, arguments):
    """Against a plain formula differentiated by JAX, in float32."""
    cotangent = _normal(*jax.eval_shape(ours, *arguments).shape, seed=3)

    def run(function):
        def call(*arguments):
            value, vjp = jax.vjp(function, *arguments)
            return value, *vjp(cotangent)

        return jax.jit(call)(*arguments)

    for a, b in zip(run(ours), run(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("activation", ["silu", _GELU])
def test_gate_at_the_extremes(activation):
    """Value and derivative of the gate are finite where exp, squares and cubes overflow."""
    gate = jnp.asarray([-3e38, -1e4, -90.0, 0.0, 90.0, 1e4, 3e38])
    one = jnp.float32(1.0)
    gated = lambda g: gated_activation(_F32, activation, False, g, one).value
    value, slope = jax.vmap(jax.value_and_grad(gated))(gate)
    np.testing.assert_allclose(value, np.maximum(gate, 0), atol=1e-30)
    np.testing.assert_allclose(slope, [0, 0, 0, 0.5, 1, 1, 1], atol=1e-30)


def test_clamps_at_their_ends():
    """At a limit the gradient is that of the inside, as torch's; beyond it is zero; NaN stays."""

    def gated(gate, up):
        return gated_activation(_F32, "clamped_swiglu", False, gate, up).value

    gate = jnp.asarray([7.0, 7.5, 3e38, -3e38, -90.0, jnp.nan, 1.0])
    up = jnp.asarray([7.0, -7.5, 1.0, 1.0, -7.0, 1.0, jnp.nan])
    value, (dgate, dup) = jax.vmap(jax.value_and_grad(gated, (0, 1)))(gate, up)
    seven = 7 / (1 + np.exp(-1.702 * 7))
    np.testing.assert_allclose(value[:5], [8 * seven, -6 * seven, 2 * seven, 0, 0], 1e-6, 1e-30)
    assert np.isnan(value[5:]).all()
    np.testing.assert_array_equal(dgate[:5] != 0, [True, False, False, False, False])
    np.testing.assert_array_equal(dup[:5] != 0, [True, False, True, False, False])


def test_bf16_gradients_have_the_inputs_dtype():
    recipe = get_recipe("bf16")
    x = _normal(4, 32).astype(jnp.bfloat16)

    def total(x):
        return (
            rms_norm(recipe, 1e-6, False, ONE_DEVICE, x, jnp.ones(32))
            .value.astype(jnp.float32)
            .sum()
        )

    grad = jax.grad(total)(x)
    assert grad.dtype == jnp.bfloat16


@pytest.mark.slow  # a layer is quick in tests/quant/test_dot_general.py
@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_decoder_trains_under_shard_map(recipe):
    """Rows over a mesh axis, parameters shared: the gradients of a plain call."""
    config = models.ModelConfig(40, 32, 48, 1, 2, 1, 16)
    params = initial_params(config)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 40, (4, 8)), jnp.int32)
    rope = tuple(jnp.asarray(t) for t in models.rope_tables(config, 8))
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = jax.sharding.PartitionSpec("rows"), jax.sharding.PartitionSpec()

    def logits(params, tokens, rope):
        return models.forward(params, models.Tokens.of(tokens, rope), config, recipe).logits

    def gradients(logits):
        return exact_jit(jax.grad(lambda p: (logits(p, tokens, rope) ** 2).mean()))(params)

    mapped = jax.shard_map(logits, mesh=mesh, in_specs=(whole, rows, whole), out_specs=rows)
    for a, b in zip(
        jax.tree.leaves(gradients(mapped)), jax.tree.leaves(gradients(logits)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)
