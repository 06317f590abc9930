"""Gradients of attention by Triton, for heads of up to 256 features (Dao, 2307.08691, algorithm 2).

The backward pass makes no bitwise promise between rollout and learner, so its kernels have wide
tiles. For wider heads (latent attention) the gradients of a block of keys do not fit into
registers; they are computed in jnp, block by block (reference/attention_gradient.py).

Weights are recomputed from a row's logsumexp: ``p = exp(score - logsumexp)``, and the softmax's
gradient needs the row's ``delta = sum_d do_d o_d``; fast attention gives logsumexp and o. Then
``dv = p^T do``, ``dp = do v^T``, ``ds = p (dp - delta)``, ``dq = ds k``, ``dk = ds^T q``: three
products in `query_gradient_kernel`, a program for each tile of rows, and four in
`key_gradient_kernel`, a program for each block of keys, which adds all rows of its group. Both
recompute p: no sum depends on the order in which programs run, so results are deterministic.

Gradients are with respect to the dequantised values. The stored values enter the products, with the
scales folded into scores, dp and ds; p and ds are rounded to bf16 for their products.

A block of keys selects its queries by positions, which may have any order: its loop begins with the
first query that sees any slot of the block, and drops the mask after the last query that does not
see all slots.

Memory grows with T + S: operands in bf16, float32 results, and two numbers per row.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from fp8rl_jax.kernels.arrays import rounded
from fp8rl_jax.kernels.gpu import fast_attention
from fp8rl_jax.kernels.gpu.fast_attention import (
    Tile,
    block_scores,
    row_ends,
    rows_see,
    slots_seen,
    tile_of_queries,
    tile_rows,
)
from fp8rl_jax.kernels.gpu.online_softmax import LOG2_E, multiply
from fp8rl_jax.kernels.gpu.vectors import store_vectors, vectors
from fp8rl_jax.kernels.reference import attention_gradient as reference
from fp8rl_jax.kernels.reference.attention import dequantized

_SCAN = tl.constexpr(1024)  # positions that are loaded at a time
_LOG_2 = tl.constexpr(0.6931471805599453)
_WIDE_BLOCK = 256  # of gradients in jnp: a GPU's host waits in every iteration


@triton.jit
def query_gradient_kernel(
    q,  # (B, T, H, D) bf16 or float32, as k, v and dout
    k,  # (B, S, HKV, D)
    v,  # (B, S, HKV, DV)
    positions,  # (B, T) int32
    q_scale,  # (B, T, H) float32, unused without Q_SCALED
    k_scale,  # (B, S, HKV) float32, unused without KV_SCALED
    v_scale,  # as k_scale
    oldest,  # as positions, unused without BOUNDED
    gap,  # (B, T, 2) int32, unused without GAPPED
    sinks,  # unused: they are in logsumexp
    dout,  # (B, T, H, DV)
    logsumexp,  # (B, T, H) float32, over log 2
    delta,  # (B, T, H) float32
    dq,  # (B, T, H, D) float32
    T: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    WIDTH: tl.constexpr,  # D or more, a power of two; so is the next
    V_WIDTH: tl.constexpr,
    SCALE: tl.constexpr,  # factor of the scores, over log 2
    Q_SCALED: tl.constexpr,
    KV_SCALED: tl.constexpr,
    BOUNDED: tl.constexpr,
    GAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    pointers = q, k, v, positions, q_scale, k_scale, v_scale
    queries, cache, first_row, place, exists, position = tile_of_queries(
        pointers, T, S, H, HKV, D, DV, WIDTH, Q_SCALED, KV_SCALED, ROWS
    )
    k, v, k_scale, v_scale = cache
    row_dout = vectors(dout + first_row * DV, place, exists, DV, V_WIDTH)
    row_logsumexp = tl.load(logsumexp + first_row + place, mask=exists, other=0.0)
    row_delta = tl.load(delta + first_row + place, mask=exists, other=0.0)
    ends, first, last, resumed, end = slots_seen(
        position, exists, oldest, gap, T, S, H // HKV, ROWS, KEYS, BOUNDED, GAPPED
    )
    dquery = tl.zeros((ROWS, WIDTH), tl.float32)
    for masked in tl.static_range(2):
        for start in range(first, last, KEYS):
            score, key, slot, key_place, there = block_scores(
                start, end, queries, cache, HKV, D, WIDTH, KEYS, SCALE, Q_SCALED, KV_SCALED
            )
            weight = tl.exp2(score - row_logsumexp[:, None])
            if (masked == 1) | GAPPED:
                seen = rows_see(slot, ends, 1, BOUNDED, GAPPED)
                weight = tl.where(seen, weight, 0.0)
            value = vectors(v, key_place, there, DV, V_WIDTH)
            dweight = multiply(row_dout, value.T)
            if KV_SCALED:
                dweight *= tl.load(v_scale + key_place, mask=there, other=0.0)[None, :]
            dscore = weight * (dweight - row_delta[:, None])
            if KV_SCALED:
                dscore *= tl.load(k_scale + key_place, mask=there, other=0.0)[None, :]
            dquery = tl.dot(dscore.to(key.dtype), key, dquery, input_precision="ieee")
        first, last = resumed, end
    store_vectors(dq + first_row * D, dquery * (SCALE * _LOG_2), place, exists, D, WIDTH)


@triton.jit
def _first_and_unmasked(
    positions,
    oldest,
    gap,
    slot,
    T: tl.constexpr,
    KEYS: tl.constexpr,
    BOUNDED: tl.constexpr,
    GAPPED: tl.constexpr,
):
    """Returns, for the block of keys at `slot`, the first query that sees any of its slots (T if
    none does), and the query, not before that one, from which on all queries see all its slots;
    with BOUNDED, from which on none sees any."""
    first, unmasked = T, 0
    for start in range(0, T, _SCAN):
        query = start + tl.arange(0, _SCAN)
        position = tl.load(positions + query, mask=query < T, other=-1)
        sees = (position >= slot) & (query < T)
        if BOUNDED:
            sees &= tl.load(oldest + query, mask=query < T, other=0) < slot + KEYS
            if GAPPED:
                outside = tl.load(gap + query * 2, mask=query < T, other=0) > slot
                outside |= tl.load(gap + query * 2 + 1, mask=query < T, other=0) < slot + KEYS
                sees &= outside
            partly = sees
        else:
            partly = (position < slot + KEYS - 1) & (query < T)
        first = tl.minimum(first, tl.min(tl.where(sees, query, T), 0))
        unmasked = tl.maximum(unmasked, tl.max(tl.where(partly, query + 1, 0), 0))
    return first, tl.maximum(first, unmasked)


@triton.jit
def key_gradient_kernel(
    q,  # this and the next twelve as in `query_gradient_kernel`
    k,
    v,
    positions,
    q_scale,
    k_scale,
    v_scale,
    oldest,
    gap,
    sinks,
    dout,
    logsumexp,
    delta,
    dk,  # (B, S, HKV, D) float32
    dv,  # (B, S, HKV, DV) float32
    T: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    Q_SCALED: tl.constexpr,
    KV_SCALED: tl.constexpr,
    BOUNDED: tl.constexpr,
    GAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    batch, kv_head = tl.cast(tl.program_id(2), tl.int64), tl.program_id(1)
    GROUP: tl.constexpr = H // HKV
    first_row, first_key = batch * T * H + kv_head * GROUP, batch * S * HKV + kv_head
    positions += batch * T
    q += first_row * D
    dout += first_row * DV
    logsumexp += first_row
    delta += first_row
    if Q_SCALED:
        q_scale += first_row
    if BOUNDED:
        oldest += batch * T
    if GAPPED:
        gap += batch * T * 2
    start = tl.program_id(0) * KEYS
    slot = start + tl.arange(0, KEYS)
    there = slot < S
    place = slot * HKV
    key = vectors(k + first_key * D, place, there, D, WIDTH)
    value = vectors(v + first_key * DV, place, there, DV, V_WIDTH)
    key_scale, value_scale = slot, slot
    if KV_SCALED:
        key_scale = tl.load(k_scale + first_key + place, mask=there, other=0.0) * SCALE
        value_scale = tl.load(v_scale + first_key + place, mask=there, other=0.0)
    dkey, dvalue = tl.zeros((KEYS, WIDTH), tl.float32), tl.zeros((KEYS, V_WIDTH), tl.float32)
    first, unmasked = _first_and_unmasked(positions, oldest, gap, start, T, KEYS, BOUNDED, GAPPED)
    tiles = (T * GROUP + ROWS - 1) // ROWS
    border = tl.minimum((unmasked * GROUP + ROWS - 1) // ROWS, tiles)
    first, last = first * GROUP // ROWS, border
    if BOUNDED:
        tiles = border
    for unmasked_part in tl.static_range(2):
        for tile in range(first, last):
            # Scores and weights are (keys, rows) here, to serve as left operands.
            row_place, exists, position = tile_rows(positions, tile, ROWS, T, S, H, HKV)
            query = vectors(q, row_place, exists, D, WIDTH)
            score = multiply(key, query.T)
            if KV_SCALED:
                score *= key_scale[:, None]
            else:
                score *= SCALE
            if Q_SCALED:
                query_scale = tl.load(q_scale + row_place, mask=exists, other=0.0)[None, :]
                score *= query_scale
            row_logsumexp = tl.load(logsumexp + row_place, mask=exists, other=0.0)
            weight = tl.exp2(score - row_logsumexp[None, :])
            if unmasked_part == 0:
                ends, _, _, _ = row_ends(
                    position, exists, oldest, gap, tile, ROWS, GROUP, BOUNDED, GAPPED
                )
                seen = rows_see(slot, ends, 0, BOUNDED, GAPPED)
                weight = tl.where(seen, weight, 0.0)
            row_dout = vectors(dout, row_place, exists, DV, V_WIDTH)
            dvalue = tl.dot(weight.to(row_dout.dtype), row_dout, dvalue, input_precision="ieee")
            dweight = multiply(value, row_dout.T)
            if KV_SCALED:
                dweight *= value_scale[:, None]
            row_delta = tl.load(delta + row_place, mask=exists, other=0.0)
            dscore = weight * (dweight - row_delta[None, :])
            if Q_SCALED:
                dscore *= query_scale
            dkey = tl.dot(dscore.to(query.dtype), query, dkey, input_precision="ieee")
        first, last = border, tiles
    store_vectors(dk + first_key * D, dkey * (SCALE * _LOG_2), place, there, D, WIDTH)
    store_vectors(dv + first_key * DV, dvalue, place, there, DV, V_WIDTH)


# Tiles of the kernel for dq, and of the kernel for dk and dv; keys as in `fast_attention.TILES`.
QUERY_TILES = {
    "bfloat16": {64: Tile(128, 64, 8, 3), 128: Tile(128, 64, 8, 2), 256: Tile(128, 32, 8, 2)},
    "float32": {64: Tile(32, 32, 8, 1), 128: Tile(16, 16, 8, 1), 256: Tile(16, 16, 8, 1)},
}
KEY_TILES = {
    "bfloat16": {64: Tile(128, 128, 8, 2), 128: Tile(64, 128, 8, 2), 256: Tile(32, 64, 8, 2)},
    "float32": {64: Tile(32, 32, 8, 1), 128: Tile(32, 32, 8, 1), 256: Tile(16, 16, 8, 1)},
}


def attention_vjp(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    cotangent: jax.Array,
    *,
    scale: float,
    q_scale: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    oldest: jax.Array | None = None,
    gap: jax.Array | None = None,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Computes gradients of attention with respect to the dequantised q, k and v, and to sinks.

    Args:
      q, k, v, scale, q_scale, k_scale, v_scale, sinks: as for `reference.attention`; latent
        attention's heads have no sinks.
      positions: (B, T) int32, last slot that each query sees.
      oldest, gap: slots that each query does not see, as for `reference.attention_vjp`.
      cotangent: (B, T, H, Dv), gradient of the output; rounded to bf16 if the operands are bf16.

    Returns:
      (dq, dk, dv) float32, shaped as q, k, v, and with sinks their gradient (H,).
    """
    if not fast_attention.supports(q, v):
        assert sinks is None
        return reference.attention_vjp_by_blocks(
            dequantized(q, q_scale),
            dequantized(k, k_scale),
            dequantized(v, v_scale),
            positions,
            cotangent,
            scale=scale,
            oldest=oldest,
            gap=gap,
            block=_WIDE_BLOCK,
        )
    operands = fast_attention.prepare(
        q,
        k,
        v,
        positions,
        scale=scale,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        oldest=oldest,
        gap=gap,
        sinks=sinks,
    )
    out, logsumexp = fast_attention.forward(operands)
    delta = (cotangent.astype(jnp.float32) * out).sum(-1)
    delta = jnp.where(positions[..., None] >= 0, delta, 0)  # `out` is NaN at negative positions
    dout = rounded(cotangent, operands.arrays[0].dtype)
    (dq,) = operands.call(
        query_gradient_kernel, QUERY_TILES, dout, logsumexp, delta, out=(q.shape,)
    )
    dk, dv = operands.call(
        key_gradient_kernel, KEY_TILES, dout, logsumexp, delta, out=(k.shape, v.shape), over="keys"
    )
    if sinks is None:
        return dq, dk, dv
    seen = positions[..., None] >= 0
    weight = jnp.where(seen, jnp.exp2(sinks * LOG2_E.value - logsumexp), 0)
    return dq, dk, dv, -(weight * delta).sum((0, 1))
