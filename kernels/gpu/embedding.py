"""The gradient of an embedding table by Triton: rows of equal tokens added up in ascending order.

XLA adds them in any order, by atomic additions, or with --xla_gpu_deterministic_ops sorts as many
numbers as the gradient of the rows has. Here the program of a token's first occurrence adds up all
of them, and the others do nothing; the order follows from the tokens alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from fp8rl_jax.kernels.gpu.triton_call import triton_call

_SEEN = tl.constexpr(1024)  # earlier tokens that are compared at a time
_BLOCK = tl.constexpr(32)  # later tokens that are added at a time


@triton.jit
def embedding_gradient_kernel(
    tokens,  # (T,) int32
    rows,  # (T, D)
    table,  # (V, D) float32, zeros
    table_same,  # the same array again, as a result
    T: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,  # features of a program
):
    first = tl.program_id(0)
    token = tl.load(tokens + first)
    start, earlier = 0, 0
    while (start < first) & (earlier == 0):
        place = start + tl.arange(0, _SEEN)
        others = tl.load(tokens + place, mask=place < first, other=-1)
        earlier = tl.max((others == token).to(tl.int32), 0)
        start += _SEEN
    if (earlier == 0) & (token >= 0) & (token < V):
        feature = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        inside = feature < D
        total = tl.zeros((WIDTH,), tl.float32)
        for start in range(first, T, _BLOCK):
            place = start + tl.arange(0, _BLOCK)
            others = tl.load(tokens + place, mask=place < T, other=-1)
            if tl.max((others == token).to(tl.int32), 0) > 0:
                for later in range(start, tl.minimum(start + _BLOCK, T)):
                    # Loads of other rows are masked and not skipped, so that they overlap.
                    features = tl.where(tl.load(tokens + later) == token, D, 0)
                    at = rows + tl.cast(later, tl.int64) * D + feature
                    total += tl.load(at, mask=feature < features, other=0.0).to(tl.float32)
        tl.store(table + tl.cast(token, tl.int64) * D + feature, total, mask=inside)


def embedding_gradient(tokens: jax.Array, rows: jax.Array, count: int) -> jax.Array:
    """Adds rows up by token.

    Args:
      tokens: (T,) int32; one outside the table adds nothing.
      rows: (T, D), gradients of the table's rows as they were read.
      count: V, rows of the table.

    Returns:
      (V, D) float32.
    """
    (length, width), features = rows.shape, 128
    (table,) = triton_call(
        embedding_gradient_kernel,
        tokens,
        rows,
        jnp.zeros((count, width), jnp.float32),
        out=(),
        in_place=1,
        grid=(length, -(-width // features)),
        warps=1,
        stages=1,
        T=length,
        D=width,
        V=count,
        WIDTH=features,
    )
    return table
