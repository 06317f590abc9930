"""Attention with a fixed order of summation, in plain jnp: the definition and the oracle.

Keys are cut into chunks of 64 cache slots. The maximum is taken over all chunks (exact in any
order), sums are added chunk by chunk in ascending order, and a masked chunk adds exactly zero. So a
longer cache, or more queries at a time, changes no bits. Many queries are computed a block at a
time, each with the chunks that one of its queries sees; pages of many sequences, a few sequences of
similar length at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8rl_jax.kernels.arrays import (
    EXP_LANES,
    K_BLOCK,
    KV_CHUNK,
    KV_STEP,
    max_last,
    pad_to,
    prevent_fma,
    sum_last,
    varying_as,
)
from fp8rl_jax.kernels.reference.bits import as_bytes, in_bits, scan_in_bits, widened
from fp8rl_jax.kernels.reference.matmul import FLOAT32_SIZE, Way, small_product

# Most chunks of keys in one step; 4 chunks of 128 features are FLOAT32_SIZE numbers.
_UNROLL_KV = KV_STEP // KV_CHUNK
_FEW_QUERIES = 256  # most rows of a kv head for steps of _UNROLL_KV chunks: scores take memory
_MANY_QUERIES, _BLOCK = 512, 256  # from so many on, blocks of at most so many are computed


def masked(score: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns scores, lowered to at most -1e30 where the mask is False.

    By a minimum and not a constant, which JAX would hoist out of a scan and store.
    """
    return jnp.where(mask, score, jnp.minimum(score, jnp.float32(-1e30)))


