"""Makes a `dot_general` for Flax modules that follows a recipe.

It reshapes its operands to matrices and calls `matmul`, which models of this library call directly.
First derivatives only, in reverse mode (rule.py).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from fp8rl_jax.quant.operands import BoundWeight, SiteProbe, SiteScaling, Weight, is_weight
from fp8rl_jax.quant.recipe import Recipe, get_recipe
from fp8rl_jax.quant.rule import Rows, matmul


def make_dot_general(
    recipe: Recipe | str,
    state: SiteScaling | None = None,
    probe: SiteProbe | None = None,
    devices: int = 1,
):
    """Returns a function with `jax.lax.dot_general`'s signature that follows `recipe`.

    Pass it to a module that takes `dot_general=` (`nn.Dense`, `nn.DenseGeneral`, `nnx.Linear`).
    The left operand is the activation, the right one the weight; the result has the left
    operand's dtype, or `preferred_element_type`. `precision` and `out_sharding` are accepted
    because modules pass them, and are ignored. Batch dimensions (`DenseGeneral(batch_dims=...)`,
    stacked experts) are separate products, each with its own scales.

    `nn.Einsum` and `nnx.Einsum` are not covered: they take no such function, and `jnp.einsum`
    exchanges its operands for some outputs, so the weight would be quantised as an activation.

    Args:
      recipe: a Recipe or its name.
      state: result of `init_site` for this call site; needed by recipes with stateful policies.
      probe: result of `init_probe(..., weight=True)`; its cotangent is what the call observed.
      devices: number of devices over which XLA divides the left operand's rows; 1 under a
        shard_map.

    Raises (when called):
      ValueError: a quantised weight that is not contracted on its first axis after the batch, or
        a stateful recipe without `state`.
    """
    recipe = get_recipe(recipe)

    def dot_general(
        lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None, out_sharding=None
    ):
        dtype = jnp.dtype(preferred_element_type or lhs.dtype)
        dimensions = tuple(tuple(map(tuple, axes)) for axes in dimension_numbers)  # hashable
        return _follow(recipe, devices, dimensions, dtype, lhs, rhs, (state, probe))

    return dot_general


def matrix_shape(shape: tuple[int, ...], dimension_numbers) -> tuple[int, ...]:
    """Returns the shape (batch axes..., K, N) of a right operand as matrices."""
    (_, contract), (_, batch) = dimension_numbers
    free = [size for axis, size in enumerate(shape) if axis not in (*contract, *batch)]
    depth = math.prod(shape[a] for a in contract)
    return (*(shape[a] for a in batch), depth, math.prod(free))


# Jitted so that a call outside jit compiles one program, not one per operation.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _follow(recipe: Recipe, devices: int, dimensions, dtype, lhs, rhs, site):
    quantised = is_weight(rhs)
    if not quantised and 0 in (*lhs.shape, *rhs.shape):  # as in nn.Dense(0): nothing to do
        return jax.lax.dot_general(lhs, rhs, dimensions, preferred_element_type=dtype)
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimensions
    lhs_free = [a for a in range(lhs.ndim) if a not in (*lhs_contract, *lhs_batch)]
    rhs_free = [a for a in range(rhs.ndim) if a not in (*rhs_contract, *rhs_batch)]
    batch = [lhs.shape[a] for a in lhs_batch]
    depth = math.prod(lhs.shape[a] for a in lhs_contract)
    height = math.prod(lhs.shape[a] for a in lhs_free)
    x = jnp.transpose(lhs, [*lhs_batch, *lhs_free, *lhs_contract])
    if not quantised:
        matrix = jnp.transpose(rhs, [*rhs_batch, *rhs_contract, *rhs_free])
        matrix = matrix.reshape(matrix_shape(rhs.shape, dimensions))
        state, probe = site
        w: Weight = BoundWeight(matrix, None, state, probe)
    elif rhs.ndim == len(batch) + 2 and [*rhs_batch, *rhs_contract] == [*range(len(batch) + 1)]:
        w = rhs
    else:
        raise ValueError(
            f"a quantised weight is a matrix [in, out] contracted on axis 0 (with batch axes "
            f"in front), got shape {rhs.shape} contracted on {tuple(rhs_contract)}"
        )
    multiply = functools.partial(matmul, recipe, rows=Rows(devices), dtype=dtype)
    if batch:
        product = jax.vmap(multiply)
        weights = jax.tree.map(lambda a: a.reshape(-1, *a.shape[len(batch) :]), w)
        y = product(x.reshape(-1, height, depth), weights)
    else:
        y = multiply(x.reshape(height, depth), w)
    free = [lhs.shape[a] for a in lhs_free] + [rhs.shape[a] for a in rhs_free]
    return y.reshape(batch + free)


def keep_dtypes(*args: Any, dtype: Any = None, inexact: bool = True) -> list[Any]:
    """Returns inputs and (quantised) kernels unchanged; for Flax's `promote_dtype=`."""
    return list(args)
