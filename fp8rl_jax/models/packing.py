"""Rows of several sequences: where their tokens are, and how attention reads them.

Every sequence begins at a multiple of PAGE slots, so a row is cut into pages of one sequence each,
as a `PagedCache` is. Attention takes each page of queries for a sequence of its own, whose table
lists the pages of keys from the first of its sequence on. Chunks of keys are then counted from the
sequence's start, so that its results have the bits of a row of its own, and no query reads another
sequence, whatever it holds. Gradients promise no bits: they run over whole rows, with the slots
that each query sees.

A sequence may share the whole pages of its prompt with an earlier one of its row. It then begins
after them, and its tables list the other's pages first: keys have the bits that they would have in
pages of its own, because a token's keys depend on the tokens up to it alone.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from fp8rl_jax.models.kv_cache import PAGE, LayerCache, Stored, pages_of


@flax.struct.dataclass
class Packed:
    """Places of the tokens of rows that hold several sequences.

    Attributes:
      positions: (B, T) int32, positions within a sequence; for padding the number of tokens
        that the sequence of its page shares, or 0.
      starts: (B, T) int32, slot of the first own token of a token's sequence; its own for padding.
      table: (B, T / PAGE, N) int32, the pages of a row that the queries of a page may read.
      shared: (B, T, 2) int32, the slots that a token's sequence shares, from the one to before the
        other, or None if no sequence does; twice a sequence's first slot if it shares none.
    """

    positions: jax.Array
    starts: jax.Array
    table: jax.Array
    shared: jax.Array | None = None

    @property
    def table_of_pages(self) -> jax.Array:
        """(B * T / PAGE, N) int32, `table` with pages counted over all rows."""
        rows, pages, width = self.table.shape
        table = self.table + pages * jnp.arange(rows, dtype=jnp.int32)[:, None, None]
        return table.reshape(rows * pages, width)


Places = jax.Array | Packed  # (B, T) int32, the position of each token, which is also its slot


def packed(starts: jax.Array, longest: int, shared: jax.Array | None = None) -> Packed:
    """Returns the places of tokens.

    Args:
      starts: (B, T) int32, slot of the first own token of each token's sequence, a multiple of
        PAGE; T for padding, which follows a sequence's tokens.
      longest: most tokens of a sequence.
      shared: (B, T / PAGE, 2) int32, for each page the first of the pages that its sequence
        shares, and how many: its sequence's first page and 0 if none. None if no sequence does.
    """
    slots = starts.shape[1]
    slot = jnp.arange(slots, dtype=jnp.int32)
    starts = jnp.minimum(starts, slot)
    pages = slots // PAGE
    first = starts[:, ::PAGE, None] // PAGE  # a page begins with a token, or is empty
    more = jnp.arange(min(pages_of(longest), pages), dtype=jnp.int32)
    if shared is None:
        return Packed(slot - starts, starts, jnp.minimum(first + more, pages - 1))
    begin = shared[..., :1]
    count = shared[..., 1:]
    table = jnp.where(more < count, begin + more, first + more - count)
    of_tokens = PAGE * jnp.repeat(jnp.concatenate([begin, begin + count], 2), PAGE, axis=1)
    positions = slot - starts + of_tokens[..., 1] - of_tokens[..., 0]
    return Packed(positions, starts, jnp.minimum(table, pages - 1), of_tokens)


def as_sequences(queries, stored: Stored, places: Places):
    """Returns what attention takes for sequences without a cache.

    Args:
      queries: tree of arrays (B, T, ...), or ().
      stored: their keys and values, or latents.
      places: of the tokens.

    Returns:
      (`queries`, their keys and values as a cache, the queries' positions).
    """
    if not isinstance(places, Packed):
        return queries, LayerCache(stored), places
    queries, stored, positions = jax.tree.map(  # (B, T, ...) by pages; a scalar as it is
        lambda x: x.reshape(-1, PAGE, *x.shape[2:]) if x.ndim else x,
        (queries, stored, places.positions),
    )
    return queries, LayerCache(stored, table=places.table_of_pages), positions


def seen_slots(
    places: Places, window: jax.Array | None = None
) -> tuple[jax.Array, dict[str, jax.Array | None]]:
    """Returns the last slot of its row that each token sees, (B, T) int32, and the keywords of
    `kernels.attention_vjp` for those before it that it does not see. `window`: () int32, the most
    tokens that a query sees, or None."""
    if not isinstance(places, Packed):
        return places, {"oldest": None if window is None else places - window + 1}
    begin = end = places.starts
    if places.shared is not None:
        begin, end = jnp.moveaxis(places.shared, 2, 0)
    before = end - begin
    last = places.starts + places.positions - before
    oldest = begin
    if window is not None:
        least = places.positions - window + 1
        own = places.starts + least - before
        oldest = jnp.where(least < before, begin + jnp.maximum(least, 0), own)
    gap = {} if places.shared is None else {"gap": jnp.stack([end, places.starts], 2)}
    return last, {"oldest": oldest, **gap}
