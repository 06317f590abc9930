"""The rule of a linear layer: FP8 in the forward pass and in both gradients, by a custom VJP.

The default recipe's operands (`gemm_table` lists those of any recipe):

=====  ======================================  ==========================================
GEMM   lhs                                     rhs
=====  ======================================  ==========================================
fprop  x, 1x128 along K (in)                   w, 128x128
dgrad  dy, 1x128 along N (out)                 the same w bytes, transposed
wgrad  x requantised 1x128 along tokens        dy requantised 1x128 along tokens
=====  ======================================  ==========================================

wgrad requantises from the bf16 value, never from the row-quantised bytes: quantising twice costs
about twice the error. Every operand is rounded to bf16 here, so that no caller can forget it.

Kept between forward and backward: x as wgrad will read it (FP8, one byte an element and its scales;
under per-tensor scales the same bytes as in fprop), and references to the weight's bytes. No bf16
copy of x and no second copy of the weight. Weight blocks that are not square (per channel, 1x32)
are quantised again for dgrad, from the bf16 value.

A weight may come as a plain array (quantised here: drop-in for any Flax module), as a QArray (in
the rollout, which has no masters) or as a `BoundWeight`. All give the same bits.

fprop sums in canonical order. Gradients make no bitwise promise, so on a CPU they multiply
dequantised operands in a single sum: equal to the blockwise sum up to float32 rounding, and about
twice as fast.

With *experts*, x is (tiles, R, K): tiles of R rows, sorted by expert, and all rows of a tile belong
to one expert, its entry in `experts` (tiles,) int32 (E or more: a tile without rows). The rule is
the same: every tile has separate scales, and wgrad quantises along the tokens of a tile, so tiles
of 128 rows give it the blocks of a dense layer. All shapes are static, and no row's bits depend on
how many rows its expert got: a tile is one product with its expert's matrix. A tile without rows
gives zeros, whatever it holds, and adds nothing to gradients; nor do rows of zeros (padding). Tiles
run one after another; on a GPU grouped kernels take them all in one launch where the recipe allows
it (`has_grouped_kernels`). Both give a row of fprop the bits of a dense product. (`lax.ragged_dot`
is not used: its bits depend on the sizes of the groups.)

Not done: forward-mode differentiation and second derivatives; both raise. Rounding has no useful
derivative, so the derivative of a gradient would be that of another function.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8rl_jax.kernels import in_bits, keep, kept, matmul_at_once, round_bf16, varying_as
from fp8rl_jax.quant.operands import (
    Activation,
    BoundWeight,
    OperandProbe,
    OperandScaling,
    Quantized,
    SiteProbe,
    Weight,
    as_activation,
    bind,
    compute_value,
    observe,
    plain_value,
    quantize_activation,
    quantize_operand,
    stacked,
)
from fp8rl_jax.quant.products import Experts, Matrix, dgrad, fprop, wgrad
from fp8rl_jax.quant.qarray import QArray
from fp8rl_jax.quant.recipe import Operand, Recipe
from fp8rl_jax.quant.varying import varying_vjp


@dataclasses.dataclass(frozen=True)
class Rows:
    """How the left operand x of a product is divided over devices.

    Attributes:
      devices: number of devices over which XLA divides x's rows; 1 under a shard_map.
      gather: the shard_map's mesh axis over which K of x is divided; None if each device has all
        of K.
      whole: places the gradient of w whole on every device before it is divided as w is; else its
        product would be that of a part.
      parts: number of parts of the rows whose gradients of w are added by halves (`wgrad`).
    """

    devices: int = 1
    gather: str | None = None
    whole: Callable[[jax.Array], jax.Array] = lambda gradient: gradient
    parts: int = 1


def matmul(
    recipe: Recipe, x: jax.Array | Activation, w: Weight, rows: Rows = Rows(), dtype=jnp.float32
) -> jax.Array:
    """Multiplies (M, K) by (K, N) under a recipe, in canonical order; returns (M, N) in `dtype`.

    The sum is float32 and is rounded once.

    Gradients: dx in x's dtype, dw in the dtype of the parameter (float32 for a master). Under
    shard_map the gradient of an operand that all devices share is summed over them, and a probe's
    observations are combined (amaxes by maximum, counts by sum).

    With `rows.gather` x holds this device's part of K: (M, K / n). Each device quantises its part,
    and the bytes are gathered. The backward pass keeps the part only; it sums dx over the axis in
    float32 and returns this device's part.
    """
    return _product(recipe, rows, dtype, as_activation(x), bind(w), None)


def grouped_matmul(
    recipe: Recipe,
    x: jax.Array | Activation,
    w: Weight,
    experts: jax.Array,
    devices: int = 1,
    dtype=jnp.float32,
) -> jax.Array:
    """Multiplies every tile of rows by the matrix of its expert.

    Args:
      recipe: numerics of the product.
      x: (tiles, R, K); a quantised form has the same shape.
      w: (E, K, N): an array, a QArray, or a BoundWeight whose arrays all have the E axis in front
        (`init_site` and `init_probe` of the shape (E, K, N) make such states).
      experts: (tiles,) int32, ascending for wgrad's GPU kernel; E or more for a tile without rows,
        which gives zeros and adds nothing to gradients and observations.
      devices: number of devices over which XLA divides the rows R.
      dtype: dtype of the result, float32 or bf16.

    Returns:
      (tiles, R, N) in `dtype`. Gradients as for `matmul`; an expert's probe combines the tiles of
      that expert, amaxes by maximum and counts by sum.
    """
    experts = jnp.asarray(experts)
    return _product(recipe, Rows(devices), dtype, as_activation(x), bind(w), experts)


@functools.partial(varying_vjp, static=3)
def _product(
    recipe: Recipe, rows: Rows, dtype, x: Activation, w: BoundWeight, experts: Experts
) -> jax.Array:
    """Computes `matmul`, or with experts `grouped_matmul`, with its custom VJP."""
    return _primal(recipe, rows, dtype, x, w, experts)[0]


def _primal(
    recipe: Recipe, rows: Rows, dtype, x: Activation, w: BoundWeight, experts: Experts
) -> tuple[jax.Array, jax.Array, Quantized | None, Quantized | None]:
    """Returns the product, x in the compute dtype, and the quantised x and w (None in bf16)."""
    value = compute_value(x.value, recipe)
    w = kept(w)
    multiply = functools.partial(fprop, recipe, experts=experts, dtype=dtype, devices=rows.devices)
    if recipe.activation is None or recipe.weight is None:
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
        weights = quantize_operand(w.value, recipe.weight, getattr(w.scaling, "weight", None))
    y = multiply(_gathered(quantized[0], rows.gather), weights[0])
    return y, value, quantized, weights


def _gathered(x, axis: str | None):
    """All-gathers a matrix's columns over a mesh axis; returns `x` itself without an axis."""
    if axis is None:
        return x
    gather = functools.partial(lax.all_gather, axis_name=axis, axis=1, tiled=True)
    if isinstance(x, QArray):
        scale = x.scale if x.block_shape[-1] == -1 else gather(x.scale)
        return QArray(in_bits(gather, x.qvalue), scale, x.block_shape)
    return gather(x)


