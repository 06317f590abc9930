"""Quantisation of activations and output gradients, by the GPU kernels where they know the recipe.

`site.quantize_operand` defines the result, for every recipe. The kernels compute DeepSeek-V3's
blocks under dynamic scales with the same bytes and scales, in one launch instead of four, and write
the operands of a weight gradient in the order in which its product reads them. A norm or a gate in
front of linear layers can do it in its own launch (`fuses_quantisation`), and returns both forms of
its result, an `Activation`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from fp8rl_jax.kernels import K_BLOCK, by_platform, gpu_kernels, resolve
from fp8rl_jax.quant import formats, scaling
from fp8rl_jax.quant.qarray import QArray
from fp8rl_jax.quant.recipe import BF16, Operand, Recipe
from fp8rl_jax.quant.site import OperandScaling, quantize_operand

# A quantised operand, and the amax of each block in float32; None where nothing reads it.
Quantized = tuple[QArray, jax.Array | None]
_ROW, _COLUMN = (1, K_BLOCK), (K_BLOCK, 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Activation:
    """An activation, and its quantised form where the operation that made it quantised it, too.

    Attributes:
      value: (..., K). Receives the gradient, and wgrad's operand is made from it.
      q: (M, K), the value's rows as `quantize_activation` quantises them; a product takes it
        instead of quantising again. None: the product quantises the value.
    """

    value: jax.Array
    q: QArray | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    def matrix(self) -> Activation:
        """The value as (M, K)."""
        return Activation(self.value.reshape(-1, self.shape[-1]), self.q)


def as_activation(x: jax.Array | Activation) -> Activation:
    """`x` as an Activation."""
    return x if isinstance(x, Activation) else Activation(x)


def kernel_settings(operand: Operand) -> dict[str, Any] | None:
    """{'dtype', 'power_of_two'} for the kernels; None for an operand that no kernel knows."""
    powers = {scaling.dynamic(): False, scaling.power_of_two(scaling.dynamic()): True}
    if operand.policy not in powers or operand.block not in (_ROW, _COLUMN):
        return None
    return {"dtype": operand.dtype, "power_of_two": powers[operand.policy]}


def fuses_quantisation(recipe: Recipe) -> bool:
    """Whether the kernel of a norm or a gate can quantise its result as a linear layer would.

    It quantises the value in the compute dtype, which must be what the layer rounds to.
    """
    operand = recipe.activation
    if operand is None or resolve(recipe.kernels) == "reference":
        return False
    rows = operand.block == _ROW and kernel_settings(operand) is not None
    return rows and recipe.compute_dtype == BF16


def quantize_activation(
    x: jax.Array, operand: Operand, current: OperandScaling | None, implementation: str
) -> Quantized:
    """Rounds a (..., rows, columns) array to bf16 and quantises it.

    Args:
      x: activations or output gradients; axes in front are stacks, with blocks of their own.
      operand, current: as for `quantize_operand`.
      implementation: of `Recipe.kernels`.

    Returns:
      QArray, and the amax of each block where the policy keeps a state.
    """
    settings = kernel_settings(operand)
    whole = operand.block == _ROW or x.ndim == 2 or x.shape[-2] % K_BLOCK == 0
    if settings is None or not whole:
        return quantize_operand(x, operand, current)

    def kernel(x):
        rows = formats.round_bf16(x).reshape(-1, x.shape[-1])
        if operand.block == _ROW:
            q, scale = gpu_kernels().norm.quantize_rows(rows, **settings)
            scale = scale.T.reshape(*x.shape[:-1], -1)
        else:
            q, scale = gpu_kernels().norm.quantize_columns(rows, **settings)
            q, scale = q.T, scale.reshape(*x.shape[:-2], -1, x.shape[-1])
        return QArray(q.reshape(x.shape), scale, operand.block)

    def plain(x):
        return quantize_operand(x, operand, None)[0]

    return by_platform(implementation, kernel, plain, x), None
