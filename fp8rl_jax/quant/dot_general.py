"""The injectable dot_general: FP8 in the forward pass and in both gradients, by a custom VJP.

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

Not done: forward-mode differentiation, and second derivatives (both raise).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8rl_jax.kernels import (
    K_BLOCK,
    as_bits,
    as_bytes,
    block_matmul,
    choose,
    from_bits,
    from_bytes,
)
from fp8rl_jax.kernels.cpu_products import product_at_once
from fp8rl_jax.quant import formats, grouped_kernels
from fp8rl_jax.quant.activations import Activation, as_activation, quantize_activation
from fp8rl_jax.quant.qarray import QArray
from fp8rl_jax.quant.recipe import Recipe
from fp8rl_jax.quant.recipes import get_recipe
from fp8rl_jax.quant.site import (
    OperandProbe,
    OperandScaling,
    SiteProbe,
    SiteScaling,
    observe,
    quantize_operand,
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
    x: QArray, w: QArray, implementation: str = "auto", dtype=jnp.float32
) -> jax.Array:
    """(M, K) times (K, N), both quantised -> (M, N) in `dtype`, in canonical order.

    Scales that are constant over 128 of K multiply each block's partial sum. Finer ones (1x32)
    are multiplied into the operands first: exact for powers of two, which is what MXFP8 has.
    """
    multiply = functools.partial(block_matmul, implementation=implementation, dtype=dtype)
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


def _multiply(recipe: Recipe, x: jax.Array, w: jax.Array, dtype=jnp.float32) -> jax.Array:
    """(M, K) times (K, N) of values in the compute dtype."""
    return block_matmul(x, w, implementation=recipe.kernels, dtype=dtype)


def _product(recipe: Recipe, x: QArray, w: QArray, dtype=jnp.float32) -> jax.Array:
    """A GEMM of quantised operands: the FP8 product, or its bf16 imitation."""
    if recipe.fake:
        x_value, w_value = (formats.round_bf16(operand.dequantize()) for operand in (x, w))
        return _multiply(recipe, x_value, w_value, dtype)
    return scaled_matmul(x, w, recipe.kernels, dtype)


def _gradient(recipe: Recipe, x: QArray | jax.Array, w: QArray | jax.Array) -> jax.Array:
    """A product of the backward pass in float32: (M, K) times (K, N), quantised or values.

    Gradients make no bitwise promise, so the reference multiplies dequantised operands at once:
    equal to the blockwise sum up to float32 rounding, and about twice as fast on a CPU.
    """

    def kernel(x, w):
        if isinstance(x, QArray) and isinstance(w, QArray):
            return _product(recipe, x, w)
        return _multiply(recipe, x, w)

    def plain(x, w):
        values = [plain_value(operand) for operand in (x, w)]
        if recipe.fake:
            values = [formats.round_bf16(value) for value in values]
        return product_at_once(*values)

    return choose(recipe.kernels, kernel, plain, x, w)


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
    if isinstance(w, LayerOf):
        if gather is None and grouped_kernels.applies(recipe):
            return choose(recipe.kernels, *_named_layer(recipe, dtype), *share(x, w))
        w = w.taken()
    return _matmul(recipe, gather, dtype, *share(x, bind(w)))


def _named_layer(recipe: Recipe, dtype):
    """`matmul` by a LayerOf, as two functions: read in its stack by a kernel, and cut out."""

    def in_place(x, w):
        x = jax.tree.map(lambda leaf: leaf[None], x)
        return grouped_kernels.forward(recipe, x, w, jnp.zeros(1, jnp.int32), dtype)[0]

    def cut_out(x, w):
        return matmul(recipe, x, w.taken(), None, dtype)

    return in_place, cut_out


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _matmul(recipe: Recipe, gather: str | None, dtype, x: Activation, w: BoundWeight) -> jax.Array:
    return _forward(recipe, x, w, gather, dtype)[0]


def _gathered(x: QArray | jax.Array, axis: str | None):
    """All columns of a matrix from each device's part of them; `x` without an axis."""
    if axis is None:
        return x
    if isinstance(x, QArray):
        bits = _gathered(as_bytes(x.qvalue), axis)
        scale = x.scale if x.block_shape[-1] == -1 else _gathered(x.scale, axis)
        return QArray(from_bytes(bits, x.qvalue.dtype), scale, x.block_shape)
    return lax.all_gather(x, axis, axis=1, tiled=True)


@dataclasses.dataclass(frozen=True)
class _Operands:
    """The operands of fprop: x in the compute dtype, and both as (QArray, amax) if quantised."""

    x_value: jax.Array
    x: tuple[QArray, jax.Array | None] | None = None
    w: tuple[QArray, jax.Array | None] | None = None


