"""Recipes: which format, block and scaling policy each operand of each GEMM gets. A recipe is data.

The default `fp8` has DeepSeek-V3's blocks (arXiv:2412.19437), as NeMo RL and Miles use them:
weights E4M3 in 128x128 blocks, activations and output gradients E4M3 in 1x128 blocks along the
contraction, wgrad requantised along tokens from the bf16 value. It stores K and V in INT8 with one
scale per (token, kv head): as many bytes as E4M3, and nearer to bf16 (`python -m studies recipes`).
Embeddings, norms and the output head stay in bf16, routers in float32.

Of the named recipes, `fake_forward` and `fake` imitate FP8 by quantising and dequantising before
bf16 products, as the cases 2 and 3 of the article "Unified FP8: Moving Beyond Mixed Precision for
Stable and Accelerated MoE RL" (2025) do. `f32` is the canary of the drift tests: FP8 and bf16
rounding absorb most last-bit differences, and float32 none.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from fp8rl_jax.base import user_code
from fp8rl_jax.base.errors import UserError, did_you_mean
from fp8rl_jax.kernels import IMPLEMENTATIONS
from fp8rl_jax.quant import scaling
from fp8rl_jax.quant.qarray import E4M3, E5M2, INT8

BF16, FLOAT32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
DYNAMIC = scaling.dynamic()
KV_KINDS = ("none", "dynamic", "calibrated")
KV_DTYPES = (E4M3, INT8)
BACKWARDS = ("fp8", "dequantized", "bf16")


@dataclasses.dataclass(frozen=True)
class Operand:
    """How one operand class (weights, activations, gradients) is quantised.

    Attributes:
      dtype: E4M3 or E5M2.
      block: block of a 2-D operand, -1 for a whole axis. Weights: (K, N). Activations and
        gradients: (row, contraction); for wgrad, which contracts over rows, the reverse.
      policy: scaling policy, which gives the scales.

    Raises:
      UserError: dtype is no FP8 format, or block is not a pair of valid sizes.
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
        """Whether blocks are square: the transpose then needs no requantising."""
        return self.block[0] == self.block[1]

    @property
    def transposed(self) -> Operand:
        """This operand for a GEMM over its other axis: blocks reversed, unless it keeps a state."""
        return self if self.policy.stateful else dataclasses.replace(self, block=self.block[::-1])

    @property
    def row_local(self) -> bool:
        """Whether a row's scale depends on that row, or on nothing in the batch."""
        return self.block[0] == 1 or not self.policy.reads_amax


