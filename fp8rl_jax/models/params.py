"""Parameter trees: initialisation, quantisation for the forward pass, and their checksum.

::

    masters (float32, trained)
       |  quantize_params
       v
    weights (FP8 bytes for linear layers, bf16 tables, float32 norms and routers)
       |  for_decoding                       |  trainable_params: masters and weights paired
       v                                     v
    a CPU's decode loop                   the learner's forward pass

The trees have equal structures unless the recipe keeps the first or last layers in bf16, which cuts
`layers` into up to three runs.

A *site* is a quantised linear layer of a run, named by its path (``layers.o_proj``). Policy states
and probes are flat dictionaries of sites, stacked over the run's layers, and over experts where the
site has them: each expert has its own blocks, scales and states.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax import lax
from jax.experimental.layout import Format, Layout

from fp8rl_jax.kernels import keep, resolve, round_bf16
from fp8rl_jax.models.arrays import (
    EXPERTS,
    HEAD,
    LINEAR,
    SMALL,
    TABLE,
    array_in,
    array_of,
    leaf_shapes,
    role_of,
)
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.masters import frozen, is_adapted, merged
from fp8rl_jax.models.rope import rope_tables
from fp8rl_jax.models.stacks import (
    DENSE_STACK,
    STACK,
    LayerGroup,
    Path,
    is_whole,
    layer_groups,
    path_of,
)
from fp8rl_jax.models.transformer import Transformer
from fp8rl_jax.quant import (
    BoundWeight,
    QArray,
    Recipe,
    SiteProbe,
    SiteScaling,
    block_health,
    compute_value,
    get_recipe,
    init_probe,
    init_site,
    is_weight,
    quantize_weight,
    update_site,
)
from fp8rl_jax.quant.kv import LAYER_SCALES, of_sites, scales_in, with_scales
from fp8rl_jax.quant.operands import plain_value, stacked
from fp8rl_jax.quant.scaling import dynamic, never_saturates


@functools.partial(jax.jit, static_argnums=0)
def init_params(config: ModelConfig, key: jax.Array):
    """Makes random float32 parameters: {'embed_tokens', 'layers': {...}, 'norm', ['lm_head']}.

    Layer parameters are stacked along a first axis, one entry per layer of the stack ('layers',
    'dense_layers'), those of experts also along a second axis of length num_experts.
    """
    # Under jit, unused results are dropped: flax runs the model to find its parameters.
    tokens = jnp.zeros((1, 1), jnp.int32)
    cos, sin = (jnp.asarray(t)[tokens] for t in rope_tables(config, 1))
    module = Transformer(config, get_recipe("f32"))
    return module.init(key, tokens, None, tokens, cos, sin, tokens)["params"]


def _site(path) -> str:
    """Returns the name of a weight's site."""
    return ".".join(path_of(path)[:-1])


def _runs(params, recipe: Recipe) -> list[LayerGroup]:
    """Returns the runs of layers of `params` under a recipe."""
    names = (name for name in (DENSE_STACK, STACK) if name in params)
    return layer_groups({n: jax.tree.leaves(params[n])[0].shape[0] for n in names}, recipe)


def split_layers(params, recipe: Recipe):
    """Splits the stacks of layers in `params` into runs under one recipe (models/stacks.py).

    Returns the tree unchanged if all layers of each stack have the same recipe.
    """
    runs = _runs(params, recipe)
    if is_whole(runs):
        return params
    others = {name: value for name, value in params.items() if name not in (DENSE_STACK, STACK)}
    return others | {
        run.name: jax.tree.map(lambda x, run=run: x[run.span], params[run.stack]) for run in runs
    }


def _sites(params, recipe: Recipe, shapes: bool = False) -> dict[str, tuple[Recipe, Any]]:
    """Returns {'layers.o_proj': (recipe of that site, weight)} of every quantised layer; with
    `shapes` the weights' shapes, and merges no adapters."""

    def cut(params):
        return split_layers(merged(params, recipe), recipe)

    recipes = {run.name: run.recipe for run in _runs(frozen(params) or params, recipe)}
    leaves = jax.eval_shape(cut, params) if shapes else cut(params)
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(leaves):
        names = path_of(path)
        if role_of(names) == LINEAR:
            site = recipes[names[0]].for_module(names[-2])
            if site.quantized:
                found[_site(path)] = (site, leaf)
    return found


