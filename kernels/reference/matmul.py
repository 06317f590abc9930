"""Matrix product with a fixed order of summation, in plain jnp: the definition and the oracle.

Purpose: give every row of an output the same bits whatever else is in the batch. A rollout
decodes a few rows at a time and the learner scores whole sequences; XLA's own dots choose their
order of summation by shape, so the two would differ in the last bits. Here the order is part of the
definition: the contraction is cut into blocks of 128, of up to 512 where bf16 is multiplied without
scales; each block gives a float32 partial in an order that products.py defines, which is multiplied
by its scales and added in ascending order.

Not done here: speed on a GPU. On a CPU FP8 operands are converted to bf16, which is exact, and
multiplied there; FP8 is emulated and never faster than bf16.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from fp8rl_jax.kernels.arrays import K_BLOCK, pad_to, prevent_fma
from fp8rl_jax.kernels.reference.bits import as_bytes, from_bytes
from fp8rl_jax.kernels.reference.products import BF16_DEPTH, in_bf16, padded_rows, product

_UNROLL_K = 16  # blocks of K; above it a loop: compile time and memory, the same bits


def repeat_last(x: jax.Array, times: int) -> jax.Array:
    """`x` (..., n) float32 with each entry repeated `times` times, (..., n * times).

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


def _parts_of(rows: int) -> int:
    """Equal parts of `rows` rows such that XLA cuts between them, whichever axes of the mesh that
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
      rhs_scale: (KB, ceil(N / 128)) or (KB, N) float32, or None, as `lhs_scale` is.

    Returns:
      (M, N) float32: ``sum_b (lhs_b @ rhs_b) * lhs_scale_b * rhs_scale_b``, b ascending.

    A product of bf16 or FP8 operands may have other bits than one of the same numbers in float32.
    The scheme (a float32 partial per 128 of K, scaled, then added) is that of DeepSeek-V3,
    arXiv:2412.19437, section 3.3.2.
    """
    if lhs.ndim != 2 or rhs.ndim != 2 or lhs.shape[1] != rhs.shape[0]:
        raise ValueError(f"block_matmul takes (M, K) and (K, N), got {lhs.shape} and {rhs.shape}")
    assert (lhs_scale is None) == (rhs_scale is None)
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
        if rhs_scale.shape[1] != columns:
            rhs_scale = repeat_last(rhs_scale, K_BLOCK)[:, :columns]
        rhs_scale = pad_to(rhs_scale, 1, K_BLOCK)
    depth = K_BLOCK
    if lhs_scale is None and in_bf16(lhs_dtype, rhs_dtype):
        depth = max(d for d in range(K_BLOCK, BF16_DEPTH + 1, K_BLOCK) if lhs.shape[1] % d == 0)
    blocks = lhs.shape[1] // depth

    def partial(block: int | jax.Array) -> jax.Array:
        start = block * depth
        left = lax.dynamic_slice_in_dim(lhs, start, depth, 1)
        right = lax.dynamic_slice_in_dim(rhs, start, depth, 0)
        partial_sum = product(from_bytes(left, lhs_dtype), from_bytes(right, rhs_dtype))
        if lhs_scale is None or rhs_scale is None:
            return partial_sum
        left_scale = lax.dynamic_slice_in_dim(lhs_scale, block, 1, 1)
        right_scale = lax.dynamic_slice_in_dim(rhs_scale, block, 1, 0)
        return prevent_fma(partial_sum * (left_scale * right_scale))

    total = partial(0)
    if blocks <= _UNROLL_K:
        for block in range(1, blocks):
            total = total + partial(block)
    else:
        total = lax.fori_loop(1, blocks, lambda block, acc: acc + partial(block), total)
    if width != each:
        total = total.reshape(parts, width, -1)[:, :each].reshape(rows, total.shape[1])
    return total[:, :columns]
