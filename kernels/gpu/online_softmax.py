"""Attention's online softmax (Milakov and Gimelshein, arXiv:1805.02867) over keys: what strict
attention does with one split of them, and how it joins splits. Rules and reasons: attention.py.
"""

import triton
import triton.language as tl

from fp8rl_jax.kernels.arrays import KV_CHUNK
from fp8rl_jax.kernels.gpu import attention_operands as operands
from fp8rl_jax.kernels.gpu.vectors import exponent, load_pairs, vectors

ROWS = tl.constexpr(operands.ROWS)
BLOCK = tl.constexpr(KV_CHUNK)
SPLIT = tl.constexpr(operands.SPLIT)
LOWEST = tl.constexpr(-3.4e38)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def first_seen(window, position, exists, WINDOWED: tl.constexpr):
    """Returns each row's first slot within its window, and the tile's; 0 without a window."""
    oldest, first = position * 0, 0
    if WINDOWED:
        oldest = tl.maximum(position - tl.load(window) + 1, 0)
        first = tl.min(tl.where(exists, oldest, 2147483647), 0)
    return oldest, first


@triton.jit
def sees(slot, position, oldest, WINDOWED: tl.constexpr):
    """Returns whether rows see slots; arguments broadcast, `oldest` is their first."""
    found = slot <= position
    if WINDOWED:
        found &= slot >= oldest
    return found


@triton.jit
def multiply(a, b):
    return tl.dot(a, b, input_precision="ieee")  # has an effect on float32 only


@triton.jit
def scale_at(x, first, place, there, SCALES: tl.constexpr):
    """Loads scales at `first` + `place`: one for each (SCALES 2), or one for all (1)."""
    if SCALES == 2:
        scale = tl.load(x + first + place, mask=there, other=0.0)
    else:
        scale = tl.broadcast_to(tl.load(x), there.shape)
    return scale


@triton.jit
def nothing(V_WIDTH: tl.constexpr):
    """Returns the initial maximum, sum and weighted values, of no keys."""
    top = tl.full((ROWS,), LOWEST, tl.float32)
    return top, tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, V_WIDTH), tl.float32)


@triton.jit
def one_split_of(
    split,
    rows,  # the tile's queries, their odd features (only beside keys of a byte: then the former are
    # the even ones), their rotated features and scales, positions, and the last position; each
    # row's first slot of its window, and the tile's
    cache,  # pointers to k, v, k_scale, v_scale, k_rope and table
    HKV: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    DR: tl.constexpr,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    R_WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    Q_SCALES: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
    PAGED: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Computes maximum, sum and weighted values of a tile's rows over the keys of a split."""
    query, odd_query, query_rope, query_scale, position, last, oldest, begin = rows
    k, v, k_scale, v_scale, k_rope, table = cache
    K_PAIRS: tl.constexpr = k.dtype.element_ty.primitive_bitwidth == 8
    V_PAIRS: tl.constexpr = v.dtype.element_ty.primitive_bitwidth == 8
    top, total, values = nothing(V_WIDTH // 2 if V_PAIRS else V_WIDTH)
    odd_values = values
    page, begin_block = 0, split * (SPLIT // BLOCK)
    if WINDOWED:
        begin_block = tl.maximum(begin_block, begin // BLOCK)
    if PAGED:
        page = tl.load(table + begin_block)
    for start in range(begin_block * BLOCK, tl.minimum(split * SPLIT + SPLIT, last + 1), BLOCK):
        slot = start + tl.arange(0, BLOCK)
        there = slot <= last
        if PAGED:
            first = tl.cast(page, tl.int64) * (BLOCK * HKV)
            place = tl.arange(0, BLOCK) * HKV
            # One block ahead: in the same iteration it would take a pipeline stage from the keys.
            page = tl.load(table + tl.minimum(start + BLOCK, last) // BLOCK)
        else:
            first = 0
            place = slot * HKV
        if K_PAIRS:
            key, odd_key = load_pairs(k + first * D, place, there, D, WIDTH)
            score = tl.dot(odd_query, odd_key.T, tl.dot(query, key.T))
        else:
            key = vectors(k + first * D, place, there, D, WIDTH)
            score = multiply(query, key.T)
        multiplier = tl.full((1, BLOCK), SCALE, tl.float32)
        if K_SCALES > 0:
            multiplier *= scale_at(k_scale, first, place, there, K_SCALES)[None, :]
        if Q_SCALES > 0:
            multiplier = multiplier * query_scale[:, None]
        score *= multiplier
        if DR > 0:
            key_rope = vectors(k_rope + first * DR, place, there, DR, R_WIDTH)
            score += multiply(query_rope, key_rope.T) * SCALE
        seen = sees(slot[None, :], position[:, None], oldest[:, None], WINDOWED)
        score = tl.where(seen, score, float("-inf"))
        scaled_score = score
        if V_SCALES > 0:
            value_scale = scale_at(v_scale, first, place, there, V_SCALES)
            if V_PAIRS:
                scaled_score += exponent(value_scale)[None, :]
        above = tl.maximum(top, tl.max(scaled_score, 1))
        weight = tl.exp2(score - above[:, None])
        rescale = tl.exp2(top - above)
        total = tl.fma(total, rescale, tl.sum(weight, 1))
        if V_SCALES > 0:
            weight *= value_scale[None, :]
        wide_rescale = tl.broadcast_to(rescale[:, None], values.shape)
        if V_PAIRS:
            value, odd_value = load_pairs(v + first * DV, place, there, DV, V_WIDTH)
            weight = weight.to(tl.float16)
            values = tl.fma(values, wide_rescale, tl.dot(weight, value))
            odd_values = tl.fma(odd_values, wide_rescale, tl.dot(weight, odd_value))
        else:
            value = vectors(v + first * DV, place, there, DV, V_WIDTH)
            part = multiply(weight.to(value.dtype), value)
            values = tl.fma(values, wide_rescale, part)
        top = above
    if V_PAIRS:
        values = tl.interleave(values, odd_values)
    return top, total, values


@triton.jit
def join(top, total, values, more_top, more_total, more_values):
    """Joins the results of two splits; a split without visible keys changes nothing."""
    above = tl.maximum(top, more_top)
    rescale, more_rescale = tl.exp2(top - above), tl.exp2(more_top - above)
    total = tl.fma(total, rescale, more_total * more_rescale)
    wide = tl.broadcast_to(rescale[:, None], values.shape)
    return above, total, tl.fma(values, wide, more_values * more_rescale[:, None])


@triton.jit
def with_sinks(sinks, head, exists, top, total, values):
    """Adds the sinks of each row's head to maximum, sum and weighted values."""
    sink = tl.load(sinks + head, mask=exists, other=0.0) * LOG2_E
    above = tl.maximum(top, sink)
    rescale = tl.exp2(top - above)
    total = tl.fma(total, rescale, tl.exp2(sink - above))
    return above, total, values * tl.broadcast_to(rescale[:, None], values.shape)