def init_scaling(params, recipe: Recipe | str) -> dict[str, SiteScaling]:
    """Returns initial states of the stateful policies: {site: SiteScaling}, or {} without any.

    Policies of weights have observed the initial weights once; otherwise the first rollout would
    run on weights quantised with a scale of 1.
    """
    recipe = get_recipe(recipe)
    made = {n: init_site(site, x.shape) for n, (site, x) in _sites(params, recipe, True).items()}
    states = {name: state for name, state in made.items() if state is not None}
    observing = [name for name, state in states.items() if state.weight is not None]
    sites = _sites(params, recipe) if observing else {}
    for name in observing:
        site, leaf = sites[name]
        amax = {"weight": quantize_weight(leaf, site, states[name])[1]}
        seen = update_site(site, SiteScaling(weight=states[name].weight), amax)
        states[name] = dataclasses.replace(states[name], weight=seen.weight)
    return states


def init_probes(params, recipe: Recipe | str, health: bool) -> dict[str, SiteProbe]:
    """Returns zeros whose gradients carry each site's observations: {site: SiteProbe}."""
    probes = {
        name: init_probe(site, leaf.shape, health)
        for name, (site, leaf) in _sites(params, get_recipe(recipe), shapes=True).items()
    }
    return {name: probe for name, probe in probes.items() if probe is not None}


def update_scaling(params, recipe: Recipe | str, scaling, seen) -> dict[str, SiteScaling]:
    """Returns the policies' states after an optimiser step.

    Args:
      params: masters that the step's forward pass used; their amax is observed here.
      recipe: numerics of the learner.
      scaling: the states that the step used.
      seen: gradients of the step's probes ({site: SiteProbe}).
    """
    sites = _sites(params, get_recipe(recipe))

    def advance(name: str, state: SiteScaling) -> SiteScaling:
        site, leaf = sites[name]
        amax = {
            operand: getattr(seen[name], operand).amax
            for operand in ("activation", "gradient")
            if getattr(state, operand) is not None
        }
        if state.weight is not None:
            amax["weight"] = quantize_weight(leaf, site, state)[1]
        return update_site(site, state, amax)

    states = {name: advance(name, state) for name, state in of_sites(scaling).items()}
    return with_scales(states, scales_in(scaling))


def quantize_params(params, recipe: Recipe | str, scaling: dict | None = None):
    """Quantises masters for the forward pass: QArrays for linear layers, compute dtype for tables.

    Where activations have a stateful policy, the weight is a BoundWeight that carries the frozen
    state. Attention also gets its scales of keys and values, if `scaling` has any. The result
    depends on values, recipe and states alone, so rollout and learner hold the same bytes. FP8
    weights of a frozen base (masters.py) that have no adapter and the recipe's format stay as they
    are.

    Args:
      params: float32 masters, `Adapted`, or a frozen base.
      recipe: numerics of the rollout or of the learner.
      scaling: states from `init_scaling`, for recipes with stateful policies.

    Raises:
      ValueError: the recipe is stateful and `scaling` lacks a site.
    """
    recipe = get_recipe(recipe)
    scaling = scaling or {}
    params = merged(params, recipe, keep_quantised=True)  # FP8 is made of weights in bf16, too
    sites = _sites(params, recipe, shapes=True)
    head = ("lm_head" if "lm_head" in params else "embed_tokens",)

    def convert(path, leaf):
        name = _site(path)
        if role_of(path_of(path)) == LINEAR and name in sites:
            state = scaling.get(name)
            if isinstance(leaf, QArray) and _has_format(leaf, sites[name][0]):
                return leaf
            q, _ = quantize_weight(plain_value(leaf), sites[name][0], state)
            if state is None or state.activation is None:
                return q
            return BoundWeight(q, scaling=SiteScaling(activation=state.activation))
        if role_of(path_of(path)) in SMALL:
            return leaf
        is_head = path_of(path) == head
        return compute_value(plain_value(leaf), recipe.for_head() if is_head else recipe)

    weights = jax.tree_util.tree_map_with_path(
        convert, split_layers(params, recipe), is_leaf=is_weight
    )
    scales = scales_in(scaling)
    for run in [] if scales is None else _runs(params, recipe):
        attention = weights[run.name]["self_attn"]
        for name, key in LAYER_SCALES.items():
            attention[key] = getattr(scales, name)[run.layers]
    return weights


