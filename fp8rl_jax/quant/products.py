"""The three products of a linear layer, of one matrix or of experts: fprop, dgrad and wgrad.

Operands are QArrays, or values in the compute dtype. With `experts`, rows come in tiles of a fixed
size, sorted by expert, one expert a tile: (tiles, R, K) with (tiles,) int32, E or more where a tile
has no rows. All shapes are static, and no row's bits depend on how many rows its expert got: a tile
is one product of its expert's matrix. A tile without rows gives zeros at run time, whatever it
holds, and adds nothing. (`lax.ragged_dot` is not used: its bits depend on the sizes of the groups.)

Tiles run one after another; on a GPU grouped kernels take them all in one launch where the recipe
allows it (`has_grouped_kernels`). Both give a row of fprop the bits of a dense product.

fprop sums in canonical order. Gradients make no bitwise promise, so on a CPU they multiply
dequantised operands at once: equal to the blockwise sum up to float32 rounding, and about twice as
fast.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from fp8rl_jax.kernels import (
    K_BLOCK,
    as_bits,
    block_matmul,
    by_platform,
    from_bits,
    gpu_kernels,
    matmul_at_once,
)
from fp8rl_jax.quant import formats
from fp8rl_jax.quant.qarray import QArray
from fp8rl_jax.quant.recipe import Recipe
from fp8rl_jax.quant.varying import share
from fp8rl_jax.quant.weights import plain_value, take_layer

Operand = QArray | jax.Array


def _spread(scale: jax.Array, axis: int, block: int, per: int, length: int) -> jax.Array:
    """Scales per `block` along an axis of `length` -> one per `per` elements of it."""
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
    """(M, K) times (K, N), both quantised -> (M, N) in `dtype`, in canonical order.

    Scales that are constant over 128 of K multiply each block's partial sum. Finer ones (1x32)
    are multiplied into the operands first: exact for powers of two, which is what MXFP8 has.
    `devices` as for `block_matmul`.
    """
    multiply = functools.partial(
        block_matmul, implementation=implementation, dtype=dtype, devices=devices
    )
    (rows, depth), columns = x.shape, w.shape[1]
    (x_rows, x_depth), (w_depth, w_columns) = x.block_shape, w.block_shape
    coarse = (block == -1 or block % K_BLOCK == 0 for block in (x_depth, w_depth))
    if not all(coarse):
        return multiply(x.dequantize(), w.dequantize())
    left = _spread(x.scale, 1, x_depth, K_BLOCK, depth)
    left = _spread(left, 0, x_rows, 1, rows)
    right = _spread(w.scale, 0, w_depth, K_BLOCK, depth)
    per = K_BLOCK if w_columns == -1 or w_columns % K_BLOCK == 0 else 1
    right = _spread(right, 1, w_columns, per, columns)
    return multiply(x.qvalue, w.qvalue, left, right)


def _values(recipe: Recipe, *operands: Operand) -> list[jax.Array]:
    """Dequantised operands; of a recipe that imitates FP8 in bf16, rounded to that."""
    values = [plain_value(operand) for operand in operands]
    return [formats.round_bf16(value) for value in values] if recipe.fake else values


def _multiply(
    recipe: Recipe, x: Operand, w: Operand, dtype=jnp.float32, devices: int = 1
) -> jax.Array:
    """(M, K) times (K, N) -> (M, N) in `dtype`, in canonical order."""
    if isinstance(x, QArray) and isinstance(w, QArray) and not recipe.fake:
        return scaled_matmul(x, w, recipe.kernels, dtype, devices)
    return block_matmul(
        *_values(recipe, x, w), implementation=recipe.kernels, dtype=dtype, devices=devices
    )


def _multiply_for_gradient(recipe: Recipe, x: Operand, w: Operand) -> jax.Array:
    """(M, K) times (K, N) -> (M, N) float32, in the order that is fastest."""

    def plain(x, w):
        return matmul_at_once(*_values(recipe, x, w), recipe.kernels)

    return by_platform(recipe.kernels, functools.partial(_multiply, recipe), plain, x, w)


def has_grouped_kernels(recipe: Recipe) -> bool:
    """Whether the grouped GPU kernels know the operands of a recipe: values in the compute dtype,
    or DeepSeek-V3's blocks."""
    blocks = {"weight": (K_BLOCK, K_BLOCK), "activation": (1, K_BLOCK), "gradient": (1, K_BLOCK)}
    operands = recipe.operands.items()
    return not recipe.quantized or all(x.block == blocks[name] for name, x in operands)


