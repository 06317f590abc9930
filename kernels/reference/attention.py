"""Attention with a fixed order of summation, in plain jnp: the definition and the oracle.

Keys are cut into chunks of 64 cache slots; the maximum runs over everything (exact in any order),
the sums run chunk by chunk in ascending order, and a masked chunk adds exactly zero. So a longer
cache, or more queries at a time, changes nothing.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8rl_jax.kernels.arrays import K_BLOCK, KV_CHUNK, guard, pad_to
from fp8rl_jax.kernels.reference.bits import as_bytes, from_bytes
from fp8rl_jax.kernels.reference.e4m3 import widened
from fp8rl_jax.kernels.reference.products import FLOAT32_SIZE, small_product
from fp8rl_jax.kernels.reference.reductions import max_last, sum_last

# Fewer queries of a kv head take XLA to matrix-vector code, whose order of summation differs; more
# would be zeros that decoding pays for.
_MIN_QUERIES = 2
_UNROLL_KV = 4  # chunks of keys at once, if there are; their scores are products of FLOAT32_SIZE
_FEW_QUERIES = 256  # rows at most (of a kv head), for the memory that their scores take


def visible(positions: jax.Array, slots: jax.Array, groups: int) -> jax.Array:
    """(B, T) query positions and (S,) cache slots -> (B, 1, T * groups, S) mask."""
    mask = slots[None, None, :] <= positions[:, :, None]
    return jnp.repeat(mask, groups, axis=1)[:, None]


def masked(score: jax.Array, mask: jax.Array) -> jax.Array:
    """Scores, and at most -1e30 where the mask is False.

    As a minimum: JAX would take the constant of a `where` out of a scan, and write it out.
    """
    return jnp.where(mask, score, jnp.minimum(score, jnp.float32(-1e30)))


def dequantized(x: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Queries, keys or values (..., Dh) in float32, times their scales, () or (...)."""
    x = widened(x, jnp.float32)
    if scale is None:
        return x
    return x * (scale[..., None] if scale.ndim else scale)


def _by_head(x: jax.Array | None, chunks: int) -> jax.Array | None:
    """(B, S, Hkv, ...) -> (B, Hkv, a multiple of so many chunks of S, ...); one number, or none, as
    it is."""
    if x is None or not x.ndim:
        return x
    return jnp.moveaxis(pad_to(x, 1, chunks * KV_CHUNK), 1, 2)