def _has_format(weight: QArray, site: Recipe) -> bool:
    """Returns whether a weight has a site's type, blocks and kind of scales."""
    own = site.weight
    if own is None or own.policy != dynamic():
        return False
    return (weight.qvalue.dtype, weight.block_shape) == (jnp.dtype(own.dtype), own.block)


def for_decoding(weights, recipe: Recipe, *, stacks: bool):
    """Converts rollout weights to the form that a CPU's decode loop reads fastest, with equal bits.

    A decode loop reads every weight once a token, so FP8 is `widened` before the loop: to two bytes
    a weight, or four where a CPU multiplies in float32; exact products take FP8. With `stacks` the
    stacks of linear layers are stored as bits (`keep`): XLA:CPU would otherwise convert the full
    stack whenever an iteration slices one layer. A forward pass with taps takes no such bits.
    """

    def is_widened(x) -> bool:
        return isinstance(x, QArray) and recipe.kernels != "exact"

    def convert(path, leaf):
        if role_of(path_of(path)) != LINEAR:
            return leaf
        leaf = jax.tree.map(lambda x: x.widened() if is_widened(x) else x, leaf, is_leaf=is_widened)
        return keep(leaf) if stacks else leaf

    return jax.tree_util.tree_map_with_path(convert, weights, is_leaf=is_weight)


def kernel_formats(weights, shardings):
    """Adds to shardings of rollout weights the layouts that GPU kernels read without a copy.

    The kernels read the (in, out) matrices of linear layers and head column by column. A buffer
    stored row by row would be copied in every rollout.

    Args:
      weights: result of `quantize_params`, or its shapes.
      shardings: the sharding of each array.

    Returns:
      The shardings; those of the matrices above as `Format`s with a layout.
    """

    def by_column(x, sharding):
        axes = list(range(x.ndim))
        return Format(Layout(major_to_minor=(*axes[:-2], axes[-1], axes[-2])), sharding)

    def visit(path, weight, sharding):
        array = array_in(path)
        if array is None or not (array.role == LINEAR or array.hf == HEAD):
            return sharding
        if isinstance(weight, BoundWeight):
            return dataclasses.replace(sharding, value=visit(path, weight.value, sharding.value))
        return jax.tree.map(by_column, weight, sharding)

    return jax.tree_util.tree_map_with_path(visit, weights, shardings, is_leaf=is_weight)


def _value(weight):
    """Returns the array that the forward pass multiplies by."""
    return weight.value if isinstance(weight, BoundWeight) else weight


def trainable_params(
    params, weights, recipe: Recipe | str, scaling: dict | None = None, probes: dict | None = None
):
    """Pairs masters with the bytes that the forward pass reads.

    Differentiate with respect to `params`, or the adapters in it (and `probes`); `weights` must
    come from outside the differentiated function, or pass through `lax.stop_gradient`.

    Args:
      params: float32 masters, or `Adapted`.
      weights: result of `quantize_params` on `params`.
      recipe: numerics under which they were quantised.
      scaling: states of stateful policies, as in `quantize_params`.
      probes: result of `init_probes`; None observes nothing.
    """

    def pair(path: Path, weight):
        master = masters.get(path)
        if master is None:  # a scale of keys or values
            return weight
        if role_of(path) in SMALL:
            return master
        site = ".".join(path[:-1])
        state, probe = (tree.get(site) for tree in (scaling or {}, probes or {}))
        value = lax.stop_gradient(_value(weight))
        if as_bits and role_of(path) == LINEAR:
            value = keep(value)
        return BoundWeight(value, master, lax.stop_gradient(state), probe, adapters.get(path[:-1]))

    recipe = get_recipe(recipe)
    # Where no kernel reads the stacks: XLA:CPU would convert them whole, to slice a layer out.
    as_bits = resolve(recipe.kernels) == "reference"
    adapters: dict = {}
    if is_adapted(params):
        factors = params.factors()
        params = lax.stop_gradient(merged(params, recipe))
        for run in _runs(params, recipe):
            for path, arrays in factors.items():
                if path[0] == run.stack:
                    adapters[run.name, *path[1:]] = tuple(x[run.span] for x in arrays)
    masters = traverse_util.flatten_dict(split_layers(params, recipe))
    leaves = traverse_util.flatten_dict(weights)
    return traverse_util.unflatten_dict({path: pair(path, leaf) for path, leaf in leaves.items()})


