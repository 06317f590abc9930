"""The products of a linear layer, by kernels or in jnp: forward and both gradients.

See rule.py for what the operands are, and for products of experts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from fp8rl_jax.kernels import (
    K_BLOCK,
    block_matmul,
    by_platform,
    gpu_kernels,
    layer_kernels,
    matmul_at_once,
    round_bf16,
    scan_in_bits,
    varying_as,
)
from fp8rl_jax.quant.operands import (
    Activation,
    compute_value,
    plain_value,
    quantize_activation,
    quantize_weight,
    take_layer,
)
from fp8rl_jax.quant.qarray import QArray
from fp8rl_jax.quant.recipe import Recipe

Matrix = QArray | jax.Array  # a product's operand: quantised, or in the compute dtype
Experts = jax.Array | None  # (tiles,) int32, each tile's expert; None for one matrix of rows


def _values(recipe: Recipe, *operands: Matrix) -> list[jax.Array]:
    """Dequantises operands; under a `fake` recipe also rounds them to bf16."""
    values = [plain_value(operand) for operand in operands]
    return [round_bf16(value) for value in values] if recipe.fake else values


def _spread(scale: jax.Array, axis: int, block: int, per: int, length: int) -> jax.Array:
    """Repeats scales, one per `block` of an axis's `length` elements, to one per `per` elements."""
    count = -(-length // per)
    if scale.shape[axis] == count and (block == per or block == -1):
        return scale
    if block == -1 or scale.shape[axis] == 1:
        shape = list(scale.shape)
        shape[axis] = count
        return jnp.broadcast_to(scale, shape)
    return lax.slice_in_dim(jnp.repeat(scale, block // per, axis=axis), 0, count, axis=axis)


def scaled_matmul(
    x: QArray, w: QArray, implementation: str = "auto", dtype=jnp.float32, devices: int = 1
) -> jax.Array:
    """Multiplies quantised (M, K) and (K, N) in canonical order; returns (M, N) in `dtype`.

    Scales that are constant over 128 of K multiply each block's partial sum. Finer scales (1x32)
    are multiplied into the operands first: exact for powers of two, as MXFP8 has.
    `devices` as for `block_matmul`.
    """
    multiply = functools.partial(
        block_matmul, implementation=implementation, dtype=dtype, devices=devices
    )
    rows, depth = x.qvalue.shape
    columns = w.qvalue.shape[1]
    x_rows, x_depth = x.block_shape
    w_depth, w_columns = w.block_shape
    if (x_depth != -1 and x_depth % K_BLOCK) or (w_depth != -1 and w_depth % K_BLOCK):
        return multiply(x.dequantize(), w.dequantize())
    left = _spread(x.scale, 1, x_depth, K_BLOCK, depth)
    left = _spread(left, 0, x_rows, 1, rows)
    right = _spread(w.scale, 0, w_depth, K_BLOCK, depth)
    per = K_BLOCK if w_columns == -1 or w_columns % K_BLOCK == 0 else 1
    right = _spread(right, 1, w_columns, per, columns)
    return multiply(x.qvalue, w.qvalue, left, right)


def _multiply(
    recipe: Recipe, x: Matrix, w: Matrix, dtype=jnp.float32, devices: int = 1
) -> jax.Array:
    """Multiplies (M, K) by (K, N) in canonical order; returns (M, N) in `dtype`."""
    if isinstance(x, QArray) and isinstance(w, QArray) and not recipe.fake:
        return scaled_matmul(x, w, recipe.kernels, dtype, devices)
    return block_matmul(
        *_values(recipe, x, w), implementation=recipe.kernels, dtype=dtype, devices=devices
    )


def _multiply_for_gradient(recipe: Recipe, x: Matrix, w: Matrix, dtype=jnp.float32) -> jax.Array:
    """Multiplies (M, K) by (K, N) in the fastest order; returns (M, N) in `dtype`."""

    def plain(x, w):
        return matmul_at_once(*_values(recipe, x, w), recipe.kernels).astype(dtype)

    kernel = functools.partial(_multiply, recipe, dtype=dtype)
    return by_platform(recipe.kernels, kernel, plain, x, w)


def has_grouped_kernels(recipe: Recipe) -> bool:
    """Returns whether the grouped GPU kernels support a recipe's operands: values in the compute
    dtype, or DeepSeek-V3's blocks."""
    blocks = {"weight": (K_BLOCK, K_BLOCK), "activation": (1, K_BLOCK), "gradient": (1, K_BLOCK)}
    operands = recipe.operands.items()
    return not recipe.quantized or all(x.block == blocks[name] for name, x in operands)


def _by_kernel(name: str, recipe: Recipe, x: Matrix, w: Matrix, *others, **keywords):
    """Calls a kernel of kernels/gpu/matmul.py: ``name(x, w, *others, x_scale, w_scale)``."""
    kernel = getattr(gpu_kernels().matmul, name)
    if isinstance(x, QArray) and isinstance(w, QArray) and not recipe.fake:
        return kernel(x.qvalue, w.qvalue, *others, x.scale, w.scale, **keywords)
    return kernel(*_values(recipe, x, w), *others, **keywords)


def _of_experts(
    recipe: Recipe,
    multiply: Callable,
    x: Matrix,
    w: Matrix,
    experts: jax.Array,
    dtype,
    transposed: bool = False,
) -> jax.Array:
    """Multiplies tiles by their experts' matrices, or the transposes: by a grouped kernel where
    supported, else by ``multiply(tile, matrix)`` tile by tile; (tiles, R, columns) in `dtype`."""

    def at_once(x, w, experts):
        return _by_kernel(
            "grouped_matmul", recipe, x, w.mT if transposed else w, experts, dtype=dtype
        )

    def by_tile(x, w, experts):
        columns = w.shape[-2] if transposed else w.shape[-1]
        nothing = varying_as(jnp.zeros((x.shape[1], columns), dtype), x)

        def one(_, tile):
            rows, expert = tile

            def product():
                matrix = take_layer(w, expert)
                return multiply(rows, matrix.mT if transposed else matrix)

            return (), lax.cond(expert < w.shape[0], product, lambda: nothing)

        return scan_in_bits(one, (), (x, experts))[1]

    if not has_grouped_kernels(recipe):
        return by_tile(x, w, experts)
    return by_platform(recipe.kernels, at_once, by_tile, x, w, experts)


def fprop(
    recipe: Recipe,
    x: Matrix,
    w: Matrix,
    experts: Experts = None,
    dtype=jnp.float32,
    devices: int = 1,
) -> jax.Array:
    """Returns ``x w``, summed in float32 in canonical order and rounded once.

    Args:
      recipe: recipe of the operands.
      x: (M, K); (tiles, R, K) with experts.
      w: (K, N); (E, K, N) with experts.
      experts: (tiles,) int32, or None.
      dtype: dtype of the result, float32 or bf16.
      devices: number of devices over which XLA divides the rows.

    Returns:
      (M, N); (tiles, R, N) with experts.
    """
    multiply = functools.partial(_multiply, recipe, dtype=dtype, devices=devices)
    if experts is None:
        return multiply(x, w)
    return _of_experts(recipe, multiply, x, w, experts, dtype)


def dgrad(recipe: Recipe, dy: Matrix, w: Matrix, experts: Experts, dtype) -> jax.Array:
    """Returns ``dy w^T`` in `dtype`: (M, N) and (K, N) -> (M, K); experts as for `fprop`."""
    multiply = functools.partial(_multiply_for_gradient, recipe, dtype=dtype)
    if experts is None:
        return multiply(dy, w.mT)
    return _of_experts(recipe, multiply, dy, w, experts, dtype, transposed=True)


def wgrad(
    recipe: Recipe, x: Matrix, dy: Matrix, experts: Experts, count: int, parts: int = 1
) -> jax.Array:
    """Returns ``x^T dy`` in float32: (M, K) and (M, N) -> (K, N).

    The sum over M is one product in the fastest order, or, with `parts`, a power of two, as many as
    divide M, which are added by halves: half as many devices that share M give the bits of one.
    With experts (tiles, R, K) and (tiles, R, N) -> (count, K, N), the tiles of every expert added
    in ascending order; zeros for an expert without tiles.
    """
    if experts is None:
        return _wgrad(recipe, x, dy, parts)

    def at_once(x, dy, experts):
        return _by_kernel("grouped_wgrad", recipe, x, dy, experts, count)

    def by_tile(x, dy, experts):
        def add(total, tile):
            x, dy, expert = tile

            def more():
                return total.at[expert].add(_multiply_for_gradient(recipe, x.mT, dy))

            return lax.cond(expert < count, more, lambda: total), None

        zeros = jnp.zeros((count, x.shape[-1], dy.shape[-1]))
        zeros = varying_as(zeros, x, dy)
        return scan_in_bits(add, zeros, (x, dy, experts))[0]

    if not has_grouped_kernels(recipe) or x.shape[1] % K_BLOCK:
        return by_tile(x, dy, experts)
    return by_platform(recipe.kernels, at_once, by_tile, x, dy, experts)


def _wgrad(recipe: Recipe, x: Matrix, dy: Matrix, parts: int) -> jax.Array:
    """Computes `wgrad` of one matrix."""

    def multiply(x, dy):
        return matmul_at_once(x.mT, dy, recipe.kernels)

    def plain(x, dy):
        x, dy = _values(recipe, x, dy)
        count = math.gcd(len(x), parts)
        if count == 1:
            return multiply(x, dy)
        sums = jax.vmap(multiply)(*(v.reshape(count, -1, v.shape[1]) for v in (x, dy)))
        while len(sums) > 1:
            pairs = sums.reshape(-1, 2, *sums.shape[1:])
            sums = pairs[:, 0] + pairs[:, 1]
        return sums[0]

    def kernel(x, dy):
        return _multiply(recipe, x.mT, dy)

    return by_platform(recipe.kernels, kernel, plain, x, dy)


def layer_matmuls(
    recipe: Recipe,
    x: Activation,
    stacks: Sequence[QArray | jax.Array],
    layer: jax.Array,
    dtype=jnp.float32,
    residual: jax.Array | None = None,
) -> list[jax.Array]:
    """Multiplies (M, K) by one layer of each stack (L, K, N), without a copy of it.

    A kernel takes all in one launch. For forward passes, under recipes that `has_grouped_kernels`.

    Args:
      recipe, x, dtype: as for `matmul`.
      stacks: up to three.
      layer: () int32.
      residual: (M, N) in the compute dtype, added to the rounded product of a single stack, or
        None. The sum is rounded, too.

    Returns:
      (M, N) of each stack, with the bits of `matmul`.
    """
    value = compute_value(x.value, recipe)
    if recipe.activation is None:
        left: Matrix = value
        weights: list[Matrix] = [compute_value(plain_value(w), recipe) for w in stacks]
    else:
        left = x.q or quantize_activation(value, recipe.activation, None, recipe.kernels)[0]
        weights = [w if isinstance(w, QArray) else quantize_weight(w, recipe)[0] for w in stacks]

    def kernel(left, weights, layer, residual):
        run = functools.partial(layer_kernels, recipe.kernels)
        quantised = [w for w in weights if isinstance(w, QArray)]
        if isinstance(left, QArray) and quantised and not recipe.fake:
            values = [w.qvalue for w in quantised]
            scales = [w.scale for w in quantised]
            return run(left.qvalue, values, layer, left.scale, scales, dtype, residual)
        left, *values = _values(recipe, left, *weights)
        return run(left, values, layer, None, None, dtype, residual)

    def plain(left, weights, layer, residual):
        results = [_multiply(recipe, left, take_layer(w, layer), dtype) for w in weights]
        return results if residual is None else [plus(residual, results[0], recipe)]

    return by_platform(recipe.kernels, kernel, plain, left, weights, layer, residual)


def plus(residual: jax.Array, update: jax.Array, recipe: Recipe) -> jax.Array:
    """Returns their sum in float32, in the compute dtype."""
    return compute_value(residual.astype(jnp.float32) + update.astype(jnp.float32), recipe)
