"""The linear layer and the norm, with fixed rounding points.

::

    Linear  --multiply-->  quant.matmul            one product, input and output tapped
    RMSNorm                                        a kernel on a GPU, jnp elsewhere

Every operation computes in float32 and rounds once, to bf16, at its end (`compute_value`). On a GPU
norm and gate (activations.py) are kernels: XLA would order a norm's sum by the number of rows. On a
CPU the formulas are written so that a forward-only program and a train step give the same bits on
XLA:CPU: `lax.rsqrt` and never ``1 / sqrt`` (XLA rewrites it in one of the two), and `prevent_fma`
on every product that feeds an addition. (Attention and log-probabilities also pad the last axis of
`exp` to a multiple of 16, because its vector and scalar code differ; model widths usually are
multiples.)

Norm and gate have custom derivatives, which keep their inputs in the compute dtype: automatic
differentiation would keep several float32 copies of every activation, many times what the linear
layers keep (docs/recipes.md has the figures).

On a GPU, norms and gates in front of linear layers also return their result in FP8 (`Activation`),
so that the layers need not quantise it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from fp8rl_jax.kernels import by_platform, gpu_kernels, keep, kept, prevent_fma, stored, sum_last
from fp8rl_jax.models.arrays import array_of, shape_of
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.parallel import columns
from fp8rl_jax.models.parallel.mesh import AXIS, ONE_DEVICE, WHOLE, Parallel
from fp8rl_jax.models.parallel.specs import gathers_quantised
from fp8rl_jax.models.taps import tap
from fp8rl_jax.quant import (
    Activation,
    BoundWeight,
    QArray,
    Recipe,
    Rows,
    Weight,
    as_activation,
    compute_value,
    grouped_matmul,
    matmul,
    take_layer,
)
from fp8rl_jax.quant.operands import (
    fuses_quantisation,
    kernel_settings,
    quantize_activation,
    quantize_operand,
)
from fp8rl_jax.quant.products import has_grouped_kernels, layer_matmuls, plus
from fp8rl_jax.quant.varying import varying_vjp

ROW_PARTS = 8  # of sums over the rows of a batch, so that half as many devices give the bits of one


def tap_activation(
    module: nn.Module,
    name: str,
    x: Activation,
    view: Callable[[jax.Array], jax.Array] | None = None,
) -> Activation:
    """Taps an activation's value. A swapped-in value drops the quantised copy; it is made again."""
    value = tap(module, name, x.value, view)
    return x if value is x.value else Activation(value)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StackedLayer:
    """One layer of stacked weights, by its index and without a copy. For forward passes only.

    Slicing a layer out of a stack copies it before a kernel can read it. That triples the memory
    traffic of a decode step, which spends its time reading weights.

    Attributes:
      stack: (L, K, N), or (L, E, K, N) of experts, an array or a QArray; (L, D) gains of norms.
      layer: () int32.
    """

    stack: QArray | jax.Array
    layer: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stack.shape[1:]


LayerWeight = Weight | StackedLayer


def multiply(
    recipe: Recipe, x: Activation, w: LayerWeight, rows: Rows, dtype=jnp.float32
) -> jax.Array:
    """Runs `quant.matmul`; a kernel reads a `StackedLayer` in its stack where it can."""
    if not isinstance(w, StackedLayer):
        return matmul(recipe, x, w, rows, dtype)
    if rows.gather is not None or not has_grouped_kernels(recipe):
        return matmul(recipe, x, take_layer(w.stack, w.layer), rows, dtype)
    return layer_matmuls(recipe, x, [w.stack], w.layer, dtype)[0]


def multiply_experts(
    recipe: Recipe, x: jax.Array | Activation, w: LayerWeight, experts: jax.Array, devices: int = 1
) -> jax.Array:
    """Runs `quant.grouped_matmul`; passes a `StackedLayer` (L, E, K, N) to it as L * E experts."""
    if not isinstance(w, StackedLayer):
        return grouped_matmul(recipe, x, w, experts, devices)
    layers, count = w.stack.shape[:2]
    numbers = jnp.where(experts < count, w.layer * count + experts, layers * count)
    matrices = jax.tree.map(lambda stack: stack.reshape(-1, *stack.shape[2:]), w.stack)
    return grouped_matmul(recipe, x, matrices, numbers, devices)


def kernel_of(
    module: nn.Module, config: ModelConfig, parallel: Parallel, spec: PartitionSpec = WHOLE
) -> LayerWeight:
    """Returns a module's parameter `kernel` (..., in, out), of the shape in models/arrays.py.

    It is gathered over the mesh, except along the axes that `spec` keeps sharded. A `StackedLayer`
    is returned unchanged; Flax checks the shapes of kernels that are not sharded.
    """
    if module.has_variable("params", "kernel"):
        named: Any = module.get_variable("params", "kernel")
        if isinstance(named, StackedLayer):
            return named
        if parallel.inside:
            return columns.gather_stored(named)
    array = array_of((*module.path, "kernel"))
    shape = array.shape(config)
    assert shape is not None, array.path
    scale = 1 / math.sqrt(2 * config.num_hidden_layers) if array.residual else 1.0
    kernel = module.param("kernel", kernel_init(scale, len(shape) - 2), shape)
    return parallel.replicate(kernel, spec)


