"""The injectable dot_general: FP8 in the forward pass and in both gradients, by a custom VJP.

=====  ======================================  ==========================================
GEMM   lhs                                     rhs
=====  ======================================  ==========================================
fprop  x, 1x128 along K (in)                   w, 128x128
dgrad  dy, 1x128 along N (out)                 the same w bytes, transposed
wgrad  x requantised 1x128 along tokens        dy requantised 1x128 along tokens
=====  ======================================  ==========================================

wgrad requantises from the bf16 value, never from the row-quantised bytes: quantising twice costs
about twice the error. Every operand is rounded to bf16 here, so that no caller can forget it.

A weight may come as a plain array (quantised here: drop-in for any Flax module), as a QArray
(rollout: the bytes are all there is) or as a `TrainableWeight` (learner: bytes quantised once per
step for the forward pass, with the float32 master that receives the gradient). The three give the
same bits.

Not done: batch dimensions (so no experts yet), forward-mode differentiation.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8rl_jax.kernels import K_BLOCK, block_matmul
from fp8rl_jax.quant import formats
from fp8rl_jax.quant.qarray import QArray, quantize
from fp8rl_jax.quant.recipe import Recipe, get_recipe


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["value", "master"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class TrainableWeight:
    """A weight as the forward pass sees it, with the master parameter that it stands for.

    Attributes:
      value: QArray or bf16 array: exactly what the rollout holds. Receives no gradient.
      master: float32 parameter of the same shape. Receives the gradient; its value is not read.
    """

    value: QArray | jax.Array
    master: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def ndim(self) -> int:
        return self.value.ndim

    @property
    def T(self) -> TrainableWeight:
        return TrainableWeight(self.value.T, self.master.T)


Weight = jax.Array | QArray | TrainableWeight


def compute_value(x: jax.Array, recipe: Recipe) -> jax.Array:
    """`x` in the recipe's compute dtype (rounded to bf16, or float32 as it is)."""
    return x.astype(jnp.float32) if recipe.compute_dtype == jnp.float32 else formats.round_bf16(x)


def quantize_weight(w: jax.Array, recipe: Recipe) -> QArray:
    """Rounds a weight (..., K, N) to bf16 and quantises it in the recipe's weight blocks."""
    return quantize(formats.round_bf16(w), recipe.weight_block, recipe.dtype, recipe.power_of_two)


def quantize_rows(x: jax.Array, recipe: Recipe) -> QArray:
    """Rounds (M, K) to bf16 and quantises it in the recipe's activation blocks."""
    return quantize(
        formats.round_bf16(x), recipe.activation_block, recipe.dtype, recipe.power_of_two
    )


def quantize_columns(x: jax.Array, recipe: Recipe) -> QArray:
    """Rounds (tokens, K) to bf16 and quantises it in blocks along tokens, for wgrad."""
    block = recipe.activation_block[::-1]
    return quantize(formats.round_bf16(x), block, recipe.dtype, recipe.power_of_two)


def _contract_rows(x: jax.Array, dy: jax.Array) -> jax.Array:
    """``x^T dy`` in float32: (tokens, K), (tokens, N) -> (K, N)."""
    return lax.dot_general(
        x.astype(jnp.float32), dy.astype(jnp.float32), (((0,), (0,)), ((), ())),
        preferred_element_type=jnp.float32,
    )  # fmt: skip


def _wgrad(x: QArray, dy: QArray) -> jax.Array:
    """Weight gradient of operands quantised along tokens.

    Gradients make no bitwise promise, so the reference multiplies the scales in first: one dot,
    equal to the blockwise sum up to float32 rounding and twice as fast on a CPU.
    """
    return _contract_rows(x.dequantize(), dy.dequantize())


