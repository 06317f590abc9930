"""The KV cache: stored keys and values of every layer, slot == position.

Two forms. `KVCache` has a row of slots for every sequence. `PagedCache` has one pool of pages of
64 slots for all sequences and layers; a table lists each sequence's pages, so that sequences share
the pages of a common prompt, and a finished sequence frees its own. Attention over either form
has one definition and equal bits (tests/rollout/test_paged_cache.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8rl_jax.kernels import KV_CHUNK, as_bytes, resolve
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.parallel.mesh import ONE_DEVICE, Parallel
from fp8rl_jax.models.stacks import layer_groups, layer_stacks
from fp8rl_jax.quant import Recipe
from fp8rl_jax.quant.recipe import E4M3


@flax.struct.dataclass
class StoredKV:
    """Keys and values as attention reads them, of one layer or stacked (a leading L axis).

    A cache holds the bits of E4M3 and bf16, as uint8 and uint16 (`as_bytes`).

    Attributes:
      k, v: (L, B, S, Hkv, Dh), each in `Recipe.stored_dtype`, else the compute dtype.
      k_scale, v_scale: (L, B, S, Hkv) float32 with one scale per (token, kv head); None when k or v
        is not quantised, or one scale of all tokens is among the weights.
      keys_by_feature: whether k is (L, B, Hkv, Dh, S) instead, the layout of products in jnp.
    """

    k: jax.Array
    v: jax.Array
    k_scale: jax.Array | None
    v_scale: jax.Array | None
    keys_by_feature: bool = flax.struct.field(pytree_node=False, default=False)


@flax.struct.dataclass
class StoredLatent:
    """Latents and rotated keys of latent attention, of one layer or stacked (a leading L axis).

    Attributes:
      latent: (L, B, S, R) in the stored dtype of k, else the compute dtype; keys and values of
        all heads are linear in it.
      scale: (L, B, S) float32 with one scale per token; None when latent is not quantised.
      rope: (L, B, S, Dr) in the compute dtype, the rotated part of the key, shared by all heads.
    """

    latent: jax.Array
    scale: jax.Array | None
    rope: jax.Array


Stored = StoredKV | StoredLatent
_BITS = {jnp.dtype(E4M3): jnp.uint8, jnp.dtype(jnp.bfloat16): jnp.uint16}
_NUMBERS = {jnp.dtype(bits): number for number, bits in _BITS.items()}
_Count = TypeVar("_Count", int, jax.Array, np.ndarray)
PAGE = KV_CHUNK  # slots of a page; attention reads one page at a time


def pages_of(tokens: _Count) -> _Count:
    """Returns how many pages `tokens` tokens (a number or an array) take."""
    return -(-tokens // PAGE)


def least_pages(tokens: int) -> int:
    """Returns the smallest pool that can decode one sequence of `tokens` tokens: its pages, one for
    the last page of a prompt shared with other samples, and the reserved page 0."""
    return pages_of(tokens) + 2


@flax.struct.dataclass
class LayerCache:
    """The KV cache of one layer within the arrays of all layers, or alone: sequences themselves.

    Attributes:
      stored: arrays (L, B, S, ...) of all layers, or (L * P, PAGE, ...) with `table`; or
        (B, S, ...) of sequences themselves. With `keys_by_feature` the slots of k are its last
        axis: (L, B, Hkv, Dh, S) or (L * P, Hkv, Dh, PAGE).
      layer: () int32, index of this layer in the arrays, or None.
      table: (L, B, N) int32, the pages of each sequence in the order of its slots; (B, N)
        without `layer`; or None.
    """

    stored: Stored
    layer: jax.Array | None = None
    table: jax.Array | None = None

    def write(self, new: Stored, positions: jax.Array) -> LayerCache:
        """Returns the cache with `new` (B, T, ...) written at `positions` (B, T)."""
        assert self.layer is not None
        if self.table is not None:
            page = jnp.take_along_axis(self._table_of_layer(), positions // PAGE, axis=1)

            def put(old: jax.Array, slots_last: bool, x: jax.Array) -> jax.Array:
                between = (slice(None),) * 2 * slots_last  # heads and features
                return old.at[(page, *between, positions % PAGE)].set(as_bytes(x))

        else:
            place = jnp.stack([jnp.broadcast_to(self.layer, positions.shape), positions], axis=-1)

            def put(old: jax.Array, slots_last: bool, x: jax.Array) -> jax.Array:
                # The batch is a batching dimension, so on a mesh each device writes its own rows.
                # With batch indices XLA would gather the rows of all devices.
                slots = old.ndim - 1 if slots_last else 2
                dimensions = lax.ScatterDimensionNumbers(
                    update_window_dims=tuple(range(2, x.ndim)),
                    inserted_window_dims=(0, slots),
                    scatter_dims_to_operand_dims=(0, slots),
                    operand_batching_dims=(1,),
                    scatter_indices_batching_dims=(0,),
                )
                # Said to be unique, writes need no sorting under --xla_gpu_deterministic_ops.
                return lax.scatter(old, place, as_bytes(x), dimensions, unique_indices=True)

        return dataclasses.replace(self, stored=_by_array(put, self.stored, new))

    def _table_of_layer(self) -> jax.Array:
        assert self.layer is not None and self.table is not None
        return lax.dynamic_index_in_dim(self.table, self.layer, keepdims=False)

    def as_read(self, implementation: str) -> LayerCache:
        """Returns the cache as attention by `implementation` reads it: arrays of FP8 and bf16, not
        of bits. A layer is read in the arrays of all by its index, by kernels in (L * B, S, ...) or
        pages, elsewhere in (L, B, S, ...); pages have the layer's own table there."""
        numbers = functools.partial(jax.tree.map, _numbers)
        if self.layer is None:
            return dataclasses.replace(self, stored=numbers(self.stored))
        if resolve(implementation) != "reference":
            return dataclasses.replace(self, stored=numbers(self.merged))
        if self.table is not None:
            return LayerCache(numbers(self.stored), table=self._table_of_layer())
        return dataclasses.replace(self, stored=numbers(self.stored))

    @property
    def merged(self) -> Stored:
        """The arrays of all layers, with one axis for layers and sequences; or the pages."""
        if self.table is not None:
            return self.stored
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), self.stored)

    def with_merged(self, merged: Stored) -> LayerCache:
        """Returns the cache with the arrays `merged`: the inverse of `merged`."""
        stored = jax.tree.map(lambda x, like: x.reshape(like.shape), merged, self.stored)
        return dataclasses.replace(self, stored=stored)


