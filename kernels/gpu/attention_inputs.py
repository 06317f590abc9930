"""What stands between the projections of attention and attention, in one Triton kernel.

Biases of the projections, QK-norm, RoPE, quantisation of queries, keys and values, and writing keys
and values to the cache in place; or single steps of one array, for the learner. A row is a head of
a token; it is held as the two halves that RoPE turns against each other.

Invariants:
  * a row's result depends on the row alone;
  * each step may be left out, and a kernel that does several writes the bits of kernels that do
    them one after another: values are rounded to the compute dtype after the bias, after the norm
    and after RoPE;
  * the norm's sum has an order that is written out: squares of both halves, then neighbours, then
    sums of neighbours. No layout of the compiler decides it. Multiply-adds are not fused;
  * quantisation is that of quant/kv.py: of the value as bf16, with one scale a row (quantiser.py)
    or with a given one.

Where only half of a head's features are rotated, both halves of that half lie in `first`.

Not done: gradients (of `rms_norm` in models/layers.py, of `apply_rope` in models/rope.py).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from fp8rl_jax.kernels.arrays import KV_CHUNK, fp8_max
from fp8rl_jax.kernels.gpu.quantiser import E4M3, INF_BITS, block_scales, magnitude_bits
from fp8rl_jax.kernels.gpu.triton_call import triton_call

_FP8_MAX = tl.constexpr(fp8_max(E4M3))
_INT8_MAX = tl.constexpr(fp8_max(jnp.int8))
_PAGE = tl.constexpr(KV_CHUNK)
# Scales of what is stored: none, one that is given, or one a row.
_GIVEN, _OF_ROW = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _sum_of_row(x):
    """Adds a row's numbers: neighbours, then sums of neighbours. (ROWS, a power of two)."""
    for _ in tl.static_range(16):
        if x.shape[1] > 1:
            left, right = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
            x = left + right
    return x