def weight_health(params, weights, recipe: Recipe | str) -> dict[str, dict[str, jax.Array]]:
    """Returns `block_health` of every quantised weight: {site: {count: (L,) or (L, E) float32}}."""
    recipe = get_recipe(recipe)
    params = merged(params, recipe)
    values = {
        _site(path): _value(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(weights, is_leaf=is_weight)
        if role_of(path_of(path)) == LINEAR
    }
    health = {}
    for name, (site, master) in _sites(params, recipe).items():
        assert site.weight is not None
        saturable = not never_saturates(site.weight.policy)
        count = stacked(lambda x, q, s=saturable: block_health(x, q, s), master.ndim - 2)
        health[name] = count(round_bf16(master), values[name])
    return health


def checksum(tree) -> jax.Array:
    """Returns a 32-bit hash of all bytes of a tree, uint32, independent of sharding.

    Each leaf's words are mixed with their index (the finaliser of MurmurHash3 by Austin Appleby,
    public domain) and added, which is exact in any order; leaves are then chained. No leaf is
    reshaped: over a mesh each device reads its own part, and nothing is gathered.
    """
    return chained(array_checksums(tree))


def array_checksums(tree) -> list[jax.Array]:
    """Returns the sum of each array's mixed words, uint32, in the order of the tree's leaves."""
    return [_array_checksum(leaf) for leaf in jax.tree.leaves(tree)]


_MOST_LAYERS = 128  # of a stack whose checksum is one long sum


def _array_checksum(x: jax.Array) -> jax.Array:
    """Returns the sum of an array's mixed words, uint32."""

    def whole(x: jax.Array) -> jax.Array:
        return _mixed(_words(x)).sum(dtype=jnp.uint32)

    def by_layer(x: jax.Array) -> jax.Array:
        # XLA:CPU stores what it reduces: one layer instead of all. It slices bf16 and FP8 as wider
        # types, and stores the bits of a float32 array.
        words = x if x.dtype.itemsize == 4 else _words(x)
        size = math.prod(x.shape[1:])
        mixed = (_mixed(_words(layer), i * size) for i, layer in enumerate(words))
        return functools.reduce(operator.add, mixed).sum(dtype=jnp.uint32)

    stacked = x.ndim > 2 and 0 < len(x) <= _MOST_LAYERS
    return lax.platform_dependent(x, cpu=by_layer if stacked else whole, default=whole)


def _words(x: jax.Array) -> jax.Array:
    """Returns the bits of `x`, unsigned integers of its size."""
    bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    return lax.bitcast_convert_type(x, bits)


def _mixed(words: jax.Array, start: int = 0) -> jax.Array:
    """Returns the words of an array from the `start`-th on, mixed with their index."""
    index = jnp.full(words.shape, np.uint32((1 + start) % 2**32))  # row-major, from 1
    for axis in range(words.ndim):
        stride = np.uint32(math.prod(words.shape[axis + 1 :]) % 2**32)
        index += lax.broadcasted_iota(jnp.uint32, words.shape, axis) * stride
    return _mix(words.astype(jnp.uint32) ^ _mix(index))


def chained(sums: list) -> jax.Array:
    """Combines the sums of `array_checksums` into the `checksum` of their tree."""
    total = jnp.uint32(0)
    for one in sums:
        total = _mix(total * np.uint32(31) + one)
    return total


def _mix(h: jax.Array) -> jax.Array:
    h = (h ^ (h >> 16)) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * np.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


class ParameterCounts(NamedTuple):
    """Result of `parameter_counts`.

    Attributes:
      total: all parameters.
      active: parameters that one token uses: of the routed experts, only its k.
      tables: embedding and output head; counted once if they are tied.
    """

    total: int
    active: int
    tables: int


def parameter_counts(config: ModelConfig) -> ParameterCounts:
    """Counts a model's parameters; allocates nothing."""
    total = idle = tables = 0
    for path, shape in leaf_shapes(config).items():
        array = array_of(path)
        count = math.prod(shape)
        total += count
        if array.axes == EXPERTS:
            idle += count // config.num_experts * (config.num_experts - config.num_experts_per_tok)
        if array.role == TABLE:
            tables += count
    return ParameterCounts(total, total - idle, tables)