def _product(recipe: Recipe, bias) -> Any:
    """Returns the dtype of a linear layer's product: rounded here unless a bias follows."""
    return recipe.compute_dtype if bias is None else jnp.float32


def add_bias(
    recipe: Recipe, parallel: Parallel, y: jax.Array, bias: jax.Array | StackedLayer | None
) -> jax.Array:
    """Returns ``y + bias``, added in float32 and rounded once; `y` without a bias.

    Args:
      recipe: numerics.
      parallel: mesh, over whose devices the gradient of the bias is summed.
      y: (..., N), a product: float32 if there is a bias, else in the compute dtype.
      bias: (N,) float32, or None.
    """
    return y if bias is None else _plus_bias(recipe, parallel, y, _taken(bias))


def _taken(bias: jax.Array | StackedLayer) -> jax.Array:
    return take_layer(bias.stack, bias.layer) if isinstance(bias, StackedLayer) else bias


@functools.partial(varying_vjp, static=2)
def _plus_bias(recipe: Recipe, parallel: Parallel, y: jax.Array, bias: jax.Array) -> jax.Array:
    return compute_value(prevent_fma(y) + bias, recipe)


def _plus_bias_forward(recipe, parallel, y, bias):
    return _plus_bias(recipe, parallel, y, bias), None


def _plus_bias_backward(recipe, parallel, residual, cotangent):
    dy = cotangent.astype(jnp.float32)
    return dy, parallel.sum_over_batch(recipe, dy)


_plus_bias.defvjp(_plus_bias_forward, _plus_bias_backward)


def vector(
    module: nn.Module,
    config: ModelConfig,
    parallel: Parallel,
    name: str,
    init: Callable = nn.initializers.zeros,
    spec: PartitionSpec = WHOLE,
) -> jax.Array | None:
    """Returns a float32 parameter of a module that is no matrix, of the shape in models/arrays.py;
    None if the model has none. It is gathered over the mesh but along the axes that `spec` keeps
    sharded, and read outside kernels that index stacks."""
    if module.has_variable("params", name):
        named: Any = module.get_variable("params", name)
        if isinstance(named, StackedLayer) or parallel.inside:
            return _taken(named)
    shape = shape_of((*module.path, name), config)
    if shape is None:
        return None
    return stored(parallel.replicate(module.param(name, init, shape), spec))


class Part(nn.Module):
    """A part of the decoder: a module with the model's shapes, numerics, and the devices that share
    it."""

    config: ModelConfig
    recipe: Recipe
    parallel: Parallel


class Linear(Part):
    """A linear layer, with a bias if models/arrays.py has one. Its quantised input and its output
    are tapped. Without `adds_bias` the caller adds it, to a product in float32.

    Inside a shard_map the kernel may be sharded by columns, and the input may have all features or
    this device's shard of them. The result has this device's columns if the kernel is sharded, else
    all columns; nothing is tapped.
    """

    adds_bias: bool = True

    @nn.compact
    def __call__(self, x: jax.Array | Activation) -> jax.Array:
        """Maps (..., in) to (..., out), both in the compute dtype."""
        parallel = self.parallel
        x = as_activation(x)
        kernel = kernel_of(self, self.config, parallel)
        bias = vector(self, self.config, parallel, "bias")
        if parallel.inside:
            x, kernel, rows = _split(self.recipe, parallel, x, kernel)
            bias = None if bias is None else columns.gather_or_slice(bias, kernel.shape[-1])
        else:
            x = tap_activation(
                self, "input", x, functools.partial(_as_multiplied, self.recipe, kernel)
            )
            rows = Rows(parallel.devices, whole=parallel.replicate, parts=ROW_PARTS)
        y = multiply(self.recipe, x.matrix(), kernel, rows, _product(self.recipe, bias))
        y = y.reshape(*x.shape[:-1], y.shape[-1])
        if not self.adds_bias:
            return y
        y = add_bias(self.recipe, parallel, y, bias)
        return y if parallel.inside else tap(self, "output", y)


