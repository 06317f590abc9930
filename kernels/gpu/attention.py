"""Strict attention by Triton: the same bits in decode, prefill and learner.

Arguments and definition are those of `reference.attention`; the bits are not. A tile is 16 rows:
queries of one sequence and the heads of one group, which share keys and values. Keys come in blocks
of 64 cache slots, blocks in splits of 512. Tile, block and split decide bits. `one_split_of` is the
online softmax over the blocks of a split, `join` adds a split to the previous ones, both in
ascending order and float32. `attention_kernel` runs all splits of a tile in one program (prefill
and learner: many tiles), or writes each split's results for `join_kernel` (decode: few tiles, long
caches): the same functions in the same order, hence the same bits. In the second form programs take
the splits that hold keys from a list, one after another, which each makes from the sequences' last
positions: uneven lengths leave none of them idle, and a table for longer sequences costs nothing.

Invariants for the bits of a row:
  * they depend only on its position, query, visible keys and values. Rows of a tile do not mix: a
    row of a tensor core's result depends on that row of the left operand, and only the loop's end
    is shared;
  * keys after its position add nothing: their scores are -inf, their weights exactly 0; the maximum
    stays, the sums are multiplied by exp2(0) = 1 and 0 is added. So further blocks, because of
    another row of the tile or a longer cache, change nothing;
  * the place of a block of keys, in a sequence's cache or in a page of a pool, does not matter. A
    page is a block; no page after the last position of the tile is read;
  * slots after the last position of the tile are not read but replaced by 0: garbage may be NaN,
    and 0 * NaN is NaN;
  * with a window, blocks before the first key of every row of a tile are left out. To a row that
    begins later such a block adds nothing either: the maximum is LOWEST, the sums are 0;
  * the sum over a block's 64 weights is the one reduction whose order the compiler chooses, by the
    layout of the score's tile. It is the same in all three uses (tests/kernels/gpu/test_sass.py).

Beside bf16 keys or values the operands of the tensor core are bf16. Beside E4M3 and INT8 they are
float16: one instruction widens two E4M3 to float16, exactly, where bf16 takes several. Such keys or
values are loaded as pairs of features, in 16 bits, and a head's even and odd features are two
products. (On an
H200 reading single bytes and bf16 took 1.6 times as long.) Of the weights' 11 bits of float16 none
is lost to a small scale: what a row's maximum is taken of, and what it is subtracted from, is the
score plus the exponent of the value's scale, so that a weight times its scale is at most 2.

Weights times the values' scale are rounded to bf16 or float16, up to 2**-8 or 2**-11 of each term;
the softmax's sum adds unrounded weights. A block's product leaves the tensor core and is then added
by one multiply-add with the rescaling, so that no sum in the tensor core is longer than 64 keys, or
the features of a head. If one operand is float32 all are; products are then FMAs, not TF32. Scores
are in units of log 2: exp2 is one instruction.

Not done: gradients (attention_gradient.py); `vmap` (under `shard_map` each device calls the kernel
on its sequences, or on its heads); wider tiles for many queries, whose keys each tile reads again
(from the L2); skipping the mask in blocks that all rows see. A NaN or infinity in the values of a
token makes NaN of the rows before it in the same tile, as 0 * NaN does in the reference.
"""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from fp8rl_jax.kernels.arrays import K_BLOCK, fp8_max
from fp8rl_jax.kernels.gpu import attention_operands as operands
from fp8rl_jax.kernels.gpu.online_softmax import (
    BLOCK,
    LOWEST,
    ROWS,
    SPLIT,
    first_seen,
    join,
    nothing,
    one_split_of,
    scale_at,
    with_sinks,
)
from fp8rl_jax.kernels.gpu.quantiser import Quantisation, block_scales, magnitude_bits
from fp8rl_jax.kernels.gpu.triton_call import triton_call
from fp8rl_jax.kernels.gpu.vectors import query_pairs, store_vectors, vectors

SEQUENCES = tl.constexpr(128)  # whose splits a program counts at once


