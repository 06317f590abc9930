"""Recipes: which format, block and scaling policy each operand of each GEMM gets. A recipe is data.

The default is DeepSeek-V3's (arXiv:2412.19437), as NeMo RL and Miles use it: weights E4M3 in
128x128 blocks, activations and output gradients E4M3 in 1x128 blocks along the contraction, wgrad
requantised along tokens from the bf16 value; stored K and V in E4M3 with one scale per (token, kv
head). Embeddings, norms and the output head stay in bf16, routers in float32. The named recipes are
in `recipes.py`.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.kernels import IMPLEMENTATIONS
from fp8rl_jax.quant import scaling
from fp8rl_jax.quant.qarray import E4M3, E5M2

BF16, FLOAT32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
DYNAMIC = scaling.dynamic()
KV_KINDS = ("none", "dynamic", "calibrated")


@dataclasses.dataclass(frozen=True)
class Operand:
    """How one operand class (weights, activations, gradients) is quantised.

    Attributes:
      dtype: E4M3 or E5M2.
      block: block of a 2-D operand, -1 for a whole axis. Weights: (K, N). Activations and
        gradients: (row, contraction); for wgrad, which contracts over rows, the same reversed.
      policy: where the scale comes from.

    Raises:
      UserError: no FP8 format, or no block.
    """

    dtype: jnp.dtype = E4M3
    block: tuple[int, int] = (1, 128)
    policy: scaling.ScalingPolicy = DYNAMIC

    def __post_init__(self):
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        if self.dtype not in (E4M3, E5M2):
            raise UserError(f"dtype {self.dtype} is no FP8 format: float8_e4m3fn or float8_e5m2")
        sizes = isinstance(self.block, tuple) and len(self.block) == 2
        if not sizes or any(not isinstance(n, int) or (n < 1 and n != -1) for n in self.block):
            raise UserError(f"block {self.block}: write two sizes of at least 1, or -1 for all")

    @property
    def has_square_blocks(self) -> bool:
        """Whether the bytes of the transpose are the transposed bytes: square blocks."""
        return self.block[0] == self.block[1]

    @property
    def transposed(self) -> Operand:
        """The same operand for a GEMM that contracts over its other axis."""
        return self if self.policy.stateful else dataclasses.replace(self, block=self.block[::-1])

    @property
    def row_local(self) -> bool:
        """Whether a row's scale depends on that row, or on nothing in the batch."""
        return self.block[0] == 1 or not self.policy.reads_amax