@dataclasses.dataclass(frozen=True, repr=False)
class Recipe:
    """Numerics of one side (rollout or learner).

    `print(recipe)` shows what it does to every GEMM. To make your own, call `Recipe` with other
    operands, or replace fields of a named recipe::

        mine = Recipe("mine", activation=Operand(block=(1, 64)), backward="bf16")
        headroom = get_recipe("fp8_delayed").with_policies(gradient=delayed(history=16, margin=1))
        headroom = dataclasses.replace(headroom, name="headroom", first_layers=1)

    Attributes:
      name: the recipe's name.
      compute_dtype: dtype of activations between operations, bf16 or float32.
      head: dtype of the output head's weights and product; None for the compute dtype.
      weight, activation: how the forward pass quantises its two operands; None for both disables
        quantisation.
      backward: how the backward GEMMs multiply: 'fp8', with output gradients quantised;
        'dequantized', in bf16 on the bytes of the forward pass, so that gradients are those of
        what was computed; 'bf16', in bf16 on the operands as they were before quantisation.
        (TransformerEngine has the last two as NVTE_BACKWARD_OVERRIDE.)
      gradient: how output gradients are quantised; None unless `backward` is 'fp8'.
      fake: quantise, dequantise to bf16, and multiply in bf16, instead of an FP8 product.
      kv: scales of stored K and V: 'none' stores both in the compute dtype; 'dynamic' has one scale
        per (token, kv head); 'calibrated' one per layer and tensor, measured beforehand.
      k_dtype, v_dtype: E4M3, INT8 (with dynamic scales, amax / 127), or None for the compute dtype.
      kv_policy: scaling policy, without state, of 'dynamic' scales.
      kv_margin: factor of headroom of 'calibrated' scales, at least 1.
      fp8_attention: whether q, too, is E4M3 (with dynamic or calibrated scales as `kv` says).
      first_layers, last_layers: numbers of first and last layers whose linear layers run in bf16.
      bf16_modules: patterns (`fnmatch`) of linear layers that run in bf16: 'down_proj', '[qkv]_*'.
      kernels: implementation of products: 'auto' (kernels on a GPU, the jnp reference elsewhere),
        'reference', 'gpu', 'triton' or 'mosaic' (kernels/dispatch.py). Kernels and reference
        differ in bits.

    Raises:
      UserError: a combination that cannot work.
    """

    name: str
    compute_dtype: jnp.dtype = BF16
    head: jnp.dtype | None = None
    weight: Operand | None = Operand(block=(128, 128))
    activation: Operand | None = Operand()
    backward: str = "fp8"
    gradient: Operand | None = Operand()
    fake: bool = False
    kv: str = "dynamic"
    k_dtype: jnp.dtype | None = E4M3
    v_dtype: jnp.dtype | None = E4M3
    kv_policy: scaling.ScalingPolicy = DYNAMIC
    kv_margin: float = 1.05
    fp8_attention: bool = False
    first_layers: int = 0
    last_layers: int = 0
    bf16_modules: tuple[str, ...] = ()
    kernels: str = "auto"

    def __post_init__(self):
        for name in ("k_dtype", "v_dtype"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, jnp.dtype(getattr(self, name)))
        if self.head is not None:
            head = jnp.dtype(self.head)
            object.__setattr__(self, "head", None if head == self.compute_dtype else head)
        for fault in self._faults():
            raise UserError(f"recipe {self.name!r}: {fault}")
        if self.k_dtype is self.v_dtype is None:
            object.__setattr__(self, "kv", "none")
        if self.kv == "none":  # neither is read, so recipes must not differ in them
            object.__setattr__(self, "k_dtype", E4M3)
            object.__setattr__(self, "v_dtype", E4M3)
        if not self.quantized:
            object.__setattr__(self, "backward", "bf16")
        if self.backward != "fp8":
            object.__setattr__(self, "gradient", None)

    def _faults(self) -> Iterator[str]:
        if (self.weight is None) != (self.activation is None):
            yield "quantise weights and activations, or neither"
        if self.backward not in BACKWARDS:
            yield f"backward is {self.backward!r}; write one of {', '.join(BACKWARDS)}"
        if self.quantized and self.backward == "fp8" and self.gradient is None:
            yield "gradient is None; write how gradients are quantised, or backward='bf16'"
        if self.kv not in KV_KINDS:
            yield f"kv is {self.kv!r}; write one of {', '.join(KV_KINDS)}"
        if self.kernels not in IMPLEMENTATIONS:
            yield f"kernels is {self.kernels!r}; write one of {', '.join(IMPLEMENTATIONS)}"
        if self.head not in (None, FLOAT32, BF16):
            yield f"head is {self.head}; write float32, or None for the compute dtype"
        dtypes = {self.k_dtype, self.v_dtype}
        if not dtypes <= {None, *KV_DTYPES}:
            yield f"k_dtype is {self.k_dtype} and v_dtype {self.v_dtype}; write E4M3, INT8 or None"
        if self.fp8_attention and not self.kv_e4m3:
            yield (
                "FP8 attention needs K and V in E4M3; set k_dtype and v_dtype to it, and kv to "
                "'dynamic' or 'calibrated' (precision.kv_cache='fp8' or 'fp8_calibrated')"
            )
        if self.calibrates and dtypes != {E4M3}:
            yield "calibrated scales are for K and V in E4M3; set kv='dynamic', or both dtypes"
        if INT8 in dtypes and not scaling.never_saturates(self.kv_policy):
            yield (
                "INT8 has no NaN for what a fixed scale cannot hold, so K or V in INT8 take the "
                "scale from their own amax; set kv_policy=dynamic() or power_of_two(dynamic())"
            )
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
            block = operand.block
            policy = operand.policy
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
        from fp8rl_jax.quant.table import text_of  # which knows recipes

        title = self.name
        if self.name in DESCRIPTIONS and get_recipe(self.name) == self:
            title = f"{title}: {DESCRIPTIONS[title]}"
        return text_of(title, self)

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
        """Whether stored K or V, or both, are quantised."""
        return self.kv != "none"

    @property
    def kv_e4m3(self) -> bool:
        """Whether both K and V are stored in E4M3."""
        return self.kv_quantized and {self.k_dtype, self.v_dtype} == {E4M3}

    @property
    def calibrates(self) -> bool:
        """Whether scales of K and V are measured before they are used."""
        return self.kv == "calibrated"

    def stored_dtype(self, name: str) -> jnp.dtype | None:
        """Returns the dtype in which attention reads 'q', 'k', 'v' or the 'latent' of keys and
        values; None for the compute dtype."""
        if name == "q":
            return E4M3 if self.fp8_attention else None
        if self.kv == "none":
            return None
        return self.v_dtype if name == "v" else self.k_dtype

    @property
    def row_local(self) -> bool:
        """Whether no activation's scale depends on another row. If one does, drift is certain:
        the scale then depends on which other tokens share the batch."""
        return self.activation is None or self.activation.row_local

    def with_policies(self, **policies: scaling.ScalingPolicy) -> Recipe:
        """Returns the recipe with other scaling policies.

        Args:
          policies: a ScalingPolicy for 'weight', 'activation' or 'gradient'.

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
        """Returns the recipe with linear layers in the compute dtype."""
        return dataclasses.replace(self, weight=None, activation=None, fake=False)

    def for_head(self) -> Recipe:
        """Returns the recipe of the output head, which is never quantised."""
        plain = self.unquantized()
        return dataclasses.replace(plain, compute_dtype=self.head or self.compute_dtype, head=None)

    def for_module(self, name: str) -> Recipe:
        """Returns the recipe of the linear layer `name`: this one, or `unquantized`."""
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.bf16_modules):
            return self.unquantized()
        return self

    def layer_segments(self, layers: int) -> list[tuple[str, slice, Recipe]]:
        """Returns runs of layers with one recipe: (name in the parameter tree, slice, recipe).

        Raises:
          UserError: first_layers + last_layers is more than the model's `layers`.
        """
        first = self.first_layers
        last = self.last_layers
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
    """Returns whether two recipes have the same forward pass; their backward passes may differ."""
    return one == dataclasses.replace(
        other, name=one.name, backward=one.backward, gradient=one.gradient
    )


_POW2 = scaling.power_of_two(DYNAMIC)
_TENSOR = (-1, -1)
_UNQUANTIZED = {"weight": None, "activation": None, "kv": "none"}
_RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("fp8", k_dtype=INT8, v_dtype=INT8),
        Recipe("fp8_blockwise"),
        Recipe("fp8_linear", kv="none"),
        Recipe(
            "fp8_blockwise_pow2",
            weight=Operand(block=(128, 128), policy=_POW2),
            activation=Operand(policy=_POW2),
            gradient=Operand(policy=_POW2),
            kv_policy=_POW2,
        ),
        Recipe(
            "fp8_tensorwise",
            weight=Operand(block=_TENSOR),
            activation=Operand(block=_TENSOR),
            gradient=Operand(block=_TENSOR),
        ),
        Recipe(
            "fp8_delayed",
            weight=Operand(block=_TENSOR, policy=scaling.delayed()),
            activation=Operand(block=_TENSOR, policy=scaling.delayed()),
            gradient=Operand(E5M2, _TENSOR, scaling.delayed()),
        ),
        Recipe(
            "mxfp8",
            weight=Operand(block=(32, 1), policy=_POW2),
            activation=Operand(block=(1, 32), policy=_POW2),
            gradient=Operand(block=(1, 32), policy=_POW2),
            kv_policy=_POW2,
        ),
        Recipe("fake_forward", backward="bf16", fake=True),
        Recipe("fake", fake=True),
        Recipe("bf16", **_UNQUANTIZED),  # type: ignore[arg-type]
        Recipe("f32", compute_dtype=FLOAT32, **_UNQUANTIZED),  # type: ignore[arg-type]
    )
}
# A line of at most 78 characters for each of `recipe_names`.
DESCRIPTIONS = {
    "fp8": "weights E4M3 128x128, activations and gradients E4M3 1x128, K and V INT8",
    "fp8_blockwise": "fp8 with K and V in E4M3",
    "fp8_linear": "fp8 with K and V in bf16, as NVIDIA's NeMo RL",
    "fp8_blockwise_pow2": "fp8_blockwise with scales that are powers of two",
    "fp8_tensorwise": "one dynamic scale per tensor, E4M3",
    "fp8_delayed": "one scale per tensor from earlier steps (TransformerEngine's HYBRID)",
    "mxfp8": "1x32 blocks with power-of-two (E8M0) scales, E4M3; emulated",
    "fake_forward": "quantise, dequantise, bf16 GEMM; bf16 backward (case 2 of the Miles study)",
    "fake": "quantise, dequantise, bf16 GEMM in both directions (case 3 of the Miles study)",
    "bf16": "no quantisation",
    "f32": "no quantisation, everything float32: the canary of the drift tests",
}


def recipe_names() -> list[str]:
    """Returns every name that `get_recipe` takes."""
    return list(_RECIPES)


def get_recipe(recipe: Recipe | str) -> Recipe:
    """Returns the recipe of that name; a Recipe is returned unchanged.

    Args:
      recipe: a name of `recipe_names`, or ``package.module:function``, a function without
        arguments that returns a Recipe.

    Raises:
      UserError: no recipe has that name, or the function does not return one.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise UserError(
            f"a recipe is a Recipe or a name, not {recipe!r}: write one of "
            + ", ".join(recipe_names())
        )
    if ":" in recipe:
        return _load(recipe)
    if recipe not in _RECIPES:
        known = "write one of " + ", ".join(recipe_names())
        hint = did_you_mean(recipe, recipe_names(), known, "{!r}")
        raise UserError(f"unknown recipe {recipe!r}; {hint}")
    return _RECIPES[recipe]


@functools.cache
def _load(text: str) -> Recipe:
    """Loads a user's recipe once per name: rollout and learner then share its policies, which are
    compared by identity."""
    return user_code.call(text, "recipe", Recipe)