@triton.jit
def _listed(
    item, latest, earliest, window, B: tl.constexpr, S: tl.constexpr, WINDOWED: tl.constexpr
):
    """Returns the sequence and the split that stand at `item` in the list of all splits that are
    seen, sequence after sequence; and how many the list has."""
    found, split, before = 0, 0, 0
    for start in range(0, B, SEQUENCES):
        sequence = start + tl.arange(0, SEQUENCES)
        there = sequence < B
        last = tl.minimum(tl.load(latest + sequence, mask=there, other=-1), S - 1)
        first = last
        if WINDOWED:
            first = tl.load(earliest + sequence, mask=there, other=0)
        oldest, _ = first_seen(window, first, there, WINDOWED)
        begin = oldest // SPLIT
        count = tl.where(last >= 0, last // SPLIT + 1 - begin, 0)
        end = before + tl.cumsum(count, 0)
        here = (end > item) & (end - count <= item)
        found += tl.sum(tl.where(here, sequence, 0), 0)
        split += tl.sum(tl.where(here, begin + item - (end - count), 0), 0)
        before += tl.sum(count, 0)
    return found, split, before


@triton.jit
def _rows(
    positions,
    batch,
    kv_head,
    tile,
    S: tl.constexpr,
    T: tl.constexpr,
    H: tl.constexpr,
    HKV: tl.constexpr,
):
    """Returns each row's offset in (B, T, H), existence and position; and the last position.

    A row that does not exist has position -1 and sees no key.
    """
    GROUP: tl.constexpr = H // HKV
    row = tile * ROWS + tl.arange(0, ROWS)
    exists = row < T * GROUP
    query = row // GROUP
    position = tl.load(positions + batch * T + query, mask=exists, other=-1)
    place = (batch * T + query) * H + kv_head * GROUP + row % GROUP
    return place, exists, position, tl.minimum(tl.max(position, 0), S - 1)


@triton.jit
def _store_result(
    results,  # pointers to out, q and q_scale
    sinks,
    place,
    exists,
    top,
    total,
    values,
    T: tl.constexpr,
    H: tl.constexpr,
    DV: tl.constexpr,
    V_WIDTH: tl.constexpr,
    SINKS: tl.constexpr,
    QUANTIZE: tl.constexpr,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """Stores a tile's results, and with QUANTIZE what `norm.quantize_rows` makes of them."""
    out, q, q_scale = results
    if SINKS:
        top, total, values = with_sinks(sinks, place % H, exists, top, total, values)
    # Adding 0.0 makes -0.0 positive: another block without visible keys would do that, too.
    result = tl.div_rn(values, tl.broadcast_to(total[:, None], values.shape)) + 0.0
    rounded = result.to(out.dtype.element_ty)
    store_vectors(out, rounded, place, exists, DV, V_WIDTH)
    if QUANTIZE:  # a head is a block of 128
        value = rounded.to(tl.float32)
        s, stored = block_scales(tl.max(magnitude_bits(value), axis=1), FP8_MAX, POWER_OF_TWO)
        value = (value * s[:, None]).to(q.dtype.element_ty)
        store_vectors(q, value, place, exists, DV, V_WIDTH)
        token, head = place // H, place % H
        tl.store(q_scale + head * (tl.num_programs(2) * T) + token, stored, mask=exists)


@triton.jit
def _tile(
    pointers,  # to the operands, as `attention_kernel` has them
    batch,  # int64
    kv_head,
    tile,
    B: tl.constexpr,
    T: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    DR: tl.constexpr,
    WIDTH: tl.constexpr,
    R_WIDTH: tl.constexpr,
    Q_SCALES: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
    PAGED: tl.constexpr,
    LAYERS: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Loads a tile's queries. Returns rows and cache for `one_split_of`; the rows' offset in
    (B, T, H) and whether they exist; the tile's last position and first slot."""
    q, k, v, positions, q_scale, k_scale, v_scale, q_rope, k_rope, table, layer, window = pointers
    place, exists, position, last = _rows(positions, batch, kv_head, tile, S, T, H, HKV)
    oldest, begin = first_seen(window, position, exists, WINDOWED)
    # From here on, 32-bit offsets count from the first token's keys of a sequence or page.
    sequence, first = batch, tl.cast(kv_head, tl.int64)  # sequence: of all layers
    if LAYERS:
        sequence += tl.load(layer) * B
    if PAGED:
        table += sequence * (S // BLOCK)
    else:
        first += sequence * (S * HKV)
    k += first * D
    v += first * DV
    k_rope += first * DR
    if K_SCALES == 2:
        k_scale += first
    if V_SCALES == 2:
        v_scale += first
    if k.dtype.element_ty.primitive_bitwidth == 8:
        query, odd_query = query_pairs(q, place, exists, D, WIDTH)
    else:
        query = vectors(q, place, exists, D, WIDTH)
        odd_query = query
    query_rope, query_scale = query, position
    if Q_SCALES > 0:
        query_scale = scale_at(q_scale, 0, place, exists, Q_SCALES)
    if DR > 0:
        query_rope = vectors(q_rope, place, exists, DR, R_WIDTH)
    rows = query, odd_query, query_rope, query_scale, position, last, oldest, begin
    cache = k, v, k_scale, v_scale, k_rope, table
    return rows, cache, place, exists, last, begin


@triton.jit
def attention_kernel(
    q,  # (B, T, H, D)
    k,  # (B, S, HKV, D), or with PAGED (pages, BLOCK, HKV, D); v, scales and k_rope accordingly.
    # With LAYERS and without PAGED (L * B, S, HKV, D)
    v,  # (B, S, HKV, DV)
    positions,  # (B, T) int32
    q_scale,  # (B, T, H) float32 with Q_SCALES 2, one number with 1, unused with 0
    k_scale,  # (B, S, HKV), as q_scale by K_SCALES
    v_scale,  # (B, S, HKV), as q_scale by V_SCALES
    q_rope,  # (B, T, H, DR), unused if DR is 0
    k_rope,  # (B, S, HKV, DR)
    table,  # (B, S / BLOCK) int32, the page of each block of slots, unused without PAGED; with
    # LAYERS (L, B, S / BLOCK)
    layer,  # (1,) int32, unused without LAYERS
    window,  # (1,) int32, unused without WINDOWED
    sinks,  # (H,) float32, unused without SINKS
    latest,  # (B,) int32, each sequence's last position; unused without ONE_SPLIT
    earliest,  # (B,) int32, its first position; unused without ONE_SPLIT or WINDOWED
    out,  # (B, T, H, DV); with ONE_SPLIT (SPLITS, B, T, H, DV) float32, weighted values
    top,  # (SPLITS, B, T, H) float32 with ONE_SPLIT, else unused
    total,  # as top
    out_q,  # (B, T, H, DV) FP8, unused without QUANTIZE
    out_scale,  # (H, B, T) float32, as out_q
    B: tl.constexpr,
    T: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    DR: tl.constexpr,
    WIDTH: tl.constexpr,  # D or more, a power of two; so are the next two
    V_WIDTH: tl.constexpr,
    R_WIDTH: tl.constexpr,
    SCALE: tl.constexpr,  # factor of the scores, over log 2
    Q_SCALES: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
    PAGED: tl.constexpr,
    LAYERS: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    ONE_SPLIT: tl.constexpr,  # programs run single splits of a list, for `join_kernel`
    QUANTIZE: tl.constexpr,  # also store out_q and out_scale (without ONE_SPLIT)
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    pointers = q, k, v, positions, q_scale, k_scale, v_scale, q_rope, k_rope, table, layer, window
    if ONE_SPLIT:
        kv_head, tile = tl.program_id(0) % HKV, tl.program_id(0) // HKV
        listed = _listed(0, latest, earliest, window, B, S, WINDOWED)[2]
        first, step = tl.program_id(1), tl.num_programs(1)
    else:
        # The tiles with the most keys start first: they take longest.
        tile = tl.num_programs(0) - 1 - tl.program_id(0)
        batch, kv_head = tl.cast(tl.program_id(2), tl.int64), tl.program_id(1)
        first, listed, step = 0, 1, 1
    # What does not change from item to item is computed again: it would take registers.
    for item in tl.range(first, listed, step, disable_licm=True):
        if ONE_SPLIT:
            sequence, split, _ = _listed(item, latest, earliest, window, B, S, WINDOWED)
            batch = tl.cast(sequence, tl.int64)
        rows, cache, place, exists, last, begin = _tile(
            pointers,
            batch,
            kv_head,
            tile,
            B,
            T,
            S,
            H,
            HKV,
            D,
            DV,
            DR,
            WIDTH,
            R_WIDTH,
            Q_SCALES,
            K_SCALES,
            V_SCALES,
            PAGED,
            LAYERS,
            WINDOWED,
        )
        if ONE_SPLIT:
            # With several queries, rows of another tile may be those that see the split.
            if (split * SPLIT <= last) & (split * SPLIT + SPLIT > begin):
                row_top, row_total, values = one_split_of(
                    split,
                    rows,
                    cache,
                    HKV,
                    D,
                    DV,
                    DR,
                    WIDTH,
                    V_WIDTH,
                    R_WIDTH,
                    SCALE,
                    Q_SCALES,
                    K_SCALES,
                    V_SCALES,
                    PAGED,
                    WINDOWED,
                )
                place += tl.cast(split, tl.int64) * (B * T * H)
                tl.store(top + place, row_top, mask=exists)
                tl.store(total + place, row_total, mask=exists)
                store_vectors(out, values, place, exists, DV, V_WIDTH)
        else:
            row_top, row_total, values = nothing(V_WIDTH)
            for split in range(begin // SPLIT, (last + SPLIT) // SPLIT):
                more_top, more_total, more_values = one_split_of(
                    split,
                    rows,
                    cache,
                    HKV,
                    D,
                    DV,
                    DR,
                    WIDTH,
                    V_WIDTH,
                    R_WIDTH,
                    SCALE,
                    Q_SCALES,
                    K_SCALES,
                    V_SCALES,
                    PAGED,
                    WINDOWED,
                )
                row_top, row_total, values = join(
                    row_top, row_total, values, more_top, more_total, more_values
                )
            _store_result(
                (out, out_q, out_scale),
                sinks,
                place,
                exists,
                row_top,
                row_total,
                values,
                T,
                H,
                DV,
                V_WIDTH,
                SINKS,
                QUANTIZE,
                FP8_MAX,
                POWER_OF_TWO,
            )


@triton.jit
def join_kernel(
    positions,  # (B, T) int32
    parts,  # (SPLITS, B, T, H, DV), as `attention_kernel` wrote it with ONE_SPLIT
    top,  # (SPLITS, B, T, H)
    total,  # as top
    window,  # as in `attention_kernel`, as the next one
    sinks,
    out,  # (B, T, H, DV)
    out_q,  # as in `attention_kernel`
    out_scale,
    T: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
    HKV: tl.constexpr,
    DV: tl.constexpr,
    V_WIDTH: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    QUANTIZE: tl.constexpr,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    batch = tl.cast(tl.program_id(2), tl.int64)
    place, exists, position, last = _rows(
        positions, batch, tl.program_id(1), tl.program_id(0), S, T, H, HKV
    )
    _, begin = first_seen(window, position, exists, WINDOWED)
    feature = tl.arange(0, V_WIDTH)
    mask = exists[:, None] & (feature < DV)[None, :]
    row_top, row_total, values = nothing(V_WIDTH)
    at = place
    if WINDOWED:
        at += begin // SPLIT * tl.num_programs(2) * (T * H)
    # Triton rounds -1 // SPLIT to 0: of a tile that sees no key nobody wrote a part.
    for _ in tl.range(begin // SPLIT, (last + SPLIT) // SPLIT, num_stages=4):
        part = tl.load(parts + at[:, None] * DV + feature[None, :], mask=mask, other=0.0)
        more_top = tl.load(top + at, mask=exists, other=LOWEST)
        more_total = tl.load(total + at, mask=exists, other=0.0)
        row_top, row_total, values = join(row_top, row_total, values, more_top, more_total, part)
        at += tl.num_programs(2) * (T * H)
    _store_result(
        (out, out_q, out_scale),
        sinks,
        place,
        exists,
        row_top,
        row_total,
        values,
        T,
        H,
        DV,
        V_WIDTH,
        SINKS,
        QUANTIZE,
        FP8_MAX,
        POWER_OF_TWO,
    )


def _kind(scale: jax.Array | None) -> int:
    """Returns 0 for no scale, 1 for one common scale, 2 for one per token and head."""
    return 0 if scale is None else 2 if scale.ndim else 1


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
    layer: jax.Array | None = None,
    window: jax.Array | None = None,
    sinks: jax.Array | None = None,
    dtype=jnp.float32,
    quantisation: Quantisation | None = None,
    one_split: bool | None = None,
):
    """Computes `reference.attention` by the Triton kernels, rounded once to `dtype`.

    Args:
      q, k, v, positions, scale, q_scale, k_scale, v_scale, q_rope, k_rope, table, window, sinks: as
        for the reference. Page ids are not checked: one outside the pool reads other memory.
      layer: () int32, for keys and values of several layers: without a table the sequences of this
        layer are entries ``layer * B`` to ``layer * B + B - 1`` of the first axis; `table` is that
        of all layers, (L, B, N). Or None.
      dtype: dtype of the result.
      quantisation: how to also quantise the rounded result, as `norm.quantize_rows` would the rows
        of all heads; for heads of 128 features, each a block of a scale. Or None.
      one_split: whether a program runs one split of the keys; None chooses by shape. Never changes
        a bit.

    Returns:
      (B, T, H, Dv) in `dtype`; NaN for a query of negative position. With `quantisation` (this,
      q (B * T, H * Dv) FP8, scale (H, B * T) float32).

    Raises:
      ValueError: shapes do not fit, or a dtype is not supported.
    """
    ropes: tuple[jax.Array | None, ...] = (q_rope, k_rope)
    scales = q_scale, k_scale, v_scale
    operands.check_operands(q, k, v, positions, scales, ropes, table, layer is not None)
    (batch, queries, heads, features), (slots, kv_heads, v_features) = q.shape, v.shape[1:]
    if table is not None:
        slots *= table.shape[-1]
    tiles = -(-queries * heads // kv_heads // operands.ROWS)
    splits = -(-slots // operands.SPLIT)
    if one_split is None:
        one_split = operands.takes_one_split(batch, queries, heads, kv_heads, slots)
    if operands.in_float32(q, k, v, q_rope, k_rope):
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        ropes = tuple(None if x is None else x.astype(jnp.float32) for x in ropes)
    window = None if window is None else window.reshape(1).astype(jnp.int32)
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    rows = batch, queries, heads
    assert quantisation is None or v_features == K_BLOCK
    given = quantisation or Quantisation()
    results = (
        jax.ShapeDtypeStruct((*rows, v_features), dtype),
        quantisation and jax.ShapeDtypeStruct((*rows, v_features), given.dtype),
        quantisation and jax.ShapeDtypeStruct((heads, batch, queries), jnp.float32),
    )
    rope_features = 0 if q_rope is None else q_rope.shape[3]
    of_splits = [(splits, *rows, v_features), (splits, *rows), (splits, *rows)]
    parts = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in of_splits]
    shape = {
        "T": queries,
        "S": slots,
        "H": heads,
        "HKV": kv_heads,
        "DV": v_features,
        "V_WIDTH": operands.head_width(v_features, v.dtype),
        "WINDOWED": window is not None,
        "SINKS": sinks is not None,
        "FP8_MAX": fp8_max(given.dtype),
        "POWER_OF_TWO": given.power_of_two,
    }
    grid = tiles, kv_heads, batch
    if one_split:
        # Programs that share the list of splits: where there are more, one takes several, one after
        # another, so a longer table than sequences need costs nothing.
        others = kv_heads * tiles
        grid = others, min(batch * splits, -(-operands.MOST_PROGRAMS // others)), 1
    wider = max(k.dtype, v.dtype, key=lambda x: x.itemsize)
    widest = max(features, v_features)
    warps, stages = operands.warps_and_stages(widest, wider)
    found = triton_call(
        attention_kernel,
        q,
        k,
        v,
        positions,
        *scales,
        *ropes,
        table,
        None if layer is None else layer.reshape(1),
        window,
        sinks,
        positions.max(1) if one_split else None,
        positions.min(1) if one_split and window is not None else None,
        out=(*parts, None, None) if one_split else (results[0], None, None, *results[1:]),
        grid=grid,
        warps=warps,
        stages=stages,
        registers=operands.most_registers(widest, k.dtype, v.dtype),
        B=batch,
        D=features,
        DR=rope_features,
        WIDTH=operands.head_width(features, k.dtype),
        R_WIDTH=operands.head_width(rope_features or 1),
        SCALE=scale / math.log(2),
        Q_SCALES=_kind(q_scale),
        K_SCALES=_kind(k_scale),
        V_SCALES=_kind(v_scale),
        PAGED=table is not None,
        LAYERS=layer is not None,
        ONE_SPLIT=one_split,
        QUANTIZE=quantisation is not None and not one_split,
        **shape,
    )
    if one_split:
        values, top, total, *_ = found
        y, y_q, y_scale = triton_call(
            join_kernel,
            positions,
            values,
            top,
            total,
            window,
            sinks,
            out=results,
            grid=(tiles, kv_heads, batch),
            warps=4,
            stages=1,
            QUANTIZE=quantisation is not None,
            **shape,
        )
    else:
        y, _, _, y_q, y_scale = found
    if quantisation is None:
        return y
    tokens = batch * queries
    return y, y_q.reshape(tokens, heads * v_features), y_scale.reshape(heads, tokens)
