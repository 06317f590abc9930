"""Strict attention's operands: which fit, and the sizes of programs that follow from shapes."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fp8rl_jax.kernels.arrays import KV_CHUNK
from fp8rl_jax.kernels.gpu.tiles import MULTIPROCESSORS

ROWS = 16  # of a tile: queries of one sequence and heads of one group
SPLIT = 512  # keys that one program may add up alone
_TYPES = (jnp.float8_e4m3fn, jnp.int8, jnp.bfloat16, jnp.float32)
# Most programs for which each split gets its own program: four on each multiprocessor.
_FEW_PROGRAMS = 4 * MULTIPROCESSORS
# Programs among which the splits of a decode step are divided: four times those that run at once,
# so that one that ends early makes room.
MOST_PROGRAMS = 4 * 5 * MULTIPROCESSORS


def head_width(features: int, dtype=jnp.bfloat16) -> int:
    """Returns the width of a tile for `features`: the next power of two, 16 or more; 32 or more
    beside numbers of a byte, whose products are of half the features."""
    fewest = 32 if jnp.dtype(dtype).itemsize == 1 else 16
    return max(fewest, 1 << (features - 1).bit_length())


def warps_and_stages(widest: int, dtype) -> tuple[int, int]:
    """Returns a program's warps and stages, by the widest vector of a head and the dtype of keys
    and values, the wider of two. Warps decide bits.

    Float32 gets more warps, because its operands take twice the registers. Bytes get fewer: what
    every warp does for itself is the larger part. Keys and values of two stages must fit into 227
    KiB of shared memory together.
    """
    if dtype == jnp.float32:
        return (8, 3) if widest <= 64 else (16, 2)
    if jnp.dtype(dtype).itemsize == 1 and widest <= 128:
        return 2, 3
    return (4 if widest <= 128 else 8), (3 if widest <= 256 else 2)


# Most registers of a thread, by the bytes of a key's number and a value's, and the widest vector.
_MOST_REGISTERS = {2: {64: 128, 128: 168, 256: 128}, 3: {128: 128}, 4: {64: 80}}


def most_registers(widest: int, k_dtype, v_dtype) -> int | None:
    """Returns the most registers of a thread, or None for no bound, by the widest vector of a head
    and the dtypes of keys and values.

    Each of a multiprocessor's four schedulers has 16,384 registers: two warps of 169 to 255 a
    thread, three of 168, four of 128, six of 80. A bound is set where one more warp then fits, and
    shared memory has room for its program; what does not fit into registers is kept in memory
    outside the loop over keys.
    """
    size = jnp.dtype(k_dtype).itemsize + jnp.dtype(v_dtype).itemsize
    bounds = _MOST_REGISTERS.get(size, {})
    return next((bound for width, bound in bounds.items() if widest <= width), None)


def in_float32(*operands: jax.Array | None) -> bool:
    return any(x is not None and x.dtype == jnp.float32 for x in operands)


def check_operands(
    q, k, v, positions, scales, ropes=(None, None), table=None, layers: bool = False
) -> None:
    """Raises ValueError for shapes that do not fit and for unsupported dtypes.

    `scales` are those of q, k and v, `ropes` q_rope and k_rope; all as for `attention`, or None.
    With `layers` keys and values are those of several layers.
    """

    def check(fits: bool, sentence: str) -> None:
        if not fits:
            raise ValueError(f"attention: {sentence}")

    (batch, queries, heads, features), (sequences, slots, kv_heads, _) = q.shape, k.shape
    if table is not None:
        found, sequences = f"table {table.dtype}{table.shape}", batch
        fits = table.ndim == 2 + layers and table.shape[-2] == batch and table.dtype == jnp.int32
        check(fits, f"{found} must be int32 of ({batch}, pages of a sequence)")
        check(slots == KV_CHUNK, f"pages of keys {k.shape} must have {KV_CHUNK} slots")
    fits = not sequences % batch if layers else sequences == batch
    fits = fits and heads % kv_heads == 0 and k.shape[3] == features
    check(fits, f"queries {q.shape} do not fit keys {k.shape}")
    check(v.shape[:3] == k.shape[:3], f"values {v.shape} do not fit keys {k.shape}")
    if ropes[1] is not None:
        fits = ropes[1].shape[:3] == k.shape[:3]
        check(fits, f"k_rope {ropes[1].shape} does not fit keys {k.shape}")
    fits = positions.shape == (batch, queries)
    check(fits, f"positions {positions.shape} do not fit queries {q.shape}")
    for x in (q, k, v, *(x for x in ropes if x is not None)):
        check(x.dtype in _TYPES, f"operands are E4M3, INT8, bf16 or float32, got {x.dtype}")
    check(q.dtype != jnp.int8, "queries are INT8, which keys and values alone may be")
    even = not any(x.dtype.itemsize == 1 and x.shape[3] % 2 for x in (k, v))
    check(even, f"heads of {features} and {v.shape[3]} features of a byte: write even numbers")
    widest, most = max(features, v.shape[3]), 256 if in_float32(q, k, v, *ropes) else 512
    check(widest <= most, f"heads of {widest} features; the kernel takes 512, and 256 in float32")
    fits = slots * kv_heads * widest < 2**31  # the kernel counts in 32 bits
    check(fits, f"a sequence's keys {k.shape[1:]} must be fewer than 2**31 numbers")
    for name, scale, like in zip(("q_scale", "k_scale", "v_scale"), scales, (q, k, v), strict=True):
        fits = scale is None or not scale.ndim or scale.shape == like.shape[:3]
        shape = None if scale is None else scale.shape
        check(fits, f"{name} {shape} must be () or {like.shape[:3]}")


def takes_one_split(batch: int, queries: int, heads: int, kv_heads: int, slots: int) -> bool:
    """Returns whether each split of the keys gets its own program: in a decode step, always, since
    its sequences have any lengths; else where there are few tiles. Not in caches of one split."""
    tiles = -(-queries * heads // kv_heads // ROWS)
    few = queries == 1 or tiles * kv_heads * batch <= _FEW_PROGRAMS
    return slots > SPLIT and few
