"""Tokens of a forward pass, and where each of them stands."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from fp8rl_jax.models.packing import Packed, Places


@flax.struct.dataclass
class Tokens:
    """Rows of tokens, right-padded.

    Attributes:
      ids: (B, T) int32.
      places: where tokens stand in their sequences; rows of several sequences have no cache.
      valid: (B, T) bool, False for padding: observations leave it out, and experts do not compute
        it.
      rope: result of `rope_tables`, which is to be an argument of the surrounding jit. When None,
        the forward pass makes the tables (convenient, but outside the zero-drift promise).
    """

    ids: jax.Array
    places: Places
    valid: jax.Array
    rope: tuple[jax.Array, jax.Array] | None = None

    @classmethod
    def of(
        cls,
        ids: jax.Array,
        rope: tuple[jax.Array, jax.Array] | None = None,
        *,
        positions: jax.Array | None = None,
        lengths: jax.Array | None = None,
    ) -> Tokens:
        """Returns tokens of one sequence a row.

        Args:
          ids, rope: see `Tokens`.
          positions: (B, T) int32; by default 0..T-1. A token's cache slot is its position; with a
            `KVCache` those of a row must differ.
          lengths: (B,) int32, real tokens of each row; by default all.
        """
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
        valid = jnp.ones(ids.shape, bool) if lengths is None else positions < lengths[:, None]
        return cls(ids, positions, valid, rope)

    @property
    def positions(self) -> jax.Array:
        """(B, T) int32, positions within a sequence."""
        return self.places.positions if isinstance(self.places, Packed) else self.places
