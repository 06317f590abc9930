"""Norm, gated activation and the linear layer, with fixed rounding points.

Every operation computes in float32 and rounds once, to bf16, at its end (`compute_value`). On a GPU
norm and gate are kernels: XLA would order a norm's sum by the number of rows. On a CPU the
forms are chosen so that a forward-only program and a train step give the same bits on XLA:CPU:
`lax.rsqrt` and never ``1 / sqrt`` (rewritten in one of the two), `prevent_fma` on every product
that feeds an addition. (Attention and log-probabilities also keep `exp` to a last axis that is a
multiple of 16, because its vector and scalar code differ; model widths usually are.)

Each has a derivative of its own that reads the values as they came in, in the compute dtype: left
to itself, automatic differentiation would keep several float32 copies of every activation, many
times what the linear layers keep (docs/recipes.md has the figures).

The kernel of a norm or a gate can quantise its result in passing, as the linear layers behind it
would (`gives_rows`). What they then take beside the value is its *rows*: a QArray (M, features),
M = B * T.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from fp8rl_jax.kernels import (
    as_bits,
    by_platform,
    from_bits,
    gpu_kernels,
    prevent_fma,
    stored,
    sum_last,
    sum_rows,
)
from fp8rl_jax.models import tensor_parallel
from fp8rl_jax.models.taps import swaps_any, tap
from fp8rl_jax.quant import (
    BoundWeight,
    LayerOf,
    QArray,
    Recipe,
    compute_value,
    keep_dtypes,
    make_dot_general,
)
from fp8rl_jax.quant.activations import fuses_rows, kernel_settings, quantize_activation
from fp8rl_jax.quant.site import quantize_operand
from fp8rl_jax.quant.varying import share

_WHOLE = PartitionSpec()


def replicate(tree, spec: PartitionSpec = _WHOLE):
    """Gathers sharded weights before use, where a mesh is set (FSDP); else returns `tree`.

    Left alone, XLA's partitioner splits the contraction over devices and adds the parts in
    another order; with the weight gathered first the matmul is the one of a single device. `spec`
    is what stays in parts on purpose (columns of the output head over `tensor`).
    """
    if jax.sharding.get_abstract_mesh().empty:
        return tree

    def gather(leaf):
        if isinstance(leaf, BoundWeight):  # the forward pass does not read the master
            return dataclasses.replace(leaf, value=gather(leaf.value))
        return jax.tree.map(lambda x: lax.with_sharding_constraint(x, spec), leaf)

    return jax.tree.map(gather, tree, is_leaf=lambda x: isinstance(x, BoundWeight))


def gather_kernel(*args: Any, dtype: Any = None, inexact: bool = True) -> list[Any]:
    """For Flax's `promote_dtype=`: keeps every dtype and gathers the kernel over the mesh."""
    inputs, kernel, bias = keep_dtypes(*args, dtype=dtype, inexact=inexact)
    return [inputs, replicate(kernel), bias]


def named_layer(module: nn.Module) -> LayerOf | None:
    """A module's kernel where it is one layer of a stack; Flax checks the shapes of others."""
    if not module.has_variable("params", "kernel"):
        return None
    kernel: Any = module.get_variable("params", "kernel")
    return kernel if isinstance(kernel, LayerOf) else None


class Linear(nn.Dense):
    """A bias-free `nn.Dense` that taps its input, as quantised, and its output."""

    recipe: Recipe | None = None

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """(..., in) -> (..., features), both in the compute dtype."""
        named = named_layer(self)
        if named is not None:
            assert self.dot_general is not None
            return self.dot_general(inputs, named, (((inputs.ndim - 1,), (0,)), ((), ())))
        inputs = tap(self, "input", inputs, self._as_multiplied)
        return tap(self, "output", super().__call__(inputs))

    def _as_multiplied(self, x: jax.Array) -> jax.Array:
        """Input (..., in) in the values that enter the product, float32."""
        assert self.recipe is not None
        operand = self.recipe.activation
        if operand is None:
            return x.astype(jnp.float32)
        kernel: Any = self.get_variable("params", "kernel")
        scaling = kernel.scaling if isinstance(kernel, BoundWeight) else None
        rows = x.reshape(-1, x.shape[-1])
        state = None if scaling is None else scaling.activation
        return quantize_operand(rows, operand, state)[0].dequantize().reshape(x.shape)


