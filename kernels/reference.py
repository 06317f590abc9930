"""Canonical-order matmul and attention in plain jnp: the CPU implementation and the oracle.

Purpose: give every row of an output the same bits whatever else is in the batch. A rollout
decodes a few rows at a time and the learner scores whole sequences; XLA's own dots and reductions
choose their order of summation by shape, so the two would differ in the last bits. Here the order
is part of the definition:

* `block_matmul`: the contraction is cut into blocks of 128, of up to 512 where bf16 is multiplied
  without scales; each block gives a float32 partial in an order that cpu_products.py defines, which
  is multiplied by its scales and added in ascending order.
* `attention`: keys are cut into chunks of 64 cache slots; the maximum runs over everything (exact
  in any order), the sums run chunk by chunk in ascending order, and a masked chunk adds exactly
  zero. So a longer cache, or more queries at a time, changes nothing.

Not done here: speed on a GPU. On a CPU FP8 operands are converted to bf16, which is exact, and
multiplied there; FP8 is emulated and never faster than bf16.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8rl_jax.kernels.bits import as_bytes, from_bytes
from fp8rl_jax.kernels.cpu_products import (
    BF16_DEPTH,
    FLOAT32_SIZE,
    in_bf16,
    padded_rows,
    product,
    small_product,
)
from fp8rl_jax.kernels.e4m3 import widened
from fp8rl_jax.kernels.reductions import max_last, sum_last

K_BLOCK = 128
KV_CHUNK = 64
EXP_LANES = 16  # exp over a last axis that is a multiple of this takes the vector code throughout
# Fewer queries of a kv head take XLA to matrix-vector code, whose order of summation differs; more
# would be zeros that decoding pays for.
_MIN_QUERIES = 2
_UNROLL_K = 16  # blocks of K; above it a loop: compile time and memory, the same bits
_UNROLL_KV = 4  # chunks of keys, likewise, if there are; their scores are products of FLOAT32_SIZE
_FEW_QUERIES = 256  # rows at most (of a kv head), for the memory that their scores take
_GUARD = -3.4e38


def guard(product: jax.Array) -> jax.Array:
    """Returns `product` unchanged, in a form that XLA cannot contract into a fused multiply-add.

    LLVM contracts ``a * b + c`` depending on how many users ``a * b`` has, which differs between
    a forward-only program and a train step. A maximum with a number below every finite product
    stands between the two. NaN passes; -inf becomes -3.4e38.
    """
    return jnp.maximum(product, jnp.float32(_GUARD))


def round_bf16(x: jax.Array) -> jax.Array:
    """Rounds to bf16, to nearest even, in a form that XLA does not simplify away."""
    if x.dtype == jnp.bfloat16:
        return x
    return lax.reduce_precision(x.astype(jnp.float32), 8, 7).astype(jnp.bfloat16)


def rounded(x: jax.Array, dtype) -> jax.Array:
    """`x` in `dtype`, rounded at this place."""
    return round_bf16(x) if dtype == jnp.bfloat16 else x.astype(dtype)


def pad_to(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    """`x` with zeros behind, up to a multiple of so many entries along an axis."""
    missing = -x.shape[axis] % multiple
    if not missing:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return jnp.pad(x, widths)


def repeat_last(x: jax.Array, times: int) -> jax.Array:
    """`x` (..., n) float32 with each entry so many times in a row, (..., n * times).

    As a product with (1, 0), which is exact: what XLA:CPU fuses of a repeat into the operations
    that read it is looked up number by number, which took several times as long as all the rest of
    a scaled product.
    """
    pairs = jnp.stack([x.reshape(-1), jnp.zeros(x.size, x.dtype)], axis=1)
    ones = jnp.stack([jnp.ones(times, x.dtype), jnp.zeros(times, x.dtype)])
    repeated = lax.dot_general(
        pairs, ones, (((1,), (0,)), ((), ())), precision=lax.Precision.HIGHEST
    )
    return repeated.reshape(*x.shape[:-1], x.shape[-1] * times)


def _expand_columns(scale: jax.Array, columns: int) -> jax.Array:
    """Scales per block of 128 columns (KB, ceil(N/128)) -> scales per column (KB, N)."""
    if scale.shape[1] == columns:
        return scale
    return repeat_last(scale, K_BLOCK)[:, :columns]


def _parts_of(rows: int) -> int:
    """Equal parts of so many rows such that XLA cuts between them, whichever axes of the mesh that
    is set the rows are divided over. Under shard_map all rows are the device's own."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty or mesh.manual_axes else math.gcd(rows, mesh.size)


def _pad_parts(x: jax.Array | None, parts: int, rows: int) -> jax.Array | None:
    """(parts * n, K) -> (parts * rows, K): zeros behind each part, whose rows need not move."""
    if x is None:
        return None
    each, depth = x.shape[0] // parts, x.shape[1]
    x = x.reshape(parts, each, depth)
    return jnp.pad(x, ((0, 0), (0, rows - each), (0, 0))).reshape(parts * rows, depth)