def _numbers(x: jax.Array) -> jax.Array:
    return x.view(_NUMBERS.get(x.dtype, x.dtype))


def _by_array(function: Callable, stored: Stored, *others: Stored) -> Stored:
    """Applies ``function(x, slots_last, *ys)`` to every array x of `stored`, with ys of `others`.

    Slots are the last axis of k with `keys_by_feature`, else the axis after (L, B), or after pages.
    """
    arrays, tree = jax.tree.flatten(stored)
    keys = stored.k if isinstance(stored, StoredKV) and stored.keys_by_feature else None
    beside = (jax.tree.leaves(other) for other in others)
    found = [function(x, x is keys, *ys) for x, *ys in zip(arrays, *beside, strict=True)]
    return jax.tree.unflatten(tree, found)


@flax.struct.dataclass
class KVCache:
    """Keys and values of all layers, with a row of slots for every sequence.

    Attributes:
      runs: one entry per run of layers (`layer_groups`); usually one.
    """

    runs: tuple[Stored, ...]

    @property
    def slots(self) -> int:
        """Tokens that a sequence may have."""
        stored = self.runs[0]
        return (stored.v if isinstance(stored, StoredKV) else stored.latent).shape[2]

    def repeat(self, count: int) -> KVCache:
        """Repeats every sequence `count` times in a row, along the batch axis."""
        return jax.tree.map(lambda x: jnp.repeat(x, count, axis=1), self)

    def grow(self, slots: int) -> KVCache:
        """Returns the cache with `slots` more empty slots."""

        def pad(x: jax.Array, slots_last: bool) -> jax.Array:
            grown = x.ndim - 1 if slots_last else 2
            return jnp.pad(x, [(0, slots if axis == grown else 0) for axis in range(x.ndim)])

        return KVCache(tuple(_by_array(pad, stored) for stored in self.runs))


