"""The Triton kernel of fast attention, and what its gradient's kernels share with it.

The online softmax of FlashAttention-2 (Dao, arXiv:2307.08691, algorithm 1) over tiles of 64 or 128
rows, which the wide tensor core instruction (wgmma) takes, where strict attention has 16. A row is
a query and one head of a group; keys come in blocks. Scores are in units of log 2, so that exp2
serves. The mask is by positions, which may have any order: blocks of keys that all rows of a tile
see go without it, blocks that none sees are left out.

Operands of the tensor core are all bf16 or all float32 (then without TF32). Scales of quantised
queries, keys and values are folded, as in strict attention: those of keys and queries multiply
scores, those of values multiply weights. Weights are rounded to bf16 for their product with values.

A row's bits are not those of strict attention: there are no splits, a block may be of 128 keys, and
the tensor core itself adds a block's product to the sum so far. Nothing is promised of them.
"""

import triton
import triton.language as tl

_LOWEST = tl.constexpr(-3.4e38)


@triton.jit
def tile_rows(positions, tile, ROWS: tl.constexpr, T, S, H: tl.constexpr, HKV: tl.constexpr):
    """Of a tile's rows: place in (T, H) of one sequence and group, whether they exist, positions.

    A row that does not exist has a position of -1. Positions are at most S - 1.
    """
    GROUP: tl.constexpr = H // HKV
    row = tile * ROWS + tl.arange(0, ROWS)
    exists = row < T * GROUP
    query = row // GROUP
    position = tl.load(positions + query, mask=exists, other=-1)
    return query * H + row % GROUP, exists, tl.minimum(position, S - 1)


@triton.jit
def vectors(x, place, exists, D: tl.constexpr, WIDTH: tl.constexpr):
    """Vectors of D numbers at places, zeros up to WIDTH and where none exists."""
    feature = tl.arange(0, WIDTH)
    mask = exists[:, None]
    if D != WIDTH:
        mask = mask & (feature < D)[None, :]
    return tl.load(x + place[:, None] * D + feature[None, :], mask=mask, other=0.0)


@triton.jit
def store_vectors(x, values, place, exists, D: tl.constexpr, WIDTH: tl.constexpr):
    feature = tl.arange(0, WIDTH)
    mask = exists[:, None] & (feature < D)[None, :]
    tl.store(x + place[:, None] * D + feature[None, :], values, mask=mask)


@triton.jit
def multiply(a, b):
    return tl.dot(a, b, input_precision="ieee")  # read for float32 operands alone


@triton.jit
def scores_of(
    query, key, query_scale, k_scale, place, there,
    SCALE: tl.constexpr, Q_SCALED: tl.constexpr, KV_SCALED: tl.constexpr,
):  # fmt: skip
    """(rows, keys) scores over log 2, without a mask."""
    score = multiply(query, key.T)
    if KV_SCALED:
        score *= (tl.load(k_scale + place, mask=there, other=0.0) * SCALE)[None, :]
    else:
        score *= SCALE
    if Q_SCALED:
        score *= query_scale[:, None]
    return score


@triton.jit
def seen_by(position, exists, S, KEYS: tl.constexpr):
    """Slots where a tile's loop over keys takes up its mask, at a block's start, and ends.

    What lies behind the end is not read: garbage may be NaN, and 0 * NaN is.
    """
    all_see = tl.min(tl.where(exists, position, S - 1), 0) + 1
    some_see = tl.max(position, 0) + 1
    unmasked = tl.maximum(all_see, 0) // KEYS * KEYS
    return unmasked, some_see


@triton.jit
def _add_block(
    top, total, values, start, end, query, query_scale, position, k, v, k_scale, v_scale,
    HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, KEYS: tl.constexpr, SCALE: tl.constexpr, Q_SCALED: tl.constexpr,
    KV_SCALED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Maximum, sum and weighted values with those of a block of keys."""
    slot = start + tl.arange(0, KEYS)
    there = slot < end
    place = slot * HKV
    key = vectors(k, place, there, D, WIDTH)
    score = scores_of(query, key, query_scale, k_scale, place, there, SCALE, Q_SCALED, KV_SCALED)
    if MASKED:
        score = tl.where(slot[None, :] <= position[:, None], score, float("-inf"))
    above = tl.maximum(top, tl.max(score, 1))
    weight = tl.exp2(score - above[:, None])
    rescale = tl.exp2(top - above)
    total = tl.fma(total, rescale, tl.sum(weight, 1))
    if KV_SCALED:
        weight *= tl.load(v_scale + place, mask=there, other=0.0)[None, :]
    value = vectors(v, place, there, DV, V_WIDTH)
    values = tl.dot(
        weight.to(value.dtype), value, values * rescale[:, None], input_precision="ieee"
    )
    return above, total, values


@triton.jit
def fast_attention_kernel(
    q,  # (B, T, H, D) bf16 or float32, as the next two
    k,  # (B, S, HKV, D)
    v,  # (B, S, HKV, DV)
    positions,  # (B, T) int32
    q_scale,  # (B, T, H) float32, unused without Q_SCALED
    k_scale,  # (B, S, HKV) float32, unused without KV_SCALED
    v_scale,  # likewise
    out,  # (B, T, H, DV) float32
    logsumexp,  # (B, T, H) float32, over log 2
    T: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    WIDTH: tl.constexpr,  # D or more, a power of two; so is the next
    V_WIDTH: tl.constexpr,
    SCALE: tl.constexpr,  # of the scores, over log 2
    Q_SCALED: tl.constexpr,
    KV_SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    batch, kv_head = tl.cast(tl.program_id(2), tl.int64), tl.program_id(1)
    # Within a sequence 32 bits count; the tiles with the most keys come first, as they end last.
    first_row, first_key = batch * T * H + kv_head * (H // HKV), batch * S * HKV + kv_head
    k += first_key * D
    v += first_key * DV
    if KV_SCALED:
        k_scale += first_key
        v_scale += first_key
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    place, exists, position = tile_rows(positions + batch * T, tile, ROWS, T, S, H, HKV)
    query = vectors(q + first_row * D, place, exists, D, WIDTH)
    query_scale = position
    if Q_SCALED:
        query_scale = tl.load(q_scale + first_row + place, mask=exists, other=0.0)
    top = tl.full((ROWS,), _LOWEST, tl.float32)
    total, values = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, V_WIDTH), tl.float32)
    unmasked, end = seen_by(position, exists, S, KEYS)
    for start in range(0, unmasked, KEYS):
        top, total, values = _add_block(
            top, total, values, start, end, query, query_scale, position, k, v, k_scale, v_scale,
            HKV, D, DV, WIDTH, V_WIDTH, KEYS, SCALE, Q_SCALED, KV_SCALED, False,
        )  # fmt: skip
    for start in range(unmasked, end, KEYS):
        top, total, values = _add_block(
            top, total, values, start, end, query, query_scale, position, k, v, k_scale, v_scale,
            HKV, D, DV, WIDTH, V_WIDTH, KEYS, SCALE, Q_SCALED, KV_SCALED, True,
        )  # fmt: skip
    values *= (1.0 / total)[:, None]
    store_vectors(out + first_row * DV, values, place, exists, DV, V_WIDTH)
    tl.store(logsumexp + first_row + place, top + tl.log2(total), mask=exists)
