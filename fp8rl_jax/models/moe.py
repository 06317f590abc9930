"""Mixture-of-experts feed-forward layer under the zero-drift promise: dropless, in fixed tiles.

Qwen3-MoE's layer (Qwen3 technical report, arXiv:2505.09388; sparse gating after Shazeer et al.,
arXiv:1701.06538)::

    S, w = the k experts of a token and their weights    models/router.py
    y = sum_{i in S} w_i * down_i(f(gate_i(x)) * up_i(x))

f is the model's activation; in gpt-oss (arXiv:2508.10925) the three layers have biases.

Every token reaches each of its k experts: there is no capacity limit, so a token's result does not
depend on the experts of other tokens. Rows are sorted by expert and padded with zeros to tiles of
one expert each (`make_tiles`), so that all shapes are static, and a tile is one canonical matmul.
Rows of a matmul are independent, so the forward bits depend neither on the number of rows in a tile
nor on its other rows. The number of rows matters for speed (`tile_rows`) and for wgrad, which
quantises along the rows of a tile.

The k results of a token are added in the order of its slots, in float32, and rounded once to the
compute dtype. Besides what the matmuls keep, the backward pass keeps the experts' results in the
compute dtype, k rows a token.

parallel/experts.py runs this layer with experts on several devices (`mesh.expert`).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from fp8rl_jax.kernels import backend, keep, kept, prevent_fma, sum_last, sum_rows, varying_as
from fp8rl_jax.models.activations import gated_activation
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.layers import Kernel, LayerWeight, multiply_experts, vector
from fp8rl_jax.models.parallel.mesh import Parallel
from fp8rl_jax.quant import Activation, Recipe, compute_value
from fp8rl_jax.quant.varying import varying_vjp

_FEWEST_ROWS = 8  # per tile: matmuls pad to 8
_MOST_ROWS = 128  # those of wgrad's blocks


class Experts(nn.Module):
    """Weights of experts: gate_proj and up_proj (E, D, F), down_proj (E, F, D); in some models
    gate_bias and up_bias (E, F), down_bias (E, D).

    Sharded over the mesh axis `expert`; inside a shard_map, E counts this device's experts.
    """

    config: ModelConfig
    parallel: Parallel

    @nn.compact
    def __call__(self) -> dict[str, LayerWeight]:
        spec = self.parallel.expert_spec(self.config)
        names = ("gate_proj", "up_proj", "down_proj")
        found = {name: Kernel(self.config, self.parallel, spec, name=name)() for name in names}
        for name in ("gate_bias", "up_bias", "down_bias"):
            bias = vector(self, self.config, self.parallel, name, spec=spec)
            if bias is not None:
                found[name] = bias
        return found


def tile_rows(assignments: int, experts: int) -> int:
    """Returns the rows of a tile: the power of two from 8 to 128 that fits an expert's mean share.

    Small tiles make a decode step cheap (large ones would be mostly padding); 128 rows give wgrad
    the blocks of a dense layer. The forward bits are the same for all sizes.
    """
    average = -(-assignments // experts)
    return min(max(_FEWEST_ROWS, 1 << (average - 1).bit_length()), _MOST_ROWS)


class Tiles(NamedTuple):
    """Maps every (token, slot) pair to its row in tiles of R rows; a tile has rows of one expert.

    Attributes:
      experts: (tiles,) int32, the expert of each tile; E for tiles without rows.
      assignment: (tiles * R,) int32, what fills each row: token * k + slot; M * k for padding.
      place: (M, k) int32, the row of each token and slot.
    """

    experts: jax.Array
    assignment: jax.Array
    place: jax.Array

    @property
    def source(self) -> jax.Array:
        """(tiles * R,) int32, the token that fills each row; M (no token) for padding."""
        return self.assignment // self.place.shape[1]


def make_tiles(experts: jax.Array, count: int, rows: int) -> Tiles:
    """Sorts tokens by chosen experts (M, k), numbers below `count`, into tiles of `rows` rows.

    There are as many tiles as the worst distribution needs: every expert that can have a row
    leaves at most ``rows - 1`` rows of its last tile empty.
    """
    tokens, slots = experts.shape
    total = tokens * slots
    tiles = (total + min(count, total) * (rows - 1)) // rows
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    ordered = flat[order]
    sizes = jnp.zeros(count, jnp.int32).at[flat].add(1)
    used = -(-sizes // rows)
    ends = jnp.cumsum(used)
    first_row = (ends - used) * rows
    rank = jnp.arange(total, dtype=jnp.int32) - (jnp.cumsum(sizes) - sizes)[ordered]
    row = first_row[ordered] + rank
    place = jnp.zeros(total, jnp.int32).at[order].set(row).reshape(tokens, slots)
    assignment = jnp.full(tiles * rows, total, jnp.int32).at[row].set(order.astype(jnp.int32))
    owner = jnp.searchsorted(ends, jnp.arange(tiles, dtype=jnp.int32), side="right")
    return Tiles(owner.astype(jnp.int32), assignment, place)


def fill_rows(x: jax.Array, source: jax.Array) -> jax.Array:
    """Returns the rows `source` of `x` (M, n); zeros where the number is M."""
    return x.at[source].get(mode="fill", fill_value=0)


@jax.custom_vjp
def dispatch(x: jax.Array, tiles: Tiles) -> jax.Array:
    """Copies tokens (M, D) to the rows of their experts (tiles, R, D), zeros for padding.

    The gradient of a token is the sum over its k rows, in float32.
    """
    return fill_rows(x, tiles.source).reshape(tiles.experts.shape[0], -1, x.shape[1])


def _dispatch_forward(x, tiles):
    return dispatch(x, tiles), (tiles, jnp.zeros((0,), x.dtype))


def _dispatch_backward(residual, cotangent):
    tiles, like = residual
    rows = cotangent.reshape(-1, cotangent.shape[-1])
    total = rows[tiles.place[:, 0]].astype(jnp.float32)
    for slot in range(1, tiles.place.shape[1]):
        total = total + rows[tiles.place[:, slot]].astype(jnp.float32)
    return total.astype(like.dtype), None


dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def combine(recipe: Recipe, y: jax.Array, weights: jax.Array, tiles: Tiles) -> jax.Array:
    """Adds every token's expert results, weighted, in the order of its slots.

    Args:
      recipe: numerics; gives the compute dtype.
      y: (tiles, R, D) float32, results in tiles.
      weights: (M, k) float32.
      tiles: map from (token, slot) to rows of `y`.

    Returns:
      (M, D) in the compute dtype. The backward pass keeps y in the compute dtype.
    """
    rows = y.reshape(-1, y.shape[-1])
    total = prevent_fma(rows[tiles.place[:, 0]] * weights[:, :1])
    for slot in range(1, weights.shape[1]):
        total = total + prevent_fma(rows[tiles.place[:, slot]] * weights[:, slot : slot + 1])
    return compute_value(total, recipe)


def _combine_forward(recipe, y, weights, tiles):
    return combine(recipe, y, weights, tiles), (keep(compute_value(y, recipe)), weights, tiles)


def _combine_backward(recipe, residual, cotangent):
    y, weights, tiles = residual
    y = kept(y)
    dy = cotangent.astype(jnp.float32)
    rows = y.reshape(-1, y.shape[-1])
    slots = range(weights.shape[1])
    of_slots = (rows[tiles.place[:, slot]].astype(jnp.float32) for slot in slots)
    dweights = [sum_last(prevent_fma(of_slot * dy)) for of_slot in of_slots]
    by_row = jnp.zeros_like(tiles.assignment, jnp.float32).at[tiles.place].set(weights)
    drows = fill_rows(dy, tiles.source) * by_row[:, None]
    return drows.reshape(y.shape), jnp.stack(dweights, axis=1), None


combine.defvjp(_combine_forward, _combine_backward)


@varying_vjp
def _plus_bias(y: jax.Array, bias: jax.Array, tiles: Tiles) -> jax.Array:
    """Adds the bias (E, N) of each tile's expert to its rows (tiles, R, N) in float32, but not to
    padding: it stays zero, and enters no scale of wgrad. Its gradient adds up tiles in order; on a
    GPU, where a scatter has none, by a product."""
    own = bias.at[tiles.experts].get(mode="fill", fill_value=0)
    return prevent_fma(y) + jnp.where(_filled(tiles), own[:, None], 0.0)


def _filled(tiles: Tiles) -> jax.Array:
    """Returns which rows of tiles hold a token, (tiles, R, 1) bool."""
    return (tiles.assignment < tiles.place.size).reshape(tiles.experts.shape[0], -1, 1)


def _plus_bias_forward(y, bias, tiles):
    return _plus_bias(y, bias, tiles), (tiles, jnp.zeros((bias.shape[0], 0)))


def _plus_bias_backward(residual, dy):
    tiles, like = residual
    rows = jnp.where(_filled(tiles), dy, 0.0).swapaxes(0, 1)
    by_tile = sum_rows(rows.reshape(rows.shape[0], -1)).reshape(rows.shape[1:])
    if backend() == "cpu":
        zeros = varying_as(jnp.zeros((like.shape[0], by_tile.shape[1])), by_tile)
        return dy, zeros.at[tiles.experts].add(by_tile, mode="drop"), None
    owns = (jnp.arange(like.shape[0])[:, None] == tiles.experts).astype(jnp.float32)
    return dy, jnp.dot(owns, by_tile, precision=lax.Precision.HIGHEST), None


_plus_bias.defvjp(_plus_bias_forward, _plus_bias_backward)


def expert_results(
    config: ModelConfig,
    recipe: Recipe,
    rows: Activation,
    experts: dict[str, LayerWeight],
    tiles: Tiles,
) -> jax.Array:
    """Computes ``down_i(f(gate_i(x)) * up_i(x))`` of every tile by its expert i.

    Args:
      config: gives the activation f.
      recipe: numerics; experts follow `Recipe.for_module` of 'gate_proj', 'up_proj', 'down_proj'.
      rows: (tiles, R, D) in the compute dtype.
      experts: {'gate_proj', 'up_proj': (E, D, F), 'down_proj': (E, F, D)}, and biases, as made by
        `Experts`.
      tiles: which expert each tile has, and which rows hold a token.

    Returns:
      (tiles, R, D) float32; zeros for rows without a token or an expert.
    """

    def product(x: Activation, name: str) -> jax.Array:
        layer = f"{name}_proj"
        y = multiply_experts(recipe.for_module(layer), x, experts[layer], tiles.experts)
        bias = experts.get(f"{name}_bias")
        return y if bias is None else _plus_bias(y, bias, tiles)

    gate, up = (compute_value(product(rows, name), recipe) for name in ("gate", "up"))
    return product(gated_activation(recipe, config.hidden_act, False, gate, up), "down")


def moe_forward(
    config: ModelConfig,
    recipe: Recipe,
    x: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
    experts: dict[str, LayerWeight],
) -> jax.Array:
    """Runs the chosen experts of every token and adds their weighted results.

    Args:
      config: shapes.
      recipe, experts: as for `expert_results`.
      x: (B, T, D) in the compute dtype.
      weights: (B, T, k) float32, from `routing_weights`.
      chosen: (B, T, k) int32, from `select_experts`; E for tokens that are not computed.

    Returns:
      (B, T, D) in the compute dtype; zeros for tokens that are not computed.
    """
    count = config.num_experts
    flat = x.reshape(-1, x.shape[-1])
    weights, chosen = (y.reshape(flat.shape[0], -1) for y in (weights, chosen))
    tiles = make_tiles(chosen, count + 1, tile_rows(chosen.size, count))
    y = expert_results(config, recipe, Activation(dispatch(flat, tiles)), experts, tiles)
    return combine(recipe, y, weights, tiles).reshape(x.shape)
