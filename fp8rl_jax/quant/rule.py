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

import jax
import jax.numpy as jnp
from jax import lax

from fp8rl_jax.kernels import as_bits, as_bytes, from_bits, from_bytes
from fp8rl_jax.quant import formats
from fp8rl_jax.quant.activations import Activation, Quantized, as_activation, quantize_activation
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
    StackedLayer,
    Weight,
    bind,
    compute_value,
    plain_value,
    quantize_weight,
    take_layer,
)


@dataclasses.dataclass(frozen=True)
class Rows:
    """How a product's left operand lies on devices.

    Attributes:
      devices: over how many devices XLA divides its rows; 1 under a shard_map.
      gather: the shard_map's mesh axis whose devices have a part of K each; None if x is whole.
    """

    devices: int = 1
    gather: str | None = None


Experts = jax.Array | None  # of the tiles of rows, (tiles,) int32; None for one matrix of rows


def matmul(
    recipe: Recipe, x: jax.Array | Activation, w: Weight, rows: Rows = Rows(), dtype=jnp.float32
) -> jax.Array:
    """(M, K) times (K, N) under a recipe, in canonical order -> (M, N) in `dtype`.

    The sum is float32 and is rounded once.

    Gradients: dx in x's dtype, dw in the dtype of the parameter (float32 for a master). Under
    shard_map the gradient of an operand that all devices share is summed over them, and what a
    probe observed is combined (amaxes by maximum).

    With `rows.gather` x is this device's part of K: (M, K / n). It is quantised where it is stored
    and gathered as bytes. What is kept for the backward pass is the part; dx is summed over the
    axis, in float32, and comes back as the part.
    """
    x = as_activation(x)
    if not isinstance(w, StackedLayer):
        return _product(recipe, rows, dtype, *share(x, bind(w), None))
    if rows.gather is not None or not has_grouped_kernels(recipe):
        return matmul(recipe, x, take_layer(w.stack, w.layer), rows, dtype)
    tile = jax.tree.map(lambda leaf: leaf[None], x)  # the layers of a stack are experts
    return _product(recipe, rows, dtype, *share(tile, bind(w.stack), w.layer[None]))[0]


def grouped_matmul(
    recipe: Recipe, x: jax.Array | Activation, w: Weight, experts: jax.Array, devices: int = 1
) -> jax.Array:
    """Every tile of rows times the matrix of its expert.

    Args:
      recipe: numerics.
      x: (tiles, R, K); a quantised form has the same shape.
      w: (E, K, N): an array, a QArray, a StackedLayer, or a BoundWeight whose arrays all have the E
        axis in front (`init_site` and `init_probe` of the shape (E, K, N) make such states).
      experts: (tiles,) int32, ascending for wgrad's GPU kernel; E or more where a tile has no rows:
        it gives zeros, and moves and observes nothing.
      devices: over which XLA divides the rows R.

    Returns:
      (tiles, R, N) float32. Gradients as for `matmul`; a probe sees its expert's tiles combined,
      amaxes by maximum and counts by sum.
    """
    experts = jnp.asarray(experts)
    if isinstance(w, StackedLayer):
        layers, count = w.stack.shape[:2]
        experts = jnp.where(experts < count, w.layer * count + experts, layers * count)
        w = jax.tree.map(lambda stack: stack.reshape(-1, *stack.shape[2:]), w.stack)
    rows = Rows(devices)
    return _product(recipe, rows, jnp.float32, *share(as_activation(x), bind(w), experts))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _product(
    recipe: Recipe, rows: Rows, dtype, x: Activation, w: BoundWeight, experts: Experts
) -> jax.Array:
    """`matmul`, or with experts `grouped_matmul`, of operands in one form."""
    return _primal(recipe, rows, dtype, x, w, experts)[0]


def _primal(
    recipe: Recipe, rows: Rows, dtype, x: Activation, w: BoundWeight, experts: Experts
) -> tuple[jax.Array, jax.Array, Quantized | None, Quantized | None]:
    """The product, x in the compute dtype, and the quantised operands if they are quantised."""
    value = compute_value(x.value, recipe)
    multiply = functools.partial(fprop, recipe, experts=experts, dtype=dtype, devices=rows.devices)
    if recipe.activation is None:
        weight = compute_value(plain_value(w.value), recipe)
        return multiply(_gathered(value, rows.gather), weight), value, None, None
    if x.q is not None:
        quantized: Quantized = x.q, None
    else:
        state = _of_tiles(getattr(w.scaling, "activation", None), experts)
        quantized = quantize_activation(value, recipe.activation, state, recipe.kernels)
    if isinstance(w.value, QArray):
        weights: Quantized = w.value, None
    else:
        weights = quantize_weight(w.value, recipe, w.scaling)
    y = multiply(_gathered(quantized[0], rows.gather), weights[0])
    return y, value, quantized, weights


def _gathered(x, axis: str | None):
    """All columns of a matrix from each device's part of them; `x` without an axis."""
    if axis is None:
        return x
    if isinstance(x, QArray):
        bits = _gathered(as_bytes(x.qvalue), axis)
        scale = x.scale if x.block_shape[-1] == -1 else _gathered(x.scale, axis)
        return QArray(from_bytes(bits, x.qvalue.dtype), scale, x.block_shape)
    return lax.all_gather(x, axis, axis=1, tiled=True)


