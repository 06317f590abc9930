"""Exact tensor parallelism: every matrix is cut along its output features, and nothing else is.

An output column of a product does not depend on the other columns, so a device that holds some
columns of a weight computes their bits as a single device would. What must not happen is that a
contraction is cut and its parts are added over devices (the row-parallel layer of Megatron-LM,
Shoeybi et al., arXiv:1909.08053): the sum would run in another order. So inputs are gathered whole
before each product; under an FP8 recipe after their quantisation, one byte an element
(`quant.matmul` with `gather=`).

Where the mesh axis `tensor` is above 1, or GPU kernels multiply, `split_columns` runs the decoder
under `jax.shard_map` over all axes. Within, it is written out what a device holds:

* every device has its own rows of the batch, over `data`, `fsdp` and `expert`; weights that are
  trained are sharded over `fsdp` too and are gathered layer by layer.
* experts are those of the device's place on the axis `expert` (expert_parallel.py).
* q, k, v: columns of the projections, then attention by heads, if both kinds of heads divide by
  the axis; the KV cache is sharded by heads too. Else every device attends with all heads.
* gate, up, the gated product between them: columns.
* o and down: columns; their results are gathered, and the residual stream, norms and embedding are
  replicated.
* the output head: columns of the vocabulary; the logits are gathered, and the sum over the
  vocabulary runs on every device.

Left to the partitioner, the storage of a gradient (rows of down_proj over `tensor`) spreads
backwards to the activation it is made from and forwards again into the product of the forward pass,
whose blocks of 128 were then cut in two and added by an all-reduce: float32 drift of one ulp. With
shard_map over `tensor` alone and `data` left to the partitioner the bits are right, but XLA then
gathers all rows of the batch wherever it gathers columns.

A layer is computed whole, on every device, where a part would cut a block of the recipe
(`column_unit`) or a vector of 16; so any size of the axis is exact, and some do not pay.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from fp8rl_jax.kernels import EXP_LANES, as_bytes, from_bytes, resolve, sum_rows
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.stacks import layer_groups, layer_stacks
from fp8rl_jax.quant import Activation, BoundWeight, QArray, Recipe, is_weight
from fp8rl_jax.quant.recipe import Operand
from fp8rl_jax.quant.varying import share, spread
from fp8rl_jax.sharding import BATCH_AXES, stored_over

AXIS, EXPERT = "tensor", "expert"
_STORAGE = "fsdp"
_WHOLE = PartitionSpec()
# Places of the linear layers of a decoder layer in its parameters: those that may be cut,
_MLP = ("gate_proj", "up_proj", "down_proj")
_LINEAR = {
    *(("self_attn", name, "kernel") for name in ("q_proj", "k_proj", "v_proj")),
    *((name, "kernel") for name in ("o_proj", *_MLP)),
}
# and those that every device computes whole. Of experts and heads whole ones are stored.
_WHOLE_LINEAR = {
    *(("self_attn", name, "kernel") for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")),
    *(("shared_experts", name, "kernel") for name in _MLP),
}
_STACKS = {
    **{("self_attn", name, "kernel"): "heads" for name in ("k_b_proj", "v_b_proj")},
    **{("experts", name, "kernel"): "experts" for name in _MLP},
}


def size() -> int:
    """Devices on the axis `tensor` of the mesh that is set; 1 without one or inside a shard_map."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty or mesh.manual_axes else mesh.shape.get(AXIS, 1)


def _sees_all_rows() -> bool:
    """Whether several devices share what this code sees whole: not without a mesh, on one device,
    or inside a shard_map, where rows are a device's own already."""
    mesh = jax.sharding.get_abstract_mesh()
    return not (mesh.empty or mesh.size == 1 or mesh.manual_axes)


