"""A page pool as reference counts: how many sequences and prompts read each page.

A page whose count is 0 is free; there is no separate free list. Page 0 is a scratch page for idle
rows; in a page table 0 means 'no page'.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def count_free(refs: jax.Array) -> jax.Array:
    """Returns the () int32 number of free pages."""
    return (refs == 0).sum(dtype=jnp.int32)


def first_true(chosen: jax.Array, count: int, otherwise: int) -> jax.Array:
    """Returns (count,) int32 indices of the first True of (N,) bool, filled up with `otherwise`."""
    place = jnp.where(chosen, jnp.cumsum(chosen) - 1, count)
    numbers = jnp.arange(chosen.shape[0], dtype=jnp.int32)
    return jnp.full((count,), otherwise, jnp.int32).at[place].set(numbers, mode="drop")


def allocate(refs: jax.Array, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Takes a free page for every True of `wanted`.

    Args:
      refs: (P,) int32 counts.
      wanted: bool of any shape, with at most as many True as there are free pages.

    Returns:
      (refs, pages): pages int32 shaped as `wanted`, the lowest free pages in order; 0 where False.
    """
    lowest = first_true(refs == 0, wanted.size, otherwise=0)
    order = jnp.cumsum(wanted.ravel()) - 1
    pages = jnp.where(wanted, lowest[order].reshape(wanted.shape), 0)
    return hold(refs, pages), pages


def hold(refs: jax.Array, pages: jax.Array) -> jax.Array:
    """Adds a reference to every page of `pages`; 0 stands for no page."""
    return refs.at[pages].add((pages != 0).astype(refs.dtype))


def release(refs: jax.Array, pages: jax.Array) -> jax.Array:
    """Drops a reference to every page of `pages`; 0 stands for no page."""
    return refs.at[pages].add(-(pages != 0).astype(refs.dtype))