def _of_tiles(state: OperandScaling | None, experts: Experts) -> OperandScaling | None:
    """Every tile's state of those of its experts; `state` without experts."""
    if experts is None:
        return state
    return jax.tree.map(lambda leaf: leaf.at[experts].get(mode="clip"), state)


def _observed(
    x: jax.Array, quantized: Quantized, operand: Operand, probe: OperandProbe, experts: Experts
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


_STATIC = {"static": True}  # no array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Residual:
    """What the backward pass needs.

    Attributes:
      x: wgrad's left operand, quantised if wgrad is, small floats as `Bits`.
      weight: the weight that dgrad reads, transposed there: quantised, or an array that is
        rounded or quantised again. Never a copy: an argument, or the bytes of fprop.
      experts: of the tiles, or None.
      gradient: state of the gradient's policy, and the gradient's probe.
      seen: the probe's cotangent, but for the gradient's; None without a probe.
      x_dtype: of the argument.
      parameter_dtype: of what receives the weight's gradient; None for bytes without a master.
      has_master: whether that is a master, not the value itself.
    """

    x: QArray | jax.Array
    weight: QArray | jax.Array
    experts: Experts
    gradient: tuple[OperandScaling | None, OperandProbe | None]
    seen: SiteProbe | None
    x_dtype: jnp.dtype = dataclasses.field(metadata=_STATIC)
    parameter_dtype: jnp.dtype | None = dataclasses.field(metadata=_STATIC)
    has_master: bool = dataclasses.field(metadata=_STATIC)


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


def _forward(
    recipe: Recipe, rows: Rows, dtype, x: Activation, w: BoundWeight, experts: Experts
) -> tuple[jax.Array, _Residual]:
    # The guard makes a copy, so what is kept of the arguments has not passed through it.
    guarded_x, guarded_w = jax.tree.map(_first_order, (x, w))
    y, value, quantized, weights = _primal(recipe, rows, dtype, guarded_x, guarded_w, experts)
    parameter = w.value if w.master is None else w.master
    seen = w.probe and SiteProbe()
    if w.probe is not None and quantized is not None and weights is not None:
        seen = _observe_forward(recipe, w.value, w.probe, value, quantized, weights, experts)
    kept: QArray | jax.Array
    if quantized is None or weights is None or recipe.gradient is None:
        kept = compute_value(x.value, recipe)
        weight = parameter if recipe.quantized else w.value
    else:
        assert recipe.activation is not None and recipe.weight is not None
        by_columns = recipe.activation.transposed
        kept = quantized[0]
        if by_columns != recipe.activation:
            kept, _ = quantize_activation(value, by_columns, None, recipe.kernels)
        weight = parameter
        if recipe.weight.has_square_blocks:
            weight = w.value if isinstance(w.value, QArray) else weights[0]
    return y, _Residual(
        x=as_bits(kept),
        weight=weight,
        experts=experts,
        gradient=(getattr(w.scaling, "gradient", None), getattr(w.probe, "gradient", None)),
        seen=seen,
        x_dtype=x.value.dtype,
        parameter_dtype=None if isinstance(parameter, QArray) else parameter.dtype,
        has_master=w.master is not None,
    )


def _observe_forward(
    recipe: Recipe, w, probe: SiteProbe, x: jax.Array, rows: Quantized, weights: Quantized, experts
) -> SiteProbe:
    """What the probes of activation and weight ask for."""
    assert recipe.activation is not None and recipe.weight is not None
    activation = weight = None
    if probe.activation is not None:
        activation = _observed(x, rows, recipe.activation, probe.activation, experts)
    if probe.weight is not None and not isinstance(w, QArray):
        count = functools.partial(observe, operand=recipe.weight, probe=probe.weight)
        weight = stacked(count, w.ndim - 2)(formats.round_bf16(w), *weights)
    return SiteProbe(weight, activation)


def _backward(
    recipe: Recipe, lhs: Rows, dtype, residual: _Residual, dy: jax.Array
) -> tuple[Activation, BoundWeight, None]:
    """Cotangents of x and w, the latter with the site's observations."""
    del dtype
    gather = lhs.gather
    dy, experts = compute_value(dy, recipe), residual.experts
    x, weight, seen = _gathered(from_bits(residual.x), gather), residual.weight, residual.seen
    rows: QArray | jax.Array
    columns: QArray | jax.Array
    if recipe.gradient is None or recipe.weight is None:
        weight = compute_value(plain_value(weight), recipe)
        rows = columns = dy
    else:
        state, probe = residual.gradient
        state = _of_tiles(state, experts)
        quantized = quantize_activation(dy, recipe.gradient, state, recipe.kernels)
        if seen is not None and probe is not None:
            found = _observed(dy, quantized, recipe.gradient, probe, experts)
            seen = dataclasses.replace(seen, gradient=found)
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
    dw = None  # in the place of a cotangent: zeros
    if residual.parameter_dtype is not None:
        dw = wgrad(recipe, x, columns, experts, weight.shape[0]).astype(residual.parameter_dtype)
    value, master = (None, dw) if residual.has_master else (dw, None)
    return Activation(dx), BoundWeight(value, master, None, seen), None  # type: ignore[arg-type]


_product.defvjp(_forward, _backward)