def _split(
    recipe: Recipe, parallel: Parallel, x: Activation, kernel: LayerWeight
) -> tuple[Activation, LayerWeight, Rows]:
    """Returns the operands of a linear layer inside a shard_map, and how its product treats rows:
    whether it gathers the input's features, quantised, or `x` has them all."""
    depth = kernel.shape[0]
    cut = columns.is_sharded(kernel)
    gather = None
    if cut and gathers_quantised(recipe, x.shape[-1]):
        gather = AXIS if x.shape[-1] < depth else None
    else:
        x = dataclasses.replace(x, value=columns.gather_or_slice(x.value, depth))
    if cut and gather is None:
        kernel = columns.count_once(kernel, parallel.tensor)
    return x, kernel, Rows(gather=gather)


def _as_multiplied(recipe: Recipe, kernel: LayerWeight, x: jax.Array) -> jax.Array:
    """Returns a linear layer's input (..., in) after quantisation, dequantised to float32."""
    if recipe.activation is None:
        return x.astype(jnp.float32)
    scaling = kernel.scaling if isinstance(kernel, BoundWeight) else None
    state = None if scaling is None else scaling.activation
    rows = x.reshape(-1, x.shape[-1])
    return quantize_operand(rows, recipe.activation, state)[0].dequantize().reshape(x.shape)


def linear(part: Part, name: str, adds_bias: bool = True) -> Linear:
    """Makes a `Linear` of `part` under the recipe of the layer `name`."""
    return Linear(part.config, part.recipe.for_module(name), part.parallel, adds_bias, name=name)


def linears(
    part: Part,
    names: Sequence[str],
    x: Activation,
    residual: jax.Array | None = None,
    adds_bias: bool = True,
) -> list[jax.Array]:
    """Runs linear layers of one input, children of `part`; in one launch where a kernel reads their
    weights in stacks, with the same bits.

    Args:
      part: module whose compact `__call__` calls this.
      names: names of the layers, three at most.
      x: (..., in), in the compute dtype.
      residual: (..., out) to which a single layer's whole result is added, or None.
      adds_bias: whether to add the layers' biases, if they have some; the caller adds them
        otherwise, to products in float32.

    Returns:
      (..., out) of each; inside a shard_map a part of its columns, unless there is a `residual`.
    """
    recipes = [part.recipe.for_module(name) for name in names]
    params = part.variables.get("params", {})
    weights = [params[name]["kernel"] for name in names if name in params]
    stacked = [w for w in weights if isinstance(w, StackedLayer)]
    alike = all(recipe == recipes[0] for recipe in recipes) and has_grouped_kernels(recipes[0])
    if len(stacked) == len(names) and alike and part.parallel.tensor == 1:
        biases = [params[name].get("bias") for name in names]  # all of them or none
        before = None if residual is None or biases[0] is not None else rows_of(residual)
        with jax.named_scope("+".join(names)):
            products = layer_matmuls(
                recipes[0],
                x.matrix(),
                [w.stack for w in stacked],
                stacked[0].layer,
                _product(part.recipe, biases[0]),
                before,
            )
        ys = [y.reshape(*x.shape[:-1], y.shape[-1]) for y in products]
        if not adds_bias:
            return ys
        ys = [add_bias(part.recipe, part.parallel, y, b) for y, b in zip(ys, biases, strict=True)]
        residual = None if before is not None else residual  # the kernel has added it
    else:
        ys = [linear(part, name, adds_bias)(x) for name in names]
    if residual is None:
        return ys
    return [plus(residual, columns.gather_or_slice(ys[0], residual.shape[-1]), part.recipe)]


def kernel_init(init_scale: float = 1.0, stacks: int = 0) -> nn.initializers.Initializer:
    """Returns a normal initialiser of (..., in, out), standard deviation init_scale / sqrt(in).

    `stacks`: number of leading axes (experts or heads).
    """
    return nn.initializers.variance_scaling(
        init_scale**2, "fan_in", "normal", batch_axis=tuple(range(stacks))
    )


class Kernel(nn.Module):
    """A module that holds a parameter `kernel` (..., in, out) and returns it (`kernel_of`)."""

    config: ModelConfig
    parallel: Parallel
    spec: PartitionSpec = WHOLE

    @nn.compact
    def __call__(self) -> LayerWeight:
        return kernel_of(self, self.config, self.parallel, self.spec)


def by_kernel_or_jnp(
    recipe: Recipe,
    quantise: bool,
    kernel: Callable,
    plain: Callable,
    shape: tuple[int, ...],
    *operands,
) -> Activation:
    """Runs an operation on activations by a kernel of kernels/gpu, or in jnp.

    Args:
      recipe: numerics; in front of a linear layer its own.
      quantise: whether linear layers follow; the result is then also quantised, if the recipe
        `fuses_quantisation`.
      kernel: (*operands, dtype, quantisation) -> an array that can take `shape`; with a
        quantisation (this, q (M, D), scale (ceil(D / 128), M)).
      plain: (*operands) -> an array in float32 that can take `shape`.
      shape: (..., D), of the result.
      operands: arrays, or trees of them.
    """
    operand = recipe.activation if quantise and fuses_quantisation(recipe) else None

    def by_kernel(*operands):
        if operand is None:
            return Activation(kernel(*operands, recipe.compute_dtype, None).reshape(shape))
        quantisation = gpu_kernels().norm.Quantisation(**kernel_settings(operand))
        y, q, scale = kernel(*operands, recipe.compute_dtype, quantisation)
        return Activation(y.reshape(shape), QArray(q, scale.T, operand.block))

    def in_jnp(*operands):
        y = compute_value(plain(*operands).reshape(shape), recipe)
        if operand is None:
            return Activation(y)
        return Activation(y, quantize_activation(rows_of(y), operand, None, "reference")[0])

    return by_platform(recipe.kernels, by_kernel, in_jnp, *operands)