@dataclasses.dataclass(frozen=True, repr=False)
class Recipe:
    """Numerics of one side (rollout or learner).

    `print(recipe)` shows what it does to every GEMM. One of your own is a call with other
    operands, or a named one with some of its fields replaced::

        mine = Recipe("mine", activation=Operand(block=(1, 64)), gradient=None)
        headroom = get_recipe("fp8_delayed").with_policies(gradient=delayed(history=16, margin=1))
        headroom = dataclasses.replace(headroom, name="headroom", first_layers=1)

    Attributes:
      name: the recipe's name.
      compute_dtype: dtype of activations between operations, bf16 or float32.
      weight, activation: how the forward pass quantises its two operands; None for both disables
        quantisation.
      gradient: how the backward pass quantises output gradients; None: the backward GEMMs run in
        bf16, on the operands as they were before quantisation.
      fake: quantise, dequantise to bf16, and multiply in bf16, instead of an FP8 product.
      kv: 'none' stores K and V in the compute dtype; 'dynamic' in E4M3 with one scale per (token,
        kv head); 'calibrated' in E4M3 with one scale per layer and tensor, measured beforehand.
      kv_policy: where 'dynamic' scales come from; keeps no state.
      fp8_attention: q too is E4M3 (with dynamic or calibrated scales as `kv` says).
      first_layers, last_layers: numbers of first and last layers whose linear layers run in bf16.
      bf16_modules: patterns (`fnmatch`) of linear layers that run in bf16: 'down_proj', '[qkv]_*'.
      kernels: implementation of products: 'auto' (Triton kernels on a GPU, the jnp reference
        elsewhere), 'reference', 'triton' or 'mosaic' (kernels/dispatch.py). Their bits differ.

    Raises:
      UserError: a combination that cannot work.
    """

    name: str
    compute_dtype: jnp.dtype = BF16
    weight: Operand | None = Operand(block=(128, 128))
    activation: Operand | None = Operand()
    gradient: Operand | None = Operand()
    fake: bool = False
    kv: str = "dynamic"
    kv_policy: scaling.ScalingPolicy = DYNAMIC
    fp8_attention: bool = False
    first_layers: int = 0
    last_layers: int = 0
    bf16_modules: tuple[str, ...] = ()
    kernels: str = "auto"

    def __post_init__(self):
        for fault in self._faults():
            raise UserError(f"recipe {self.name!r}: {fault}")

    def _faults(self) -> Iterator[str]:
        if (self.weight is None) != (self.activation is None):
            yield "quantise weights and activations, or neither"
        if self.kv not in KV_KINDS:
            yield f"kv is {self.kv!r}; write one of {', '.join(KV_KINDS)}"
        if self.kernels not in IMPLEMENTATIONS:
            yield f"kernels is {self.kernels!r}; write one of {', '.join(IMPLEMENTATIONS)}"
        if self.fp8_attention and self.kv == "none":
            yield "FP8 attention needs K and V in FP8; set kv='dynamic' or 'calibrated'"
        if min(self.first_layers, self.last_layers) < 0:
            yield (
                f"first_layers is {self.first_layers} and last_layers {self.last_layers}; write "
                "numbers of at least 0"
            )
        if not isinstance(self.bf16_modules, tuple):
            yield f"bf16_modules is {self.bf16_modules!r}; write a tuple of patterns"
        if self.kv_policy.stateful:
            yield (
                f"kv_policy {self.kv_policy.name} keeps a state, which a KV cache has no place "
                "for; use kv='calibrated'"
            )
        for name, operand in self.operands.items():
            block, policy = operand.block, operand.policy
            if name == "weight" and policy.stateful and not operand.has_square_blocks:
                yield (
                    f"weight blocks {block} are not square, so dgrad quantises the weight a second "
                    f"time, and {policy.name} keeps one state: use square blocks, or a policy "
                    "without state"
                )
            if name != "weight" and policy.stateful and block[0] != -1:
                yield (
                    f"{name} blocks are {block}, so the number of scales changes with the number "
                    f"of rows, and {policy.name} keeps a state of fixed size: use blocks that span "
                    "all rows, as fp8_delayed does"
                )

    def __repr__(self) -> str:
        return f"Recipe({self.name!r})"

    def __str__(self) -> str:
        from fp8rl_jax.quant.table import text_of  # which imports this module

        return text_of(self)

    @property
    def quantized(self) -> bool:
        """Whether linear layers quantise their operands."""
        return self.weight is not None

    @property
    def stateful(self) -> bool:
        """Whether any policy keeps a state."""
        return any(operand.policy.stateful for operand in self.operands.values())

    @property
    def operands(self) -> dict[str, Operand]:
        """The quantised operand classes: {'weight' | 'activation' | 'gradient': Operand}."""
        names = ("weight", "activation", "gradient")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @property
    def kv_quantized(self) -> bool:
        """Whether stored K and V are FP8."""
        return self.kv != "none"

    @property
    def row_local(self) -> bool:
        """Whether no activation's scale depends on another row. If one does, drift is certain:
        the scale then depends on which other tokens share the batch."""
        return self.activation is None or self.activation.row_local

    def with_policies(self, **policies: scaling.ScalingPolicy) -> Recipe:
        """The same with other scaling policies.

        Args:
          policies: of 'weight', 'activation' or 'gradient'.

        Raises:
          UserError: the recipe does not quantise such an operand, or its blocks do not suit the
            policy.
        """
        operands: dict[str, Any] = {}
        for name, policy in policies.items():
            if name not in self.operands:
                raise UserError(
                    f"recipe {self.name!r} quantises no {name!r}: write a policy for one of "
                    f"{', '.join(self.operands) or 'the operands of another recipe'}"
                )
            if not isinstance(policy, scaling.ScalingPolicy):
                raise UserError(
                    f"the policy of {name} is {policy!r}: write a ScalingPolicy, such as dynamic()"
                )
            operands[name] = dataclasses.replace(self.operands[name], policy=policy)
        return dataclasses.replace(self, **operands)

    def unquantized(self) -> Recipe:
        """The same with linear layers in the compute dtype."""
        return dataclasses.replace(self, weight=None, activation=None, gradient=None, fake=False)

    def for_module(self, name: str) -> Recipe:
        """The recipe of the linear layer `name`: this one, or `unquantized`."""
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.bf16_modules):
            return self.unquantized()
        return self

    def layer_segments(self, layers: int) -> list[tuple[str, slice, Recipe]]:
        """Runs of layers under one recipe: (name in the parameter tree, layers, recipe).

        Raises:
          UserError: more layers are named than there are.
        """
        first, last = self.first_layers, self.last_layers
        if not self.quantized or first + last == 0:
            return [("layers", slice(0, layers), self)]
        if first + last > layers:
            raise UserError(
                f"recipe {self.name!r}: the first {first} and last {last} layers in bf16 are more "
                f"than the model's {layers}; lower them, or use the recipe bf16"
            )
        middle = dataclasses.replace(self, first_layers=0, last_layers=0)
        plain = middle.unquantized()
        runs = [
            ("layers_first", slice(0, first), plain),
            ("layers", slice(first, layers - last), middle),
            ("layers_last", slice(layers - last, layers), plain),
        ]
        return [run for run in runs if run[1].stop > run[1].start]


def same_forward(one: Recipe, other: Recipe) -> bool:
    """Whether two recipes compute the same forward pass; their backward passes may differ."""
    return one == dataclasses.replace(other, name=one.name, gradient=one.gradient)