def _forward(
    recipe: Recipe, x: Activation, w: BoundWeight, gather: str | None, dtype
) -> tuple[jax.Array, _Operands]:
    x_value = compute_value(x.value, recipe)
    if recipe.activation is None:
        weight = compute_value(plain_value(w.value), recipe)
        y = _multiply(recipe, _gathered(x_value, gather), weight, dtype)
        return y, _Operands(x_value)
    rows: tuple[QArray, jax.Array | None]
    if x.q is not None:
        rows = x.q, None
    else:
        state = None if w.scaling is None else w.scaling.activation
        rows = quantize_activation(x_value, recipe.activation, state, recipe.kernels)
    columns: tuple[QArray, jax.Array | None]
    if isinstance(w.value, QArray):
        columns = w.value, None
    else:
        columns = quantize_weight(w.value, recipe, w.scaling)
    y = _product(recipe, _gathered(rows[0], gather), columns[0], dtype)
    return y, _Operands(x_value, rows, columns)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["x", "weight", "gradient", "probe", "seen"],
    meta_fields=["x_dtype", "parameter_dtype", "has_master"],
)
@dataclasses.dataclass(frozen=True)
class _Residual:
    """What the backward pass needs.

    Attributes:
      x: wgrad's left operand, quantised if wgrad is, small floats as `Bits`.
      weight: the weight that dgrad reads, transposed there: quantised, or an array that is
        rounded or quantised again. Never a copy: an argument, or the bytes of fprop.
      gradient: state of the gradient's policy.
      probe: the gradient's probe.
      seen: cotangents of the other probes, observed in the forward pass.
      x_dtype: of the argument.
      parameter_dtype: of what receives the weight's gradient; None for bytes without a master.
      has_master: whether that is a master, not the value itself.
    """

    x: QArray | jax.Array
    weight: QArray | jax.Array
    gradient: OperandScaling | None
    probe: OperandProbe | None
    seen: dict[str, OperandProbe]
    x_dtype: jnp.dtype
    parameter_dtype: jnp.dtype | None
    has_master: bool


def matmul_forward(
    recipe: Recipe, x: Activation, w: BoundWeight, gather: str | None = None, dtype=jnp.float32
):
    """`matmul` and what its backward pass needs."""
    x, w = jax.tree.map(_first_order, (x, w))
    y, operands = _forward(recipe, x, w, gather, dtype)
    parameter = w.value if w.master is None else w.master
    residual = functools.partial(
        _Residual,
        x_dtype=x.value.dtype,
        parameter_dtype=None if isinstance(parameter, QArray) else parameter.dtype,
        has_master=w.master is not None,
        seen=_observe_forward(recipe, operands, w),
    )
    if operands.x is None or operands.w is None or recipe.gradient is None:
        weight = parameter if recipe.quantized else w.value
        return y, residual(as_bits(operands.x_value), weight, None, None)
    assert recipe.activation is not None and recipe.weight is not None
    turned = recipe.activation.turned
    if turned == recipe.activation:
        columns = operands.x[0]
    else:
        columns, _ = quantize_activation(operands.x_value, turned, None, recipe.kernels)
    weight = operands.w[0] if recipe.weight.transposes else parameter
    state = None if w.scaling is None else w.scaling.gradient
    probe = None if w.probe is None else w.probe.gradient
    return y, residual(as_bits(columns), weight, state, probe)


def _observe_forward(recipe: Recipe, operands: _Operands, w: BoundWeight):
    """What the probes of activation and weight ask for: {operand: cotangent}."""
    seen: dict[str, OperandProbe] = {}
    if w.probe is None or operands.x is None or operands.w is None:
        return seen
    assert recipe.activation is not None and recipe.weight is not None
    if w.probe.activation is not None:
        q, amax = operands.x
        seen["activation"] = observe(
            operands.x_value, q, amax, recipe.activation, w.probe.activation
        )
    if w.probe.weight is not None and not isinstance(w.value, QArray):
        weight, weight_amax = operands.w
        assert weight_amax is not None
        value = formats.round_bf16(w.value)
        seen["weight"] = observe(value, weight, weight_amax, recipe.weight, w.probe.weight)
    return seen


