"""Log-probabilities from hidden states without logits in memory, by the Triton kernels.

``logp(t) = x_t - log sum_v exp(x_v)`` with ``x = (hidden @ head) / temperature``: the definition of
models/logprobs.py, computed as ``(x_t - max) - log sum_v exp(x_v - max)``. A learner scores whole
responses with `head_logprobs`; a sampler, which has the logits of its few rows in memory because it
draws from them, uses `logprobs_of_logits`. Both give a row the same bits, whatever the number of
rows and the place of the row among them, provided that the logits are `kernels.matmul.matmul`'s
(see triton_head.py for why).

Memory: the forward pass keeps 12 bytes per row and 128 columns. The backward pass writes the
gradient of the logits for `CHUNK` tokens at a time, twice (each of the two products that follow
reads it along its own contraction), in the operands' type: with bf16 and a vocabulary of 151,936
that is 2.5 GB, as much as the float32 gradient of a head of width 4,096.

Gradients make no bitwise promise; those of bf16 operands take the logits' gradient in bf16. There
is none of the entropy, which is a metric. Kernels have no rule for `vmap` or differentiation:
the caller joins the two passes in a `custom_vjp`.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from fp8rl_jax.kernels.matmul import matmul
from fp8rl_jax.kernels.reference import pad_to
from fp8rl_jax.kernels.tiles import HEAD_COLUMNS, head_tile
from fp8rl_jax.kernels.triton_call import align, per_load, triton_call, varying_as

CHUNK = 4096  # tokens whose gradient of the logits exists at once
_LOGITS_ROWS = 8  # that a program reads from memory


def _kind(hidden: jax.Array, head: jax.Array) -> str:
    for dtype, kind in ((jnp.bfloat16, "bf16"), (jnp.float32, "float32")):
        if hidden.dtype == head.dtype == dtype:
            return kind
    raise ValueError(
        f"hidden states and head must both be bf16 or both float32, got {hidden.dtype} and "
        f"{head.dtype}; convert one of them"
    )


def _float32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _tiles(columns: int) -> int:
    return -(-columns // HEAD_COLUMNS)


def _statistics_shapes(rows: int, columns: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Maximum, sum and moment of each row and tile; the target's logit of each row."""
    return (*[_float32(rows, _tiles(columns))] * 3, _float32(rows))


def _combine(statistics, targets: jax.Array, columns: int):
    from fp8rl_jax.kernels.triton_head import combine_kernel

    rows, tiles = statistics[0].shape
    return triton_call(
        combine_kernel, *statistics, targets,
        out=(_float32(rows),) * 3,
        grid=(rows,), warps=4, stages=1,
        N=columns, TILES=tiles, WIDTH=1 << (tiles - 1).bit_length(),
    )  # fmt: skip


def head_logprobs(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, inverse_temperature: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probability of each row's target, the row's entropy, and its log-sum-exp.

    Args:
      hidden: (M, D) bf16 or float32.
      head: (D, V) of the same type. Read as (V, D): free for a transposed embedding.
      targets: (M,) int32; outside 0 .. V - 1 the log-probability is NaN.
      inverse_temperature: (M,) float32.

    Returns:
      logp (M,) float32; entropy (M,) float32 in nats; log of the sum of the exponentials of the
      scaled logits (M,) float32, for `head_logprobs_vjp`.

    Raises:
      ValueError: operands of another type.
    """
    from fp8rl_jax.kernels.triton_head import head_statistics_kernel

    kind = _kind(hidden, head)
    rows, columns = hidden.shape[0], head.shape[1]
    hidden, head = align(hidden), align(head.T)
    tile = head_tile(kind, rows)
    statistics = triton_call(
        head_statistics_kernel, hidden, head, targets, inverse_temperature,
        out=_statistics_shapes(rows, columns),
        grid=(-(-rows // tile.rows) * _tiles(columns),), warps=tile.warps, stages=tile.stages,
        M=rows, N=columns, K=hidden.shape[1], **tile.constants(kind),
    )  # fmt: skip
    return _combine(statistics, targets, columns)


def logprobs_of_logits(
    logits: jax.Array, targets: jax.Array, inverse_temperature: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The same three from (M, V) float32 logits, before temperature; bit for bit the same.

    Raises:
      ValueError: logits of another type.
    """
    from fp8rl_jax.kernels.triton_head import logits_statistics_kernel

    if logits.dtype != jnp.float32:
        raise ValueError(f"logits must be float32, got {logits.dtype}; the head's product gives it")
    rows, columns = logits.shape
    statistics = triton_call(
        logits_statistics_kernel, logits, targets, inverse_temperature,
        out=_statistics_shapes(rows, columns),
        grid=(_tiles(columns), -(-rows // _LOGITS_ROWS)), warps=4, stages=1,
        M=rows, N=columns, BM=_LOGITS_ROWS, BN=HEAD_COLUMNS,
    )  # fmt: skip
    return _combine(statistics, targets, columns)


def head_logprobs_vjp(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    inverse_temperature: jax.Array,
    logsumexp: jax.Array,
    dlogp: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Gradients of ``sum(dlogp * logp)``, recomputing the logits.

    Args:
      hidden, head, targets, inverse_temperature: as for `head_logprobs`.
      logsumexp: (M,) float32, its third result.
      dlogp: (M,) float32. A row of 0 gets a gradient of 0 if its logits are finite.

    Returns:
      dhidden (M, D) and dhead (D, V), float32.

    Raises:
      ValueError: operands of another type.
    """
    from fp8rl_jax.kernels.triton_head import head_gradient_kernel

    kind = _kind(hidden, head)
    (rows, depth), columns, dtype = hidden.shape, head.shape[1], hidden.dtype
    pack = per_load(dtype)
    chunk = min(CHUNK, rows + -rows % pack)
    width = columns + -columns % pack
    hidden, head = align(hidden), pad_to(head, 0, pack)
    head_t, head = head.T, align(head)
    tile = head_tile(kind, chunk)

    def gradients(rows_of_chunk: Sequence[jax.Array]):
        x = rows_of_chunk[0]
        dlogits, dlogits_t = triton_call(
            head_gradient_kernel, x, head_t, *rows_of_chunk[1:],
            out=tuple(jax.ShapeDtypeStruct(s, dtype) for s in ((chunk, width), (width, chunk))),
            grid=(-(-chunk // tile.rows) * _tiles(width),), warps=tile.warps, stages=tile.stages,
            M=chunk, N=columns, K=x.shape[1], WIDTH=width, **tile.constants(kind),
        )  # fmt: skip
        return matmul(x.T, dlogits_t.T), matmul(dlogits, head.T)

    def add(total: jax.Array, rows_of_chunk: Sequence[jax.Array]):
        dhead, dhidden = gradients(rows_of_chunk)
        return total + dhead, dhidden

    # Added rows have dlogp = 0: they add nothing.
    per_row = (hidden, targets, inverse_temperature, logsumexp, dlogp)
    chunks = tuple(pad_to(x, 0, chunk).reshape(-1, chunk, *x.shape[1:]) for x in per_row)
    if chunks[0].shape[0] == 1:
        dhead, dhidden = gradients([x[0] for x in chunks])
    else:
        zeros = varying_as(jnp.zeros((hidden.shape[1], width), jnp.float32), *per_row, head)
        dhead, dhidden = lax.scan(add, zeros, chunks)
    return dhidden.reshape(-1, hidden.shape[1])[:rows, :depth], dhead[:depth, :columns]
