"""The dot_general rule over experts: rows in tiles, one expert per tile.

Rows are sorted by expert and padded to tiles of a fixed size beforehand, so that every shape is
static and no row's bits depend on how many rows its expert got: a tile is one `matmul`. Rows of
zeros (padding) give zeros and move no gradient; tiles without rows are left out at run time.
`lax.ragged_dot` is not used: its bits depend on the sizes of the groups.

wgrad quantises along the tokens of a tile, so tiles of 128 rows give it the blocks of a dense
layer. Tiles run one after another (`lax.map`); on a GPU the grouped kernels take them all at once
where the recipe allows it. Kept for the backward pass: x in the compute dtype.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from fp8rl_jax.kernels import as_bits, choose, from_bits
from fp8rl_jax.quant import formats, grouped_kernels
from fp8rl_jax.quant.activations import Activation
from fp8rl_jax.quant.dot_general import matmul, matmul_backward, matmul_forward
from fp8rl_jax.quant.recipe import Recipe
from fp8rl_jax.quant.site import OperandProbe
from fp8rl_jax.quant.varying import share
from fp8rl_jax.quant.weights import (
    BoundWeight,
    LayerOf,
    Weight,
    bind,
    compute_value,
    take_layer,
)


def grouped_matmul(recipe: Recipe, x: jax.Array, w: Weight, experts: jax.Array) -> jax.Array:
    """Every tile of rows times the matrix of its expert.

    Args:
      recipe: numerics.
      x: (tiles, R, K).
      w: (E, K, N): an array, a QArray, a LayerOf, or a BoundWeight whose arrays all have the E axis
        in front (`init_site` and `init_probe` of the shape (E, K, N) make such states).
      experts: (tiles,) int32; E or more where a tile has no rows: it gives zeros, costs nothing,
        and moves and observes nothing.

    Returns:
      (tiles, R, N) float32. Gradients as for `matmul`; a probe sees its expert's tiles combined,
      amaxes by maximum and counts by sum.
    """
    w = w if isinstance(w, LayerOf) else bind(w)
    return _grouped(recipe, *share(x, w, jnp.asarray(experts)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(
    recipe: Recipe, x: jax.Array, w: BoundWeight | LayerOf, experts: jax.Array
) -> jax.Array:
    def by_tile(x, w, experts):
        w = w.taken() if isinstance(w, LayerOf) else w
        nothing, _ = share(jnp.zeros((x.shape[1], w.shape[-1])), x)

        def product(tile):
            rows, expert = tile
            used, one = expert < w.shape[0], functools.partial(take_layer, w, expert)
            return lax.cond(used, lambda: matmul(recipe, rows, one()), lambda: nothing)

        return lax.map(product, (x, experts))

    if not grouped_kernels.applies(recipe):
        return by_tile(x, w, experts)

    def at_once(x, w, experts):
        return grouped_kernels.forward(recipe, Activation(x), w, experts)

    return choose(recipe.kernels, at_once, by_tile, x, w, experts)


def _forward(recipe: Recipe, x: jax.Array, w: BoundWeight, experts: jax.Array):
    like = jnp.zeros((0,), x.dtype)
    return _grouped(recipe, x, w, experts), (as_bits(compute_value(x, recipe)), like, w, experts)


def _combine(total: jax.Array | None, tile: jax.Array | None, expert: jax.Array, largest: bool):
    """`tile` added to (or compared with) the entry of its expert."""
    if total is None or tile is None:
        return total
    if not largest:
        return total.at[expert].add(tile)
    both = jnp.stack([lax.dynamic_index_in_dim(total, expert, 0, keepdims=False), tile])
    return lax.dynamic_update_index_in_dim(total, formats.amax(both, 0), expert, 0)


def _is_probe(x) -> bool:
    return isinstance(x, OperandProbe)


def _backward(recipe: Recipe, residual, dy: jax.Array):
    x, like, w, experts = residual
    x = from_bits(x)

    def tile_gradients(x, dy, expert):
        _, kept = matmul_forward(recipe, Activation(x), take_layer(w, expert))
        if kept.parameter_dtype is not None:  # sums of many tiles: cast once, at the end
            kept = dataclasses.replace(kept, parameter_dtype=jnp.dtype(jnp.float32))
        kept = dataclasses.replace(kept, x_dtype=like.dtype)
        dx, cotangent = matmul_backward(recipe, kept, dy)
        return dx.value, cotangent

    def parts(cotangent):
        """(arrays to add, probes to combine) of a weight's cotangent."""
        return (cotangent.value, cotangent.master), cotangent.probe

    nothing, _ = share(jnp.zeros(x.shape[1:], like.dtype), x)

    def step(total, tile):
        used = tile[2] < count
        return lax.cond(used, lambda: add_tile(total, tile), lambda: (total, nothing))

    def add_tile(total, tile):
        dx, cotangent = tile_gradients(*tile)
        added, probes = parts(cotangent)
        expert = tile[2]
        sums = jax.tree.map(lambda t, n: _combine(t, n, expert, False), total[0], added)

        def combine(t: OperandProbe, n: OperandProbe) -> OperandProbe:
            return OperandProbe(
                _combine(t.amax, n.amax, expert, True), _combine(t.counts, n.counts, expert, False)
            )

        return (sums, jax.tree.map(combine, total[1], probes, is_leaf=_is_probe)), dx

    count = jax.tree.leaves(w)[0].shape[0]
    tile = (jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in (x, dy, experts))
    shapes = jax.eval_shape(tile_gradients, *tile)[1]
    zeros = jax.tree.map(lambda s: jnp.zeros((count, *s.shape), s.dtype), parts(shapes))
    zeros, _ = share(zeros, (x, dy))

    def by_tile(x, w, experts, dy):
        del w  # `add_tile` takes each tile's from it
        return lax.scan(step, zeros, (x, dy, experts))

    def at_once(x, w, experts, dy):
        dx, dw, seen = grouped_kernels.backward(recipe, x, w, experts, dy)
        sums, probes = zeros
        if probes is not None:
            probes = dataclasses.replace(probes, **seen)
        return (jax.tree.map(lambda _: dw, sums), probes), dx.astype(like.dtype)

    if grouped_kernels.differentiates(recipe, x.shape[1]):
        (sums, probes), dx = choose(recipe.kernels, at_once, by_tile, x, w, experts, dy)
    else:
        (sums, probes), dx = by_tile(x, w, experts, dy)
    value, master = sums

    def cast(total, like):
        return None if total is None else total.astype(like.dtype)

    return dx, BoundWeight(cast(value, w.value), cast(master, w.master), None, probes), None


_grouped.defvjp(_forward, _backward)
