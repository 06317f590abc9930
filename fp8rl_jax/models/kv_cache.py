"""The KV cache: stored keys and values of every layer, slot == position."""

from __future__ import annotations

from typing import TypeVar

import flax.struct
import jax
import jax.numpy as jnp

from fp8rl_jax.kernels import as_bytes, from_bytes
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.stacks import layer_runs, layer_stacks
from fp8rl_jax.quant import Recipe
from fp8rl_jax.quant.formats import E4M3


@flax.struct.dataclass
class StoredKV:
    """Keys and values as attention reads them, of one layer or stacked (a leading L axis).

    Attributes:
      k, v: (L, B, S, Hkv, Dh) E4M3 under an FP8 recipe, else the compute dtype.
      k_scale, v_scale: (L, B, S, Hkv) float32 with one scale per (token, kv head); None when k and
        v are not quantised, or when their scales are calibrated (arguments of `forward`).
    """

    k: jax.Array
    v: jax.Array
    k_scale: jax.Array | None
    v_scale: jax.Array | None


@flax.struct.dataclass
class StoredLatent:
    """What multi-head latent attention reads, of one layer or stacked (a leading L axis).

    Attributes:
      latent: (L, B, S, R) E4M3 under an FP8 recipe, else the compute dtype; keys and values of
        all heads are linear in it.
      scale: (L, B, S) float32 with one scale per token; None when latent is not quantised.
      rope: (L, B, S, Dr) in the compute dtype, the rotated features of the key, of all heads.
    """

    latent: jax.Array
    scale: jax.Array | None
    rope: jax.Array


Stored = TypeVar("Stored", StoredKV, StoredLatent)


def write(stored: Stored, new: Stored, positions: jax.Array) -> Stored:
    """One layer's cache with `new` (B, T, ...) written at `positions` (B, T)."""
    rows = jnp.arange(positions.shape[0])[:, None]

    def put(old: jax.Array, x: jax.Array) -> jax.Array:
        return from_bytes(as_bytes(old).at[rows, positions].set(as_bytes(x)), old.dtype)

    return jax.tree.map(put, stored, new)


@flax.struct.dataclass
class KVCache:
    """What every layer has stored, one entry per run of layers under one recipe.

    Attributes:
      runs: as `layer_runs` cuts the layers; usually one.
    """

    runs: tuple[StoredKV | StoredLatent, ...]

    @property
    def slots(self) -> int:
        """Tokens that a sequence may have."""
        return jax.tree.leaves(self.runs[0])[0].shape[2]

    def repeat(self, count: int) -> KVCache:
        """Every sequence `count` times in a row, along the batch axis."""
        return jax.tree.map(lambda x: jnp.repeat(x, count, axis=1), self)

    def grow(self, slots: int) -> KVCache:
        """The cache with `slots` more empty slots."""

        def pad(x: jax.Array) -> jax.Array:
            widths = [(0, 0), (0, 0), (0, slots)] + [(0, 0)] * (x.ndim - 3)
            return from_bytes(jnp.pad(as_bytes(x), widths), x.dtype)

        return jax.tree.map(pad, self)


def init_cache(config: ModelConfig, recipe: Recipe, batch: int, slots: int) -> KVCache:
    """An empty cache for `batch` sequences of at most `slots` tokens."""

    dtype = E4M3 if recipe.kv_quantized else recipe.compute_dtype

    def empty(layers: int) -> StoredKV | StoredLatent:
        shape: tuple[int, ...] = (layers, batch, slots)
        if config.latent:
            latent = jnp.zeros((*shape, config.kv_lora_rank), dtype)
            scale = jnp.zeros(shape, jnp.float32) if recipe.kv_quantized else None
            rope = jnp.zeros((*shape, config.qk_rope_head_dim), recipe.compute_dtype)
            return StoredLatent(latent, scale, rope)
        shape = (*shape, config.num_key_value_heads, config.head_dim)
        scale = jnp.zeros(shape[:-1], jnp.float32) if recipe.kv == "dynamic" else None
        return StoredKV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), scale, scale)

    runs = layer_runs(layer_stacks(config), recipe)
    return KVCache(tuple(empty(run.span.stop - run.span.start) for run in runs))
