"""The rule of a linear layer: FP8 in the forward pass and in both gradients, by a custom VJP.

The default recipe's operands (`recipes.gemm_table` prints those of any other):

=====  ======================================  ==========================================
GEMM   lhs                                     rhs
=====  ======================================  ==========================================
fprop  x, 1x128 along K (in)                   w, 128x128
dgrad  dy, 1x128 along N (out)                 the same w bytes, transposed
wgrad  x requantised 1x128 along tokens        dy requantised 1x128 along tokens
=====  ======================================  ==========================================

wgrad requantises from the bf16 value, never from the row-quantised bytes: quantising twice costs
about twice the error. Every operand is rounded to bf16 here, so that no caller can forget it.

What stays alive between forward and backward: x as wgrad will read it (FP8, one byte an element
and its scales; under per-tensor scales the very bytes of fprop), and references to the weight's
bytes. No bf16 copy of x and no second copy of the weight. Weight blocks that are not square
(per channel, 1x32) are quantised again for dgrad, from the bf16 value.

A weight may come as a plain array (quantised here: drop-in for any Flax module), as a QArray
(rollout: the bytes are all there is) or as a `BoundWeight`. All give the same bits.

The rule of experts (`grouped_matmul`) is the same, over tiles of rows with one expert each
(products.py): every tile has scales of its own, and wgrad quantises along the tokens of a tile, so
tiles of 128 rows give it the blocks of a dense layer. Rows of zeros (padding) give zeros and move
no gradient.

Not done: forward-mode differentiation, and second derivatives (both raise).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8rl_jax.kernels import as_bits, as_bytes, from_bits, from_bytes
from fp8rl_jax.quant import formats
from fp8rl_jax.quant.activations import Activation, as_activation, quantize_activation
from fp8rl_jax.quant.products import dgrad, fprop, has_grouped_kernels, wgrad
from fp8rl_jax.quant.qarray import QArray
from fp8rl_jax.quant.recipe import Operand, Recipe
from fp8rl_jax.quant.site import (
    OperandProbe,
    OperandScaling,
    SiteProbe,
    observe,
    quantize_operand,
    stacked,
)
from fp8rl_jax.quant.varying import share
from fp8rl_jax.quant.weights import (
    BoundWeight,
    LayerOf,
    Weight,
    bind,
    compute_value,
    plain_value,
    quantize_weight,
)


def matmul(
    recipe: Recipe,
    x: jax.Array | Activation,
    w: Weight,
    gather: str | None = None,
    dtype=jnp.float32,
) -> jax.Array:
    """(M, K) times (K, N) under a recipe, in canonical order -> (M, N) in `dtype`.

    The sum is float32 and is rounded once.

    Gradients: dx in x's dtype, dw in the dtype of the parameter (float32 for a master). Under
    shard_map the gradient of an operand that all devices share is summed over them, and what a
    probe observed is combined (amaxes by maximum).

    With `gather`, the name of a shard_map's mesh axis, x is this device's part of K: (M, K / n).
    It is quantised where it lies and gathered as bytes. What is kept for the backward pass is the
    part; dx is summed over the axis, in float32, and comes back as the part.
    """
    x = as_activation(x)
    if not isinstance(w, LayerOf):
        return _product(recipe, gather, dtype, *share(x, bind(w), None))
    if gather is not None or not has_grouped_kernels(recipe):
        return matmul(recipe, x, w.taken(), gather, dtype)
    tile = jax.tree.map(lambda leaf: leaf[None], x)  # the layers of a stack are experts
    return _product(recipe, None, dtype, *share(tile, bind(w.stack), w.layer[None]))[0]


def grouped_matmul(recipe: Recipe, x: jax.Array, w: Weight, experts: jax.Array) -> jax.Array:
    """Every tile of rows times the matrix of its expert.

    Args:
      recipe: numerics.
      x: (tiles, R, K).
      w: (E, K, N): an array, a QArray, a LayerOf, or a BoundWeight whose arrays all have the E axis
        in front (`init_site` and `init_probe` of the shape (E, K, N) make such states).
      experts: (tiles,) int32, ascending for wgrad's GPU kernel; E or more where a tile has no rows:
        it gives zeros, and moves and observes nothing.

    Returns:
      (tiles, R, N) float32. Gradients as for `matmul`; a probe sees its expert's tiles combined,
      amaxes by maximum and counts by sum.
    """
    experts = jnp.asarray(experts)
    if isinstance(w, LayerOf):
        layers, count = w.stack.shape[:2]
        experts = jnp.where(experts < count, w.layer * count + experts, layers * count)
        w = jax.tree.map(lambda stack: stack.reshape(-1, *stack.shape[2:]), w.stack)
    return _product(recipe, None, jnp.float32, *share(Activation(x), bind(w), experts))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _product(
    recipe: Recipe,
    gather: str | None,
    dtype,
    x: Activation,
    w: BoundWeight,
    experts: jax.Array | None,
) -> jax.Array:
    """`matmul`, or with experts `grouped_matmul`, of operands in one form."""
    return _forward(recipe, gather, dtype, x, w, experts)[0]


def _gathered(x: QArray | jax.Array, axis: str | None):
    """All columns of a matrix from each device's part of them; `x` without an axis."""
    if axis is None:
        return x
    if isinstance(x, QArray):
        bits = _gathered(as_bytes(x.qvalue), axis)
        scale = x.scale if x.block_shape[-1] == -1 else _gathered(x.scale, axis)
        return QArray(from_bytes(bits, x.qvalue.dtype), scale, x.block_shape)
    return lax.all_gather(x, axis, axis=1, tiled=True)


