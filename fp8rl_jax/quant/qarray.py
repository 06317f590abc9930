"""QArray: FP8 bytes with float32 scales, and the canonical blockwise quantiser.

The definition (TransformerEngine's convention for FP8 block scaling)::

    amax  = max |x| over the block            float32
    s     = fp8_max / amax                    a true quotient; 1 where amax == 0
    q     = cast(clip(x * s, -fp8_max, fp8_max))
    scale = 1 / s                             what is stored

This is the policy `scaling.dynamic`; s may come from any other (`quantize_with`). With
`power_of_two`, s is rounded down to a power of two *before* quantising. Where the quotient
overflows, s is the largest float32. A block that holds NaN or inf becomes NaN everywhere, bytes
and scale, and is counted by `block_health`: never a silently plausible byte.

MXFP8 (OCP Microscaling, https://arxiv.org/abs/2310.10537) is the block of 32 with powers of two:
scales are values that E8M0 holds, kept as float32. They are rounded up so that nothing saturates,
as in arXiv:2506.08027; the OCP text's own rule takes ``floor(log2 amax) - 8`` and saturates.

`quantize` rounds nothing but its result. Its callers inside this library (the dot_general rule,
the KV cache, the refit) round to bf16 first, because that is the value the other side sees.
Denormals: XLA:CPU flushes them to zero, so blocks whose amax is below 2**-107 (E5M2: 1.75 * 2**-94)
may differ from an IEEE implementation in their smallest elements, and below 1.75 * 2**-118 (E5M2:
1.75 * 2**-111) the stored scale itself is a denormal: the whole block dequantises to zero.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8rl_jax.kernels import fp8_max, in_bits, stored, to_e4m3, widened
from fp8rl_jax.kernels.reference.probe import wide_type
from fp8rl_jax.quant import scaling

E4M3 = jnp.dtype(jnp.float8_e4m3fn)
E5M2 = jnp.dtype(jnp.float8_e5m2)
INT8 = jnp.dtype(jnp.int8)  # of stored keys and values, by scales that follow from the amax
# The largest value plus half a step: above it, rounding to nearest overflows.
_ROUNDING_LIMIT = {E4M3: 464.0, E5M2: 61440.0, INT8: 127.5}
# Bits of the largest finite value without its sign; inf and NaN are above them, INT8 has neither.
_LARGEST_CODE = {E4M3: np.uint8(0x7E), E5M2: np.uint8(0x7B), INT8: np.uint8(0x7F)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QArray:
    """A quantised array: ``value ~ qvalue * scale``, the scale repeated over its block.

    Invariants:
      * `qvalue` has the shape of the value and holds numbers of an FP8 format or INT8, in its dtype
        or, if `widened`, in a larger one.
      * `scale` is float32, one per block, with as many axes as `qvalue`.
      * `block_shape` names the block of the last ``len(block_shape)`` axes (-1: the whole axis);
        further axes in front are stacks (layers, experts) and are blocked one by one.
      * equal values, block_shape and format give equal bytes.
    """

    qvalue: jax.Array
    scale: jax.Array
    block_shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.qvalue.shape

    @property
    def ndim(self) -> int:
        return self.qvalue.ndim

    @property
    def mT(self) -> QArray:
        """The transposed matrices: bytes, scales and block shape; nothing is requantised."""
        return QArray(self.qvalue.mT, self.scale.mT, self.block_shape[::-1])

    def spread_scale(self) -> jax.Array:
        """Returns the scale of every element, in a shape that broadcasts to that of `qvalue`."""
        scale = self.scale
        for axis, size in enumerate(self.shape):
            if scale.shape[axis] in (1, size):
                continue
            scale = jnp.repeat(scale, self.block_shape[axis - self.ndim], axis=axis)
            scale = lax.slice_in_dim(scale, 0, size, axis=axis)
        return scale

    def widened(self) -> QArray:
        """Returns the same numbers in the type in which this CPU multiplies FP8 (`wide_type`).

        Each product of FP8 converts its operands, which takes longer than a product of a few rows.
        The conversion is exact, so converting once beforehand changes no bit.
        """
        return dataclasses.replace(self, qvalue=widened(self.qvalue, wide_type(self.qvalue.dtype)))

    def dequantize(self, dtype=jnp.float32) -> jax.Array:
        """Returns ``qvalue * scale`` in float32, cast to `dtype`, in the shape of `qvalue`."""
        return (widened(self.qvalue, jnp.float32) * self.spread_scale()).astype(dtype)


def saturating_cast(x: jax.Array, dtype) -> jax.Array:
    """Clips float32 to the finite range of `dtype`, then rounds to nearest even; NaN stays NaN.

    (JAX's own cast to E4M3 turns everything above 464 into NaN. INT8 has no NaN: there the scale is
    one.)
    """
    limit = jnp.float32(fp8_max(dtype))
    x = jnp.clip(x, -limit, limit)
    if jnp.dtype(dtype) == INT8:
        return jnp.round(x).astype(INT8)
    return to_e4m3(x) if jnp.dtype(dtype) == E4M3 else x.astype(dtype)


def cast_at_scale(x: jax.Array, s: jax.Array, dtype) -> jax.Array:
    """Returns `saturating_cast` of float32 x * s, for an s that does not follow from x's amax.

    An element that is NaN or infinite becomes NaN alone: its neighbours must not depend on it.
    """
    return saturating_cast(jnp.where(jnp.isfinite(x), x * s, jnp.nan), dtype)


def _resolve(shape: tuple[int, ...], block_shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the block size of every axis: 1 for stacks in front, the axis's size for -1."""
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
    """Pads with zeros, which never change an amax, and splits each axis into (count, block)."""
    counts = tuple(-(-n // b) for n, b in zip(x.shape, blocks, strict=True))
    widths = [(0, c * b - n) for n, b, c in zip(x.shape, blocks, counts, strict=True)]
    x = in_bits(lambda x: jnp.pad(x, widths), x) if any(w for _, w in widths) else x
    return x.reshape(tuple(n for pair in zip(counts, blocks, strict=True) for n in pair)), counts


def quantize(
    x: jax.Array, block_shape: Sequence[int], dtype=E4M3, power_of_two: bool = False
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

    Example:
      >>> x = quantize(jnp.ones((4, 256)), block_shape=(1, 128))
      >>> x.qvalue.dtype, x.scale.shape
      (dtype(float8_e4m3fn), (4, 2))
    """
    policy = scaling.dynamic()
    policy = scaling.power_of_two(policy) if power_of_two else policy
    return quantize_with(x, block_shape, dtype, policy)[0]


def quantize_with(
    x: jax.Array,
    block_shape: Sequence[int],
    dtype,
    policy: scaling.ScalingPolicy,
    state: scaling.State = (),
) -> tuple[QArray, jax.Array]:
    """Quantises `x` with scales from any scaling policy.

    Where a scale does not come from the block itself (static, delayed, a user's), an element that
    is NaN or infinite becomes NaN alone: its neighbours must not depend on it.

    Args:
      x, block_shape, dtype: as for `quantize`.
      policy: a policy of quant/scaling.py, or a user's.
      state: the policy's state, for one scale per block of `x`.

    Returns:
      The QArray, and the amax of each block: float32, shaped as the scale.
    """
    blocks = _resolve(x.shape, block_shape)
    padded, counts = _blocked(x, blocks)
    padded = padded.astype(jnp.float32)
    amax = scaling.find_amax(padded, tuple(range(1, padded.ndim, 2))).reshape(counts)
    # Without the barrier XLA folds the quotients 448/amax and 1/s, and 54% of scales are wrong.
    s = stored(lax.optimization_barrier(policy.scale(state, amax, fp8_max(dtype))))
    spread = s.reshape(tuple(n for count in counts for n in (count, 1)))
    if scaling.never_saturates(policy):
        q = saturating_cast(padded * spread, dtype)
    else:
        q = cast_at_scale(padded, spread, dtype)
    q = q.reshape(tuple(c * b for c, b in zip(counts, blocks, strict=True)))
    q = in_bits(lambda q: q[tuple(slice(0, n) for n in x.shape)], q)
    return QArray(q, 1.0 / s, tuple(block_shape)), amax


def scale_shape(shape: Sequence[int], block_shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of the scales of an array of `shape`: ceil(n / block) per axis."""
    blocks = _resolve(tuple(shape), block_shape)
    return tuple(-(-n // b) for n, b in zip(shape, blocks, strict=True))


def block_health(x: jax.Array, q: QArray, saturable: bool = True) -> dict[str, jax.Array]:
    """Counts what quantisation lost, as float32 scalars (summed by the caller).

    `saturated`: finite elements with ``|x| / scale`` beyond the last value that rounds to the
    maximum (464 for E4M3, 61440 for E5M2), `underflowed`: non-zero elements stored as zero,
    `elements`, `nonfinite_blocks` (blocks whose scale is not finite, or that hold an element stored
    as NaN).

    With `saturable=False` the first count is 0 without a check: a scale that follows from the
    block's amax saturates nothing. `q` must not be `widened`.
    """
    stored = lax.bitcast_convert_type(q.qvalue, jnp.uint8) & np.uint8(0x7F)
    lost = (x != 0) & (stored == 0)
    if not saturable:
        saturated, underflowed = jnp.float32(0), jnp.sum(lost, dtype=jnp.float32)
        bad = ~jnp.isfinite(q.scale)
    else:
        limit = _ROUNDING_LIMIT[q.qvalue.dtype] * q.spread_scale()
        above = (jnp.abs(x.astype(jnp.float32)) > limit) & jnp.isfinite(x)
        not_finite = stored > _LARGEST_CODE[q.qvalue.dtype]
        # One pass for the three: XLA would compute the bytes again for each separate reduction.
        blocks = _resolve(x.shape, q.block_shape)
        counted = [
            _blocked(flag.astype(jnp.int32), blocks)[0] for flag in (above, lost, not_finite)
        ]
        sums = lax.reduce(
            counted,
            [jnp.int32(0)] * 3,
            lambda a, b: [m + n for m, n in zip(a, b, strict=True)],
            tuple(range(1, 2 * x.ndim, 2)),
        )
        saturated, underflowed = (jnp.sum(n, dtype=jnp.float32) for n in sums[:2])
        bad = (sums[2].reshape(q.scale.shape) > 0) | ~jnp.isfinite(q.scale)
    return {
        "saturated": saturated,
        "underflowed": underflowed,
        "nonfinite_blocks": jnp.sum(bad, dtype=jnp.float32),
        "elements": jnp.float32(math.prod(x.shape)),
    }
