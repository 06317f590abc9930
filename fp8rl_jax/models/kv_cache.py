"""The KV cache: stored keys and values of every layer, slot == position."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from fp8rl_jax.models.config import ModelConfig
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

    def write(self, new: StoredKV, positions: jax.Array) -> StoredKV:
        """One layer's keys and values with `new` (B, T, ...) written at `positions` (B, T)."""
        rows = jnp.arange(positions.shape[0])[:, None]
        return jax.tree.map(lambda old, x: old.at[rows, positions].set(x), self, new)


@flax.struct.dataclass
class KVCache:
    """What every layer has stored, one entry per run of layers under one recipe.

    Attributes:
      runs: as `Recipe.layer_segments` cuts the layers; usually one.
    """

    runs: tuple[StoredKV, ...]

    @property
    def slots(self) -> int:
        """Tokens that a sequence may have."""
        return self.runs[0].k.shape[2]

    def repeat(self, count: int) -> KVCache:
        """Every sequence `count` times in a row, along the batch axis."""
        return jax.tree.map(lambda x: jnp.repeat(x, count, axis=1), self)

    def grow(self, slots: int) -> KVCache:
        """The cache with `slots` more empty slots."""
        return jax.tree.map(
            lambda x: jnp.pad(x, [(0, 0), (0, 0), (0, slots)] + [(0, 0)] * (x.ndim - 3)), self
        )


def init_cache(config: ModelConfig, recipe: Recipe, batch: int, slots: int) -> KVCache:
    """An empty cache for `batch` sequences of at most `slots` tokens."""

    def empty(layers: int) -> StoredKV:
        shape = (layers, batch, slots, config.num_key_value_heads, config.head_dim)
        dtype = E4M3 if recipe.kv_quantized else recipe.compute_dtype
        scale = jnp.zeros(shape[:-1], jnp.float32) if recipe.kv == "dynamic" else None
        return StoredKV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), scale, scale)

    runs = recipe.layer_segments(config.num_hidden_layers)
    return KVCache(tuple(empty(layers.stop - layers.start) for _, layers, _ in runs))