def _of_tiles(state: OperandScaling | None, experts: jax.Array | None) -> OperandScaling | None:
    """Every tile's state of those of its experts; `state` without experts."""
    if experts is None:
        return state
    return jax.tree.map(lambda leaf: leaf.at[experts].get(mode="clip"), state)


def _observed(
    x: jax.Array,
    quantized: tuple[QArray, jax.Array | None],
    operand: Operand,
    probe: OperandProbe,
    experts: jax.Array | None,
) -> OperandProbe:
    """`observe`; of tiles, combined by expert."""
    q, amax = quantized
    if experts is None:
        return observe(x, q, amax, operand, probe)
    seen = jax.vmap(lambda x, q, amax: observe(x, q, amax, operand, probe))(x, q, amax)
    counts, amax = seen.counts, seen.amax
    if counts is not None and probe.counts is not None:
        zeros, _ = share(jnp.zeros_like(probe.counts), counts)
        counts = zeros.at[experts].add(counts, mode="drop")
    if amax is not None and probe.amax is not None:
        bits = lax.bitcast_convert_type(amax, jnp.uint32)  # so that NaN stays
        zeros, _ = share(jnp.zeros(probe.amax.shape, jnp.uint32), bits)
        amax = lax.bitcast_convert_type(zeros.at[experts].max(bits, mode="drop"), jnp.float32)
    return OperandProbe(amax, counts)


@dataclasses.dataclass(frozen=True)
class _Operands:
    """The operands of fprop: x in the compute dtype, and both as (QArray, amax) if quantised."""

    x_value: jax.Array
    x: tuple[QArray, jax.Array | None] | None = None
    w: tuple[QArray, jax.Array | None] | None = None


def _forward(
    recipe: Recipe,
    gather: str | None,
    dtype,
    x: Activation,
    w: BoundWeight,
    experts: jax.Array | None,
) -> tuple[jax.Array, _Operands]:
    x_value = compute_value(x.value, recipe)
    if recipe.activation is None:
        weight = compute_value(plain_value(w.value), recipe)
        return fprop(recipe, _gathered(x_value, gather), weight, experts, dtype), _Operands(x_value)
    rows: tuple[QArray, jax.Array | None]
    if x.q is not None:
        rows = x.q, None
    else:
        state = None if w.scaling is None else _of_tiles(w.scaling.activation, experts)
        rows = quantize_activation(x_value, recipe.activation, state, recipe.kernels)
    columns: tuple[QArray, jax.Array | None]
    if isinstance(w.value, QArray):
        columns = w.value, None
    else:
        columns = quantize_weight(w.value, recipe, w.scaling)
    y = fprop(recipe, _gathered(rows[0], gather), columns[0], experts, dtype)
    return y, _Operands(x_value, rows, columns)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["x", "weight", "experts", "gradient", "probe", "seen"],
    meta_fields=["x_dtype", "parameter_dtype", "has_master"],
)
@dataclasses.dataclass(frozen=True)
class _Residual:
    """What the backward pass needs.

    Attributes:
      x: wgrad's left operand, quantised if wgrad is, small floats as `Bits`.
      weight: the weight that dgrad reads, transposed there: quantised, or an array that is
        rounded or quantised again. Never a copy: an argument, or the bytes of fprop.
      experts: of the tiles, or None.
      gradient: state of the gradient's policy.
      probe: the gradient's probe.
      seen: cotangents of the other probes, observed in the forward pass.
      x_dtype: of the argument.
      parameter_dtype: of what receives the weight's gradient; None for bytes without a master.
      has_master: whether that is a master, not the value itself.
    """

    x: QArray | jax.Array
    weight: QArray | jax.Array
    experts: jax.Array | None
    gradient: OperandScaling | None
    probe: OperandProbe | None
    seen: dict[str, OperandProbe]
    x_dtype: jnp.dtype
    parameter_dtype: jnp.dtype | None
    has_master: bool


@jax.custom_jvp
def _first_order(x: jax.Array) -> jax.Array:
    """`x`; raises where a derivative of a derivative is asked for."""
    return x