def block_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_scale: jax.Array | None = None,
    rhs_scale: jax.Array | None = None,
) -> jax.Array:
    """Matrix product with a fixed order of summation: rows do not see each other.

    Args:
      lhs: (M, K), any float type that float32 holds exactly (E4M3, E5M2, bf16, float32).
      rhs: (K, N), likewise.
      lhs_scale: (M, KB) float32 with KB = ceil(K / 128), or None for unscaled operands.
      rhs_scale: (KB, ceil(N / 128)) or (KB, N) float32, or None.

    Returns:
      (M, N) float32: ``sum_b (lhs_b @ rhs_b) * lhs_scale_b * rhs_scale_b``, b ascending.

    A product of bf16 or FP8 operands may have other bits than one of the same numbers in float32.
    The scheme (a float32 partial per 128 of K, scaled, then added) is that of DeepSeek-V3,
    arXiv:2412.19437, section 3.3.2.
    """
    if lhs.ndim != 2 or rhs.ndim != 2 or lhs.shape[1] != rhs.shape[0]:
        raise ValueError(f"block_matmul takes (M, K) and (K, N), got {lhs.shape} and {rhs.shape}")
    rows, columns = lhs.shape[0], rhs.shape[1]
    lhs_dtype, rhs_dtype = lhs.dtype, rhs.dtype
    lhs, rhs = as_bytes(lhs), as_bytes(rhs)
    lhs = pad_to(lhs, 1, K_BLOCK)
    parts = _parts_of(rows)
    each = rows // parts
    width = padded_rows(each)
    if width != each:
        lhs, lhs_scale = (_pad_parts(x, parts, width) for x in (lhs, lhs_scale))
    rhs = pad_to(pad_to(rhs, 0, K_BLOCK), 1, K_BLOCK)
    if rhs_scale is not None:
        rhs_scale = pad_to(_expand_columns(rhs_scale, columns), 1, K_BLOCK)
    depth = K_BLOCK
    if lhs_scale is None and rhs_scale is None and in_bf16(lhs_dtype, rhs_dtype):
        depth = max(d for d in range(K_BLOCK, BF16_DEPTH + 1, K_BLOCK) if lhs.shape[1] % d == 0)
    blocks = lhs.shape[1] // depth

    def partial(block: int | jax.Array) -> jax.Array:
        start = block * depth
        left = lax.dynamic_slice_in_dim(lhs, start, depth, 1)
        right = lax.dynamic_slice_in_dim(rhs, start, depth, 0)
        partial_sum = product(from_bytes(left, lhs_dtype), from_bytes(right, rhs_dtype))
        scale = None
        if lhs_scale is not None:
            scale = lax.dynamic_slice_in_dim(lhs_scale, block, 1, 1)
        if rhs_scale is not None:
            right_scale = lax.dynamic_slice_in_dim(rhs_scale, block, 1, 0)
            scale = right_scale if scale is None else scale * right_scale
        return partial_sum if scale is None else guard(partial_sum * scale)

    total = partial(0)
    if blocks <= _UNROLL_K:
        for block in range(1, blocks):
            total = total + partial(block)
    else:
        total = lax.fori_loop(1, blocks, lambda block, acc: acc + partial(block), total)
    if width != each:
        total = total.reshape(parts, width, -1)[:, :each].reshape(rows, total.shape[1])
    return total[:, :columns]


def _visible(positions: jax.Array, slots: jax.Array, groups: int) -> jax.Array:
    """(B, T) query positions and (S,) cache slots -> (B, 1, T * groups, S) mask."""
    mask = slots[None, None, :] <= positions[:, :, None]
    return jnp.repeat(mask, groups, axis=1)[:, None]


def _masked(score: jax.Array, mask: jax.Array) -> jax.Array:
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
        return _masked(score, mask), mask

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


def attention_vjp(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    cotangent: jax.Array,
    *,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of softmax attention with respect to dequantised q, k, v, in float32.

    The backward pass makes no bitwise promise, so it is written plainly, with memory that grows
    with T * S: probabilities are recomputed, then ``dv = p^T do``,
    ``ds = p * (do v^T - rowsum)``, ``dq = ds k``, ``dk = ds^T q``.

    Args:
      q: (B, T, H, Dh); k: (B, S, Hkv, Dh); v: (B, S, Hkv, Dv), dequantised.
      positions: (B, T) int32.
      cotangent: (B, T, H, Dv), of the output of `attention`.
      scale: softmax scale.

    Returns:
      (dq, dk, dv) float32, shaped as q, k, v.
    """
    batch, queries, heads, _ = q.shape
    kv_heads = k.shape[2]
    groups = heads // kv_heads

    def split(x: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32).reshape(batch, queries, kv_heads, groups, -1)
        return x.transpose(0, 2, 1, 3, 4).reshape(batch, kv_heads, queries * groups, -1)

    def join(x: jax.Array) -> jax.Array:
        x = x.reshape(batch, kv_heads, queries, groups, -1).transpose(0, 2, 1, 3, 4)
        return x.reshape(batch, queries, heads, -1)

    qs, dout = split(q), split(cotangent)
    keys, values = (x.astype(jnp.float32).transpose(0, 2, 1, 3) for x in (k, v))
    mask = _visible(positions, jnp.arange(k.shape[1]), groups)
    score = _masked(jnp.einsum("bhtd,bhsd->bhts", qs, keys) * scale, mask)
    weight = jnp.exp(score - max_last(score)[..., None])
    weight = weight / sum_last(weight)[..., None]
    dvalues = jnp.einsum("bhts,bhtd->bhsd", weight, dout)
    dweight = jnp.einsum("bhtd,bhsd->bhts", dout, values)
    dscore = weight * (dweight - sum_last(dweight * weight)[..., None]) * scale
    dqs = jnp.einsum("bhts,bhsd->bhtd", dscore, keys)
    dkeys = jnp.einsum("bhts,bhtd->bhsd", dscore, qs)
    return join(dqs), dkeys.transpose(0, 2, 1, 3), dvalues.transpose(0, 2, 1, 3)
