"""Exact expert parallelism: rows are sent to the devices of their experts, results are sent back.

Under `jax.shard_map` a device of the mesh axis `expert` (n devices) holds E / n experts and its own
rows of the batch::

    1  quantise the device's rows, gather rows, scales and choices of all n devices
    2  run the device's experts on all of these rows             models/moe.py
    3  send every result, one per (token, slot), to the owner of its row
    4  the owner adds its k results in the order of slots        models/moe.py

Devices exchange rows and never sums, and a row of a product does not depend on other rows. So the
result has the bits of one device on any mesh, whatever the routing, if each of the recipe's scales
is constant or depends on one row. (Common implementations add partial results between devices, in
an order that follows from the mesh: the reduce-scatter of vLLM's default, the kernels of DeepEP.)

No token is dropped: buffers hold the worst case, in which all tokens choose the experts of one
device: n k rows for each row of a device. Many rows are sent in n / 2 passes, with buffers of 2 k.

Under stateful policies a row's scale depends on its expert: then rows are sent in the compute
dtype. The gradient of rows is summed over devices (reduce-scatter), the gradient of results is sent
the way results are, and an expert's weight gradient is complete on the expert's device.

Sources: GShard (Lepikhin et al., arXiv:2006.16668) for the axis; the order of additions is ours.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from fp8rl_jax.kernels import axes_of, by_platform, in_bits
from fp8rl_jax.models import moe
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.parallel.mesh import EXPERT
from fp8rl_jax.quant import Activation, BoundWeight, QArray, Recipe, Weight
from fp8rl_jax.quant.operands import quantize_activation
from fp8rl_jax.quant.varying import repeat_probe, share, varying_vjp

_FEW_TOKENS = 512  # most tokens of a device that are sent in one pass


def passes_of(tokens: int, devices: int) -> int:
    """Returns the number of passes in which a device sends `tokens` rows to `devices` devices."""
    return 1 if tokens <= _FEW_TOKENS else -(-devices // 2)


def exchange_forward(
    config: ModelConfig,
    recipe: Recipe,
    x: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
    experts: dict[str, Weight],
) -> jax.Array:
    """Runs `moe.moe_forward` inside a shard_map over the axis `expert`, with the same bits.

    Args:
      config, recipe: shapes and numerics of the layer.
      x: (B, T, D) in the compute dtype: this device's rows, or all rows, replicated over `expert`.
      weights, chosen: (B, T, k) for these rows; experts are numbered over all devices.
      experts: this device's {'gate_proj', 'up_proj': (E / n, D, F), 'down_proj': (E / n, F, D)},
        and biases.

    Returns:
      (B, T, D) in the compute dtype, for the same rows.
    """
    rows = x.reshape(-1, x.shape[-1])
    weights, chosen = (y.reshape(rows.shape[0], -1) for y in (weights, chosen))
    run = functools.partial(_in_passes, config, recipe)
    # In a shard_map that does not track varying values (`check_vma=False`), devices' rows differ.
    tracked = EXPERT in axes_of(lax.axis_index(EXPERT))
    if tracked and EXPERT not in axes_of(x):
        run = functools.partial(_shared_rows, config, run)
    return run(rows, weights, chosen, experts).reshape(x.shape)


def _padded(config: ModelConfig, count: int, rows, weights, chosen):
    """Pads the arguments to `count` rows with zeros that choose no expert."""
    added = count - rows.shape[0]
    if not added:
        return rows, weights, chosen
    rows, weights = (jnp.pad(y, ((0, added), (0, 0))) for y in (rows, weights))
    return rows, weights, jnp.pad(chosen, ((0, added), (0, 0)), constant_values=config.num_experts)


def _shared_rows(config: ModelConfig, run, rows, weights, chosen, experts):
    """Splits replicated rows over the devices, runs each part, and all-gathers the results."""
    count = rows.shape[0]
    share_size = -(-count // lax.axis_size(EXPERT))
    arrays = _padded(config, share_size * lax.axis_size(EXPERT), rows, weights, chosen)
    *arrays, index = share((*arrays, lax.axis_index(EXPERT)))
    rows, weights, chosen = (
        lax.dynamic_slice_in_dim(y, index * share_size, share_size) for y in arrays
    )
    y = run(rows, weights, chosen, experts)
    return lax.all_gather(y, EXPERT, axis=0, tiled=True, to="invarying")[:count]


def _in_passes(config: ModelConfig, recipe: Recipe, rows, weights, chosen, experts):
    """Runs `_one_pass` on the rows (m, D) of this device in `passes_of` passes."""
    passes = passes_of(rows.shape[0], lax.axis_size(EXPERT))
    run = functools.partial(_one_pass, config, recipe)
    if passes == 1:
        return run(rows, weights, chosen, experts)
    size = -(-rows.shape[0] // passes)
    arrays = _padded(config, passes * size, rows, weights, chosen)
    arrays = tuple(y.reshape(passes, size, -1) for y in arrays)
    arrays, experts = share((arrays, experts))  # gradients of experts are summed over passes first
    probes = {n: repeat_probe(getattr(w, "probe", None), passes) for n, w in experts.items()}

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(experts, scanned):
        (rows, weights, chosen), probes = scanned
        bound = {
            name: dataclasses.replace(w, probe=probes[name]) if isinstance(w, BoundWeight) else w
            for name, w in experts.items()
        }
        return run(rows, weights, chosen, bound)

    y = lax.scan(lambda _, x: (None, step(experts, x)), None, (arrays, probes))[1]
    return y.reshape(passes * size, -1)[: rows.shape[0]]


def _one_pass(config: ModelConfig, recipe: Recipe, rows, weights, chosen, experts):
    """Sends rows (m, D) of all n devices to their experts and the results (m, D) back."""
    devices = lax.axis_size(EXPERT)
    count = config.num_experts // devices
    routes = lax.all_gather(chosen, EXPERT, axis=0, tiled=True)  # (n m, k)
    own = routes - count * lax.axis_index(EXPERT)
    here = (own >= 0) & (own < count)
    own = jnp.where(here, own, count)  # other devices' experts: not computed
    tiles = moe.make_tiles(own, count + 1, moe.tile_rows(own.size, config.num_experts))
    value = _gather_and_dispatch(rows, tiles)
    q = _quantised_rows(recipe, rows, tiles)
    y = moe.expert_results(config, recipe, Activation(value, q), experts, tiles)

    # Send: this device's results, ordered by owner, token and slot.
    position = jnp.where(here, jnp.cumsum(here).reshape(here.shape) - 1, own.size).reshape(-1)
    position = position.astype(jnp.int32)
    capacity = y.shape[0] * y.shape[1]
    rows_sent = jnp.full(own.size, capacity, jnp.int32)
    rows_sent = rows_sent.at[position].set(tiles.place.reshape(-1), mode="drop")
    place_of = jnp.append(position, own.size)[tiles.assignment]
    sent = _permute(y.reshape(capacity, -1), rows_sent, place_of)

    # Receive: results ordered by sending device, token and slot.
    holder = jnp.minimum(routes // count, devices).reshape(devices, -1)  # n: padding
    owner = jnp.broadcast_to(jnp.arange(devices)[:, None], holder.shape)
    table = jnp.zeros((devices, devices), jnp.int32).at[holder, owner].add(1, mode="drop")
    received = exchange(recipe.kernels, chosen.size, sent, table)
    order = jnp.argsort(chosen.reshape(-1) // count, stable=True).astype(jnp.int32)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(chosen.size, dtype=jnp.int32))
    by_row = moe.Tiles(chosen.reshape(-1)[order], order, place.reshape(chosen.shape))
    return moe.combine(recipe, received[:, None], weights, by_row)


@jax.custom_vjp
def _gather_and_dispatch(rows: jax.Array, tiles: moe.Tiles) -> jax.Array:
    """Runs `moe.dispatch` on the rows of all devices: (m, D) -> (tiles, R, D).

    The gradient of a row is the sum over its k rows in tiles, then over devices, in float32.
    """
    everyone = in_bits(lambda bits: lax.all_gather(bits, EXPERT, axis=0, tiled=True), rows)
    return moe.dispatch(everyone, tiles)


def _gather_and_dispatch_forward(rows, tiles):
    return _gather_and_dispatch(rows, tiles), (tiles, jnp.zeros((0,), rows.dtype))


def _gather_and_dispatch_backward(residual, cotangent):
    tiles, like = residual
    total = cotangent.reshape(-1, cotangent.shape[-1])[tiles.place].astype(jnp.float32).sum(1)
    total = lax.psum_scatter(total, EXPERT, scatter_dimension=0, tiled=True)
    return total.astype(like.dtype), None


_gather_and_dispatch.defvjp(_gather_and_dispatch_forward, _gather_and_dispatch_backward)


def _quantised_rows(recipe: Recipe, rows: jax.Array, tiles: moe.Tiles) -> QArray | None:
    """Returns the rows of all devices in tiles, quantised before they are sent; None if a row's
    scale depends on more than the row."""
    operand = recipe.for_module("gate_proj").activation
    if operand is None or operand != recipe.for_module("up_proj").activation:
        return None
    if operand.block[0] != 1 or operand.policy.stateful:
        return None
    q = quantize_activation(lax.stop_gradient(rows), operand, None, recipe.kernels)[0]

    def in_tiles(x: jax.Array) -> jax.Array:
        everyone = lax.all_gather(x, EXPERT, axis=0, tiled=True)
        return moe.fill_rows(everyone, tiles.source).reshape(len(tiles.experts), -1, x.shape[-1])

    return QArray(in_bits(in_tiles, q.qvalue), in_tiles(q.scale), q.block_shape)


@jax.custom_vjp
def _permute(x: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    """Returns (N, D) whose row i is row ``source[i]`` of `x` (M, D), or zeros where that is M.

    `target` (M,) is the inverse: the row of the result that each row of `x` becomes, N for none.
    """
    return moe.fill_rows(x, source)


_permute.defvjp(
    lambda x, source, target: (_permute(x, source, target), (source, target)),
    lambda residual, cotangent: (_permute(cotangent, *residual[::-1]), None, None),
)


@functools.partial(varying_vjp, static=2)
def exchange(implementation: str, size: int, rows: jax.Array, table: jax.Array) -> jax.Array:
    """Sends every row to a device of the axis `expert`.

    Args:
      implementation: as in `Recipe.kernels`. GPU programs send only the rows; other platforms send
        blocks of the largest size that one device may send to another.
      size: R, rows of the result.
      rows: (S, D) float32, ordered by the device that receives them.
      table: (n, n) int32, the same on all devices: how many rows device i sends to device j.

    Returns:
      (R, D), ordered by the device that sent them, then zeros. The gradient is sent back the same
      way.
    """
    me = lax.axis_index(EXPERT)

    def starts(counts: jax.Array) -> jax.Array:
        return jnp.cumsum(counts, dtype=jnp.int32) - counts

    def ragged(rows, table):
        into = (jnp.cumsum(table, axis=0, dtype=jnp.int32) - table)[me]
        empty, _ = share((jnp.zeros((size, rows.shape[1]), rows.dtype), rows))
        return lax.ragged_all_to_all(
            rows, empty, starts(table[me]), table[me], into, table[:, me], axis_name=EXPERT
        )

    def dense(rows, table):
        numbers = jnp.arange(min(rows.shape[0], size), dtype=jnp.int32)
        source = starts(table[me])[:, None] + numbers
        source = jnp.where(numbers < table[me][:, None], source, rows.shape[0])
        found = lax.all_to_all(moe.fill_rows(rows, source), EXPERT, 0, 0)  # (n, width, D)
        target = starts(table[:, me])[:, None] + numbers
        target = jnp.where(numbers < table[:, me][:, None], target, size)
        empty, _ = share((jnp.zeros((size, rows.shape[1]), rows.dtype), rows))
        return empty.at[target].set(found, mode="drop")

    return by_platform(implementation, ragged, dense, rows, table)


def _exchange_forward(implementation, size, rows, table):
    return exchange(implementation, size, rows, table), (table, jnp.zeros((rows.shape[0], 0)))


def _exchange_backward(implementation, size, residual, cotangent):
    table, like = residual
    return exchange(implementation, like.shape[0], cotangent, table.T), None


exchange.defvjp(_exchange_forward, _exchange_backward)
