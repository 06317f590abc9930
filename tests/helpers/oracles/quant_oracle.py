"""Numpy oracle for FP8 block quantisation, delayed scaling and the three scaled matrix products.

Written from the numerics specification alone, independently of the implementation that it
checks, and in a different manner on purpose: blocks are walked one by one, and a value is rounded
to E4M3 or E5M2 by a search in the table of the format's 256 codes, never by a dtype cast. It
favours being easy to check by eye over speed.

Arithmetic on values and scales is IEEE float32 as numpy does it, denormals included. An
implementation that flushes denormals to zero differs from this oracle in two places and nowhere
else. An element that is itself a denormal may round to a nonzero code here, in blocks whose amax
is below 1.75 * 2**-108 (E4M3) or 1.75 * 2**-94 (E5M2). And the stored scale 1 / s is a denormal
here and zero there, in blocks whose amax is below 1.75 * 2**-118 (E4M3) or 1.75 * 2**-111 (E5M2).
`flush_denormals` applied to the values and to the scales is that implementation.

Conventions: `codes` are uint8 bit patterns of float8_e4m3fn or float8_e5m2, as `fmt` says ("e4m3"
unless told, or "e5m2"); `scale` is the stored dequantisation scale, so that value = decode(code) *
scale, and `multiplier` the number that values are multiplied by; blocks start at index 0 of each
axis and the last one may be partial.
"""

import math

import numpy as np

E4M3_MAX = np.float32(448.0)
E5M2_MAX = np.float32(57344.0)
E4M3_NAN = np.uint8(0x7F)
E5M2_NAN = np.uint8(0x7E)
BLOCK = 128

_FLT_MAX = np.finfo(np.float32).max
_FLT_MIN = np.finfo(np.float32).tiny
_SIGN_AND_EXPONENT = np.uint32(0xFF800000)


def e4m3_values() -> np.ndarray:
    """Value of every E4M3 code: float32, shape (256,), indexed by the code.

    From the bit fields of the OCP E4M3 ("fn") format: 1 sign bit, 4 exponent bits with bias 7,
    3 mantissa bits, gradual underflow, no infinities, and NaN only at S.1111.111 (0x7f, 0xff).
    """
    values = np.empty(256, dtype=np.float32)
    for code in range(256):
        sign = -1.0 if code >> 7 else 1.0
        exponent = (code >> 3) & 0xF
        mantissa = code & 0x7
        if exponent == 0xF and mantissa == 0x7:
            values[code] = np.nan
        elif exponent == 0:
            values[code] = sign * math.ldexp(mantissa, 1 - 7 - 3)
        else:
            values[code] = sign * math.ldexp(8 + mantissa, exponent - 7 - 3)
    return values


def e5m2_values() -> np.ndarray:
    """Value of every E5M2 code: float32, shape (256,), indexed by the code.

    1 sign bit, 5 exponent bits with bias 15, 2 mantissa bits, gradual underflow; the top exponent
    holds an infinity (mantissa 0) and NaNs, as in IEEE 754: this is float16 without its last 8
    mantissa bits.
    """
    values = np.empty(256, dtype=np.float32)
    for code in range(256):
        sign = -1.0 if code >> 7 else 1.0
        exponent = (code >> 2) & 0x1F
        mantissa = code & 0x3
        if exponent == 0x1F:
            values[code] = np.nan if mantissa else sign * np.inf
        elif exponent == 0:
            values[code] = sign * math.ldexp(mantissa, 1 - 15 - 2)
        else:
            values[code] = sign * math.ldexp(4 + mantissa, exponent - 15 - 2)
    return values


_VALUES = {"e4m3": e4m3_values(), "e5m2": e5m2_values()}
_MAX = {"e4m3": E4M3_MAX, "e5m2": E5M2_MAX}
_NAN = {"e4m3": E4M3_NAN, "e5m2": E5M2_NAN}
# Codes 0x00 to 0x7e (E4M3) or 0x7b (E5M2) are the magnitudes from 0 to the maximum, ascending.
_MAGNITUDES = {
    "e4m3": _VALUES["e4m3"][:0x7F].astype(np.float64),
    "e5m2": _VALUES["e5m2"][:0x7C].astype(np.float64),
}


def finite_magnitudes(fmt: str = "e4m3") -> np.ndarray:
    """The finite values of the codes without a sign, ascending from 0 to the maximum: float64."""
    return _MAGNITUDES[fmt].copy()


