"""Attention by tiles of 128 rows (16 or 32 in float32) with each row's logsumexp, for gradients.

Arguments and definition are those of strict attention (attention.py), whose gradients recompute the
result by this faster kernel.

It is the online softmax of FlashAttention-2 (Dao, arXiv:2307.08691, algorithm 1) over tiles for the
wide tensor core instruction (wgmma); strict attention has tiles of 16 rows. A row is a query and
one head of a group; keys come in blocks. Scores are in units of log 2, for exp2. The mask is by
the last slot that each row sees (its position, in any order) and with BOUNDED the first: blocks of
keys that all rows of a tile see need no mask, blocks that no row sees are skipped. With a first
slot, of a window or of a sequence that begins within the row, every block is masked. With GAPPED a
row does not see the slots of a gap in between either: those of other sequences between a prompt
that it shares and its own tokens.

Operands of the tensor core are all bf16 or all float32 (then without TF32). E4M3 is widened to bf16
beforehand, exactly, because this instruction reads bf16 from shared memory. Scales are folded and
weights rounded as in strict attention. A row's bits are not those of strict attention: there are no
splits, a block may have 128 keys, and the tensor core adds a block's product to the sum so far.

Not done: heads wider than 256 features, so latent attention; `vmap`.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from fp8rl_jax.kernels.gpu.attention_operands import check_operands, head_width, in_float32
from fp8rl_jax.kernels.gpu.online_softmax import LOWEST, multiply, sees, with_sinks
from fp8rl_jax.kernels.gpu.triton_call import triton_call
from fp8rl_jax.kernels.gpu.vectors import store_vectors, vectors


@triton.jit
def tile_rows(positions, tile, ROWS: tl.constexpr, T, S, H: tl.constexpr, HKV: tl.constexpr):
    """Returns each row's offset in one sequence's (T, H), whether it exists, and the last slot that
    it sees, at most S - 1; -1 for a row that does not exist.
    """
    GROUP: tl.constexpr = H // HKV
    row = tile * ROWS + tl.arange(0, ROWS)
    exists = row < T * GROUP
    query = row // GROUP
    position = tl.load(positions + query, mask=exists, other=-1)
    return query * H + row % GROUP, exists, tl.minimum(position, S - 1)


@triton.jit
def row_ends(
    position,
    exists,
    oldest,
    gap,
    tile,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    BOUNDED: tl.constexpr,
    GAPPED: tl.constexpr,
):
    """Returns the ends of what each row sees: its last slot, as given; its first one; the first
    slot of its gap; the slot after the gap. Then the tile's first slot, the first slot that is in
    the gaps of all rows, and the slot after those. Without bounds and gaps all but the first are 0.
    """
    row = tile * ROWS + tl.arange(0, ROWS)
    first, leave, resume = row * 0, row * 0, row * 0
    begin, skip, again = 0, 0, 0
    if BOUNDED:
        first = tl.load(oldest + row // GROUP, mask=exists, other=2147483647)
        begin = tl.maximum(tl.min(first, 0), 0)
    if GAPPED:
        place = gap + row // GROUP * 2
        leave = tl.load(place, mask=exists, other=0)
        resume = tl.load(place + 1, mask=exists, other=2147483647)
        skip, again = tl.max(leave, 0), tl.min(resume, 0)
    return (position, first, leave, resume), begin, skip, again


@triton.jit
def rows_see(slot, ends, AXIS: tl.constexpr, BOUNDED: tl.constexpr, GAPPED: tl.constexpr):
    """Returns whether rows, of `row_ends`, see slots, which are the axis AXIS."""
    position, first, leave, resume = ends
    slot = tl.expand_dims(slot, 1 - AXIS)
    seen = sees(slot, tl.expand_dims(position, AXIS), tl.expand_dims(first, AXIS), BOUNDED)
    if GAPPED:
        seen &= (slot < tl.expand_dims(leave, AXIS)) | (slot >= tl.expand_dims(resume, AXIS))
    return seen


@triton.jit
def slots_seen(
    position,
    exists,
    oldest,
    gap,
    T: tl.constexpr,
    S: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BOUNDED: tl.constexpr,
    GAPPED: tl.constexpr,
):
    """Returns the rows' ends (`row_ends`) of a program's tile of queries, and the slots of its two
    loops over keys: where the first starts and ends, and where the second does; starts are a
    block's. Without gaps the first loop needs no mask. With them the blocks between the loops are
    in the gaps of all rows. Bounds mask every block.

    Slots from the end on are not read: garbage may be NaN, and 0 * NaN is NaN.
    """
    batch = tl.cast(tl.program_id(2), tl.int64)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    oldest, gap = oldest + batch * T, gap + batch * T * 2
    ends, begin, skip, again = row_ends(
        position, exists, oldest, gap, tile, ROWS, GROUP, BOUNDED, GAPPED
    )
    all_see = tl.min(tl.where(exists, position, S - 1), 0) + 1
    some_see = tl.max(position, 0) + 1
    start, unmasked = 0, tl.maximum(all_see, 0) // KEYS * KEYS
    if BOUNDED:
        start = begin // KEYS * KEYS
        unmasked = start
    resumed = unmasked
    if GAPPED:
        unmasked = tl.minimum((skip + KEYS - 1) // KEYS * KEYS, some_see)
        resumed = tl.maximum(tl.maximum(unmasked, start), again // KEYS * KEYS)
    return ends, start, unmasked, resumed, some_see


@triton.jit
def tile_of_queries(
    pointers,  # to q, k, v, positions, q_scale, k_scale and v_scale
    T: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    WIDTH: tl.constexpr,
    Q_SCALED: tl.constexpr,
    KV_SCALED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Loads a program's tile of queries. Returns them and their scales; pointers to the keys and
    values of its sequence and head, and to their scales; the offset of its sequence and heads in
    (B, T, H); and what `tile_rows` returns."""
    q, k, v, positions, q_scale, k_scale, v_scale = pointers
    batch, kv_head = tl.cast(tl.program_id(2), tl.int64), tl.program_id(1)
    # Offsets within a sequence have 32 bits. Tiles with the most keys start first.
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
    return (query, query_scale), (k, v, k_scale, v_scale), first_row, place, exists, position