def _scale_grid(q: QArray, rows: int, contraction: int) -> jax.Array:
    """Scales (row blocks, contraction blocks) broadcast to (rows, ceil(contraction / 128))."""
    return jnp.broadcast_to(q.scale, (rows, -(-contraction // K_BLOCK)))


def _weight_grid(q: QArray) -> jax.Array:
    """Scales of a weight, broadcast to one per 128x128 block."""
    return jnp.broadcast_to(q.scale, tuple(-(-n // K_BLOCK) for n in q.shape))


def _scaled_matmul(x: QArray, w: QArray) -> jax.Array:
    return block_matmul(x.qvalue, w.qvalue, _scale_grid(x, *x.shape), _weight_grid(w))


def _forward_weight(w: Weight, recipe: Recipe) -> jax.Array | QArray:
    value = w.value if isinstance(w, TrainableWeight) else w
    if isinstance(value, QArray):
        return value
    return quantize_weight(value, recipe) if recipe.quantized else compute_value(value, recipe)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def matmul(recipe: Recipe, x: jax.Array, w: Weight) -> jax.Array:
    """(M, K) times (K, N) under a recipe, in canonical order -> (M, N) float32.

    Gradients: dx in x's dtype, dw in the dtype of the parameter (float32 for a master).
    """
    return _matmul_forward(recipe, x, w)[0]


def _matmul_forward(recipe: Recipe, x: jax.Array, w: Weight):
    value = _forward_weight(w, recipe)
    x_value = compute_value(x, recipe)
    if isinstance(value, QArray):
        y = _scaled_matmul(quantize_rows(x_value, recipe), value)
    else:
        y = block_matmul(x_value, value)
    # The residual of x is the bf16 value: wgrad requantises it along tokens.
    return y, (x_value, value, _Signature(x.dtype, type(w), _gradient_dtype(w)))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[],
    meta_fields=["x_dtype", "weight_type", "weight_dtype"],
)
@dataclasses.dataclass(frozen=True)
class _Signature:
    """What the backward pass must know of the arguments: dtypes, and which kind of weight."""

    x_dtype: jnp.dtype
    weight_type: type
    weight_dtype: jnp.dtype | None


def _gradient_dtype(w: Weight) -> jnp.dtype | None:
    if isinstance(w, QArray):
        return None
    return w.master.dtype if isinstance(w, TrainableWeight) else w.dtype


def _matmul_backward(recipe: Recipe, residual, dy: jax.Array):
    x, value, signature = residual
    dy = compute_value(dy, recipe)
    if isinstance(value, QArray):
        dx = _scaled_matmul(quantize_rows(dy, recipe), value.T)
    else:
        dx = block_matmul(dy, value.T)
    dx = dx.astype(signature.x_dtype)
    if signature.weight_type is QArray:
        return dx, None
    if isinstance(value, QArray):
        dw = _wgrad(quantize_columns(x, recipe), quantize_columns(dy, recipe))
    else:
        dw = _contract_rows(x, dy)
    dw = dw.astype(signature.weight_dtype)
    if signature.weight_type is TrainableWeight:
        return dx, TrainableWeight(None, dw)  # type: ignore[arg-type]  # None: no gradient
    return dx, dw


matmul.defvjp(_matmul_forward, _matmul_backward)


def make_dot_general(recipe: Recipe | str):
    """Returns a function with `jax.lax.dot_general`'s signature that follows `recipe`.

    Pass it to a module that takes `dot_general=` (`nn.Dense`, `nn.DenseGeneral`, `nnx.Linear`).
    The left operand is the activation, the right one the weight; the result has the left
    operand's dtype, or `preferred_element_type`. `precision` and `out_sharding` are accepted for
    the signature's sake and change nothing.

    Raises (when called):
      ValueError: batch dimensions, or a quantised weight that is not contracted on its first axis.
    """
    recipe = get_recipe(recipe)

    def dot_general(
        lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None, out_sharding=None
    ):
        del precision, out_sharding
        (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
        if lhs_batch or rhs_batch:
            raise ValueError(
                "make_dot_general's rule has no batch dimensions; contract a 2-D weight, or keep "
                "jax.lax.dot_general for this layer"
            )
        lhs_free = [a for a in range(lhs.ndim) if a not in lhs_contract]
        rhs_free = [a for a in range(rhs.ndim) if a not in rhs_contract]
        depth = math.prod(lhs.shape[a] for a in lhs_contract)
        x = jnp.transpose(lhs, [*lhs_free, *lhs_contract]).reshape(-1, depth)
        if not isinstance(rhs, QArray | TrainableWeight):
            w: Weight = jnp.transpose(rhs, [*rhs_contract, *rhs_free]).reshape(depth, -1)
        elif rhs.ndim == 2 and tuple(rhs_contract) == (0,):
            w = rhs
        else:
            raise ValueError(
                f"a quantised weight is a matrix [in, out] contracted on axis 0, got shape "
                f"{rhs.shape} contracted on {tuple(rhs_contract)}"
            )
        y = matmul(recipe, x, w)
        dtype = preferred_element_type or lhs.dtype
        y = formats.round_bf16(y) if dtype == jnp.bfloat16 else y.astype(dtype)
        shape = [lhs.shape[a] for a in lhs_free] + [rhs.shape[a] for a in rhs_free]
        return y.reshape(shape)

    return dot_general


def keep_dtypes(*args: Any, dtype: Any = None, inexact: bool = True) -> list[Any]:
    """For Flax's `promote_dtype=`: passes inputs and (quantised) kernels through unchanged."""
    del dtype, inexact
    return list(args)