def _of_tiles(state: Any, experts: Experts) -> Any:
    """Returns the arrays of each tile's expert, of a state or an adapter; `state` itself without
    experts."""
    if experts is None:
        return state
    return jax.tree.map(lambda leaf: leaf.at[experts].get(mode="clip"), state)


def _observed(
    x: jax.Array, quantized: Quantized, operand: Operand, probe: OperandProbe, experts: Experts
) -> OperandProbe:
    """Runs `observe`; with experts, runs it on every tile and combines the results by expert."""
    q, amax = quantized
    if experts is None:
        return observe(x, q, amax, operand, probe)
    seen = jax.vmap(lambda x, q, amax: observe(x, q, amax, operand, probe))(x, q, amax)
    counts = seen.counts
    amax = seen.amax
    if counts is not None and probe.counts is not None:
        zeros = varying_as(jnp.zeros(probe.counts.shape), counts)
        counts = zeros.at[experts].add(counts, mode="drop")
    if amax is not None and probe.amax is not None:
        bits = lax.bitcast_convert_type(amax, jnp.uint32)  # so that NaN stays
        zeros = varying_as(jnp.zeros(probe.amax.shape, jnp.uint32), bits)
        amax = lax.bitcast_convert_type(zeros.at[experts].max(bits, mode="drop"), jnp.float32)
    return OperandProbe(amax, counts)


_STATIC = {"static": True}  # a field without arrays


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Residual:
    """Values that the forward pass keeps for the backward pass.

    Attributes:
      x: wgrad's left operand, quantised if wgrad is, as `keep` returns it.
      weight: the weight, which dgrad transposes: quantised, or an array that dgrad rounds or
        quantises again. Never a copy: an argument, or the bytes of fprop.
      experts: (tiles,) int32, each tile's expert, or None.
      gradient: state of the gradient's policy, and the gradient's probe.
      seen: observations of activation and weight; None without a probe.
      x_dtype: dtype of the argument x.
      parameter_dtype: dtype of the array that receives the weight's gradient; None for bytes
        without a master.
      has_master: whether that array is the master; otherwise it is the weight's value.
      adapter: (a, b) of the weight, which then has no gradient of its own, or None.
    """

    x: QArray | jax.Array
    weight: QArray | jax.Array
    experts: Experts
    gradient: tuple[OperandScaling | None, OperandProbe | None]
    seen: SiteProbe | None
    x_dtype: jnp.dtype = dataclasses.field(metadata=_STATIC)
    adapter: tuple[jax.Array, jax.Array] | None
    parameter_dtype: jnp.dtype | None = dataclasses.field(metadata=_STATIC)
    has_master: bool = dataclasses.field(metadata=_STATIC)


