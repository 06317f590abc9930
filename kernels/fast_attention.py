"""Attention by tiles of 64 or 128 rows: for the learner and prefill where speed counts, not bits.

The arguments and the meaning are those of `strict_attention`; decode has too few rows for these
tiles and stays there. Beside the result comes each row's logsumexp, from which the gradients
(attention_gradient.py) recompute the weights.

E4M3 operands are widened to bf16 beforehand, once for all tiles and exactly, because this tensor
core instruction reads bf16 from shared memory.

Not done: heads wider than 256 features, so latent attention; `vmap`.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from fp8rl_jax.kernels.reference import rounded
from fp8rl_jax.kernels.strict_attention import head_width
from fp8rl_jax.kernels.triton_call import triton_call

WIDEST = 256  # features of a head


@dataclasses.dataclass(frozen=True)
class Tile:
    """Rows and keys that meet at a time, warps of a program, and depth of its pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int


# By the operands' type and the widest vector of a head.
TILES = {
    "bfloat16": {64: Tile(128, 128, 8, 3), 128: Tile(128, 64, 8, 3), 256: Tile(128, 64, 8, 2)},
    "float32": {64: Tile(32, 32, 8, 2), 128: Tile(16, 32, 8, 2), 256: Tile(16, 32, 8, 2)},
}


def tile_for(table: dict[int, Tile], widest: int) -> Tile:
    """The tile for a head whose widest vector has so many features."""
    return table[min(width for width in table if width >= widest)]


@dataclasses.dataclass(frozen=True)
class Operands:
    """What the kernels of attention and its gradients read, all in one type.

    Attributes:
      arrays: q, k, v in bf16 or float32, positions, and the scales of q, k and v: one for each
        vector, or a placeholder.
      constants: of every kernel: shapes, the scores' scale, and which scales there are.
    """

    arrays: tuple[jax.Array, ...]
    constants: dict[str, int | float | bool]

    def in_their_type(self, x: jax.Array) -> jax.Array:
        """`x`, rounded to bf16 where the operands are."""
        return rounded(x, self.arrays[0].dtype)

    def call(self, kernel, tables: dict, *more: jax.Array, out, over: str = "rows"):
        """A kernel's results.

        Args:
          kernel: takes `arrays`, then `more`.
          tables: {dtype: {width: Tile}}.
          more: further operands.
          out: shapes of the results, float32.
          over: 'rows' or 'keys', of which each program has a tile.
        """
        q, _, v = self.arrays[:3]
        (batch, queries, heads, features), (slots, kv_heads, v_features) = q.shape, v.shape[1:]
        tile = tile_for(tables[q.dtype.name], max(features, v_features))
        programs = {
            "rows": -(-queries * heads // kv_heads // tile.rows), "keys": -(-slots // tile.keys)
        }  # fmt: skip
        return triton_call(
            kernel, *self.arrays, *more,
            out=tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in out),
            grid=(programs[over], kv_heads, batch), warps=tile.warps, stages=tile.stages,
            ROWS=tile.rows, KEYS=tile.keys, **self.constants,
        )  # fmt: skip


def supports(q: jax.Array, v: jax.Array) -> bool:
    """Whether the kernels take heads of these widths."""
    return max(q.shape[3], v.shape[3]) <= WIDEST


def _check(q, k, v, positions) -> None:
    (batch, queries, heads, features), (_, slots, kv_heads, _) = q.shape, k.shape
    if heads % kv_heads or k.shape != (batch, slots, kv_heads, features):
        raise ValueError(f"attention: queries {q.shape} do not fit keys {k.shape}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"attention: values {v.shape} do not fit keys {k.shape}")
    if positions.shape != (batch, queries):
        raise ValueError(f"attention: positions {positions.shape} do not fit queries {q.shape}")
    if not supports(q, v):
        raise ValueError(
            f"attention: heads of {features} and {v.shape[3]} features; the kernel takes {WIDEST}"
        )
    if max(queries * heads, slots * kv_heads) * max(features, v.shape[3]) >= 2**31:
        raise ValueError(  # the kernel counts in 32 bits
            f"attention: queries {q.shape[1:]} and keys {k.shape[1:]} of a sequence must be fewer "
            "than 2**31 numbers"
        )


def prepare(q, k, v, positions, *, scale, q_scale=None, k_scale=None, v_scale=None) -> Operands:
    """Operands of the kernels; arguments as of `attention`."""
    _check(q, k, v, positions)
    dtype = jnp.float32 if any(x.dtype == jnp.float32 for x in (q, k, v)) else jnp.bfloat16
    q_scaled, kv_scaled = q_scale is not None, k_scale is not None or v_scale is not None
    scales = [
        jnp.broadcast_to(jnp.float32(1) if given is None else given, like.shape[:3])
        if used
        else jnp.zeros((1,), jnp.float32)
        for given, like, used in (
            (q_scale, q, q_scaled), (k_scale, k, kv_scaled), (v_scale, v, kv_scaled)
        )
    ]  # fmt: skip
    constants = {
        "T": q.shape[1], "S": k.shape[1], "H": q.shape[2], "HKV": k.shape[2],
        "D": q.shape[3], "DV": v.shape[3], "WIDTH": head_width(q.shape[3]),
        "V_WIDTH": head_width(v.shape[3]), "SCALE": scale / math.log(2),
        "Q_SCALED": q_scaled, "KV_SCALED": kv_scaled,
    }  # fmt: skip
    return Operands((*(x.astype(dtype) for x in (q, k, v)), positions, *scales), constants)


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
) -> tuple[jax.Array, jax.Array]:
    """`reference.attention` by the kernel with wide tiles, and what its gradients need.

    Args:
      q, k, v, positions, scale, q_scale, k_scale, v_scale: as for the reference.

    Returns:
      (B, T, H, Dv) float32, NaN for a query of negative position, and each row's logsumexp of the
      scores, (B, T, H) float32 over log 2.

    Raises:
      ValueError: shapes that do not fit, or heads wider than `WIDEST`.
    """
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    return forward(prepare(q, k, v, positions, scale=scale, **scales))


def forward(operands: Operands) -> tuple[jax.Array, jax.Array]:
    """`attention` of prepared operands."""
    from fp8rl_jax.kernels.triton_attention_fast import fast_attention_kernel

    q, _, v = operands.arrays[:3]
    return operands.call(
        fast_attention_kernel, TILES, out=((*q.shape[:3], v.shape[3]), q.shape[:3])
    )