def uses_shard_map(recipe: Recipe) -> bool:
    """Whether `forward` writes out who computes what, under shard_map, on the mesh that is set.

    For sharded columns; and for GPU kernels, which XLA's partitioner cannot cut: left alone, every
    device would compute all rows.
    """
    return _sees_all_rows() and (size() > 1 or resolve(recipe.kernels) != "reference")


def in_shard_map() -> bool:
    """Whether a module runs on one of several devices, within `split_columns`."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def expert_devices(config: ModelConfig) -> int:
    """Devices of the mesh that is set that share the experts of a layer; 1 for a dense model."""
    mesh = jax.sharding.get_abstract_mesh()
    count = 1 if mesh.empty else mesh.shape.get(EXPERT, 1)
    return count if config.num_experts and config.num_experts % count == 0 else 1


def expert_spec(config: ModelConfig) -> PartitionSpec:
    """How the (E, ...) arrays of a layer's experts are sharded where they are read."""
    return PartitionSpec(EXPERT) if expert_devices(config) > 1 else _WHOLE


def own_rows_differ(x: jax.Array) -> bool:
    """Whether devices along `expert` have different rows, inside a shard_map.

    One that does not track what differs (`check_vma=False`) has rows of its own on every device.
    """
    tracked = EXPERT in _varying(lax.axis_index(EXPERT))
    return not tracked or EXPERT in _varying(x)


def _rows(count: int) -> tuple[str, ...] | None:
    """Mesh axes over which `count` rows are sharded; None if replicated."""
    shape = jax.sharding.get_abstract_mesh().shape
    axes = tuple(name for name in BATCH_AXES if name in shape)
    return axes if count % math.prod(shape[name] for name in axes) == 0 else None


# What may be cut.


def _unit(operand: Operand, blocks: tuple[int, ...]) -> int | None:
    """Least common multiple of an operand's blocks along one axis; None if it must be whole."""
    if operand.policy.stateful and operand.block != (-1, -1):
        return None  # its state has one entry a block
    if -1 in blocks and operand.policy.reads_amax:
        return None  # one scale from all of it
    return math.lcm(*(block for block in blocks if block != -1))


def column_unit(recipe: Recipe) -> int | None:
    """Output features that must stay together in a layer of `recipe`; None for all of them.

    128 for blocks of 128x128, 32 for MXFP8, 16 where a scale is fixed beforehand or nothing is
    quantised. Blocks of all three GEMMs count, so gradients are quantised as on one device.
    """
    units = [EXP_LANES]
    for name in ("weight", "gradient"):
        operand = recipe.operands.get(name)
        if operand is not None:
            unit = _unit(operand, operand.block)
            if unit is None:
                return None
            units.append(unit)
    return math.lcm(*units)


def gathers_quantised(recipe: Recipe, features: int) -> bool:
    """Whether a shard of `features` input features can be quantised without the others."""
    if recipe.activation is None:
        return True
    unit = _unit(recipe.activation, recipe.activation.block)
    return unit is not None and features % unit == 0


def _is_cut(recipe: Recipe, features: int, parts: int) -> bool:
    unit = column_unit(recipe)
    return parts > 1 and unit is not None and features % (parts * unit) == 0


def splits_heads(config: ModelConfig, parts: int) -> bool:
    """Whether attention is computed by heads."""
    counts = (config.num_attention_heads, config.num_key_value_heads)
    return parts > 1 and all(count % parts == 0 for count in counts)


def head_spec(vocabulary: int, parts: int) -> PartitionSpec:
    """How the (D, V) output head is cut; it is never quantised."""
    cut = parts > 1 and vocabulary % (parts * EXP_LANES) == 0
    return PartitionSpec(None, AXIS) if cut else _WHOLE


# What a device holds.