def matmul_backward(recipe: Recipe, residual: _Residual, dy: jax.Array, gather: str | None = None):
    """Cotangents of x and w, the latter with the site's observations."""
    dy = compute_value(_first_order(dy), recipe)
    x, seen = _gathered(from_bits(residual.x), gather), dict(residual.seen)
    if recipe.gradient is None or recipe.weight is None:
        value = compute_value(plain_value(residual.weight), recipe)
        dx, dw = _gradient(recipe, dy, value.T), _gradient(recipe, x.T, dy)
    else:
        rows, amax = quantize_activation(dy, recipe.gradient, residual.gradient, recipe.kernels)
        if residual.probe is not None:
            seen["gradient"] = observe(dy, rows, amax, recipe.gradient, residual.probe)
        weight = residual.weight
        if not isinstance(weight, QArray) or not recipe.weight.transposes:
            weight, _ = quantize_operand(plain_value(weight), recipe.weight.turned, None)
        dx = _gradient(recipe, rows, weight.T)
        turned = recipe.gradient.turned
        columns = rows
        if turned != recipe.gradient:
            columns, _ = quantize_activation(dy, turned, None, recipe.kernels)
        dw = _gradient(recipe, x.T, columns)
    if gather is not None:
        dx = lax.psum_scatter(dx, gather, scatter_dimension=1, tiled=True)
    dx = dx.astype(residual.x_dtype)
    zeros: Any = None  # in the place of a cotangent
    dw = zeros if residual.parameter_dtype is None else dw.astype(residual.parameter_dtype)
    value, master = (zeros, dw) if residual.has_master else (dw, None)
    probe = SiteProbe(**seen) if seen else None
    return Activation(dx), BoundWeight(value, master, None, probe)


_matmul.defvjp(
    lambda recipe, gather, dtype, x, w: matmul_forward(recipe, x, w, gather, dtype),
    lambda recipe, gather, dtype, kept, dy: matmul_backward(recipe, kept, dy, gather),
)


def _flatten_batch(w: Weight, batch: int) -> Weight:
    """The first `batch` axes of every array of a weight as one."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[batch:]), w)


def make_dot_general(
    recipe: Recipe | str, state: SiteScaling | None = None, probe: SiteProbe | None = None
):
    """Returns a function with `jax.lax.dot_general`'s signature that follows `recipe`.

    Pass it to a module that takes `dot_general=` (`nn.Dense`, `nn.DenseGeneral`, `nnx.Linear`).
    The left operand is the activation, the right one the weight; the result has the left
    operand's dtype, or `preferred_element_type`. `precision` and `out_sharding` are accepted for
    the signature's sake and change nothing. Batch dimensions (`DenseGeneral(batch_dims=...)`,
    stacked experts) are products of their own, each with its own scales.

    `nn.Einsum` and `nnx.Einsum` are not covered: they take no such function, and `jnp.einsum`
    swaps its operands for some outputs, so the weight would be quantised as an activation.

    Args:
      recipe: a Recipe or its name.
      state: for recipes with stateful policies: of `init_site`, for this one call site.
      probe: of `init_probe(..., weight=True)`; its cotangent is what the call observed.

    Raises (when called):
      ValueError: a quantised weight that is not contracted on its first axis after the batch, or
        a stateful recipe without `state`.
    """
    recipe = get_recipe(recipe)

    def dot_general(
        lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None, out_sharding=None
    ):
        del precision, out_sharding
        (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
        lhs_free = [a for a in range(lhs.ndim) if a not in (*lhs_contract, *lhs_batch)]
        rhs_free = [a for a in range(rhs.ndim) if a not in (*rhs_contract, *rhs_batch)]
        batch = [lhs.shape[a] for a in lhs_batch]
        depth = math.prod(lhs.shape[a] for a in lhs_contract)
        height = math.prod(lhs.shape[a] for a in lhs_free)
        x = jnp.transpose(lhs, [*lhs_batch, *lhs_free, *lhs_contract])
        if not isinstance(rhs, QArray | BoundWeight | LayerOf):
            matrix = jnp.transpose(rhs, [*rhs_batch, *rhs_contract, *rhs_free])
            matrix = matrix.reshape(*batch, math.prod(rhs.shape[a] for a in rhs_contract), -1)
            w: Weight = BoundWeight(matrix, None, state, probe) if state or probe else matrix
        elif (
            rhs.ndim == len(batch) + 2
            and tuple(rhs_contract) == (len(batch),)
            and tuple(rhs_batch) == tuple(range(len(batch)))
        ):
            w = rhs
        else:
            raise ValueError(
                f"a quantised weight is a matrix [in, out] contracted on axis 0 (with batch axes "
                f"in front), got shape {rhs.shape} contracted on {tuple(rhs_contract)}"
            )
        dtype = jnp.dtype(preferred_element_type or lhs.dtype)
        if batch:
            product = jax.vmap(functools.partial(matmul, recipe, dtype=dtype))
            y = product(x.reshape(-1, height, depth), _flatten_batch(w, len(batch)))
        else:
            y = matmul(recipe, x.reshape(height, depth), w, dtype=dtype)
        free = [lhs.shape[a] for a in lhs_free] + [rhs.shape[a] for a in rhs_free]
        return y.reshape(batch + free)

    return dot_general


def keep_dtypes(*args: Any, dtype: Any = None, inexact: bool = True) -> list[Any]:
    """For Flax's `promote_dtype=`: passes inputs and (quantised) kernels through unchanged."""
    del dtype, inexact
    return list(args)
