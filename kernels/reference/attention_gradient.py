"""Gradients of attention in jnp: of all queries at once, or by blocks to save memory.

The backward pass makes no bitwise promise, so both use XLA's dots (but `attention_vjp` the exact
ones of an exact way): ``dv = p^T do``, ``dp = do v^T``, ``ds = p * (dp - sum_s p_s dp_s)``,
``dq = ds k``, ``dk = ds^T q``. `attention_vjp` is the reference; it stores (queries, keys) arrays.
`attention_vjp_by_blocks` serves long sequences, and heads that the GPU kernels do not take. For
each block of queries, a first pass over the keys computes the log-sum-exp of the scores and sum_s
p_s dp_s, a second one the gradients (the scheme of FlashAttention, arXiv:2205.14135, appendix B,
with everything recomputed). Blocks of keys that no query of a block sees are skipped.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from fp8rl_jax.kernels.arrays import max_last, pad_to, sum_last, sum_rows, varying_as
from fp8rl_jax.kernels.reference.attention import by_kv_head, by_query, masked, matmul_by_blocks
from fp8rl_jax.kernels.reference.matmul import Way

_LOWEST = -1e30


def attention_vjp(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    cotangent: jax.Array,
    *,
    scale: float,
    oldest: jax.Array | None = None,
    gap: jax.Array | None = None,
    sinks: jax.Array | None = None,
    way: Way,
) -> tuple[jax.Array, ...]:
    """Computes gradients of attention for dequantised q, k and v; memory grows with T * S.

    Args:
      q: (B, T, H, Dh); k: (B, S, Hkv, Dh); v: (B, S, Hkv, Dv), dequantised.
      positions: (B, T) int32, last slot that each query sees.
      cotangent: (B, T, H, Dv), gradient of the output of `attention`.
      scale: softmax scale.
      oldest: (B, T) int32, first slot that each query sees; None for slot 0.
      gap: (B, T, 2) int32, slots between `oldest` and `positions` that each query does not see:
        the first of them, and the one after the last. None for none.
      sinks: as for `attention`.
      way: way of multiplying (matmul.py).

    Returns:
      (dq, dk, dv) float32, shaped as q, k, v, and with sinks their gradient (H,).
    """
    matmul = functools.partial(matmul_by_blocks, way) if way.exact else jnp.matmul
    (queries, heads), kv_heads = q.shape[1:3], k.shape[2]
    groups = heads // kv_heads
    qs, dout = by_kv_head(q, kv_heads), by_kv_head(cotangent, kv_heads)
    keys, values = (x.astype(jnp.float32).transpose(0, 2, 1, 3) for x in (k, v))

    def of_rows(x: jax.Array) -> jax.Array:
        return jnp.repeat(x, groups, axis=1)[:, None, :, None]

    slot = jnp.arange(k.shape[1])
    seen = slot <= of_rows(positions)
    if oldest is not None:
        seen &= slot >= of_rows(oldest)
    if gap is not None:
        seen &= (slot < of_rows(gap[..., 0])) | (slot >= of_rows(gap[..., 1]))
    score = masked(matmul(qs, keys.mT) * scale, seen)
    top = max_last(score)
    if sinks is not None:
        sink = jnp.tile(sinks.reshape(1, kv_heads, groups), (1, 1, queries))
        top = jnp.maximum(top, sink)
    weight = jnp.exp(score - top[..., None])
    total = sum_last(weight)
    if sinks is not None:
        sink_weight = jnp.exp(sink - top)
        total += sink_weight
    weight = weight / total[..., None]
    dvalues = matmul(weight.mT, dout)
    dweight = matmul(dout, values.mT)
    mean = sum_last(dweight * weight)
    dscore = weight * (dweight - mean[..., None]) * scale
    dqs, dkeys = matmul(dscore, keys), matmul(dscore.mT, qs)
    found = by_query(dqs, queries), dkeys.transpose(0, 2, 1, 3), dvalues.transpose(0, 2, 1, 3)
    if sinks is None:
        return found
    dsink = -(sink_weight / total * mean).reshape(-1, kv_heads, queries, groups)
    return *found, sum_rows(dsink.swapaxes(1, 2).reshape(-1, heads))


def attention_vjp_by_blocks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    cotangent: jax.Array,
    *,
    scale: float,
    oldest: jax.Array | None = None,
    gap: jax.Array | None = None,
    sinks: jax.Array | None = None,
    block: int = 64,
) -> tuple[jax.Array, ...]:
    """Computes `attention_vjp` with memory that grows with T + S instead of T * S.

    `block` is the number of queries and of keys of a block. 64 is the page with which sequences of
    a row begin, so that hardly any block has several; larger ones are fewer iterations.
    """
    (batch, queries, heads, _), (slots, kv_heads) = q.shape, k.shape[1:3]
    groups = heads // kv_heads
    size, width = min(block, queries), min(block, slots)
    if oldest is None:
        oldest = jnp.zeros_like(positions)
    hidden = jnp.stack([positions + 1] * 2, 2) if gap is None else gap
    operands = (q, k, v, positions, oldest, hidden, cotangent)

    def split(x: jax.Array) -> jax.Array:
        """Splits (B, T, H, n) into (blocks, B, Hkv, size * groups, n)."""
        x = pad_to(x, 1, size).reshape(batch, -1, size, kv_heads, groups, x.shape[3])
        x = x.transpose(1, 0, 3, 2, 4, 5)
        return x.reshape(*x.shape[:3], size * groups, -1).astype(jnp.float32)

    def join(x: jax.Array) -> jax.Array:
        x = x.reshape(-1, batch, kv_heads, size, groups, x.shape[4]).transpose(1, 0, 3, 2, 4, 5)
        return x.reshape(batch, -1, heads, x.shape[5])[:, :queries]

    keys, values = (pad_to(x.astype(jnp.float32).transpose(0, 2, 1, 3), 2, width) for x in (k, v))
    # Padded queries see no key: their position is -1, their first slot beyond all others, and all
    # slots are in their gap.
    ends = jnp.stack([positions + 1, oldest - slots, hidden[..., 0], hidden[..., 1] - slots], 2)
    ends = pad_to(ends, 1, size).reshape(batch, -1, size, 4).transpose(3, 1, 0, 2)
    rows = ends[0] - 1, ends[1] + slots, ends[2], ends[3] + slots

    def zeros(shape: tuple[int, ...], value: float = 0.0) -> jax.Array:
        return varying_as(jnp.full(shape, value, jnp.float32), operands)

    def gradients(sums, queries_of_block):
        query, dout, ends = queries_of_block
        of_rows = (jnp.repeat(x, groups, axis=1)[:, None, :, None] for x in ends)
        position, first, leave, resume = of_rows
        blocks = jnp.clip(position.max() // width + 1, 0, keys.shape[2] // width)
        begin = jnp.maximum(first.min(), 0) // width
        # All queries have the blocks from `skip` to before `again` in their gaps.
        skip = jnp.clip(-(-leave.max() // width), begin, blocks)
        again = jnp.clip(resume.min() // width, skip, blocks)
        count = blocks - begin - (again - skip)
        per_row = query.shape[:3]

        def place_of(step: int | jax.Array) -> jax.Array:
            index = begin + step
            return jnp.where(index < skip, index, index + again - skip)

        def part(x: jax.Array, index: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(x, index * width, width, 2)

        def scores(index: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Returns masked scores, and the cotangent's product with each value."""
            slot = index * width + jnp.arange(width)
            score = jnp.einsum("bhtd,bhsd->bhts", query, part(keys, index)) * scale
            seen = (slot >= first) & (slot <= position) & (slot < slots)
            if gap is not None:
                seen &= (slot < leave) | (slot >= resume)
            dweight = jnp.einsum("bhtd,bhsd->bhts", dout, part(values, index))
            return jnp.where(seen, score, -jnp.inf), dweight

        def add_up(step, carry):
            top, total, product = carry
            score, dweight = scores(place_of(step))
            above = jnp.maximum(top, score.max(-1))
            weight, rescale = jnp.exp(score - above[..., None]), jnp.exp(top - above)
            product = product * rescale + (weight * dweight).sum(-1)
            return above, total * rescale + weight.sum(-1), product

        begun = (zeros(per_row, _LOWEST), zeros(per_row), zeros(per_row))
        if sinks is not None:
            sink = jnp.tile(sinks.reshape(kv_heads, groups), (1, size))
            begun = begun[0] * 0 + sink, begun[1] + 1.0, begun[2]
        top, total, product = lax.fori_loop(0, count, add_up, begun)
        total = jnp.where(total > 0, total, 1.0)  # a query that sees nothing
        logsumexp, product = (top + jnp.log(total))[..., None], (product / total)[..., None]

        def differentiate(step, carry):
            dquery, dkeys, dvalues = carry
            index = place_of(step)
            score, dweight = scores(index)
            weight = jnp.exp(score - logsumexp)
            dscore = weight * (dweight - product) * scale

            def add(sums: jax.Array, more: jax.Array) -> jax.Array:
                return lax.dynamic_update_slice_in_dim(
                    sums, part(sums, index) + more, index * width, 2
                )

            return (
                dquery + jnp.einsum("bhts,bhsd->bhtd", dscore, part(keys, index)),
                add(dkeys, jnp.einsum("bhts,bhtd->bhsd", dscore, query)),
                add(dvalues, jnp.einsum("bhts,bhtd->bhsd", weight, dout)),
            )

        begun = zeros(query.shape), *sums
        dquery, *sums = lax.fori_loop(0, count, differentiate, begun)
        if sinks is None:
            return tuple(sums), (dquery,)
        dsink = -jnp.exp(sink - logsumexp[..., 0]) * product[..., 0]
        return tuple(sums), (dquery, dsink.reshape(-1, kv_heads, size, groups).sum((0, 2)))

    start = zeros(keys.shape), zeros(values.shape)
    blocks = split(q), split(cotangent), rows
    (dkeys, dvalues), (dqueries, *dsinks) = lax.scan(gradients, start, blocks)
    dkeys, dvalues = (x.transpose(0, 2, 1, 3)[:, :slots] for x in (dkeys, dvalues))
    return join(dqueries), dkeys, dvalues, *(x.sum(0).reshape(-1) for x in dsinks)
