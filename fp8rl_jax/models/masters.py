"""Parameters as a train state holds them: what of them is trained, and what is frozen.

A tree of float32 masters is trained as a whole. `Adapted` stands in its place where only low-rank
adapters of linear layers are trained (LoRA; Hu et al., arXiv:2106.09685): the weight ``W + s A B``,
merged in float32 and then rounded or quantised like any other. Refit and train step merge by the
same function, so rollout and learner read the same bytes; with B = 0 they are the base's. Gradients
and optimiser state are those of A and B alone, and no gradient of a whole weight is computed
(quant/rule.py).

The functions here take either, so that nothing else asks which of them a run has.

Not done: embeddings and output head; the matrices by head of latent attention; ranks that differ
between layers.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax import lax

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.kernels import prevent_fma
from fp8rl_jax.models.arrays import FACTORS, HEADS, LINEAR, LINEAR_LAYERS, SMALL, array_of, role_of
from fp8rl_jax.models.stacks import RUNS, Path, path_of
from fp8rl_jax.quant import QArray, Recipe, get_recipe, is_weight, matmul, quantize_weight
from fp8rl_jax.quant.operands import plain_value


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
    """Parameters of a model with a frozen base.

    Attributes:
      base: parameters; linear layers in float32, bf16 or as QArrays, tables in float32 or bf16.
        Checkpoints do not hold it: it is what a run began with.
      adapters: the trained part, float32: {'layers': {module: A (L, K, r) and B (L, r, N) by their
        names in FACTORS}}, of experts (L, E, K, r) and (L, E, r, N).
      scale: factor s of the product, alpha / r.
    """

    base: Any
    adapters: Any
    scale: float = dataclasses.field(metadata={"static": True})

    def factors(self) -> dict[Path, tuple[jax.Array, jax.Array]]:
        """Returns {path of a linear layer: (A, scale * B)}."""
        flat = traverse_util.flatten_dict(self.adapters)
        a, b = FACTORS
        return {
            path[:-1]: (x, self.scale * flat[*path[:-1], b])
            for path, x in flat.items()
            if path[-1] == a
        }


def is_adapted(params: Any) -> bool:
    """Returns whether a part of parameters is frozen."""
    return isinstance(params, Adapted)


def trained(params: Any) -> Any:
    """Returns the part of parameters that is trained: adapters, or all of them."""
    return params.adapters if isinstance(params, Adapted) else params


def with_trained(params: Any, values: Any) -> Any:
    """Returns parameters with another trained part."""
    return dataclasses.replace(params, adapters=values) if isinstance(params, Adapted) else values


def frozen(tree: Any) -> Any:
    """Returns the frozen base of parameters, or of those in a tree such as a train state; None if
    all is trained, or the base is missing."""
    nodes = jax.tree.leaves(tree, is_leaf=is_adapted)
    return next((node.base for node in nodes if is_adapted(node)), None)


def with_frozen(tree: Any, base: Any) -> Any:
    """Returns a tree whose `Adapted` have a base; with None they lack it."""
    change = lambda x: dataclasses.replace(x, base=base) if is_adapted(x) else x
    return jax.tree.map(change, tree, is_leaf=is_adapted)


def merged(params: Any, recipe: Recipe | str = "f32", keep_quantised: bool = False) -> Any:
    """Returns whole parameters: float32, with adapters added if there are some.

    Args:
      params: masters, `Adapted`, or a frozen base.
      recipe: numerics of who reads them. A product of A and B has the library's order of sums, so
        its bits do not depend on the program; with exact kernels its sums are exact.
      keep_quantised: whether QArrays without an adapter stay, which else are dequantised, and
        matrices with one are in the recipe's compute dtype, matrix by matrix, so that no whole
        stack of them is in float32.
    """
    if not isinstance(params, Adapted):
        return params if keep_quantised else jax.tree.map(plain_value, params, is_leaf=is_weight)
    recipe = get_recipe(recipe)
    dtype = recipe.compute_dtype if keep_quantised else jnp.float32
    factors = params.factors()

    def merge(path, leaf):
        names = path_of(path)
        if names[-1] != "kernel" or names[:-1] not in factors:
            stays = keep_quantised and isinstance(leaf, QArray)
            return leaf if stays else plain_value(leaf).astype(jnp.float32)
        arrays = (leaf, *factors[names[:-1]])
        stacks = jax.tree.map(lambda x: x.reshape(-1, *x.shape[-2:]), arrays)
        exact = recipe.kernels == "exact"
        sums = lax.map(lambda one: _plus_product(one, exact).astype(dtype), stacks)
        return sums.reshape(leaf.shape)

    return jax.tree_util.tree_map_with_path(merge, params.base, is_leaf=is_weight)


def _plus_product(
    matrices: tuple[jax.Array | QArray, jax.Array, jax.Array], exact: bool
) -> jax.Array:
    base, a, b = matrices
    recipe = get_recipe("f32")
    if exact:
        recipe = dataclasses.replace(recipe, kernels="exact")
    return plain_value(base).astype(jnp.float32) + prevent_fma(matmul(recipe, a, b))


def adapted(
    params: Any, rank: int, alpha: float, modules: Sequence[str], base: str, key: jax.Array
) -> Adapted:
    """Returns parameters with new adapters.

    Args:
      params: float32 or bf16; linear layers also as QArrays, for an FP8 base.
      rank, alpha, modules, key: as for `new_adapters`; the product's factor is alpha / rank.
      base: how matrices are kept, 'f32', 'bf16' or 'fp8': linear layers as QArrays of the recipe
        `fp8`, tables in bf16.
    """
    dtype = jnp.dtype(jnp.float32 if base == "f32" else jnp.bfloat16)

    def kept(path, leaf):
        role = role_of(path_of(path))
        if role in SMALL:
            return leaf.astype(jnp.float32)
        if base == "fp8" and role == LINEAR:
            if isinstance(leaf, QArray):
                return leaf
            # One layer (L, ..., K, N) at a time.
            return lax.map(lambda layer: quantize_weight(layer, get_recipe("fp8"))[0], leaf)
        return leaf.astype(dtype)

    frozen = jax.tree_util.tree_map_with_path(kept, params, is_leaf=is_weight)
    return Adapted(frozen, new_adapters(params, rank, modules, key), alpha / rank)


def new_adapters(shapes: Any, rank: int, modules: Sequence[str], key: jax.Array) -> Any:
    """Returns adapters of rank `rank`, as PEFT initialises them: A uniform within 1 / sqrt(K)
    (Kaiming's for slope sqrt(5)), B zero.

    Args:
      shapes: parameters of the base, or their shapes.
      rank: r.
      modules: patterns of names of linear layers, such as '[qkv]_proj'.
      key: random key.

    Raises:
      UserError: a pattern matches no layer of the model, or the rank exceeds a matrix.
    """
    found: dict[Path, jax.Array] = {}
    names = set()
    leaves = traverse_util.flatten_dict(shapes)
    for number, (path, leaf) in enumerate(sorted(leaves.items())):
        if path[0] not in RUNS or array_of(path).role != LINEAR or array_of(path).axes == HEADS:
            continue
        names.add(path[-2])
        if not any(fnmatch.fnmatchcase(path[-2], pattern) for pattern in modules):
            continue
        *first, inputs, outputs = leaf.shape
        if rank > min(inputs, outputs):
            raise UserError(
                f"lora.rank is {rank}, and {path[-2]} is {inputs} x {outputs}: write at most "
                f"{min(inputs, outputs)}, or leave the layer out of lora.modules"
            )
        bound = 1 / math.sqrt(inputs)
        a = jax.random.uniform(
            jax.random.fold_in(key, number), (*first, inputs, rank), jnp.float32, -bound, bound
        )
        found[*path[:-1], FACTORS[0]] = a
        found[*path[:-1], FACTORS[1]] = jnp.zeros((*first, rank, outputs), jnp.float32)
    for pattern in modules:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            known = [name for name in LINEAR_LAYERS if name in names]
            raise UserError(
                f"lora.modules: {pattern!r} matches no linear layer of this model, which has "
                f"{', '.join(known)}"
            )
    return traverse_util.unflatten_dict(found)