def dequantized(x: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Returns queries, keys or values (..., Dh) in float32, times their scales, () or (...)."""
    x = widened(x, jnp.float32)
    if scale is None:
        return x
    return x * (scale[..., None] if scale.ndim else scale)


def _enough_rows(x: jax.Array, axis: int, way: Way) -> jax.Array:
    """Pads `x` with zeros along an axis to a number of rows that `small_product` takes."""
    return pad_to(x, axis, way.small_steps.rows(x.shape[axis]))


def by_kv_head(x: jax.Array, kv_heads: int) -> jax.Array:
    """Reorders (B, T, H, n) to (B, Hkv, rows, n) float32; a row is a query and head of a group."""
    batch, queries, heads, features = x.shape
    x = widened(x, jnp.float32).reshape(batch, queries, kv_heads, heads // kv_heads, features)
    return x.transpose(0, 2, 1, 3, 4).reshape(batch, kv_heads, -1, features)


def by_query(x: jax.Array, queries: int) -> jax.Array:
    """Reorders (B, Hkv, rows, n) to (B, T, H, n): the inverse of `by_kv_head`."""
    batch, kv_heads, rows, features = x.shape
    x = x.reshape(batch, kv_heads, queries, rows // queries, features).transpose(0, 2, 1, 3, 4)
    return x.reshape(batch, queries, -1, features)


def _read_page(
    x: jax.Array, table: jax.Array, last: jax.Array, chunk: int | jax.Array, by_feature: bool
) -> jax.Array:
    """Reads a chunk of slots (B, Hkv, KV_CHUNK, ...) from pages x (P, KV_CHUNK, Hkv, ...); with
    `by_feature` (B, Hkv, Dh, KV_CHUNK) from (P, Hkv, Dh, KV_CHUNK).

    Slots after each sequence's `last` position (B,) become zeros: a page may hold values of its
    former sequence, and 0 * NaN is NaN. Table entries after that position are not used.
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


def _reader(
    x: jax.Array,
    at_once: int,
    table: jax.Array | None,
    positions: jax.Array,
    by_feature: bool = False,
    layer: jax.Array | None = None,
) -> Callable[[int | jax.Array], jax.Array]:
    """Makes the function that reads the slots of a step, `at_once` chunks.

    Args:
      x: (B, S, Hkv, ...), or with a table pages (P, KV_CHUNK, Hkv, ...); with `by_feature`
        (B, Hkv, Dh, S), or (P, Hkv, Dh, KV_CHUNK). Scales end with Hkv, or are ().
      at_once: number of chunks in a step.
      table, positions, layer: as for `attention`.
      by_feature: whether slots are the last axis.

    Returns:
      Function from a step to float32 (B, Hkv, slots, Dh), or with `by_feature` (B, Hkv, Dh,
      slots); to scales (B, Hkv, 1, slots), or ().
    """
    if not x.ndim:
        return lambda step: x
    axis, width, numbers = 3 if by_feature else 2, at_once * KV_CHUNK, as_bytes(x)
    slots = (3 if by_feature else 1) + (layer is not None)  # axis of x, without a table
    if table is not None:
        table, last = pad_to(table, 1, at_once), positions.max(axis=1)
    else:
        numbers = pad_to(numbers, slots, width)
        if layer is None and not by_feature:
            numbers = jnp.moveaxis(numbers, 1, axis)

    def read(step: int | jax.Array) -> jax.Array:
        if layer is not None:  # one slice: a layer alone, or all its slots, would be copies
            starts, sizes = [layer] + [0] * (x.ndim - 1), [1, *x.shape[1:]]
            starts[slots], sizes[slots] = step * width, width
            part = lax.dynamic_slice(numbers, starts, sizes)[0]
            part = part if by_feature else jnp.moveaxis(part, 1, axis)
        elif table is None:
            part = lax.dynamic_slice_in_dim(numbers, step * width, width, axis)
        else:
            chunks = [step * at_once + i for i in range(at_once)]
            pages = [_read_page(numbers, table, last, chunk, by_feature) for chunk in chunks]
            part = jnp.concatenate(pages, axis=axis)
        part = widened(part.view(x.dtype), jnp.float32)
        return part if part.ndim == 4 else part[:, :, None]

    return read


def matmul_by_blocks(way: Way, x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiplies (B, Hkv, M, K) by (B, Hkv, K, N), adding blocks of 128 of K in ascending order."""
    axes = (((3,), (2,)), ((0, 1), (0, 1)))
    starts = range(0, x.shape[3], K_BLOCK)
    blocks = (slice(start, start + K_BLOCK) for start in starts)
    parts = (small_product(way, x[..., block], w[:, :, block], axes) for block in blocks)
    return functools.reduce(jnp.add, parts)


def _by_chunk(x: jax.Array, axis: int) -> jax.Array:
    """Splits an axis of slots into (chunks, KV_CHUNK)."""
    return x.reshape(*x.shape[:axis], -1, KV_CHUNK, *x.shape[axis + 1 :])


def _weighted_values(way: Way, weight: jax.Array, value: jax.Array) -> jax.Array:
    """Multiplies (B, Hkv, rows, n, KV_CHUNK) by (B, Hkv, n, KV_CHUNK, Dv) in each of n chunks, to
    (B, Hkv, n, rows, Dv)."""
    axes, width = (((4,), (3,)), ((0, 1, 3), (0, 1, 2))), FLOAT32_SIZE // KV_CHUNK
    starts = range(0, value.shape[4], width)
    pieces = (value[..., start : start + width] for start in starts)
    parts = [small_product(way, weight, piece, axes) for piece in pieces]
    return jnp.concatenate(parts, axis=4)


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
    window: jax.Array | None = None,
    sinks: jax.Array | None = None,
    keys_by_feature: bool = False,
    layer: jax.Array | None = None,
    way: Way,
) -> jax.Array:
    """Computes causal grouped-query attention; bits do not depend on batch, cache or query count.

    Cache slot j holds the key of position j; a query at position p sees slots 0..p. The scales of
    quantised queries and keys multiply the score, those of values multiply the probability
    ("folded"), so that the stored bytes enter the products unscaled.

    Args:
      q: (B, T, H, Dh) E4M3, bf16 or float32, after QK-norm and RoPE.
      k, v: (B, S, Hkv, Dh) and (B, S, Hkv, Dv), each in E4M3, INT8, bf16 or float32; H is a
        multiple of Hkv.
      positions: (B, T) int32, position of each query.
      scale: softmax scale, usually 1/sqrt(Dh).
      q_scale: (B, T, H) float32 dequantisation scales, () for one common scale, or None for an
        unquantised q.
      k_scale, v_scale: (B, S, Hkv) float32, () or None, as for `q_scale`.
      q_rope, k_rope: (B, T, H, Dr) and (B, S, Hkv, Dr), bf16 or float32: further features of
        queries and keys, never quantised (multi-head latent attention), or None.
      table: (B, N) int32, for keys and values stored in pages of 64 slots: k (P, 64, Hkv, Dh), and
        v, k_rope and the scales with the same first axes; slot j of sequence b is in page
        ``table[b, j // 64]``. None for a cache of (B, S). Entries after a sequence's position are
        never used.
      window: () int32, most keys that a query sees: slots p - window + 1 to p. None for all.
      sinks: (H,) float32, for each head the score of a further key, which has no value: the softmax
        alone counts it (attention sinks, Xiao et al., arXiv:2309.17453). None for none.
      keys_by_feature: whether k is (B, Hkv, Dh, S), or (P, Hkv, Dh, 64) with a table: the layout
        of the products. In the other layout decoding transposes all keys for every token.
      layer: () int32, the layer to read of arrays of all, (L, B, S, ...), without a table; for few
        queries. None for arrays of one layer.
      way: way of multiplying (matmul.py).

    Returns:
      (B, T, H, Dv) float32.
    """
    run = functools.partial(
        _of_block,
        k,
        v,
        scale=scale,
        k_scale=k_scale,
        v_scale=v_scale,
        k_rope=k_rope,
        window=window,
        sinks=sinks,
        keys_by_feature=keys_by_feature,
        layer=layer,
        way=way,
    )
    (batch, queries), of_queries = positions.shape, (q, positions, q_scale, q_rope)
    if table is not None and batch > 1 and batch * queries >= _MANY_QUERIES > queries > 1:
        return _by_length(run, max(_BLOCK // queries, 1), table, of_queries)
    if queries < _MANY_QUERIES:
        return run(table, q, positions, q_scale, q_rope)
    count = -(-queries // _BLOCK)
    size = -(-queries // count)

    def blocks(x: jax.Array) -> jax.Array:
        """Splits (B, T, ...) into (count, B, size, ...); the last query is repeated."""
        if not x.ndim:
            return jnp.broadcast_to(x, (count,))
        more = [(0, 0)] * x.ndim
        more[1] = 0, count * size - queries
        x = jnp.pad(x, more, mode="edge")
        return jnp.moveaxis(x.reshape(x.shape[0], count, size, *x.shape[2:]), 1, 0)

    split = jax.tree.map(lambda x: in_bits(blocks, x), of_queries)
    found = scan_in_bits(lambda _, block: (None, run(table, *block)), None, split)[1]
    found = jnp.moveaxis(found, 0, 1)
    return found.reshape(found.shape[0], -1, *found.shape[3:])[:, :queries]


def _by_length(run: Callable, size: int, table: jax.Array, of_queries) -> jax.Array:
    """Runs attention of sequences in pages, `size` sequences of similar length at a time: a block
    takes as long as the longest of its sequences."""
    positions = of_queries[1]
    batch = len(positions)
    count = -(-batch // size)
    order = jnp.argsort(positions.max(axis=1))
    padded = jnp.pad(order, (0, count * size - batch), mode="edge").reshape(count, size)

    def blocks(x: jax.Array) -> jax.Array:
        return x[padded] if x.ndim else jnp.broadcast_to(x, (count,))

    split = jax.tree.map(lambda x: in_bits(blocks, x), (table, *of_queries))
    found = scan_in_bits(lambda _, block: (None, run(*block)), None, split)[1]
    return found.reshape(-1, *found.shape[2:])[jnp.argsort(order)]


def _of_block(
    k: jax.Array,
    v: jax.Array,
    table: jax.Array | None,
    q: jax.Array,
    positions: jax.Array,
    q_scale: jax.Array | None,
    q_rope: jax.Array | None,
    *,
    scale: float,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    k_rope: jax.Array | None,
    window: jax.Array | None,
    sinks: jax.Array | None,
    keys_by_feature: bool,
    layer: jax.Array | None,
    way: Way,
) -> jax.Array:
    """Computes `attention` of all given queries at once."""
    queries, heads = q.shape[1:3]
    slots, kv_heads = v.shape[-3:-1]
    groups = heads // kv_heads
    rows = queries * groups
    chunks = -(-slots // KV_CHUNK) if table is None else table.shape[1]
    at_once = chunks if chunks <= _UNROLL_KV else _UNROLL_KV if rows <= _FEW_QUERIES else 1
    steps, width = -(-chunks // at_once), at_once * KV_CHUNK
    cached = {"k": k, "v": v, "k_scale": k_scale, "v_scale": v_scale, "k_rope": k_rope}
    read = {
        name: _reader(x, at_once, table, positions, keys_by_feature and name == "k", layer)
        for name, x in cached.items()
        if x is not None
    }
    q = _enough_rows(by_kv_head(q, kv_heads), 2, way)
    if q_scale is not None and q_scale.ndim:
        q_scale = _enough_rows(by_kv_head(q_scale[..., None], kv_heads), 2, way)
    if q_rope is not None:
        q_rope = _enough_rows(by_kv_head(q_rope, kv_heads), 2, way)
    position = _enough_rows(jnp.repeat(positions, groups, axis=1), 1, way)

    def scores(step: int | jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns scores of a step's slots (B, Hkv, rows, width), and their mask (B, 1, ...)."""
        multiplier = jnp.float32(scale)
        if k_scale is not None:
            multiplier = read["k_scale"](step) * multiplier
        if q_scale is not None:
            multiplier = multiplier * q_scale
        # XLA:CPU multiplies a few rows by keys stored feature by feature several times faster,
        # with the same bits.
        keys = read["k"](step) if keys_by_feature else read["k"](step).swapaxes(2, 3)
        score = prevent_fma(matmul_by_blocks(way, q, keys) * multiplier)
        if q_rope is not None:
            rope = read["k_rope"](step).swapaxes(2, 3)
            score = score + prevent_fma(matmul_by_blocks(way, q_rope, rope) * jnp.float32(scale))
        slot = step * width + jnp.arange(width)
        mask = slot[None, None, :] <= position[:, :, None]
        if window is not None:
            mask &= slot[None, None, :] > position[:, :, None] - window
        return masked(score, mask[:, None]), mask[:, None]

    def add(step: int | jax.Array, sums: Any, top: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Adds the sums of a step's chunks to `sums`, one chunk after another."""
        score, mask = scores(step)
        weight = prevent_fma(jnp.exp(score - top[..., None]) * mask)
        weight_sums = sum_last(_by_chunk(weight, 3))
        if v_scale is not None:
            weight = weight * read["v_scale"](step)
        values = _weighted_values(way, _by_chunk(weight, 3), _by_chunk(read["v"](step), 2))
        for chunk in range(at_once):
            new = weight_sums[..., chunk], values[:, :, chunk]
            sums = new if sums is None else (sums[0] + new[0], sums[1] + new[1])
        return sums

    visible: int | jax.Array = steps
    if table is not None or queries < slots:  # a cache has room for the longest sequence
        visible = jnp.minimum(positions.max() // width + 1, steps)

    def zeros(*shape: int) -> jax.Array:
        zero = jnp.zeros(shape, jnp.float32)
        return varying_as(zero, q, k, v, positions, k_scale, v_scale, window)

    def raised(step: int | jax.Array, top: jax.Array) -> jax.Array:
        return jnp.maximum(top, max_last(scores(step)[0]))

    if window is None:
        top = max_last(scores(0)[0])
        if steps > 1:
            top = lax.fori_loop(1, visible, raised, top)
    else:  # steps before every query's window add exactly nothing to sums that begin with 0
        first = jnp.maximum(positions.min() - window + 1, 0) // width
        lowest = zeros(q.shape[0], kv_heads, q.shape[2]) - 1e30
        top = lax.fori_loop(first, visible, raised, lowest)
    if sinks is not None:
        of_rows = jnp.tile(sinks.reshape(1, kv_heads, groups), (1, 1, queries))
        sink = _enough_rows(of_rows, 2, way)
        top = jnp.maximum(top, sink)
    if window is None:
        sums = add(0, None, top)
        if steps > 1:
            sums = lax.fori_loop(1, visible, lambda i, sums: add(i, sums, top), sums)
    else:
        nothing = zeros(*top.shape), zeros(*top.shape, v.shape[-1])
        sums = lax.fori_loop(first, visible, lambda i, sums: add(i, sums, top), nothing)
    total, out = sums
    if sinks is not None:
        lanes = pad_to((sink - top)[..., None], 3, EXP_LANES)  # see EXP_LANES
        total = total + lax.optimization_barrier(jnp.exp(lanes))[..., 0]
    # XLA turns some quotients by a broadcast divisor into products with its reciprocal, depending
    # on the divisor's expression, which differs between one chunk and several.
    out = out * lax.optimization_barrier(1.0 / total)[..., None]
    return by_query(out[:, :, :rows], queries)