class SplitLinear(nn.Module):
    """`linear` on one of several devices, each with some columns of the kernel, or all.

    The input may be whole or this device's part. The result is this device's columns where the
    kernel is cut, else whole. `rows` is used where the product takes the whole input as it came.
    """

    recipe: Recipe
    tensor: int
    rows: QArray | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = tensor_parallel.gather_stored(self.get_variable("params", "kernel"))
        depth, cut = kernel.shape[0], tensor_parallel.differs(kernel)
        if cut and tensor_parallel.gathers_quantised(self.recipe, x.shape[-1]):
            gather = tensor_parallel.AXIS if x.shape[-1] < depth else None
        else:
            x, gather = tensor_parallel.hold(x, depth), None
        if cut and gather is None:
            kernel = tensor_parallel.count_once(kernel, self.tensor)
        whole = self.rows is not None and self.rows.shape[-1] == x.shape[-1] == depth
        rows = self.rows if whole else None
        dot_general = make_dot_general(self.recipe, gather=gather, rows=rows)
        return dot_general(
            x, kernel, (((x.ndim - 1,), (0,)), ((), ())),
            preferred_element_type=self.recipe.compute_dtype,
        )  # fmt: skip


def linear(
    recipe: Recipe,
    features: int,
    name: str,
    init_scale: float = 1.0,
    tensor: int = 1,
    rows: QArray | None = None,
) -> nn.Module:
    """A bias-free `nn.Dense` under the recipe of the layer `name`; kernel (in, features).

    Initial standard deviation: init_scale / sqrt(in). Within `tensor_parallel.split_columns` it is
    a `SplitLinear` over the same parameters.

    `rows` is the input that the layer will get as `recipe` quantises it, where that was done
    before; a layer that `recipe` leaves in bf16 goes by the input alone.
    """
    own = recipe.for_module(name)
    if own.activation != recipe.activation:
        rows = None
    if tensor_parallel.inside():
        return SplitLinear(own, tensor, rows, name=name)
    return Linear(
        features,
        use_bias=False,
        kernel_init=kernel_init(init_scale),
        dot_general=make_dot_general(own, rows=rows),
        promote_dtype=gather_kernel,
        recipe=own,
        name=name,
    )


def kernel_init(init_scale: float = 1.0, stacks: int = 0) -> nn.initializers.Initializer:
    """Normal values of standard deviation init_scale / sqrt(in), for (..., in, out).

    So many axes in front are stacks, of experts or heads.
    """
    axes = tuple(range(stacks))
    return nn.initializers.variance_scaling(init_scale**2, "fan_in", "normal", batch_axis=axes)


class Kernel(nn.Module):
    """A parameter `kernel` (..., in, out), of `kernel_init`, gathered over the mesh before use."""

    shape: tuple[int, ...]
    init_scale: float = 1.0

    @nn.compact
    def __call__(self) -> Any:
        named = named_layer(self)
        if named is not None:
            return named
        init = kernel_init(self.init_scale, len(self.shape) - 2)
        return replicate(self.param("kernel", init, self.shape))


def gives_rows(module: nn.Module, recipe: Recipe) -> bool:
    """Whether norms and gates inside `module` give their results quantised too.

    Not in a pass that swaps values: one may stand in the place of what a linear layer reads.
    """
    return fuses_rows(recipe) and not swaps_any(module)


def _with_rows(
    recipe: Recipe, fused: Callable, plain: Callable, *operands: jax.Array
) -> tuple[jax.Array, QArray]:
    """An operation's result (B, T, D), and its rows (B * T, D) as linear layers quantise them.

    Args:
      recipe: one that `fuses_rows`.
      fused: the kernel: (*operands, dtype, quantisation) -> (y, q, scale), as in
        kernels/gpu/norm.py.
      plain: (recipe, *operands) -> (B, T, D), for other platforms.
    """
    operand = recipe.activation
    settings = kernel_settings(operand) if operand else None
    assert operand is not None and settings is not None

    def kernel(*operands):
        quantisation = gpu_kernels().norm.Quantisation(**settings)
        y, q, scale = fused(*operands, recipe.compute_dtype, quantisation)
        return y.reshape(operands[0].shape), QArray(q, scale.T, operand.block)

    def unfused(*operands):
        y = plain(dataclasses.replace(recipe, kernels="reference"), *operands)
        return y, quantize_activation(_rows(y), operand, None, "reference")[0]

    return by_platform(recipe.kernels, kernel, unfused, *operands)


def _rows(x: jax.Array) -> jax.Array:
    """(B, T, D) -> (B * T, D)."""
    return x.reshape(-1, x.shape[-1])


