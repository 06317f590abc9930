"""Exact tensor parallelism: every matrix is split along its output features only.

An output column of a product does not depend on the other columns, so a device that holds some
columns of a weight computes the bits of a single device. A contraction is never split with its
parts added over devices (the row-parallel layer of Megatron-LM, Shoeybi et al., arXiv:1909.08053):
the sum would run in another order. So all input features are gathered before each product; an FP8
recipe quantises them first and gathers one byte an element (`quant.matmul` with `gather=`).

Where the mesh axis `tensor` is above 1, or GPU kernels multiply, `split_columns` runs the decoder
under `jax.shard_map` over all axes. Inside, a device holds:

* its rows of the batch, split over `data`, `fsdp` and `expert`. Trained weights are also stored
  sharded over `fsdp`, and gathered layer by layer.
* its experts, by its index on the axis `expert` (experts.py).
* q, k, v: columns of the projections, with the attention heads and KV cache of these columns if
  `tensor` divides both numbers of heads. Else every device attends with all heads.
* gate, up and their gated product: columns.
* o and down: columns; their results are gathered. Residual stream, norms and embedding are
  replicated.
* the output head: columns of the vocabulary; the logits are gathered, and the sum over the
  vocabulary runs on every device.

XLA's partitioner alone does not keep the bits: it propagates the sharding of a stored gradient
(rows of down_proj over `tensor`) back to the activation and from there into the forward product,
whose blocks of 128 it then splits in two and adds by an all-reduce: float32 drift of one ulp. With
a shard_map over `tensor` alone the bits are right, but XLA then gathers all rows of the batch
wherever it gathers columns.

A layer runs with all columns on every device if a split would cut a block of the recipe
(`column_unit`) or a vector of 16. So every size of `tensor` is exact, but some gain no speed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from fp8rl_jax.kernels import axes_of, in_bits
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.parallel.mesh import AXIS, STORAGE, WHOLE, Parallel
from fp8rl_jax.models.parallel.specs import head_spec, is_cut, splits_heads, weight_specs
from fp8rl_jax.quant import Activation, BoundWeight, Recipe
from fp8rl_jax.quant.varying import share, spread
from fp8rl_jax.sharding import BATCH_AXES


def split_columns(
    apply: Callable, config: ModelConfig, recipe: Recipe, parallel: Parallel
) -> Callable:
    """Wraps `apply` of a Transformer in a shard_map over the mesh (`Parallel.uses_shard_map`).

    The returned function takes and returns global arrays; see `models.transformer`.
    """

    def split(variables, tokens, cache, positions, cos, sin, valid):
        axes = parallel.rows(tokens.shape[0])
        weights = weight_specs(
            variables["params"], config, recipe, parallel.mesh, stored=axes is not None
        )
        rows = PartitionSpec(axes)
        heads = AXIS if splits_heads(config, parallel.tensor) else None
        by_layer = PartitionSpec(None, axes)  # (L, B, ...)
        # (L, B, S, Hkv, ...); the scales of a latent are (L, B, S).
        stored = PartitionSpec(None, axes, None, heads) if heads else by_layer
        specs = jax.tree.map(lambda x: by_layer if x.ndim > 1 else WHOLE, variables)
        run = parallel.shard_map(
            apply,
            (specs | {"params": weights}, rows, stored, rows, rows, rows, rows),
            (rows, stored, WHOLE, by_layer),
        )
        return run(variables, tokens, cache, positions, cos, sin, valid)

    return split


# For use inside `split_columns`. JAX types values that vary over devices (quant/varying.py).


def gather_or_slice(x: jax.Array, features: int) -> jax.Array:
    """Returns `x` with `features` columns: as given, gathered, or sliced to this device's shard."""
    if x.shape[-1] == features:
        return x
    if x.shape[-1] < features:
        return lax.all_gather(x, AXIS, axis=x.ndim - 1, tiled=True, to="invarying")
    x, index = share((x, lax.axis_index(AXIS)))
    return lax.dynamic_slice_in_dim(x, index * features, features, x.ndim - 1)


