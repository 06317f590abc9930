"""Attention by the Triton kernels: one definition for decode, prefill and learner.

The arguments and the meaning are those of `reference.attention`; the bits are not, but follow a
contract of their own (triton_attention.py). A query's result depends on its position, its
own values and the keys and values that it sees, not on how many queries, sequences or cache slots
come with it.

Queries, keys and values are read where they lie, E4M3 included: a decode step moves one byte per
number of the cache. Prefill and learner must do the same. To widen E4M3 to bf16 beforehand, once
for all tiles, would be exact and faster, but Triton gives the tensor core operands that it loads as
bytes in another order of features and keys (`kWidth` 4 instead of 2), so the sums would have other
bits.

With a table the cache lies in pages of a pool, one block of keys each, which the kernel reads where
they lie; the bits are those of the same cache in one piece.

Not done: gradients (attention_gradient.py); `vmap`. Under `shard_map` each device calls the kernel
on its sequences, or on its heads.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from fp8rl_jax.kernels.reference import KV_CHUNK
from fp8rl_jax.kernels.triton_call import triton_call

ROWS, SPLIT = 16, 512  # as in triton_attention.py, which needs Triton to be imported
_TYPES = (jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32)
# Programs up to which each split gets its own: four on each of Hopper's 132 multiprocessors.
_FEW_PROGRAMS = 4 * 132


def head_width(features: int) -> int:
    """Features as a tile holds them: a power of two, 16 or more."""
    return max(16, 1 << (features - 1).bit_length())


def warps_and_stages(widest: int, float32: bool) -> tuple[int, int]:
    """Of a program, by the widest vector of a head; the warps are part of the numeric contract.

    More of them for float32, whose operands take twice the registers. Keys and values of two stages
    must fit into 227 KiB of shared memory beside each other.
    """
    if float32:
        return (8, 3) if widest <= 64 else (16, 2)
    return (4 if widest <= 128 else 8), (3 if widest <= 256 else 2)


def _in_float32(*operands: jax.Array | None) -> bool:
    return any(x is not None and x.dtype == jnp.float32 for x in operands)


def _check(q, k, v, positions, scales, ropes, table) -> None:
    (batch, queries, heads, features), (sequences, slots, kv_heads, _) = q.shape, k.shape
    if table is not None:
        if table.ndim != 2 or table.shape[0] != batch or table.dtype != jnp.int32:
            raise ValueError(
                f"attention: table {table.dtype}{table.shape} must be int32 of ({batch}, pages of "
                "a sequence)"
            )
        if slots != KV_CHUNK:
            raise ValueError(f"attention: pages of keys {k.shape} must have {KV_CHUNK} slots")
        sequences = batch
    if heads % kv_heads or sequences != batch or k.shape[3] != features:
        raise ValueError(f"attention: queries {q.shape} do not fit keys {k.shape}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"attention: values {v.shape} do not fit keys {k.shape}")
    if ropes[1] is not None and ropes[1].shape[:3] != k.shape[:3]:
        raise ValueError(f"attention: k_rope {ropes[1].shape} does not fit keys {k.shape}")
    if positions.shape != (batch, queries):
        raise ValueError(f"attention: positions {positions.shape} do not fit queries {q.shape}")
    for x in (q, k, v, *(x for x in ropes if x is not None)):
        if x.dtype not in _TYPES:
            raise ValueError(f"attention takes E4M3, bf16 or float32, got {x.dtype}")
    if max(features, v.shape[3]) > (256 if _in_float32(q, k, v, *ropes) else 512):
        raise ValueError(
            f"attention: heads of {features} and {v.shape[3]} features; the kernel takes 512, and "
            "256 in float32"
        )
    if slots * kv_heads * max(features, v.shape[3]) >= 2**31:  # the kernel counts in 32 bits
        raise ValueError(
            f"attention: a sequence's keys {k.shape[1:]} must be fewer than 2**31 numbers"
        )
    for name, scale, like in zip(("q_scale", "k_scale", "v_scale"), scales, (q, k, v), strict=True):
        if scale is not None and scale.ndim and scale.shape != like.shape[:3]:
            raise ValueError(f"attention: {name} {scale.shape} must be () or {like.shape[:3]}")


def takes_one_split(batch: int, queries: int, heads: int, kv_heads: int, slots: int) -> bool:
    """Whether each split of the keys gets a program of its own: few tiles and long caches."""
    tiles = -(-queries * heads // kv_heads // ROWS)
    return slots > SPLIT and tiles * kv_heads * batch <= _FEW_PROGRAMS


def _kind(scale: jax.Array | None) -> int:
    """0 for no scale, 1 for one of them all, 2 for one per token and head."""
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
    one_split: bool | None = None,
) -> jax.Array:
    """`reference.attention` by the Triton kernels.

    Args:
      q, k, v, positions, scale, q_scale, k_scale, v_scale, q_rope, k_rope: as for the reference.
      table: (B, N) int32; then k, v, k_scale, v_scale and k_rope are pages of a pool, (P, 64, ...)
        instead of (B, S, ...), and slot j of sequence b is slot j % 64 of page table[b, j // 64].
        Entries behind a sequence's last position may be any number. Page ids are not checked: one
        outside of the pool reads other memory.
      one_split: whether a program takes one split of the keys; None for the choice by shape. Never
        changes a bit.

    Returns:
      (B, T, H, Dv) float32. NaN for a query of negative position.

    Raises:
      ValueError: shapes that do not fit, or another dtype.
    """
    from fp8rl_jax.kernels.triton_attention import attention_kernel, join_kernel

    ropes = (q_rope, k_rope)
    _check(q, k, v, positions, (q_scale, k_scale, v_scale), ropes, table)
    (batch, queries, heads, features), (slots, kv_heads, v_features) = q.shape, v.shape[1:]
    if table is not None:
        slots *= table.shape[1]
    tiles = -(-queries * heads // kv_heads // ROWS)
    splits = -(-slots // SPLIT)
    if one_split is None:
        one_split = takes_one_split(batch, queries, heads, kv_heads, slots)
    float32 = _in_float32(q, k, v, *ropes)
    if float32:
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        ropes = tuple(None if x is None else x.astype(jnp.float32) for x in ropes)

    rope_features = 0 if q_rope is None else q_rope.shape[3]
    unused = jnp.zeros((1,), jnp.float32)
    q_scale_, k_scale_, v_scale_, q_rope_, k_rope_, table_ = (
        unused if x is None else x for x in (q_scale, k_scale, v_scale, *ropes, table)
    )
    per_row = (splits,) if one_split else ()
    rows = (batch, queries, heads)

    def result(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    statistics = result(*per_row, *rows) if one_split else result(1)
    shape = {"T": queries, "S": slots, "H": heads, "HKV": kv_heads, "DV": v_features}
    shape["V_WIDTH"] = head_width(v_features)
    warps, stages = warps_and_stages(max(features, v_features), float32)
    parts, top, total = triton_call(
        attention_kernel, q, k, v, positions, q_scale_, k_scale_, v_scale_, q_rope_, k_rope_,
        table_, out=(result(*per_row, *rows, v_features), statistics, statistics),
        grid=(tiles * (splits if one_split else 1), kv_heads, batch), warps=warps,
        stages=stages,
        D=features, DR=rope_features, WIDTH=head_width(features),
        R_WIDTH=head_width(rope_features or 1),
        SCALE=scale / math.log(2), Q_SCALES=_kind(q_scale), K_SCALES=_kind(k_scale),
        V_SCALES=_kind(v_scale), PAGED=table is not None, ONE_SPLIT=one_split, **shape,
    )  # fmt: skip
    if not one_split:
        return parts
    return triton_call(
        join_kernel, positions, parts, top, total,
        out=result(*rows, v_features),
        grid=(tiles, kv_heads, batch), warps=warps, stages=1, **shape,
    )  # fmt: skip