def _by_kernel(name: str, recipe: Recipe, x: Operand, w: Operand, *others, **keywords):
    """A grouped kernel of kernels/gpu/matmul.py: ``(x, w, *others, x_scale, w_scale)``."""
    kernel = getattr(gpu_kernels().matmul, name)
    if isinstance(x, QArray) and isinstance(w, QArray) and not recipe.fake:
        return kernel(x.qvalue, w.qvalue, *others, x.scale, w.scale, **keywords)
    return kernel(*_values(recipe, x, w), *others, **keywords)


def _of_experts(
    recipe: Recipe,
    at_once: Callable,
    product: Callable,
    x: Operand,
    w: Operand,
    experts: jax.Array,
    columns: int,
    dtype,
) -> jax.Array:
    """``at_once(x, w, experts)`` by a grouped kernel, elsewhere ``product(tile, matrix of its
    expert)`` of one tile after another: (tiles, R, columns) in `dtype`."""

    def by_tile(x, w, experts):
        nothing, _ = share(jnp.zeros((x.shape[1], columns), dtype), x)

        def one(tile):
            rows, expert = from_bits(tile)

            def multiply():
                return product(rows, take_layer(w, expert))

            return as_bits(lax.cond(expert < w.shape[0], multiply, lambda: nothing))

        return from_bits(lax.map(one, as_bits((x, experts))))

    if not has_grouped_kernels(recipe):
        return by_tile(x, w, experts)
    return by_platform(recipe.kernels, at_once, by_tile, x, w, experts)


def fprop(
    recipe: Recipe,
    x: Operand,
    w: Operand,
    experts: jax.Array | None = None,
    dtype=jnp.float32,
    devices: int = 1,
) -> jax.Array:
    """``x w``, in canonical order; the sum is float32 and is rounded once.

    Args:
      recipe: whose operands they are.
      x: (M, K); (tiles, R, K) with experts.
      w: (K, N); (E, K, N) with experts.
      experts: (tiles,) int32, or None.
      dtype: of the result, float32 or bf16.
      devices: over which XLA divides the rows.

    Returns:
      (M, N); (tiles, R, N) with experts.
    """
    multiply = functools.partial(_multiply, recipe, dtype=dtype, devices=devices)

    def at_once(x, w, experts):
        return _by_kernel("grouped_matmul", recipe, x, w, experts, dtype=dtype)

    if experts is None:
        return multiply(x, w)
    return _of_experts(recipe, at_once, multiply, x, w, experts, w.shape[-1], dtype)


def dgrad(recipe: Recipe, dy: Operand, w: Operand, experts: jax.Array | None, dtype) -> jax.Array:
    """``dy w^T`` in `dtype`: (M, N) and (K, N) -> (M, K); experts as for `fprop`."""

    def multiply(dy, w):
        return _multiply_for_gradient(recipe, dy, w.mT).astype(dtype)

    def at_once(dy, w, experts):
        return _by_kernel("grouped_matmul", recipe, dy, w.mT, experts).astype(dtype)

    if experts is None:
        return multiply(dy, w)
    return _of_experts(recipe, at_once, multiply, dy, w, experts, w.shape[-2], dtype)


def wgrad(
    recipe: Recipe, x: Operand, dy: Operand, experts: jax.Array | None, count: int
) -> jax.Array:
    """``x^T dy`` in float32: (M, K) and (M, N) -> (K, N).

    With experts (tiles, R, K) and (tiles, R, N) -> (count, K, N), the tiles of every expert added
    in ascending order; zeros for an expert without any.
    """
    if experts is None:
        return _multiply_for_gradient(recipe, x.mT, dy)

    def at_once(x, dy, experts):
        return _by_kernel("grouped_wgrad", recipe, x, dy, experts, count)

    def by_tile(x, dy, experts):
        def add(total, tile):
            x, dy, expert = from_bits(tile)

            def more():
                return total.at[expert].add(_multiply_for_gradient(recipe, x.mT, dy))

            return lax.cond(expert < count, more, lambda: total), None

        zeros, _ = share(jnp.zeros((count, x.shape[-1], dy.shape[-1])), (x, dy))
        return lax.scan(add, zeros, as_bits((x, dy, experts)))[0]

    if not has_grouped_kernels(recipe) or x.shape[1] % K_BLOCK:
        return by_tile(x, dy, experts)
    return by_platform(recipe.kernels, at_once, by_tile, x, dy, experts)