def _weight_spec(weight, cut: bool, storage: int):
    """PartitionSpecs of a stacked weight (L, in, out) in any of its forms."""

    def spec(x, columns: bool, rows: int):
        inputs = _STORAGE if rows > 1 and x.shape[1] % rows == 0 else None
        if not inputs and not columns:
            return _WHOLE
        return PartitionSpec(None, inputs, AXIS if columns else None)

    if isinstance(weight, BoundWeight):
        rows = storage if weight.master is not None else 1
        master = jax.tree.map(lambda x: spec(x, cut, rows), weight.master)
        whole = (jax.tree.map(lambda _: _WHOLE, x) for x in (weight.scaling, weight.probe))
        return BoundWeight(_weight_spec(weight.value, cut, rows), master, *whole)
    if isinstance(weight, QArray):
        one = weight.block_shape[-1] == -1  # one scale for all columns
        scale = spec(weight.scale, cut and not one, storage)
        return QArray(spec(weight.qvalue, cut, storage), scale, weight.block_shape)
    return spec(weight, cut, storage)


def _stack_spec(weight, logical: str, mesh, stored: bool):
    """PartitionSpecs of a stack of matrices (L, E, in, out) in any form: whole matrices.

    Experts stay over the axis `expert` where they are read, with the states and probes of their
    sites, (L, E, ...).
    """
    count, read = weight.shape[1], _WHOLE
    if logical == "experts" and count % mesh.shape[EXPERT] == 0:
        read = PartitionSpec(None, EXPERT)
    specs = jax.tree.map(lambda _: read, weight)
    if not stored:
        return specs
    kept = PartitionSpec(None, stored_over(logical, count, mesh))
    value, master = (jax.tree.map(lambda _: kept, x) for x in (weight.value, weight.master))
    return dataclasses.replace(specs, value=value, master=master)


def rollout_specs(weights):
    """PartitionSpec of every array of a sampler's weights in any form, on a mesh whose axis
    `tensor` is 1: experts, all (L, E, ...), over `expert`."""

    def spec(path, _):
        names = {str(getattr(entry, "key", "")) for entry in path}
        return PartitionSpec(None, EXPERT) if "experts" in names else _WHOLE

    return jax.tree_util.tree_map_with_path(spec, weights)


def weight_specs(params, config: ModelConfig, recipe: Recipe, mesh, stored: bool = False):
    """PartitionSpec of every array that `forward` and `head_logits` read.

    Args:
      params: a parameter tree in any form that `forward` takes, or its shapes; entries that are no
        linear layers and no head of their own are replicated.
      config, recipe, mesh: shapes, numerics, devices.
      stored: whether weights with a master are sharded as they are stored (`sharding.RULES`).
        Others are read at every decoded token: experts are sharded over `expert`, columns over
        `tensor`, nothing over `fsdp`.
    """
    parts, storage = mesh.shape[AXIS], mesh.shape[_STORAGE] if stored else 1
    runs = {run.name: run.recipe for run in layer_groups(layer_stacks(config), recipe)}

    def spec(path, weight):
        names = [str(getattr(entry, "key", "")) for entry in path]
        if names == ["lm_head"]:
            return jax.tree.map(lambda _: head_spec(config.vocab_size, parts), weight)
        place = tuple(names[1:]) if names[0] in runs else ()
        trained = isinstance(weight, BoundWeight) and weight.master is not None
        if place in _LINEAR:
            site = runs[names[0]].for_module(names[-2])
            cut = _is_cut(site, weight.shape[-1], parts)
            return _weight_spec(weight, cut, storage if trained else 1)
        if place in _WHOLE_LINEAR and trained:
            return _weight_spec(weight, False, storage)
        if place in _STACKS:
            return _stack_spec(weight, _STACKS[place], mesh, stored and trained)
        return jax.tree.map(lambda _: _WHOLE, weight)

    return jax.tree_util.tree_map_with_path(spec, params, is_leaf=is_weight)