@jax.custom_jvp
def _first_order(x: jax.Array) -> jax.Array:
    """Returns `x`; raises NotImplementedError if it is differentiated a second time."""
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
    # `_first_order` makes copies, so the residual keeps the arguments themselves.
    guarded_x, guarded_w = jax.tree.map(_first_order, (x, w))
    y, value, quantized, weights = _primal(recipe, rows, dtype, guarded_x, guarded_w, experts)
    parameter = w.value if w.master is None else w.master
    seen = w.probe and SiteProbe()
    if w.probe is not None and quantized is not None and weights is not None:
        seen = _observe_forward(recipe, w.value, w.probe, value, quantized, weights, experts)
    left: Matrix
    weight: Matrix = parameter if recipe.quantized else w.value
    if quantized is None or weights is None or (recipe.backward == "bf16" and not w.adapter):
        left = compute_value(x.value, recipe)
    elif recipe.backward == "dequantized":
        left = quantized[0]
        weight = w.value if isinstance(w.value, QArray) else weights[0]
    else:
        assert recipe.activation is not None and recipe.weight is not None
        by_columns = recipe.activation.transposed
        left = quantized[0]
        if by_columns != recipe.activation and not w.adapter:
            left, _ = quantize_activation(value, by_columns, None, recipe.kernels)
        if recipe.weight.has_square_blocks:
            weight = w.value if isinstance(w.value, QArray) else weights[0]
    return y, _Residual(
        x=keep(left),
        weight=weight,
        experts=experts,
        gradient=(getattr(w.scaling, "gradient", None), getattr(w.probe, "gradient", None)),
        seen=seen,
        x_dtype=x.value.dtype,
        adapter=w.adapter,
        parameter_dtype=None if isinstance(parameter, QArray) or w.adapter else parameter.dtype,
        has_master=w.master is not None,
    )


def _observe_forward(
    recipe: Recipe, w, probe: SiteProbe, x: jax.Array, rows: Quantized, weights: Quantized, experts
) -> SiteProbe:
    """Returns the observations that the probes of activation and weight ask for."""
    assert recipe.activation is not None and recipe.weight is not None
    activation = weight = None
    if probe.activation is not None:
        activation = _observed(x, rows, recipe.activation, probe.activation, experts)
    if probe.weight is not None and not isinstance(w, QArray):
        count = functools.partial(observe, operand=recipe.weight, probe=probe.weight)
        weight = stacked(count, w.ndim - 2)(round_bf16(w), *weights)
    return SiteProbe(weight, activation)


def _backward(
    recipe: Recipe, lhs: Rows, dtype, residual: _Residual, dy: jax.Array
) -> tuple[Activation, BoundWeight, None]:
    """Returns the cotangents of x and w; w's holds the site's observations."""
    gather = lhs.gather
    experts = residual.experts
    seen = residual.seen
    dy = compute_value(dy, recipe)
    x = _gathered(kept(residual.x), gather)
    weight = kept(residual.weight)
    rows: Matrix
    columns: Matrix
    if recipe.gradient is None or recipe.weight is None:
        weight = compute_value(plain_value(weight), recipe)
        x = compute_value(x.dequantize(), recipe) if isinstance(x, QArray) else x
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
    dw = None  # as a cotangent: zeros
    if residual.parameter_dtype is not None:
        dw = wgrad(recipe, x, columns, experts, weight.shape[0], lhs.parts)
        dw = lhs.whole(dw).astype(residual.parameter_dtype)
    adapter = None
    if residual.adapter is not None:
        adapter = _adapter_gradients(recipe, x, dy, residual.adapter, experts)
    value, master = (None, dw) if residual.has_master else (dw, None)
    return (
        Activation(dx),
        BoundWeight(value, master, None, seen, adapter),  # type: ignore[arg-type]
        None,
    )


def _adapter_gradients(
    recipe: Recipe, x: Matrix, dy: jax.Array, adapter: tuple[jax.Array, jax.Array], experts: Experts
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of a and b where the weight contains ``a @ b``: ``x^T (dy b^T)`` and
    ``(x a)^T dy``, sums in float32 (Hu et al., arXiv:2106.09685). The gradient of the whole weight
    is not computed."""
    a, b = _of_tiles(tuple(compute_value(part, recipe) for part in adapter), experts)
    x = compute_value(x.dequantize(), recipe) if isinstance(x, QArray) else x
    if recipe.kernels == "exact":
        dot = functools.partial(matmul_at_once, implementation="exact")
        if experts is not None:
            dot = jax.vmap(dot)
        through = compute_value(dot(dy, b.mT), recipe)
        inner = compute_value(dot(x, a), recipe)
        found = dot(x.mT, through), dot(inner.mT, dy)
    else:
        einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        through = compute_value(einsum("...mn,...rn->...mr", dy, b), recipe)
        inner = compute_value(einsum("...mk,...kr->...mr", x, a), recipe)
        found = (einsum("...mk,...mr->...kr", x, through), einsum("...mr,...mn->...rn", inner, dy))
    if experts is not None:  # of tiles: added up by expert
        found = tuple(
            varying_as(jnp.zeros(whole.shape, jnp.float32), part).at[experts].add(part, mode="drop")
            for whole, part in zip(adapter, found, strict=True)
        )
    one, other = (part.astype(whole.dtype) for part, whole in zip(found, adapter, strict=True))
    return one, other


_product.defvjp(_forward, _backward)
