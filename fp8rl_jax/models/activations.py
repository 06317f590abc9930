"""The gated activation of a feed-forward layer: a kernel on a GPU, jnp elsewhere.

It computes in float32, rounds once, and has its own derivative, as layers.py explains.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from fp8rl_jax.kernels import gpu_kernels, keep, kept, prevent_fma
from fp8rl_jax.kernels.arrays import GELU_CUBE, GELU_FACTOR, SWIGLU_ALPHA, SWIGLU_LIMIT
from fp8rl_jax.models.layers import by_kernel_or_jnp, rows_of
from fp8rl_jax.quant import Activation, Recipe


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def gated_activation(
    recipe: Recipe, activation: str, quantise: bool, gate: jax.Array, up: jax.Array
) -> Activation:
    """Returns ``f(gate) * up``, ``f(x) = x / (1 + exp(-s(x)))`` (Shazeer, arXiv:2002.05202).

    `activation` is one of

    * 'silu': ``s(x) = x``;
    * 'gelu_pytorch_tanh', the approximation of GELU (Hendrycks and Gimpel, arXiv:1606.08415):
      ``s(x) = 2 sqrt(2 / pi) (x + 0.044715 x^3)``, as ``0.5 (1 + tanh(s / 2))`` is
      ``1 / (1 + exp(-s))``;
    * 'clamped_swiglu' (gpt-oss, arXiv:2508.10925): ``s(x) = 1.702 x``, with gate at most 7, up
      within -7 and 7, and ``up + 1`` in its place.

    Keeps gate and up for the backward pass in their dtype, without float32 copies. `quantise` as in
    `by_kernel_or_jnp`; only the value has a gradient.
    """

    def kernel(gate, up, dtype, quantisation):
        return gpu_kernels().norm.gated_activation(
            rows_of(gate), rows_of(up), activation, dtype, quantisation
        )

    def plain(gate, up):
        gate, up = _clamped(activation, gate.astype(jnp.float32), up.astype(jnp.float32))
        return gate / (1.0 + jnp.exp(-_exponent(activation, gate)[0])) * up

    return by_kernel_or_jnp(recipe, quantise, kernel, plain, gate.shape, gate, up)


def _clamped(activation: str, gate: jax.Array, up: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the factors of `gated_activation`, of gate and up in float32; NaN stays."""
    if activation != "clamped_swiglu":
        return gate, up
    limit = jnp.float32(SWIGLU_LIMIT)
    up = jnp.where(up > limit, limit, jnp.where(up < -limit, -limit, up))
    return jnp.where(gate > limit, limit, gate), up + 1.0


def _exponent(activation: str, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Returns s(x) of `gated_activation` and its slope, None for 1."""
    if activation == "silu":
        return x, None
    if activation == "clamped_swiglu":
        return x * jnp.float32(SWIGLU_ALPHA), jnp.float32(SWIGLU_ALPHA)
    factor = jnp.float32(GELU_FACTOR)
    inner = prevent_fma(prevent_fma(x * x) * jnp.float32(GELU_CUBE))
    return x * factor * (1.0 + inner), factor * (1.0 + 3.0 * inner)


def _gated_activation_forward(recipe, activation, quantise, gate, up):
    return gated_activation(recipe, activation, quantise, gate, up), keep((gate, up))


def _gated_activation_backward(recipe, activation, quantise, residual, cotangent):
    residual = kept(residual)
    whole_gate, whole_up = (x.astype(jnp.float32) for x in residual)
    gate, up = _clamped(activation, whole_gate, whole_up)
    dy = cotangent.value.astype(jnp.float32)
    exponent, rise = _exponent(activation, gate)
    sigmoid = 1.0 / (1.0 + jnp.exp(-exponent))
    part = gate * sigmoid * (1.0 - sigmoid)  # this form never overflows
    slope = sigmoid + (part if rise is None else jnp.where(part == 0, 0.0, part * rise))
    grads = [dy * up * slope, dy * gate * sigmoid]
    if activation == "clamped_swiglu":  # those at the limits have their gradients
        inside = whole_gate <= SWIGLU_LIMIT, jnp.abs(whole_up) <= SWIGLU_LIMIT
        grads = [jnp.where(keeps, g, 0.0) for keeps, g in zip(inside, grads, strict=True)]
    return tuple(g.astype(x.dtype) for g, x in zip(grads, residual, strict=True))


gated_activation.defvjp(_gated_activation_forward, _gated_activation_backward)