def split_columns(apply: Callable, config: ModelConfig, recipe: Recipe, parts: int) -> Callable:
    """`apply` of a Transformer with tensor=parts, on the devices of a mesh (`uses_shard_map`).

    Its arguments and results are those of the whole arrays; see `models.transformer`.
    """

    def split(params, swaps, tokens, cache, kv_scales, *others):
        axes, mesh = _rows(tokens.shape[0]), jax.sharding.get_abstract_mesh()
        weights = weight_specs(params, config, recipe, mesh, stored=axes is not None)
        rows, heads = PartitionSpec(axes), AXIS if splits_heads(config, parts) else None
        by_layer = PartitionSpec(None, axes)  # (L, B, ...)
        # (L, B, S, Hkv, ...); the scales of a latent are (L, B, S).
        stored = PartitionSpec(None, axes, None, heads) if heads else by_layer
        swapped = jax.tree.map(lambda x: by_layer if x.ndim > 1 else _WHOLE, swaps)
        return jax.shard_map(
            apply,
            in_specs=(weights, swapped, rows, stored, _WHOLE, rows, rows, rows, rows),
            out_specs=(rows, stored, _WHOLE, by_layer),
        )(params, swaps, tokens, cache, kv_scales, *others)

    return split


def by_own_rows(
    run: Callable, *by_row: jax.Array, shared: tuple = (), spec: PartitionSpec = _WHOLE
) -> Any:
    """``run(*by_row, *shared)``, every device of a mesh with its own rows of the batch.

    For work that XLA must not cut. A batch that the devices cannot share equally is computed by all
    of them.

    Args:
      run: returns arrays (B, ...).
      by_row: (B, ...).
      shared: what every device holds, or by `spec` a part of: of all its arrays the first axis.
    """
    if not _sees_all_rows():
        return run(*by_row, *shared)
    rows = PartitionSpec(_rows(by_row[0].shape[0]))
    specs = (*(rows,) * len(by_row), *(spec,) * len(shared))
    return jax.shard_map(run, in_specs=specs, out_specs=rows)(*by_row, *shared)


def sum_over_batch(x: jax.Array) -> jax.Array:
    """Sum of float32 (B, ..., N) over all axes but the last, (N,): every device of a mesh adds its
    own rows, then they add up. The order of additions, and so the last bits, depend on the mesh."""

    def own(x: jax.Array) -> jax.Array:
        return sum_rows(x.reshape(-1, x.shape[-1]))

    axes = _rows(x.shape[0]) if _sees_all_rows() else None
    if axes is None:
        return own(x)
    total = jax.shard_map(
        lambda x: lax.psum(own(x), axes), in_specs=PartitionSpec(axes), out_specs=_WHOLE
    )
    return total(x)


# Within `split_columns`. Values that differ by device are typed as such by JAX (`varying`).


def gather_or_slice(x: jax.Array, features: int) -> jax.Array:
    """`x` with `features` columns: unchanged, gathered from all devices, or this device's shard."""
    if x.shape[-1] == features:
        return x
    if x.shape[-1] < features:
        return lax.all_gather(x, AXIS, axis=x.ndim - 1, tiled=True, to="invarying")
    x, index = share(x, lax.axis_index(AXIS))
    return lax.dynamic_slice_in_dim(x, index * features, features, x.ndim - 1)


def shared_input(x: Activation, recipe: Recipe, layers: dict[str, int], parts: int) -> Activation:
    """The input of several layers, so that its gradient is added once over layers and devices.

    Args:
      x: replicated, in the compute dtype.
      recipe: of the run; layers: {name: output features}; parts: devices on the axis.

    Returns:
      The same values as float32 (`SplitLinear` rounds them again), where all the layers are cut:
      each device has a part of the gradient's sum, and bf16 would round every one of them.
    """
    if parts == 1 or not all(_is_cut(recipe.for_module(n), k, parts) for n, k in layers.items()):
        return x
    value = spread(frozenset({AXIS}), x.value.astype(jnp.float32))[0]
    return dataclasses.replace(x, value=value)


