"""The dot_general rule over experts by the grouped GPU kernels: all tiles in one launch a GEMM.

`grouped_dot` defines the rule, tile by tile; this computes the same from all rows at once, where
the recipe allows it (`applies`). The forward bits are those of the tile-by-tile rule on the same
platform: a row's quantisation depends on that row, and the grouped kernel gives a row the bits of
the dense one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fp8rl_jax.kernels import K_BLOCK
from fp8rl_jax.kernels.matmul import grouped_matmul, grouped_wgrad
from fp8rl_jax.quant import formats
from fp8rl_jax.quant.activations import Activation, quantize_activation
from fp8rl_jax.quant.qarray import QArray
from fp8rl_jax.quant.recipe import Operand, Recipe
from fp8rl_jax.quant.site import OperandProbe, observe, quantize_operand
from fp8rl_jax.quant.weights import LayerOf, Weight, bind, compute_value, plain_value

_ROW, _SQUARE = (1, K_BLOCK), (K_BLOCK, K_BLOCK)


def applies(recipe: Recipe) -> bool:
    """Whether the kernels compute this recipe: no quantisation, or DeepSeek-V3's blocks without
    states; its imitation in bf16 too."""
    if recipe.activation is None or recipe.weight is None:
        return True
    rows = [recipe.activation] + ([recipe.gradient] if recipe.gradient else [])
    blocks = all(operand.block == _ROW for operand in rows) and recipe.weight.block == _SQUARE
    return blocks and not recipe.stateful


def differentiates(recipe: Recipe, rows: int) -> bool:
    """Whether they compute its gradients too, for tiles of so many rows: whole blocks of 128."""
    return applies(recipe) and rows % K_BLOCK == 0


def _quantized(recipe: Recipe, x: jax.Array, operand: Operand) -> QArray:
    """(tiles, R, K), every tile with scales of its own."""
    return quantize_activation(x, operand, None, recipe.kernels)[0]


def _product(
    recipe: Recipe, x: QArray, w: QArray, experts: jax.Array, dtype=jnp.float32
) -> jax.Array:
    if recipe.fake:
        x_value, w_value = (formats.round_bf16(operand.dequantize()) for operand in (x, w))
        return grouped_matmul(x_value, w_value, experts, dtype=dtype)
    return grouped_matmul(x.qvalue, w.qvalue, experts, x.scale, w.scale, dtype)


def _quantized_weight(recipe: Recipe, w: Weight) -> QArray:
    assert recipe.weight is not None
    value = bind(w).value
    return value if isinstance(value, QArray) else quantize_operand(value, recipe.weight, None)[0]


def forward(
    recipe: Recipe, x: Activation, w: Weight, experts: jax.Array, dtype=jnp.float32
) -> jax.Array:
    """`grouped_dot.grouped_matmul`: (tiles, R, K), (E, K, N), (tiles,) -> (tiles, R, N)."""
    if isinstance(w, LayerOf):
        count = w.shape[0] if w.ndim == 3 else 1  # a dense layer is an expert alone
        experts = jnp.where(experts < count, w.layer * count + experts, w.stack.shape[0] * count)
        w = jax.tree.map(lambda stack: stack.reshape(-1, *stack.shape[-2:]), w.stack)
    value = compute_value(x.value, recipe)
    if recipe.activation is None:
        weight = compute_value(plain_value(bind(w).value), recipe)
        return grouped_matmul(value, weight, experts, dtype=dtype)
    rows = x.q if x.q is not None else _quantized(recipe, value, recipe.activation)
    return _product(recipe, rows, _quantized_weight(recipe, w), experts, dtype)


def _transposed(w: QArray) -> QArray:
    return QArray(w.qvalue.swapaxes(1, 2), w.scale.swapaxes(1, 2), w.block_shape[::-1])


def _observed(
    x: jax.Array, q: QArray, operand: Operand, probe: OperandProbe | None, experts: jax.Array
) -> OperandProbe | None:
    """What the tiles' probes saw, added by expert; counts only, since no state asks for amaxes."""
    if probe is None or probe.counts is None:
        return None

    def count(x, qvalue, scale):
        seen = observe(x, QArray(qvalue, scale, q.block_shape), None, operand, probe)
        return seen.counts

    counts = jax.vmap(count)(x, q.qvalue, q.scale)
    return OperandProbe(None, jnp.zeros_like(probe.counts).at[experts].add(counts, mode="drop"))


def backward(
    recipe: Recipe, x: jax.Array, w: Weight, experts: jax.Array, dy: jax.Array
) -> tuple[jax.Array, jax.Array, dict[str, OperandProbe]]:
    """dx (tiles, R, K) and dw (E, K, N), both float32, and what the probes of w observed.

    Args:
      x: in the compute dtype; the others as for `forward`; dy: (tiles, R, N).
    """
    bound = bind(w)
    dy = compute_value(dy, recipe)
    count = bound.shape[0]
    probes = bound.probe
    seen: dict[str, OperandProbe | None] = {}
    if recipe.activation is not None and probes is not None:
        rows = _quantized(recipe, x, recipe.activation)
        seen["activation"] = _observed(x, rows, recipe.activation, probes.activation, experts)
    if recipe.gradient is None or recipe.activation is None:
        parameter = bound.value if bound.master is None else bound.master
        kept = parameter if recipe.quantized else bound.value  # as for the dense rule
        weight = compute_value(plain_value(kept), recipe)
        dx = grouped_matmul(dy, weight.swapaxes(1, 2), experts)
        dw = grouped_wgrad(x, dy, experts, count)
    else:
        rows = _quantized(recipe, dy, recipe.gradient)
        if probes is not None:
            seen["gradient"] = _observed(dy, rows, recipe.gradient, probes.gradient, experts)
        dx = _product(recipe, rows, _transposed(_quantized_weight(recipe, w)), experts)
        columns = [
            _quantized(recipe, value, operand.turned)
            for value, operand in ((x, recipe.activation), (dy, recipe.gradient))
        ]
        if recipe.fake:
            values = [formats.round_bf16(q.dequantize()) for q in columns]
            dw = grouped_wgrad(*values, experts, count)
        else:
            values = [q.qvalue for q in columns]
            dw = grouped_wgrad(*values, experts, count, *(q.scale for q in columns))
    return dx, dw, {name: probe for name, probe in seen.items() if probe is not None}