@triton.jit
def _halves(
    x,  # (rows, D)
    bias,  # (L, HEADS, D) float32, unused without BIAS
    gain,  # (L, D), unused without NORM
    layer,
    cos,  # (tokens, D / 2), with PARTIAL D / 4; unused without ROPE
    sin,
    row,
    exists,
    token,
    dtype: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    ROPE: tl.constexpr,
    PARTIAL: tl.constexpr,  # tables of D / 4
    INTERLEAVED: tl.constexpr,
):
    """Returns both halves of rows after bias, norm and RoPE, (ROWS, WIDTH) in `dtype`."""
    pair = tl.arange(0, WIDTH)
    inside = (pair < D // 2)[None, :]
    mask = exists[:, None] & inside
    STRIDE: tl.constexpr = 2 if INTERLEAVED else 1
    SECOND: tl.constexpr = 1 if INTERLEAVED else D // 2
    feature = (pair * STRIDE)[None, :]
    at = x + tl.cast(row, tl.int64)[:, None] * D + feature
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + SECOND, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        bias_at = bias + layer * HEADS * D + (row % HEADS)[:, None] * D + feature
        first = first + tl.load(bias_at, mask=mask, other=0.0)
        second = second + tl.load(bias_at + SECOND, mask=mask, other=0.0)
        first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    if NORM:
        gain_at = gain + layer * D + feature
        mean = _sum_of_row(first * first + second * second) * (1.0 / D)
        inverse = tl.rsqrt(mean + EPS)
        first = first * inverse * tl.load(gain_at, mask=inside, other=0.0)
        second = second * inverse * tl.load(gain_at + SECOND, mask=inside, other=0.0)
        first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    if ROPE and PARTIAL:
        quarter = tl.arange(0, WIDTH // 2)
        angle = tl.cast(token, tl.int64)[:, None] * (D // 4) + quarter[None, :]
        c = tl.load(cos + angle, mask=exists[:, None], other=0.0)
        s = tl.load(sin + angle, mask=exists[:, None], other=0.0)
        parts = tl.permute(tl.reshape(first, (first.shape[0], 2, WIDTH // 2)), (0, 2, 1))
        one, other = tl.split(parts)
        parts = tl.join(one * c - other * s, other * c + one * s)
        first = tl.reshape(tl.permute(parts, (0, 2, 1)), (first.shape[0], WIDTH))
    elif ROPE:
        angle = tl.cast(token, tl.int64)[:, None] * (D // 2) + pair[None, :]
        c = tl.load(cos + angle, mask=mask, other=0.0)
        s = tl.load(sin + angle, mask=mask, other=0.0)
        first, second = first * c - second * s, second * c + first * s
    return first.to(dtype), second.to(dtype)


@triton.jit
def _store(out, first, second, row, exists, D: tl.constexpr, PAIRED: tl.constexpr):
    """Writes halves to rows; PAIRED puts them back where an interleaved row has them."""
    if out.dtype.element_ty == tl.uint8 or out.dtype.element_ty == tl.uint16:  # a cache of bits
        first = first.to(out.dtype.element_ty, bitcast=True)
        second = second.to(out.dtype.element_ty, bitcast=True)
    pair = tl.arange(0, first.shape[1])
    mask = exists[:, None] & (pair < D // 2)[None, :]
    at = out + row[:, None] * D
    if PAIRED:
        tl.store(at + 2 * pair[None, :], first, mask=mask)
        tl.store(at + 2 * pair[None, :] + 1, second, mask=mask)
    else:
        tl.store(at + pair[None, :], first, mask=mask)
        tl.store(at + D // 2 + pair[None, :], second, mask=mask)


@triton.jit
def _nearest_int8(x):
    """Rounds float32 within +-127 to the nearest INT8, ties to even: the last bits of its sum with
    1.5 * 2**23, whose unit is 1."""
    return (x + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def _store_as_read(
    out,  # (rows, D)
    scale,  # (rows,) float32, written with SCALES 2
    given,  # (1,) float32, read with SCALES 1
    first,
    second,
    row,
    exists,
    D: tl.constexpr,
    SCALES: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """Writes rows as attention reads them: E4M3, or INT8 if `out` is, with SCALES 1 or 2, else
    unchanged."""
    INTEGERS: tl.constexpr = out.dtype.element_ty == tl.int8
    if SCALES > 0:
        first = first.to(tl.bfloat16).to(tl.float32)
        second = second.to(tl.bfloat16).to(tl.float32)
        bits, more_bits = magnitude_bits(first), magnitude_bits(second)
        if SCALES == _OF_ROW:
            amax = tl.max(tl.maximum(bits, more_bits), axis=1)
            s, stored = block_scales(amax, _INT8_MAX if INTEGERS else _FP8_MAX, POWER_OF_TWO)
            tl.store(scale + row, stored, mask=exists)
            first, second = first * s[:, None], second * s[:, None]
        else:
            s = tl.div_rn(1.0, tl.load(given))
            first = tl.where(bits < INF_BITS, first * s, float("nan"))
            second = tl.where(more_bits < INF_BITS, second * s, float("nan"))
        if INTEGERS:
            first, second = _nearest_int8(first), _nearest_int8(second)
        else:
            first, second = first.to(tl.float8e4nv), second.to(tl.float8e4nv)
    _store(out, first, second, row, exists, D, False)


@triton.jit
def attention_inputs_kernel(
    q,  # (B, T, H, D), float32 with BIAS, else as q_out
    k,  # (B, T, HKV, D); this and all of keys and values is unused if HKV is 0
    v,  # (B, T, HKV, D)
    q_bias,  # (L, H, D) float32, unused without BIAS
    k_bias,  # (L, HKV, D)
    v_bias,
    cos,  # (B, T, D / 2) float32, with PARTIAL D / 4; unused without ROPE
    sin,
    q_gain,  # (L, D), unused without NORM
    k_gain,
    layer,  # (1,) int32, below L and the cache's layers
    q_given,  # (1,) float32, scales of SCALES 1
    k_given,
    v_given,
    positions,  # (B, T) int32
    table,  # (L, B, SLOTS / 64) int32, unused without PAGED
    k_scale,  # (L * B, SLOTS, HKV) float32, or of pages, unused unless K_SCALES is 2
    v_scale,
    k_stored,  # (L * B, SLOTS, HKV, D), or pages
    v_stored,
    q_out,  # (B, T, H, D)
    k_out,  # (B, T, HKV, D)
    q_stored,  # (B, T, H, D) E4M3, unused without Q_SCALES
    q_scale,  # (B, T, H) float32, unused unless Q_SCALES is 2
    k_scale_same,  # the cache's arrays again, as results
    v_scale_same,
    k_same,
    v_same,
    B: tl.constexpr,
    T: tl.constexpr,
    H: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,  # D / 2 or more, a power of two
    EPS: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    ROPE: tl.constexpr,
    PARTIAL: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    Q_SCALES: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    SLOTS: tl.constexpr,  # of a sequence
    PAGED: tl.constexpr,
    ROWS: tl.constexpr,
):
    Q_TILES: tl.constexpr = (B * T * H + ROWS - 1) // ROWS
    KV_TILES: tl.constexpr = (B * T * HKV + ROWS - 1) // ROWS
    PAIRED: tl.constexpr = INTERLEAVED and not ROPE
    DTYPE: tl.constexpr = q_out.dtype.element_ty
    number = tl.load(layer)
    tile = tl.program_id(0)
    if tile < Q_TILES:
        row = tile * ROWS + tl.arange(0, ROWS)
        exists, token = row < B * T * H, row // H
        first, second = _halves(
            q,
            q_bias,
            q_gain,
            number,
            cos,
            sin,
            row,
            exists,
            token,
            DTYPE,
            H,
            D,
            WIDTH,
            EPS,
            BIAS,
            NORM,
            ROPE,
            PARTIAL,
            INTERLEAVED,
        )
        place = tl.cast(row, tl.int64)
        _store(q_out, first, second, place, exists, D, PAIRED)
        if Q_SCALES > 0:
            _store_as_read(
                q_stored, q_scale, q_given, first, second, place, exists, D, Q_SCALES, POWER_OF_TWO
            )
    elif HKV > 0:
        tile -= Q_TILES
        row = tile * ROWS + tl.arange(0, ROWS)
        if tile >= KV_TILES:
            row -= KV_TILES * ROWS
        exists, token = row < B * T * HKV, row // HKV
        position = tl.load(positions + token, mask=exists, other=-1)
        there = (position >= 0) & (position < SLOTS)
        sequence = tl.cast(number * B + token // T, tl.int64)
        if PAGED:
            page_at = table + sequence * (SLOTS // _PAGE) + position // _PAGE
            page = tl.load(page_at, mask=there, other=0)
            slot = tl.cast(page, tl.int64) * _PAGE + position % _PAGE
        else:
            slot = sequence * SLOTS + position
        place = slot * HKV + row % HKV
        if tile < KV_TILES:
            first, second = _halves(
                k,
                k_bias,
                k_gain,
                number,
                cos,
                sin,
                row,
                exists,
                token,
                DTYPE,
                HKV,
                D,
                WIDTH,
                EPS,
                BIAS,
                NORM,
                ROPE,
                PARTIAL,
                INTERLEAVED,
            )
            _store(k_out, first, second, tl.cast(row, tl.int64), exists, D, PAIRED)
            _store_as_read(
                k_stored, k_scale, k_given, first, second, place, there, D, K_SCALES, POWER_OF_TWO
            )
        else:
            first, second = _halves(
                v,
                v_bias,
                v_bias,
                number,
                cos,
                sin,
                row,
                exists,
                token,
                DTYPE,
                HKV,
                D,
                WIDTH,
                EPS,
                BIAS,
                False,
                False,
                False,
                False,
            )
            _store_as_read(
                v_stored, v_scale, v_given, first, second, place, there, D, V_SCALES, POWER_OF_TWO
            )


ROWS = 16


@dataclasses.dataclass(frozen=True)
class Kept:
    """Scales of what attention reads: 'none' keeps the compute dtype; 'given' is E4M3, 'row' that
    or INT8, as the cache's arrays are.

    Attributes:
      q, k, v: of queries, keys, values.
      power_of_two: whether scales of 'row' are powers of two.
      dtype: of queries that are kept.
    """

    q: str = "none"
    k: str = "row"
    v: str = "row"
    power_of_two: bool = False
    dtype: type = E4M3


@dataclasses.dataclass(frozen=True)
class Cache:
    """Where keys and values are written.

    Attributes:
      arrays: k, v, and their scales or None; bits of (L * B, S, Hkv, D) and (L * B, S, Hkv), or of
        pages (P, 64, ...).
      layer: () int32.
      positions: (B, T) int32; one outside the slots is not written.
      table: (L, B, N) int32, the pages of each layer, or None.
    """

    arrays: tuple
    layer: jax.Array
    positions: jax.Array
    table: jax.Array | None = None


def attention_inputs(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    rope: tuple[jax.Array, jax.Array] | None,
    gains: tuple[jax.Array, jax.Array] | None,
    kept: Kept,
    scales: tuple = (None, None, None),
    *,
    eps: float = 0.0,
    interleaved: bool = False,
    layer: jax.Array | None = None,
    cache: Cache | None = None,
    biases: tuple[jax.Array, jax.Array, jax.Array] | None = None,
    dtype=None,
) -> tuple:
    """Adds biases, applies QK-norm and RoPE to queries and keys, and stores what attention reads.

    Args:
      q, k, v: (B, T, H, D), (B, T, Hkv, D) twice, bf16 or float32; D even. Or q alone, and None.
      rope: cos and sin (B, T, D / 2) float32; (B, T, D / 4) to rotate the first half of the
        features, of a power of two; or None.
      gains: of the norms of q and k, (D,), or (L, D) with `layer`; or None.
      kept: how to store.
      scales: given scales of q, k and v, () float32.
      eps: of the norm.
      interleaved: whether RoPE turns neighbours (`rope.deinterleave`) and not halves.
      layer: () int32, the row of `gains`, or None.
      cache: where to write keys and values; None for q alone.
      biases: of q, k and v, (L, H * D) float32, with a cache alone; or None. With biases q, k and v
        are float32.
      dtype: of the results, the compute dtype; None for that of q.

    Returns:
      (q, k, stored q, its scale, stored k, stored v, their scales): q and k in `dtype`, after bias,
      norm and RoPE. Stored q is None unless `kept.q`, its scale float32 (B, T, H), None unless
      'row'. The others are the arrays of `cache`, written in place; scales None unless 'row'.
    """
    (batch, queries, heads, features), kv_heads = q.shape, 0 if k is None else k.shape[2]
    if k is None or v is None or cache is None:
        assert k is v is cache is None, "keys, values and their cache go together"
    elif features % 2 or k.shape != v.shape or k.shape[::3] != q.shape[::3]:
        raise ValueError(f"attention: heads of q {q.shape}, k {k.shape} and v {v.shape} do not fit")
    partial = rope is not None and rope[0].shape[-1] == features // 4
    width = max(16, 1 << (features // 2 - 1).bit_length())
    if partial and (interleaved or 2 * width != features):
        raise ValueError(
            f"attention: heads have {features} features, and where half are rotated the kernel "
            "takes a power of two from 32, halves paired"
        )
    kinds = {"none": 0, "given": _GIVEN.value, "row": _OF_ROW.value}
    dtype = dtype or q.dtype
    number, places, table = layer, None, None
    held: tuple = (None,) * 4
    slots = 0
    if cache is not None:
        number, places, table = cache.layer, cache.positions, cache.table
        k_stored, v_stored, k_scale, v_scale = cache.arrays
        held = k_scale, v_scale, k_stored, v_stored
        slots = k_stored.shape[1] if table is None else KV_CHUNK * table.shape[-1]
    found = triton_call(
        attention_inputs_kernel,
        q,
        k,
        v,
        *(biases or (None, None, None)),
        *(rope or (None, None)),
        *(gains or (None, None)),
        jnp.zeros((1,), jnp.int32) if number is None else number.reshape(1),
        *scales,
        places,
        table,
        *held,
        out=(
            jax.ShapeDtypeStruct(q.shape, dtype),
            None if k is None else jax.ShapeDtypeStruct(k.shape, dtype),
            None if kept.q == "none" else jax.ShapeDtypeStruct(q.shape, kept.dtype),
            jax.ShapeDtypeStruct(q.shape[:3], jnp.float32) if kept.q == "row" else None,
        ),
        in_place=len(held),
        grid=(-(-batch * queries * heads // ROWS) + 2 * -(-batch * queries * kv_heads // ROWS),),
        warps=4,
        stages=1,
        B=batch,
        T=queries,
        H=heads,
        HKV=kv_heads,
        D=features,
        WIDTH=width,
        EPS=float(eps),
        BIAS=biases is not None,
        NORM=gains is not None,
        ROPE=rope is not None,
        PARTIAL=partial,
        INTERLEAVED=interleaved,
        Q_SCALES=kinds[kept.q],
        K_SCALES=kinds[kept.k],
        V_SCALES=kinds[kept.v],
        POWER_OF_TWO=kept.power_of_two,
        SLOTS=slots,
        PAGED=table is not None,
        ROWS=ROWS,
    )
    q, k, q_stored, q_scale, k_scale, v_scale, k_stored, v_stored = found
    return q, k, q_stored, q_scale, k_stored, v_stored, k_scale, v_scale


def rms_norm(x: jax.Array, gain: jax.Array, eps: float, layer: jax.Array | None = None):
    """Applies the norm alone to heads x (B, T, H, D); `gain` and `layer` as for `gains`."""
    return attention_inputs(x, None, None, None, (gain, gain), Kept(), eps=eps, layer=layer)[0]


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Applies RoPE alone to heads x (B, T, H, D), halves paired; tables as `rope`."""
    return attention_inputs(x, None, None, (cos, sin), None, Kept())[0]


def quantize(x: jax.Array, scale: jax.Array | None, power_of_two: bool, dtype=E4M3):
    """Quantises heads x (B, T, H, D) to E4M3 or, by a scale of each row's own, to INT8.

    Returns (`dtype` (B, T, H, D), float32 (B, T, H), or the given scale).
    """
    how = "row" if scale is None else "given"
    kept = Kept(how, power_of_two=power_of_two, dtype=dtype)
    found = attention_inputs(x, None, None, None, None, kept, (scale, None, None))
    return found[2], found[3] if scale is None else scale
