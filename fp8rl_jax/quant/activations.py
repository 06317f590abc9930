"""Quantisation of activations and output gradients, by the GPU kernels where they know the recipe.

`site.quantize_operand` defines the result, for every recipe. The kernels compute DeepSeek-V3's
blocks under dynamic scales with the same bytes and scales, in one launch instead of four, and write
the operands of a weight gradient in the order in which its product reads them.
"""

from __future__ import annotations

import jax

from fp8rl_jax.kernels import K_BLOCK, choose, norm
from fp8rl_jax.quant import formats, scaling
from fp8rl_jax.quant.qarray import QArray
from fp8rl_jax.quant.recipe import Operand
from fp8rl_jax.quant.site import OperandScaling, quantize_operand

_ROW, _COLUMN = (1, K_BLOCK), (K_BLOCK, 1)


def quantize_activation(
    x: jax.Array, operand: Operand, current: OperandScaling | None, implementation: str
) -> tuple[QArray, jax.Array | None]:
    """Rounds a (..., rows, columns) array to bf16 and quantises it.

    Args:
      x: activations or output gradients; axes in front are stacks, with blocks of their own.
      operand, current: as for `quantize_operand`.
      implementation: of `Recipe.kernels`.

    Returns:
      QArray, and the amax of each block where the policy keeps a state, which nobody else reads.
    """
    powers = {scaling.dynamic(): False, scaling.power_of_two(scaling.dynamic()): True}
    known = operand.policy in powers and operand.block in (_ROW, _COLUMN)
    whole = operand.block == _ROW or x.ndim == 2 or x.shape[-2] % K_BLOCK == 0
    if not known or not whole:
        return quantize_operand(x, operand, current)

    def kernel(x):
        rows = formats.round_bf16(x).reshape(-1, x.shape[-1])
        settings = operand.dtype, powers[operand.policy]
        if operand.block == _ROW:
            q, scale = norm.quantize_rows(rows, *settings)
            scale = scale.T.reshape(*x.shape[:-1], -1)
        else:
            q, scale = norm.quantize_columns(rows, *settings)
            q, scale = q.T, scale.reshape(*x.shape[:-2], -1, x.shape[-1])
        return QArray(q.reshape(x.shape), scale, operand.block)

    def plain(x):
        return quantize_operand(x, operand, None)[0]

    return choose(implementation, kernel, plain, x), None