def count_once(weight, parts: int):
    """A weight whose input is replicated: what they count of it adds up to one count."""
    if not isinstance(weight, BoundWeight) or weight.probe is None:
        return weight
    probe = weight.probe.activation
    if probe is None or probe.counts is None:
        return weight
    once = dataclasses.replace(probe, counts=probe.counts / parts)
    return dataclasses.replace(weight, probe=dataclasses.replace(weight.probe, activation=once))


def _varying(tree) -> frozenset:
    """Mesh axes over which arrays of `tree` differ."""
    axes = (jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(tree))
    return frozenset().union(*axes)


def is_sharded(tree) -> bool:
    """Whether any array of `tree` may be another on every device of the axis `tensor`."""
    return AXIS in _varying(tree)


def combine(aux: dict) -> dict:
    """A layer's observations of all rows and heads from those of each device, on every device.

    See `ForwardOutput.aux`: finite () bool, counts () float32, amaxes (B,) float32, sums over
    tokens (E,).
    """

    def every(finite: jax.Array) -> jax.Array:
        axes = tuple(_varying(finite))
        return lax.pmin(finite.astype(jnp.int32), axes) > 0 if axes else finite

    def add(counts):
        axes = tuple(_varying(counts))
        return jax.tree.map(lambda x: lax.psum(x, axes), *share(counts)) if axes else counts

    def largest(x: jax.Array) -> jax.Array:
        rows = tuple(name for name in BATCH_AXES if name in _varying(x))
        bits = lax.bitcast_convert_type(x, jnp.uint32)  # ordered as the values, and NaN stays
        bits = lax.pmax(bits, AXIS) if is_sharded(x) else bits
        bits = lax.all_gather(bits, rows, tiled=True, to="invarying") if rows else bits
        return lax.bitcast_convert_type(bits, jnp.float32)

    def amaxes(found: dict) -> dict:
        return jax.tree.map(largest, found)

    ways: dict[str, Callable] = {
        "finite": every, "kv_health": add, "kv_amax": amaxes, "expert_tokens": add,
        "expert_probability": add,
    }  # fmt: skip
    return {name: ways[name](x) for name, x in aux.items()}


def gather_stored(weight):
    """A layer's weight with all its input features, heads, or experts of this device's place on
    the axis `expert`, from what is stored here.

    The gradient of a master is summed over the devices and comes back as the part. Its value is
    gathered only for backward passes that read it.
    """

    def gather(x: jax.Array, to: str) -> jax.Array:
        if _STORAGE not in _varying(x):
            return x
        return lax.all_gather(x, _STORAGE, axis=0, tiled=True, to=to)

    def value(x: jax.Array) -> jax.Array:
        return from_bytes(gather(as_bytes(x), "invarying"), x.dtype)

    if not isinstance(weight, BoundWeight) or weight.master is None:
        return weight
    return dataclasses.replace(
        weight, value=jax.tree.map(value, weight.value), master=gather(weight.master, "varying")
    )


def split_head(recipe: Recipe, product: Callable, hidden: jax.Array, head) -> jax.Array:
    """``product(hidden, head)``, each device computing its columns of the vocabulary.

    Also where the head stays whole: the boundary of the shard_map keeps the storage of the head's
    gradient from spreading to the logits.

    Args:
      recipe: of the product.
      product: (M, D) times (D, n) -> (M, n) float32, rounding (M, D) to the compute dtype.
      hidden: (M, D); goes in as float32, for the sum of its gradient over devices.
      head: (D, V), an array or a BoundWeight.

    Returns:
      (M, V), all columns on every device of the axis.
    """
    if not uses_shard_map(recipe):
        return product(hidden, head)
    vocabulary, parts = head.shape[1], size()
    spec, rows = head_spec(vocabulary, parts), PartitionSpec(_rows(hidden.shape[0]))
    return jax.shard_map(
        lambda hidden, head: gather_or_slice(product(hidden, head), vocabulary),
        in_specs=(rows, jax.tree.map(lambda _: spec, head)),
        out_specs=rows,
    )(hidden.astype(jnp.float32), head)
