"""Gradients of attention where kernels multiply: Triton's for heads of up to 256 features.

The backward pass makes no bitwise promise between rollout and learner, so one set of kernels with
wide tiles serves strict and fast attention alike. It is deterministic: no sum depends on the order
in which programs run. Wider heads (latent attention), whose gradients of a block of keys do not fit
into registers, go block by block in jnp (attention_gradient_blocks.py).

The kernels need each row's result and logsumexp. Fast attention hands them on; after strict
attention, whose logsumexp is nowhere, fast attention makes both again.

Memory grows with T + S: beside the operands in bf16 and the float32 results, two numbers a row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fp8rl_jax.kernels import attention_gradient_blocks, fast_attention
from fp8rl_jax.kernels.fast_attention import Tile
from fp8rl_jax.kernels.reference import dequantized

# Of the kernel for dq, and of that for dk and dv, as `fast_attention.TILES`.
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
    forward: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients with respect to the dequantised q, k and v.

    Args:
      q, k, v, positions, scale, q_scale, k_scale, v_scale: as for `reference.attention`.
      cotangent: (B, T, H, Dv), of the output; rounded to bf16 unless an operand is float32.
      forward: what `fast_attention.attention` returned for these operands; None to make it again.

    Returns:
      (dq, dk, dv) float32, shaped as q, k, v.
    """
    if not fast_attention.supports(q, v):
        whole = (dequantized(*x) for x in ((q, q_scale), (k, k_scale), (v, v_scale)))
        return attention_gradient_blocks.attention_vjp(*whole, positions, cotangent, scale=scale)
    from fp8rl_jax.kernels.triton_attention_gradient import (
        key_gradient_kernel,
        query_gradient_kernel,
    )

    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    operands = fast_attention.prepare(q, k, v, positions, scale=scale, **scales)
    out, logsumexp = forward or fast_attention.forward(operands)
    delta = (cotangent.astype(jnp.float32) * out).sum(-1)
    delta = jnp.where(positions[..., None] >= 0, delta, 0)  # the result is NaN elsewhere
    of_rows = operands.in_their_type(cotangent), logsumexp, delta
    (dq,) = operands.call(query_gradient_kernel, QUERY_TILES, *of_rows, out=(q.shape,))
    dk, dv = operands.call(
        key_gradient_kernel, KEY_TILES, *of_rows, out=(k.shape, v.shape), over="keys"
    )
    return dq, dk, dv