def _read_page(
    x: jax.Array,
    table: jax.Array,
    last: jax.Array,
    chunk: int | jax.Array,
    by_feature: bool = False,
) -> jax.Array:
    """A chunk of slots (B, Hkv, KV_CHUNK, ...) out of pages x (P, KV_CHUNK, Hkv, ...); with
    `by_feature` (B, Hkv, Dh, KV_CHUNK) out of (P, Hkv, Dh, KV_CHUNK).

    Zeros behind each sequence's last position (B,): a page may hold what its former owner left,
    and 0 * NaN is NaN. A table entry of no visible slot is not read, so it may be anything.
    """
    page = lax.dynamic_index_in_dim(table, chunk, 1, keepdims=False)
    page = jnp.where(chunk * KV_CHUNK <= last, page, table[:, 0])
    slot = chunk * KV_CHUNK + jnp.arange(KV_CHUNK)
    there = (slot[None, :] <= last[:, None])[:, None]
    part = x.at[page].get(mode="clip")
    if by_feature:
        return jnp.where(there[:, :, None], part, 0)
    part = jnp.moveaxis(part, 1, 2)
    return jnp.where(there[..., None] if part.ndim == 4 else there, part, 0)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    *,
    scale: float,
    q_scale: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    q_rope: jax.Array | None = None,
    k_rope: jax.Array | None = None,
    table: jax.Array | None = None,
    keys_by_feature: bool = False,
) -> jax.Array:
    """Causal grouped-query attention whose bits depend on neither batch, cache nor query count.

    Cache slot j holds the key of position j; a query at position p sees slots 0..p. The scales of
    quantised queries and keys multiply the score, those of values multiply the probability
    ("folded"), so that the stored bytes enter the products themselves.

    Args:
      q: (B, T, H, Dh) E4M3, bf16 or float32, after QK-norm and RoPE.
      k, v: (B, S, Hkv, Dh) and (B, S, Hkv, Dv), E4M3, bf16 or float32; H is a multiple of Hkv.
      positions: (B, T) int32, position of each query.
      scale: softmax scale, usually 1/sqrt(Dh).
      q_scale: (B, T, H) float32 dequantisation scales, () for one of them all, or None for an
        unquantised q.
      k_scale, v_scale: likewise (B, S, Hkv), () or None.
      q_rope, k_rope: (B, T, H, Dr) and (B, S, Hkv, Dr), bf16 or float32: further features of
        queries and keys, never quantised (multi-head latent attention); None for none.
      table: (B, N) int32, for keys and values that lie in pages of 64 slots: k (P, 64, Hkv, Dh),
        and likewise what belongs to slots; slot j of sequence b is in page ``table[b, j // 64]``.
        None for a cache of (B, S). Entries behind a sequence's position are never read.
      keys_by_feature: k is (B, Hkv, Dh, S), or (P, Hkv, Dh, 64) with a table: as products read it,
        where decoding would turn all keys around for every token.

    Returns:
      (B, T, H, Dv) float32.
    """
    batch, queries, heads, _ = q.shape
    kv_heads, slots = v.shape[2], v.shape[1]
    groups = heads // kv_heads
    rows = queries * groups

    def by_kv_head(x: jax.Array) -> jax.Array:
        """(B, T, H, n) -> (B, Hkv, T * groups, n), at least 2 rows."""
        x = widened(x, jnp.float32).reshape(batch, queries, kv_heads, groups, -1)
        x = x.transpose(0, 2, 1, 3, 4).reshape(batch, kv_heads, rows, -1)
        return jnp.pad(x, ((0, 0), (0, 0), (0, max(_MIN_QUERIES - rows, 0)), (0, 0)))

    q = by_kv_head(q)
    if q_scale is not None and q_scale.ndim:
        q_scale = by_kv_head(q_scale[..., None])
    mask_rows = jnp.repeat(positions, groups, axis=1)
    mask_rows = jnp.pad(mask_rows, ((0, 0), (0, max(_MIN_QUERIES - rows, 0))))
    stored = k.dtype
    k, v = as_bytes(k), as_bytes(v)
    if q_rope is not None and k_rope is not None:
        q_rope = by_kv_head(q_rope)
    chunks = -(-slots // KV_CHUNK) if table is None else table.shape[1]
    at_once = chunks if chunks <= _UNROLL_KV else _UNROLL_KV if rows <= _FEW_QUERIES else 1
    steps = -(-chunks // at_once)
    if table is None:
        v, k_scale, v_scale, k_rope = (_by_head(x, at_once) for x in (v, k_scale, v_scale, k_rope))
        k = pad_to(k, 3, at_once * KV_CHUNK) if keys_by_feature else _by_head(k, at_once)
    else:
        table = pad_to(table, 1, at_once)

    def take(
        x: jax.Array, step: int | jax.Array, dtype=jnp.float32, by_feature: bool = False
    ) -> jax.Array:
        """The chunks of a step, (B, Hkv, at_once * KV_CHUNK, ...) float32; slots last where they
        lie so."""
        axis = 3 if by_feature else 2
        if table is None:
            width = at_once * KV_CHUNK
            part = lax.dynamic_slice_in_dim(x, step * width, width, axis)
        else:
            last, first = positions.max(axis=1), step * at_once
            pages = [_read_page(x, table, last, first + i, by_feature) for i in range(at_once)]
            part = jnp.concatenate(pages, axis=axis)
        return widened(from_bytes(part, dtype), jnp.float32)

    def take_keys(step: int | jax.Array) -> jax.Array:
        """The keys of a step, feature by feature: (B, Hkv, Dh, at_once * KV_CHUNK) float32.

        XLA:CPU multiplies a few rows by such a matrix several times faster, with the same bits.
        """
        keys = take(k, step, stored, keys_by_feature)
        return keys if keys_by_feature else keys.swapaxes(2, 3)

    def scale_of(x: jax.Array, step: int | jax.Array) -> jax.Array:
        """Scales of a step's slots, to broadcast over (B, Hkv, rows, slots)."""
        return take(x, step)[:, :, None, :] if x.ndim else x

    def similar(left: jax.Array, right: jax.Array) -> jax.Array:
        """Scalar products of queries and keys (B, Hkv, Dh, slots), features in blocks of 128."""
        total = None
        for start in range(0, left.shape[3], K_BLOCK):
            stop = min(start + K_BLOCK, left.shape[3])
            part = small_product(
                left[..., start:stop], right[:, :, start:stop], (((3,), (2,)), ((0, 1), (0, 1)))
            )
            total = part if total is None else total + part
        return total

    def scores(step: int | jax.Array) -> tuple[jax.Array, jax.Array]:
        multiplier = jnp.float32(scale)
        if k_scale is not None:
            multiplier = scale_of(k_scale, step) * multiplier
        if q_scale is not None:
            multiplier = multiplier * q_scale
        score = guard(similar(q, take_keys(step)) * multiplier)
        if k_rope is not None:
            rope = take(k_rope, step, k_rope.dtype).swapaxes(2, 3)
            score = score + guard(similar(q_rope, rope) * jnp.float32(scale))
        slot = step * at_once * KV_CHUNK + jnp.arange(at_once * KV_CHUNK)
        mask = (slot[None, None, :] <= mask_rows[:, :, None])[:, None]
        return masked(score, mask), mask

    def by_chunk(x: jax.Array, axis: int) -> jax.Array:
        """An axis of slots as (at_once, KV_CHUNK)."""
        return x.reshape(*x.shape[:axis], at_once, KV_CHUNK, *x.shape[axis + 1 :])

    def add(step: int | jax.Array, sums: Any, top: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`sums` and those of a step's chunks, one after the other."""
        score, mask = scores(step)
        weight = guard(jnp.exp(score - top[..., None]) * mask)
        weight_sums = sum_last(by_chunk(weight, 3))
        if v_scale is not None:
            weight = weight * scale_of(v_scale, step)
        weight, value = by_chunk(weight, 3), by_chunk(take(v, step, stored), 2)
        width = FLOAT32_SIZE // KV_CHUNK
        values = jnp.concatenate(
            [
                small_product(
                    weight,
                    value[..., start : start + width],
                    (((4,), (3,)), ((0, 1, 3), (0, 1, 2))),
                )
                for start in range(0, value.shape[4], width)
            ],
            axis=4,
        )
        for chunk in range(at_once):
            new = weight_sums[..., chunk], values[:, :, chunk]
            sums = new if sums is None else (sums[0] + new[0], sums[1] + new[1])
        return sums

    top = max_last(scores(0)[0])
    if steps > 1:
        visible: int | jax.Array = steps
        if table is not None:  # tables are as wide as the longest sequence may become
            visible = jnp.minimum(positions.max() // (at_once * KV_CHUNK) + 1, steps)
        top = lax.fori_loop(1, visible, lambda i, m: jnp.maximum(m, max_last(scores(i)[0])), top)
    total, out = add(0, None, top)
    if steps > 1:
        total, out = lax.fori_loop(
            1, visible, lambda step, sums: add(step, sums, top), (total, out)
        )
    # XLA makes some quotients by a broadcast divisor products with its reciprocal, by the divisor's
    # own form, which is not the same for one chunk and for several.
    out = (out * lax.optimization_barrier(1.0 / total)[..., None])[:, :, :rows]
    out = out.reshape(batch, kv_heads, queries, groups, -1).transpose(0, 2, 1, 3, 4)
    return out.reshape(batch, queries, heads, -1)