@_first_order.defjvp
def _first_order_jvp(primals, tangents):
    raise NotImplementedError(
        "this dot_general has first derivatives only: its rounding has none of its own, and a "
        "second derivative would be that of another function; use jax.lax.dot_general there"
    )


def _product_forward(
    recipe: Recipe,
    gather: str | None,
    dtype,
    x: Activation,
    w: BoundWeight,
    experts: jax.Array | None,
) -> tuple[jax.Array, _Residual]:
    # The guard makes a copy, so what is kept of the arguments has not passed through it.
    guarded_x, guarded_w = jax.tree.map(_first_order, (x, w))
    y, operands = _forward(recipe, gather, dtype, guarded_x, guarded_w, experts)
    parameter = w.value if w.master is None else w.master
    residual = functools.partial(
        _Residual,
        experts=experts,
        x_dtype=x.value.dtype,
        parameter_dtype=None if isinstance(parameter, QArray) else parameter.dtype,
        has_master=w.master is not None,
        seen=_observe_forward(recipe, operands, w, experts),
    )
    if operands.x is None or operands.w is None or recipe.gradient is None:
        weight = parameter if recipe.quantized else w.value
        x_value = compute_value(x.value, recipe)
        return y, residual(as_bits(x_value), weight, gradient=None, probe=None)
    assert recipe.activation is not None and recipe.weight is not None
    by_columns = recipe.activation.transposed
    if by_columns == recipe.activation:
        columns = operands.x[0]
    else:
        columns, _ = quantize_activation(operands.x_value, by_columns, None, recipe.kernels)
    if not recipe.weight.has_square_blocks:
        weight = parameter
    else:
        weight = w.value if isinstance(w.value, QArray) else operands.w[0]
    state = None if w.scaling is None else w.scaling.gradient
    probe = None if w.probe is None else w.probe.gradient
    return y, residual(as_bits(columns), weight, gradient=state, probe=probe)


def _observe_forward(
    recipe: Recipe, operands: _Operands, w: BoundWeight, experts: jax.Array | None
) -> dict[str, OperandProbe]:
    """What the probes of activation and weight ask for: {operand: cotangent}."""
    seen: dict[str, OperandProbe] = {}
    if w.probe is None or operands.x is None or operands.w is None:
        return seen
    assert recipe.activation is not None and recipe.weight is not None
    if w.probe.activation is not None:
        seen["activation"] = _observed(
            operands.x_value, operands.x, recipe.activation, w.probe.activation, experts
        )
    if w.probe.weight is not None and not isinstance(w.value, QArray):
        count = functools.partial(observe, operand=recipe.weight, probe=w.probe.weight)
        value = formats.round_bf16(w.value)
        seen["weight"] = stacked(count, value.ndim - 2)(value, *operands.w)
    return seen


def _product_backward(
    recipe: Recipe, gather: str | None, dtype, residual: _Residual, dy: jax.Array
) -> tuple[Activation, BoundWeight, None]:
    """Cotangents of x and w, the latter with the site's observations."""
    del dtype
    dy, experts = compute_value(dy, recipe), residual.experts
    x, weight, seen = _gathered(from_bits(residual.x), gather), residual.weight, residual.seen
    rows: QArray | jax.Array
    columns: QArray | jax.Array
    if recipe.gradient is None or recipe.weight is None:
        weight = compute_value(plain_value(weight), recipe)
        rows = columns = dy
    else:
        state = _of_tiles(residual.gradient, experts)
        quantized = quantize_activation(dy, recipe.gradient, state, recipe.kernels)
        if residual.probe is not None:
            found = _observed(dy, quantized, recipe.gradient, residual.probe, experts)
            seen = {**seen, "gradient": found}
        if not isinstance(weight, QArray) or not recipe.weight.has_square_blocks:
            weight, _ = quantize_operand(plain_value(weight), recipe.weight.transposed, None)
        rows = columns = quantized[0]
        by_columns = recipe.gradient.transposed
        if by_columns != recipe.gradient:
            columns, _ = quantize_activation(dy, by_columns, None, recipe.kernels)
    dx = dgrad(recipe, rows, weight, experts, jnp.float32 if gather else residual.x_dtype)
    if gather is not None:
        dx = lax.psum_scatter(dx, gather, scatter_dimension=1, tiled=True)
        dx = dx.astype(residual.x_dtype)
    value: Any = None  # in the place of a cotangent: zeros
    master = None
    if residual.parameter_dtype is not None:
        value = wgrad(recipe, x, columns, experts, weight.shape[0]).astype(residual.parameter_dtype)
    if residual.has_master:
        value, master = None, value
    probe = SiteProbe(**seen) if seen else None
    return Activation(dx), BoundWeight(value, master, None, probe), None


_product.defvjp(_product_forward, _product_backward)