def shared_input(x: Activation, recipe: Recipe, layers: dict[str, int], parts: int) -> Activation:
    """Prepares the input of several layers, so that its gradient is summed once over all devices.

    Args:
      x: (..., in), replicated, in the compute dtype.
      recipe: numerics of the run of layers.
      layers: {name: output features}.
      parts: number of devices on the axis `tensor`.

    Returns:
      The same values, as float32 if all the layers are split (`Linear` rounds them again):
      each device has a part of the gradient's sum, and bf16 would round every part.
    """
    if parts == 1 or not all(is_cut(recipe.for_module(n), k, parts) for n, k in layers.items()):
        return x
    value = spread(frozenset({AXIS}), x.value.astype(jnp.float32))
    return dataclasses.replace(x, value=value)


def count_once(weight, parts: int):
    """Divides the probe's counts by the `parts` devices, which all count one replicated input."""
    if not isinstance(weight, BoundWeight) or weight.probe is None:
        return weight
    probe = weight.probe.activation
    if probe is None or probe.counts is None:
        return weight
    once = dataclasses.replace(probe, counts=probe.counts / parts)
    return dataclasses.replace(weight, probe=dataclasses.replace(weight.probe, activation=once))


def is_sharded(tree) -> bool:
    """Returns whether any array of `tree` varies over the axis `tensor`."""
    return AXIS in axes_of(tree)


def combine(aux: dict) -> dict:
    """Combines a layer's observations over the rows and heads of all devices, on every device.

    Shapes (see `ForwardOutput.aux`): finite () bool, counts () float32, amaxes (B,) float32, sums
    over tokens (E,).
    """

    def every(finite: jax.Array) -> jax.Array:
        axes = tuple(sorted(axes_of(finite)))
        return lax.pmin(finite.astype(jnp.int32), axes) > 0 if axes else finite

    def add(counts):
        axes = tuple(sorted(axes_of(counts)))
        return jax.tree.map(lambda x: lax.psum(x, axes), share(counts)) if axes else counts

    def largest(x: jax.Array) -> jax.Array:
        rows = tuple(name for name in BATCH_AXES if name in axes_of(x))
        bits = lax.bitcast_convert_type(x, jnp.uint32)  # ordered as amaxes are; keeps NaN
        bits = lax.pmax(bits, AXIS) if is_sharded(x) else bits
        bits = lax.all_gather(bits, rows, tiled=True, to="invarying") if rows else bits
        return lax.bitcast_convert_type(bits, jnp.float32)

    def amaxes(found: dict) -> dict:
        return jax.tree.map(largest, found)

    ways: dict[str, Callable] = {
        "finite": every,
        "kv_health": add,
        "kv_amax": amaxes,
        "expert_tokens": add,
        "expert_probability": add,
    }
    return {name: ways[name](x) for name, x in aux.items()}


def gather_stored(weight):
    """Gathers a layer's weight over the axis `fsdp`, from the shard that this device stores.

    The gradient of a master is summed over the devices and returned as this device's shard. A
    backward pass gathers the value only if it reads it.
    """

    def gather(x: jax.Array, to: str) -> jax.Array:
        if STORAGE not in axes_of(x):
            return x
        return lax.all_gather(x, STORAGE, axis=0, tiled=True, to=to)

    def value(x: jax.Array) -> jax.Array:
        return in_bits(lambda bits: gather(bits, "invarying"), x)

    if not isinstance(weight, BoundWeight) or weight.master is None:
        return weight
    return dataclasses.replace(
        weight, value=jax.tree.map(value, weight.value), master=gather(weight.master, "varying")
    )


def split_head(
    recipe: Recipe, parallel: Parallel, product: Callable, hidden: jax.Array, head
) -> jax.Array:
    """Computes ``product(hidden, head)``, each device its columns of the vocabulary.

    The shard_map is used for a replicated head too: it keeps the sharding of the head's stored
    gradient from reaching the logits.

    Args:
      recipe: numerics of the product.
      parallel: the devices.
      product: (M, D) times (D, n) -> (M, n) float32, rounding (M, D) to the compute dtype.
      hidden: (M, D); enters the shard_map as float32, for the sum of its gradient over devices.
      head: (D, V), an array or a BoundWeight.

    Returns:
      (M, V), all columns on every device of the axis.
    """
    if not parallel.uses_shard_map(recipe):
        return product(hidden, head)
    vocabulary = head.shape[1]
    rows = PartitionSpec(parallel.rows(len(hidden)))
    run = parallel.shard_map(
        lambda hidden, head: gather_or_slice(product(hidden, head), vocabulary),
        (rows, jax.tree.map(lambda _: head_spec(vocabulary, parallel.tensor), head)),
        rows,
    )
    return run(hidden.astype(jnp.float32), head)