@flax.struct.dataclass
class PagedCache:
    """A page pool shared by all sequences, and each sequence's page table.

    Attributes:
      runs: as in `KVCache`, but arrays (L * P, PAGE, ...): page p of layer l at l * P + p.
      table: (B, N) int32, pages of each sequence in the order of its slots.
      pages: P, the pages of one layer.
    """

    runs: tuple[Stored, ...]
    table: jax.Array
    pages: int = flax.struct.field(pytree_node=False)

    @property
    def slots(self) -> int:
        """Tokens that a sequence may have."""
        return self.table.shape[1] * PAGE


# A scan over layers carries the cache of all layers, so that a layer writes into it in place. As a
# scanned input and output it would be copied twice per token.


def run_cache(cache: KVCache | PagedCache | None, run: int, layers: int) -> LayerCache | None:
    """Returns the cache of a run of layers, for a scan to carry; each layer sets its index."""
    if cache is None:
        return None
    table = None
    if isinstance(cache, PagedCache):  # made once, not in every layer
        first = cache.pages * jnp.arange(layers, dtype=cache.table.dtype)
        table = first[:, None, None] + cache.table
    return LayerCache(cache.runs[run], table=table)


def _empty(
    config: ModelConfig, recipe: Recipe, parallel: Parallel, shape: tuple[int, ...]
) -> Stored:
    """Returns zero-filled arrays whose leading axes are `shape` (..., slots)."""

    def zeros(dtype, *features: int) -> jax.Array:
        return jnp.zeros((*shape, *features), _BITS.get(dtype, dtype))

    k_dtype, v_dtype = (recipe.stored_dtype(name) or recipe.compute_dtype for name in "kv")

    if config.latent:
        scale = zeros(jnp.float32) if recipe.kv_quantized else None
        rope = zeros(recipe.compute_dtype, config.qk_rope_head_dim)
        return StoredLatent(zeros(k_dtype, config.kv_lora_rank), scale, rope)
    heads = config.num_key_value_heads
    k_scale, v_scale = (
        zeros(jnp.float32, heads)
        if recipe.kv == "dynamic" and recipe.stored_dtype(name) is not None
        else None
        for name in "kv"
    )
    v = zeros(v_dtype, heads, config.head_dim)
    if resolve(recipe.kernels) != "reference" or parallel.tensor > 1:
        return StoredKV(zeros(k_dtype, heads, config.head_dim), v, k_scale, v_scale)
    *first, slots = shape
    k = jnp.zeros((*first, heads, config.head_dim, slots), _BITS.get(k_dtype, k_dtype))
    return StoredKV(k, v, k_scale, v_scale, keys_by_feature=True)


def _layers(config: ModelConfig, recipe: Recipe) -> list[int]:
    """Returns the number of layers of each run."""
    runs = layer_groups(layer_stacks(config), recipe)
    return [run.span.stop - run.span.start for run in runs]


def init_cache(
    config: ModelConfig, recipe: Recipe, batch: int, slots: int, parallel: Parallel = ONE_DEVICE
) -> KVCache:
    """Makes an empty cache for `batch` sequences of at most `slots` tokens, for `forward` with the
    same `parallel`."""
    shapes = ((layers, batch, slots) for layers in _layers(config, recipe))
    return KVCache(tuple(_empty(config, recipe, parallel, shape) for shape in shapes))


def init_paged_cache(
    config: ModelConfig,
    recipe: Recipe,
    pages: int,
    table: jax.Array,
    parallel: Parallel = ONE_DEVICE,
) -> PagedCache:
    """Makes an empty pool of `pages` pages per layer, read through `table` (B, N) int32."""
    shapes = ((layers * pages, PAGE) for layers in _layers(config, recipe))
    return PagedCache(
        tuple(_empty(config, recipe, parallel, shape) for shape in shapes), table, pages
    )
