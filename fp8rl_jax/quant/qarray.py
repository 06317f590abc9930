"""QArray: FP8 bytes with float32 scales, and the canonical blockwise quantiser.

The definition (TransformerEngine's convention for FP8 block scaling)::

    amax  = max |x| over the block            float32
    s     = fp8_max / amax                    a true quotient; 1 where amax == 0
    q     = cast(clip(x * s, -fp8_max, fp8_max))
    scale = 1 / s                             what is stored

With `power_of_two`, s is rounded down to a power of two *before* quantising. Where the quotient
overflows, s is the largest float32. A block that holds NaN or inf becomes NaN everywhere, bytes
and scale, and is counted by `block_health`: never a silently plausible byte.

`quantize` rounds nothing but its result. Its callers inside this library (the dot_general rule,
the KV cache, the refit) round to bf16 first, because that is the value the other side sees.
Denormals: XLA:CPU flushes them to zero, so blocks whose amax is below 2**-107 may differ from an
IEEE implementation in their smallest elements.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from fp8rl_jax.quant import formats


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["qvalue", "scale"], meta_fields=["block_shape"]
)
@dataclasses.dataclass(frozen=True)
class QArray:
    """A quantised array: ``value ~ qvalue * scale``, the scale repeated over its block.

    Invariants:
      * `qvalue` has an FP8 dtype and the shape of the value.
      * `scale` is float32, one per block, with as many axes as `qvalue`.
      * `block_shape` names the block of the last ``len(block_shape)`` axes (-1: the whole axis);
        further axes in front are stacks (layers, experts) and are blocked one by one.
      * equal values, block_shape and format give equal bytes.
    """

    qvalue: jax.Array
    scale: jax.Array
    block_shape: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.qvalue.shape

    @property
    def ndim(self) -> int:
        return self.qvalue.ndim

    @property
    def T(self) -> QArray:
        """Transpose of a two-dimensional QArray; square blocks need no requantising."""
        assert self.ndim == 2
        return QArray(self.qvalue.T, self.scale.T, self.block_shape[::-1])

    def dequantize(self, dtype=jnp.float32) -> jax.Array:
        """``qvalue * scale`` in float32, cast to `dtype`. Shape: that of `qvalue`."""
        scale = self.scale
        for axis, size in enumerate(self.shape):
            if scale.shape[axis] == size:
                continue
            block = self.block_shape[axis - self.ndim]
            scale = jnp.repeat(scale, size if block == -1 else block, axis=axis)
            scale = lax.slice_in_dim(scale, 0, size, axis=axis)
        return (self.qvalue.astype(jnp.float32) * scale).astype(dtype)


def _resolve(shape: tuple[int, ...], block_shape: Sequence[int]) -> tuple[int, ...]:
    """Block size per axis, with stacks in front as 1 and -1 as the whole axis."""
    if len(block_shape) > len(shape):
        raise ValueError(
            f"block_shape {tuple(block_shape)} has more axes than the array {shape}; "
            "give one entry per axis"
        )
    blocks = (1,) * (len(shape) - len(block_shape)) + tuple(block_shape)
    for block in blocks:
        if block != -1 and block < 1:
            raise ValueError(f"block_shape {tuple(block_shape)}: write sizes >= 1, or -1 for all")
    return tuple(max(n, 1) if b == -1 else b for n, b in zip(shape, blocks, strict=True))


def _blocked(x: jax.Array, blocks: tuple[int, ...]) -> tuple[jax.Array, tuple[int, ...]]:
    """Pads with zeros and splits each axis into (count, block); zeros never change an amax."""
    counts = tuple(-(-n // b) for n, b in zip(x.shape, blocks, strict=True))
    widths = [(0, c * b - n) for n, b, c in zip(x.shape, blocks, counts, strict=True)]
    x = jnp.pad(x, widths) if any(w for _, w in widths) else x
    return x.reshape(tuple(n for pair in zip(counts, blocks, strict=True) for n in pair)), counts


def multiplier(amax: jax.Array, dtype, power_of_two: bool = False) -> jax.Array:
    """The scale multiplier s of a block from its amax (float32, any shape); NaN if not finite."""
    s = jnp.float32(formats.fp8_max(dtype)) / jnp.where(amax == 0, 1.0, amax)
    s = jnp.minimum(s, formats.FLOAT32_MAX)
    s = jnp.where(amax == 0, 1.0, s)
    if power_of_two:
        s = formats.floor_power_of_two(s)
    s = jnp.where(formats.is_finite_amax(amax), s, jnp.nan)
    # Without the barrier XLA folds the two quotients 448/amax and 1/s, and 54% of scales are off.
    return lax.optimization_barrier(s)


def quantize(
    x: jax.Array, block_shape: Sequence[int], dtype=formats.E4M3, power_of_two: bool = False
) -> QArray:
    """Quantises `x` with one dynamic scale per block.

    Args:
      x: bf16 or float32, any shape; ragged edges are allowed.
      block_shape: a size per axis, -1 for a whole axis; fewer entries than axes bind to the last.
      dtype: `float8_e4m3fn` or `float8_e5m2`.
      power_of_two: round the multiplier down to a power of two before quantising.

    Returns:
      QArray whose `scale` has ceil(n / block) entries per axis.

    Raises:
      ValueError: block_shape has more axes than `x`, or a size below 1 other than -1.
    """
    blocks = _resolve(x.shape, block_shape)
    padded, counts = _blocked(x.astype(jnp.float32), blocks)
    inner = tuple(range(1, padded.ndim, 2))
    s = multiplier(formats.amax(padded, inner, keepdims=True), dtype, power_of_two)
    q = formats.saturating_cast(padded * s, dtype)
    q = q.reshape(tuple(c * b for c, b in zip(counts, blocks, strict=True)))
    q = q[tuple(slice(0, n) for n in x.shape)]
    return QArray(q, (1.0 / s).reshape(counts), tuple(block_shape))


def block_health(x: jax.Array, q: QArray) -> dict[str, jax.Array]:
    """Counts of what quantisation lost, as float32 scalars (summed by the caller).

    `saturated`: elements with ``|x| / scale > 464`` (E4M3; beyond the last value that rounds to
    the maximum), `underflowed`: non-zero elements stored as zero, `elements`, `nonfinite_blocks`.
    """
    limit = formats.fp8_max(q.qvalue.dtype) * (464.0 / 448.0)
    ones = QArray(jnp.ones_like(q.qvalue), q.scale, q.block_shape).dequantize()
    x = x.astype(jnp.float32)
    return {
        "saturated": jnp.sum(jnp.abs(x) > limit * ones, dtype=jnp.float32),
        "underflowed": jnp.sum((x != 0) & (q.qvalue.astype(jnp.float32) == 0), dtype=jnp.float32),
        "nonfinite_blocks": jnp.sum(~jnp.isfinite(q.scale), dtype=jnp.float32),
        "elements": jnp.float32(math.prod(x.shape)),
    }