def rows_of(x: jax.Array) -> jax.Array:
    """Reshapes (B, T, D) to (B * T, D)."""
    return x.reshape(-1, x.shape[-1])


def _inverse_rms(x: jax.Array, eps: float) -> jax.Array:
    """Returns ``1 / sqrt(mean(x^2) + eps)`` over the last axis of float32 x."""
    mean_square = sum_last(prevent_fma(x * x))[..., None] * np.float32(1 / x.shape[-1])
    return lax.rsqrt(prevent_fma(mean_square) + np.float32(eps))


@functools.partial(varying_vjp, static=4)
def rms_norm(
    recipe: Recipe,
    eps: float,
    quantise: bool,
    parallel: Parallel,
    x: jax.Array,
    weight: jax.Array | StackedLayer,
) -> Activation:
    """Returns ``x / sqrt(mean(x^2) + eps) * weight``, last axis (Zhang & Sennrich, 1910.07467).

    Keeps x for the backward pass in its dtype, without a float32 copy. `quantise` as in
    `by_kernel_or_jnp`. Only the value has a gradient; the weight's gradient is summed over the
    devices of `parallel`.
    """

    def kernel(x, weight, dtype, quantisation):
        layer = None
        if isinstance(weight, StackedLayer):
            layer = weight.layer
            weight = weight.stack
        if x.ndim == 4:  # heads: part of attention's inputs
            return gpu_kernels().attention_inputs.rms_norm(x, weight, eps, layer)
        return gpu_kernels().norm.rms_norm(rows_of(x), weight, eps, dtype, quantisation, layer)

    def plain(x, weight):
        if isinstance(weight, StackedLayer):
            weight = take_layer(weight.stack, weight.layer)
        x = x.astype(jnp.float32)
        return x * _inverse_rms(x, eps) * weight

    return by_kernel_or_jnp(recipe, quantise, kernel, plain, x.shape, x, weight)


def _rms_norm_forward(recipe, eps, quantise, parallel, x, weight):
    return rms_norm(recipe, eps, quantise, parallel, x, weight), keep((x, weight))


def _rms_norm_backward(recipe, eps, quantise, parallel, residual, cotangent):
    x, weight = kept(residual)
    y = x.astype(jnp.float32)
    dy = cotangent.value.astype(jnp.float32)
    inverse = _inverse_rms(y, eps)
    y = y * inverse
    dy_weighted = dy * weight
    projection = sum_last(dy_weighted * y)[..., None] * np.float32(1 / x.shape[-1])
    dx = inverse * (dy_weighted - y * projection)
    return dx.astype(x.dtype), parallel.sum_over_batch(recipe, dy * y).astype(weight.dtype)


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


def gain_of(weight: Any, offset: bool) -> Any:
    """Returns what a norm multiplies by: its weight, or with `offset` 1 + weight (Gemma)."""
    if not offset:
        return weight
    if isinstance(weight, StackedLayer):
        return dataclasses.replace(weight, stack=gain_of(weight.stack, offset))
    return 1.0 + weight


class RMSNorm(nn.Module):
    """Module of `rms_norm` that holds its weight, with `offset` less 1, and taps its output."""

    eps: float
    recipe: Recipe
    parallel: Parallel = ONE_DEVICE
    quantise: bool = False
    offset: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> Activation:
        weight: Any = self.get_variable("params", "weight")
        if not isinstance(weight, StackedLayer):
            init = nn.initializers.constant(0.0 if self.offset else 1.0)
            weight = self.param("weight", init, (x.shape[-1],))
            weight = stored(self.parallel.replicate(weight))
        weight = gain_of(weight, self.offset)
        y = rms_norm(self.recipe, self.eps, self.quantise, self.parallel, x, weight)
        return tap_activation(self, "output", y)


def norm_of(config: ModelConfig, recipe: Recipe, parallel: Parallel) -> Callable[..., RMSNorm]:
    """Returns `RMSNorm` with a model's epsilon and offset."""
    return functools.partial(
        RMSNorm, config.rms_norm_eps, recipe, parallel, offset=config.unit_offset_norms
    )