@triton.jit
def block_scores(
    start,
    end,
    queries,  # and their scales
    cache,  # pointers to k, v, k_scale and v_scale
    HKV: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    SCALE: tl.constexpr,
    Q_SCALED: tl.constexpr,
    KV_SCALED: tl.constexpr,
):
    """Computes a tile's scores (rows, keys) over log 2 of a block of keys, without a mask. Returns
    them, the keys, and the keys' slots, offsets, and whether they exist."""
    query, query_scale = queries
    k, _, k_scale, _ = cache
    slot = start + tl.arange(0, KEYS)
    there = slot < end
    place = slot * HKV
    key = vectors(k, place, there, D, WIDTH)
    score = multiply(query, key.T)
    if KV_SCALED:
        score *= (tl.load(k_scale + place, mask=there, other=0.0) * SCALE)[None, :]
    else:
        score *= SCALE
    if Q_SCALED:
        score *= query_scale[:, None]
    return score, key, slot, place, there


@triton.jit
def fast_attention_kernel(
    q,  # (B, T, H, D) bf16 or float32, as the next two
    k,  # (B, S, HKV, D)
    v,  # (B, S, HKV, DV)
    positions,  # (B, T) int32
    q_scale,  # (B, T, H) float32, unused without Q_SCALED
    k_scale,  # (B, S, HKV) float32, unused without KV_SCALED
    v_scale,  # as k_scale
    oldest,  # as positions, unused without BOUNDED
    gap,  # (B, T, 2) int32, unused without GAPPED
    sinks,  # (H,) float32, unused without SINKS
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
    top = tl.full((ROWS,), LOWEST, tl.float32)
    total, values = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, V_WIDTH), tl.float32)
    ends, first, last, resumed, end = slots_seen(
        position, exists, oldest, gap, T, S, H // HKV, ROWS, KEYS, BOUNDED, GAPPED
    )
    for masked in tl.static_range(2):
        for start in range(first, last, KEYS):
            score, _key, slot, key_place, there = block_scores(
                start, end, queries, cache, HKV, D, WIDTH, KEYS, SCALE, Q_SCALED, KV_SCALED
            )
            if (masked == 1) | GAPPED:
                seen = rows_see(slot, ends, 1, BOUNDED, GAPPED)
                score = tl.where(seen, score, float("-inf"))
            above = tl.maximum(top, tl.max(score, 1))
            weight = tl.exp2(score - above[:, None])
            rescale = tl.exp2(top - above)
            total = tl.fma(total, rescale, tl.sum(weight, 1))
            if KV_SCALED:
                weight *= tl.load(v_scale + key_place, mask=there, other=0.0)[None, :]
            value = vectors(v, key_place, there, DV, V_WIDTH)
            values = tl.dot(
                weight.to(value.dtype), value, values * rescale[:, None], input_precision="ieee"
            )
            top = above
        first, last = resumed, end
    if SINKS:
        head = tl.program_id(1) * (H // HKV) + place % H
        top, total, values = with_sinks(sinks, head, exists, top, total, values)
    values *= (1.0 / total)[:, None]
    store_vectors(out + first_row * DV, values, place, exists, DV, V_WIDTH)
    tl.store(logsumexp + first_row + place, top + tl.log2(total), mask=exists)


WIDEST = 256  # most features of a head


@dataclasses.dataclass(frozen=True)
class Tile:
    """Rows of a tile, keys of a block, warps of a program, and stages of its pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int


# {operands' type: {most features of a head: tile}}.
TILES = {
    "bfloat16": {64: Tile(128, 128, 8, 3), 128: Tile(128, 64, 8, 3), 256: Tile(128, 64, 8, 2)},
    "float32": {64: Tile(32, 32, 8, 2), 128: Tile(16, 32, 8, 2), 256: Tile(16, 32, 8, 2)},
}


@dataclasses.dataclass(frozen=True)
class Operands:
    """Operands of the kernels of fast attention and its gradients; q, k and v in one type.

    Attributes:
      arrays: q, k, v in bf16 or float32, positions, the scales of q, k and v, one for each
        vector, first slots, gaps and sinks; None for what is not given.
      constants: constants of every kernel: shapes, factor of the scores, which scales are used.
    """

    arrays: tuple
    constants: dict[str, int | float | bool]

    def call(self, kernel, tables: dict, *more: jax.Array, out, over: str = "rows"):
        """Runs a kernel on `arrays` and `more`; returns float32 results of the shapes `out`.

        `tables` is {dtype: {width: Tile}}; a program has a tile of 'rows' or of 'keys' (`over`).
        """
        q, _, v = self.arrays[:3]
        (batch, queries, heads, features), (slots, kv_heads, v_features) = q.shape, v.shape[1:]
        table, widest = tables[q.dtype.name], max(features, v_features)
        tile = table[min(width for width in table if width >= widest)]
        rows = -(-queries * heads // kv_heads // tile.rows)
        programs = rows if over == "rows" else -(-slots // tile.keys)
        return triton_call(
            kernel,
            *self.arrays,
            *more,
            out=tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in out),
            grid=(programs, kv_heads, batch),
            warps=tile.warps,
            stages=tile.stages,
            ROWS=tile.rows,
            KEYS=tile.keys,
            **self.constants,
        )


def supports(q: jax.Array, v: jax.Array) -> bool:
    """Returns whether the kernels take heads of these widths."""
    return max(q.shape[3], v.shape[3]) <= WIDEST


def prepare(
    q,
    k,
    v,
    positions,
    *,
    scale,
    q_scale=None,
    k_scale=None,
    v_scale=None,
    oldest=None,
    gap=None,
    sinks=None,
) -> Operands:
    """Makes the kernels' operands from arguments of `reference.attention` that `supports` allows,
    and `oldest` and `gap` of `reference.attention_vjp`; a gap needs first slots.

    Raises:
      ValueError: shapes do not fit, or a dtype is not supported.
    """
    check_operands(q, k, v, positions, (q_scale, k_scale, v_scale))
    if math.prod(q.shape[1:3]) * max(q.shape[3], v.shape[3]) >= 2**31:  # counted in 32 bits
        raise ValueError(
            f"attention: a sequence's queries {q.shape[1:]} must be fewer than 2**31 numbers"
        )
    dtype = jnp.float32 if in_float32(q, k, v) else jnp.bfloat16
    q_scaled, kv_scaled = q_scale is not None, k_scale is not None or v_scale is not None
    scales = [
        jnp.broadcast_to(jnp.float32(1) if given is None else given, like.shape[:3])
        if used
        else None
        for given, like, used in (
            (q_scale, q, q_scaled),
            (k_scale, k, kv_scaled),
            (v_scale, v, kv_scaled),
        )
    ]
    constants = {
        "T": q.shape[1],
        "S": k.shape[1],
        "H": q.shape[2],
        "HKV": k.shape[2],
        "D": q.shape[3],
        "DV": v.shape[3],
        "WIDTH": head_width(q.shape[3]),
        "V_WIDTH": head_width(v.shape[3]),
        "SCALE": scale / math.log(2),
        "Q_SCALED": q_scaled,
        "KV_SCALED": kv_scaled,
        "BOUNDED": oldest is not None,
        "GAPPED": gap is not None,
        "SINKS": sinks is not None,
    }
    arrays = (*(x.astype(dtype) for x in (q, k, v)), positions, *scales, oldest, gap, sinks)
    return Operands(arrays, constants)


def forward(operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Computes the result, and the logsumexp of each row's scores.

    Returns:
      (B, T, H, Dv) float32, NaN for a query of negative position, and (B, T, H) float32 over log 2.
    """
    q, _, v = operands.arrays[:3]
    return operands.call(
        fast_attention_kernel, TILES, out=((*q.shape[:3], v.shape[3]), q.shape[:3])
    )