def _inverse_rms(x: jax.Array, eps: float) -> jax.Array:
    """``1 / sqrt(mean(x^2) + eps)`` over the last axis of float32 x."""
    mean_square = sum_last(prevent_fma(x * x))[..., None] * np.float32(1 / x.shape[-1])
    return lax.rsqrt(prevent_fma(mean_square) + np.float32(eps))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def rms_norm(recipe: Recipe, eps: float, x: jax.Array, weight: jax.Array) -> jax.Array:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis (Zhang & Sennrich, 1910.07467).

    Kept for the backward pass: x as it came, and no float32 copy.
    """

    def kernel(x, weight):
        y = gpu_kernels().norm.rms_norm(_rows(x), weight, eps, recipe.compute_dtype)
        return y.reshape(x.shape)

    def plain(x, weight):
        x = x.astype(jnp.float32)
        return compute_value(x * _inverse_rms(x, eps) * weight, recipe)

    return by_platform(recipe.kernels, kernel, plain, x, weight)


def _rms_norm_forward(recipe, eps, x, weight):
    return rms_norm(recipe, eps, x, weight), as_bits((x, weight))


def _rms_norm_backward(recipe, eps, residual, cotangent):
    x, weight = from_bits(residual)
    y, dy = x.astype(jnp.float32), cotangent.astype(jnp.float32)
    inverse = _inverse_rms(y, eps)
    y = y * inverse
    dy_weighted = dy * weight
    projection = sum_last(dy_weighted * y)[..., None] * np.float32(1 / x.shape[-1])
    dx = inverse * (dy_weighted - y * projection)
    return dx.astype(x.dtype), sum_rows(_rows(dy * y)).astype(weight.dtype)


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def rms_norm_quantized(
    recipe: Recipe, eps: float, x: jax.Array, weight: jax.Array
) -> tuple[jax.Array, QArray]:
    """`rms_norm`, and its rows quantised (`_with_rows`), which have no gradient."""

    def fused(x, weight, *settings):
        return gpu_kernels().norm.rms_norm(_rows(x), weight, eps, *settings)

    def plain(recipe, x, weight):
        return rms_norm(recipe, eps, x, weight)

    return _with_rows(recipe, fused, plain, x, weight)


rms_norm_quantized.defvjp(
    lambda recipe, eps, x, weight: (
        rms_norm_quantized(recipe, eps, x, weight),
        as_bits((x, weight)),
    ),
    lambda recipe, eps, residual, dy: _rms_norm_backward(recipe, eps, residual, dy[0]),
)


class RMSNorm(nn.Module):
    """`rms_norm` with its weight as a parameter."""

    eps: float
    recipe: Recipe

    def __call__(self, x: jax.Array) -> jax.Array:
        return tap(self, "output", rms_norm(self.recipe, self.eps, *self._operands(x)))

    def before_linear(self, x: jax.Array, quantise: bool) -> tuple[jax.Array, QArray | None]:
        """(B, T, D) normalised, and with `quantise` (`gives_rows`) its rows."""
        if not quantise:
            return self(x), None
        y, rows = rms_norm_quantized(self.recipe, self.eps, *self._operands(x))
        return tap(self, "output", y), rows

    @nn.compact
    def _operands(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        weight = replicate(self.param("weight", nn.initializers.ones_init(), (x.shape[-1],)))
        return share(x, stored(weight))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gated_silu(recipe: Recipe, gate: jax.Array, up: jax.Array) -> jax.Array:
    """``silu(gate) * up`` with silu(x) = x / (1 + exp(-x)) (SwiGLU, Shazeer, 2002.05202).

    Kept for the backward pass: gate and up as they came, and no float32 copy.
    """

    def kernel(gate, up):
        y = gpu_kernels().norm.gated_silu(_rows(gate), _rows(up), recipe.compute_dtype)
        return y.reshape(gate.shape)

    def plain(gate, up):
        gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
        return compute_value(gate / (1.0 + jnp.exp(-gate)) * up, recipe)

    return by_platform(recipe.kernels, kernel, plain, gate, up)


def _gated_silu_forward(recipe, gate, up):
    return gated_silu(recipe, gate, up), as_bits((gate, up))


def _gated_silu_backward(recipe, residual, cotangent):
    residual = from_bits(residual)
    gate, up = (x.astype(jnp.float32) for x in residual)
    dy = cotangent.astype(jnp.float32)
    sigmoid = 1.0 / (1.0 + jnp.exp(-gate))
    slope = sigmoid + gate * sigmoid * (1.0 - sigmoid)  # written so that it never overflows
    return (dy * up * slope).astype(residual[0].dtype), (dy * gate * sigmoid).astype(
        residual[1].dtype
    )


gated_silu.defvjp(_gated_silu_forward, _gated_silu_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gated_silu_quantized(
    recipe: Recipe, gate: jax.Array, up: jax.Array
) -> tuple[jax.Array, QArray]:
    """`gated_silu`, and its rows quantised (`_with_rows`), which have no gradient."""

    def fused(gate, up, *settings):
        return gpu_kernels().norm.gated_silu(_rows(gate), _rows(up), *settings)

    return _with_rows(recipe, fused, gated_silu, gate, up)


gated_silu_quantized.defvjp(
    lambda recipe, gate, up: (gated_silu_quantized(recipe, gate, up), as_bits((gate, up))),
    lambda recipe, residual, dy: _gated_silu_backward(recipe, residual, dy[0]),
)