def round_e4m3(x: np.ndarray) -> np.ndarray:
    """Round float32 values of any shape, |x| <= 448, to E4M3 codes (uint8, same shape).

    IEEE round to nearest, ties to the even mantissa. Neighbouring codes are neighbouring values,
    so the even mantissa of a tie is the even code (across a binade too). The sign of a zero is
    kept, also of a negative value that rounds to zero. NaN of either sign gives 0x7f. The caller
    clips: a value beyond +-448 raises ValueError.
    """
    return round_to_codes(x, "e4m3")


def round_to_codes(x: np.ndarray, fmt: str) -> np.ndarray:
    """`round_e4m3` for either format; NaN gives 0x7f (E4M3) or 0x7e (E5M2)."""
    x = _as_float32(x)
    magnitudes, top = _MAGNITUDES[fmt], float(_MAX[fmt])
    is_nan = np.isnan(x)
    magnitude = np.where(is_nan, np.float32(0.0), np.abs(x)).astype(np.float64)
    if np.any(magnitude > top):
        raise ValueError(f"round_to_codes takes values already clipped to +-{top:g}")

    below = np.searchsorted(magnitudes, magnitude, side="right") - 1
    above = np.minimum(below + 1, magnitudes.size - 1)
    to_below = magnitude - magnitudes[below]
    to_above = magnitudes[above] - magnitude
    even = np.where(below % 2 == 0, below, above)
    code = np.where(to_below < to_above, below, np.where(to_below > to_above, above, even))
    # At the maximum itself there is no code above: both neighbours are the last one.
    code = np.where(below == above, below, code)

    code = np.where(np.signbit(x), code | 0x80, code)
    return np.where(is_nan, _NAN[fmt], code).astype(np.uint8)


def saturating_codes(x: np.ndarray, fmt: str = "e4m3") -> np.ndarray:
    """Codes of float32 values of any size: clipped to the finite range, then rounded."""
    x = _as_float32(x)
    return round_to_codes(np.clip(x, -_MAX[fmt], _MAX[fmt]), fmt)


def flush_denormals(x: np.ndarray) -> np.ndarray:
    """float32 values with every denormal replaced by a zero of its sign."""
    x = _as_float32(x)
    return np.where(np.abs(x) < _FLT_MIN, np.copysign(np.float32(0), x), x)


def round_bf16(x: np.ndarray) -> np.ndarray:
    """Round float32 (or bfloat16) values to bfloat16 precision; returns float32, same shape.

    Round to nearest even on the upper 16 bits of the float32 pattern: callers of the quantiser
    round to bf16 first, the quantiser itself does not.
    """
    x = _as_float32(x)
    bits = x.view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    rounded = bits.astype(np.uint32).view(np.float32)
    return np.where(np.isnan(x), np.float32(np.nan), rounded)


def quantize_blocks(
    x: np.ndarray, block_shape: tuple[int, ...], power_of_two: bool = False, fmt: str = "e4m3"
) -> tuple[np.ndarray, np.ndarray]:
    """Quantise x with one float32 scale per block (the canonical quantiser).

    x: bfloat16 or float32, any rank; taken as it is, without rounding to bf16.
    block_shape: one entry per axis, -1 for the whole axis. A partial last block acts as if
    padded with zeros.
    Returns codes (uint8, shape of x) and scale (float32, number of blocks along each axis).

    Per block, in float32 (TransformerEngine's convention, multiplying by fl(448 / amax)); the
    maximum is 448 for E4M3 and 57344 for E5M2:

        amax  = max |x|
        s     = maximum / amax           1 where amax == 0; FLT_MAX where the quotient overflows
        s     = s with a zero mantissa   only if power_of_two
        codes = cast(clip(x * s, -maximum, maximum))
        scale = 1 / s

    A block that holds a NaN or an infinity gets the code of NaN in all its elements and a NaN
    scale, where TransformerEngine would use s = 1.
    """
    x = _as_float32(x)
    multiplier = np.empty(_block_counts(x.shape, block_shape), dtype=np.float32)
    for index, region in _blocks(x.shape, block_shape):
        multiplier[index] = _multiplier(x[region], power_of_two, _MAX[fmt])
    return quantize_given(x, block_shape, multiplier, fmt)


def quantize_given(
    x: np.ndarray, block_shape: tuple[int, ...], multiplier: np.ndarray, fmt: str = "e4m3"
) -> tuple[np.ndarray, np.ndarray]:
    """Quantise x by multipliers that are known beforehand (delayed and static scaling).

    multiplier: float32, one per block. Finite elements beyond the maximum saturate; an element
    that is NaN or infinite becomes NaN, and its neighbours are quantised as if it were not there.
    Returns codes and scale as `quantize_blocks` does.
    """
    x = _as_float32(x)
    multiplier = np.asarray(multiplier, np.float32)
    scaled = np.empty(x.shape, dtype=np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for index, region in _blocks(x.shape, block_shape):
            scaled[region] = x[region] * multiplier[index]
        scale = np.float32(1.0) / multiplier
    scaled[~np.isfinite(x)] = np.nan
    return saturating_codes(scaled, fmt), scale


def amax_blocks(x: np.ndarray, block_shape: tuple[int, ...]) -> np.ndarray:
    """Largest |x| of each block, float32; NaN where the block holds one, else inf likewise."""
    x = _as_float32(x)
    amax = np.empty(_block_counts(x.shape, block_shape), dtype=np.float32)
    for index, region in _blocks(x.shape, block_shape):
        amax[index] = np.max(np.abs(x[region]))
    return amax


def dequantize(
    codes: np.ndarray, scale: np.ndarray, block_shape: tuple[int, ...], fmt: str = "e4m3"
) -> np.ndarray:
    """Dequantised values, float32, shape of codes: fl(decode(code) * scale of its block).

    codes: uint8; scale: float32 with one entry per block, as `quantize_blocks` returns them;
    block_shape: the one that they were made with. A value that rounded up beyond FLT_MAX is inf.
    """
    return _decode(codes, scale, block_shape, np.float32, fmt)


def dequantize_exactly(
    codes: np.ndarray, scale: np.ndarray, block_shape: tuple[int, ...], fmt: str = "e4m3"
) -> np.ndarray:
    """decode(code) * scale without rounding: float64."""
    return _decode(codes, scale, block_shape, np.float64, fmt)


def matmul_1x128_128x128(x: np.ndarray, w: np.ndarray, power_of_two: bool = False) -> np.ndarray:
    """Forward product y = x w of quantised operands: float64, (M, N).

    x: (M, K), w: (K, N), float32 or bfloat16. Both are rounded to bf16; x is then quantised 1x128
    along K and w in 128x128 squares. This is the exact product of the dequantised operands, up to
    float64 rounding (decode(code) * scale is exact in float64), so it has the quantisation error
    of the scaled FP8 product and no accumulation error.
    """
    x_hat = _fake_exact(x, (1, BLOCK), power_of_two)
    w_hat = _fake_exact(w, (BLOCK, BLOCK), power_of_two)
    return x_hat @ w_hat


def dgrad_reference(dy: np.ndarray, w: np.ndarray, power_of_two: bool = False) -> np.ndarray:
    """Input gradient dx = dy w^T of quantised operands: float64, (M, K).

    dy: (M, N), w: (K, N), float32 or bfloat16. Both are rounded to bf16; dy is quantised 1x128
    along N, the contraction. w has the same codes and scales as in the forward product, merely
    transposed: square blocks need no requantising.
    """
    dy_hat = _fake_exact(dy, (1, BLOCK), power_of_two)
    w_hat = _fake_exact(w, (BLOCK, BLOCK), power_of_two)
    return dy_hat @ w_hat.T


def wgrad_reference(x: np.ndarray, dy: np.ndarray, power_of_two: bool = False) -> np.ndarray:
    """Weight gradient dw = x^T dy of quantised operands: float64, (K, N).

    x: (T, K), dy: (T, N), float32 or bfloat16, T tokens. Both are quantised in runs of 128 along
    the tokens, the contraction, straight from their bf16 values and not from the bytes that the
    forward and input-gradient products use (that would quantise twice).
    """
    x_hat = _fake_exact(x, (BLOCK, 1), power_of_two)
    dy_hat = _fake_exact(dy, (BLOCK, 1), power_of_two)
    return x_hat.T @ dy_hat


def fake_kv(x: np.ndarray, power_of_two: bool = False) -> np.ndarray:
    """K or V as a reader of the FP8 cache sees it: float32, shape of x.

    x: float32 or bfloat16, (..., head_dim). It is rounded to bf16, quantised with one scale per
    vector of the last axis (per token and KV head), and dequantised.
    """
    x = round_bf16(x)
    block_shape = (1,) * (x.ndim - 1) + (-1,)
    codes, scale = quantize_blocks(x, block_shape, power_of_two)
    return dequantize(codes, scale, block_shape)


def calc_diff(a: np.ndarray, b: np.ndarray) -> float:
    """DeepGEMM's distance 1 - 2<a,b> / (<a,a> + <b,b>), all in float64.

    a and b have the same shape. Equal arrays give 0, also two that are all zeros; a NaN on either
    side gives NaN.
    """
    a = np.asarray(a).astype(np.float64)
    b = np.asarray(b).astype(np.float64)
    if a.shape != b.shape:
        raise ValueError(f"shapes differ: {a.shape} and {b.shape}")
    denominator = np.sum(a * a) + np.sum(b * b)
    if denominator == 0.0:
        return 0.0
    return float(1.0 - 2.0 * np.sum(a * b) / denominator)


class DelayedScaling:
    """TransformerEngine's delayed scaling of one tensor, in plain Python on float64 numbers.

    The amaxes of the last `history` steps are kept in a list; the scale of a step follows from
    those before it, and is ``maximum * 2**-margin / a`` with a their largest. A
    zero or non-finite a leaves the scale what it was, 1 at the start. Quotients that float32
    cannot hold become FLT_MAX.

    nan_counts: whether a NaN in the history makes a NaN (and so freezes the scale). It does in
    the specification; TransformerEngine's own maximum is C's fmaxf, which passes over a NaN.
    A float64 quotient of two float32 numbers, rounded to float32, is the float32 quotient.
    """

    def __init__(self, history, margin=0, fmt="e4m3", nan_counts=True):
        self.length, self.nan_counts = history, nan_counts
        self.top = float(_MAX[fmt]) * 2.0**-margin
        self.seen: list[float] = []
        self.scale = np.float32(1.0)

    def update(self, amax: float) -> None:
        """After a step that saw `amax`: `scale` is the multiplier of the next step."""
        self.seen = [*self.seen, float(amax)][-self.length :]
        if self.nan_counts and any(math.isnan(a) for a in self.seen):
            found = math.nan
        else:
            found = max((a for a in self.seen if not math.isnan(a)), default=0.0)
        if math.isfinite(found) and found > 0:
            self.scale = np.float32(min(self.top / found, float(_FLT_MAX)))


def _as_float32(x):
    """x as a contiguous float32 array; only dtypes that widen to float32 exactly are taken."""
    x = np.asarray(x)
    if x.dtype != np.float32 and x.dtype.name != "bfloat16":
        raise TypeError(f"expected float32 or bfloat16, got {x.dtype}")
    return np.array(x, dtype=np.float32, order="C", copy=None)


def _multiplier(block, power_of_two, maximum):
    """The float32 multiplier s of one block; NaN if it holds anything that is not finite."""
    if not np.all(np.isfinite(block)):
        return np.float32(np.nan)
    amax = np.max(np.abs(block), initial=np.float32(0))
    if amax == 0.0:
        return np.float32(1.0)
    with np.errstate(over="ignore"):
        s = maximum / amax
    if np.isinf(s):
        s = _FLT_MAX
    if power_of_two:
        s = (s.view(np.uint32) & _SIGN_AND_EXPONENT).view(np.float32)
    return s


def _block_sizes(shape, block_shape):
    """Block size along each axis, with -1 replaced by the axis length."""
    if len(block_shape) != len(shape):
        raise ValueError(f"block_shape {block_shape} does not fit shape {shape}")
    sizes = []
    for length, block in zip(shape, block_shape, strict=True):
        if block != -1 and block < 1:
            raise ValueError(f"block sizes are positive or -1, got {block_shape}")
        sizes.append(max(length, 1) if block == -1 else block)
    return sizes


def _block_counts(shape, block_shape):
    """Number of blocks along each axis, the partial last one included."""
    sizes = _block_sizes(shape, block_shape)
    return tuple(-(-length // size) for length, size in zip(shape, sizes, strict=True))


def _blocks(shape, block_shape):
    """Yield (index of the block in the scale array, slices of its elements) for every block."""
    sizes = _block_sizes(shape, block_shape)
    for index in np.ndindex(*_block_counts(shape, block_shape)):
        yield (
            index,
            tuple(slice(i * size, (i + 1) * size) for i, size in zip(index, sizes, strict=True)),
        )


def _decode(codes, scale, block_shape, dtype, fmt="e4m3"):
    """decode(code) * scale, block by block, with the product taken in dtype."""
    codes = np.asarray(codes)
    scale = np.asarray(scale)
    if codes.dtype != np.uint8 or scale.dtype != np.float32:
        raise TypeError(f"expected uint8 codes, float32 scale; got {codes.dtype}, {scale.dtype}")
    if scale.shape != _block_counts(codes.shape, block_shape):
        raise ValueError(f"scale {scale.shape} does not fit {codes.shape} in {block_shape}")
    out = _VALUES[fmt][codes].astype(dtype)
    with np.errstate(over="ignore"):
        for index, region in _blocks(codes.shape, block_shape):
            out[region] *= scale[index].astype(dtype)
    return out


def _fake_exact(x, block_shape, power_of_two):
    """Round to bf16, quantise, and dequantise without rounding: float64."""
    codes, scale = quantize_blocks(round_bf16(x), block_shape, power_of_two)
    return _decode(codes, scale, block_shape, np.float64)
