"""Vectors of heads: loaded from memory as the tensor cores take them, and stored.

For strict attention E4M3 and INT8 are loaded as pairs of features, in 16 bits, and widened to
float16. (On an H200 single bytes, widened to bf16, took it 1.6 times as long.)
"""

import triton
import triton.language as tl


@triton.jit
def vectors(x, place, exists, D: tl.constexpr, WIDTH: tl.constexpr):
    """Loads vectors number `place`, of D numbers zero-padded to WIDTH; zeros where not `exists`."""
    feature = tl.arange(0, WIDTH)
    mask = exists[:, None]
    if D != WIDTH:
        mask = mask & (feature < D)[None, :]
    part = tl.load(x + place[:, None] * D + feature[None, :], mask=mask, other=0.0)
    if x.dtype.element_ty == tl.float8e4nv:
        # In three exact steps: a direct conversion of float16 to bf16 is a slow instruction (F2F).
        part = part.to(tl.float16).to(tl.float32).to(tl.bfloat16)
    return part


@triton.jit
def store_vectors(x, values, place, exists, D: tl.constexpr, WIDTH: tl.constexpr):
    """Writes vectors of D numbers to `place` where `exists`."""
    feature = tl.arange(0, WIDTH)
    mask = exists[:, None] & (feature < D)[None, :]
    tl.store(x + place[:, None] * D + feature[None, :], values, mask=mask)


@triton.jit
def _unpacked(pairs):
    """Widens int16 that hold two E4M3 each, exactly; returns float16 of the first and the second.

    Two int16 of a thread become two registers of two float16 by three instructions. Triton's own
    conversion takes five times as many, and its loads of single bytes as many again.
    """
    return tl.inline_asm_elementwise(
        asm="""{
            .reg .b32 sorted;
            .reg .b16 first, second;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {first, second}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, first;
            cvt.rn.f16x2.e4m3x2 $1, second;
        }""",
        constraints="=r,=r,r",
        args=[pairs],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _unpacked_integers(pairs):
    """Widens int16 that hold two INT8 each, exactly, as `_unpacked` does: with the sign bit turned
    they are the last byte of a float16 from 1024 to 1279, of which 1152 is subtracted."""
    return tl.inline_asm_elementwise(
        asm="""{
            .reg .b32 shifted, even, odd, zero;
            xor.b32 shifted, $2, 0x80808080;
            prmt.b32 even, shifted, 0x64646464, 0x4240;
            prmt.b32 odd, shifted, 0x64646464, 0x4341;
            mov.b32 zero, 0x64806480;
            sub.rn.f16x2 $0, even, zero;
            sub.rn.f16x2 $1, odd, zero;
        }""",
        constraints="=r,=r,r",
        args=[pairs],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def load_pairs(x, place, exists, D: tl.constexpr, WIDTH: tl.constexpr):
    """Loads vectors number `place`, E4M3 or INT8, as float16, the even and the odd features,
    WIDTH / 2 each; zeros where not `exists`."""
    pair = tl.arange(0, WIDTH // 2)
    mask = exists[:, None]
    if D != WIDTH:
        mask = mask & (pair < D // 2)[None, :]
    at = x.to(tl.pointer_type(tl.int16)) + place[:, None] * (D // 2) + pair[None, :]
    pairs = tl.load(at, mask=mask, other=0)
    if x.dtype.element_ty == tl.int8:
        even, odd = _unpacked_integers(pairs)
    else:
        even, odd = _unpacked(pairs)
    return even, odd


@triton.jit
def query_pairs(q, place, exists, D: tl.constexpr, WIDTH: tl.constexpr):
    """Loads queries, E4M3 or bf16, as `load_pairs` does. As float16 a bf16 keeps its bits from
    2**-14 to 65,504; smaller ones are rounded to multiples of 2**-24, larger ones are cut."""
    if q.dtype.element_ty == tl.float8e4nv:
        even, odd = load_pairs(q, place, exists, D, WIDTH)
    else:
        pair = tl.arange(0, WIDTH // 2)
        mask = exists[:, None] & (pair < D // 2)[None, :]
        at = q + place[:, None] * D + 2 * pair[None, :]
        even = _float16(tl.load(at, mask=mask, other=0.0))
        odd = _float16(tl.load(at + 1, mask=mask, other=0.0))
    return even, odd


@triton.jit
def _float16(x):
    x = tl.maximum(x.to(tl.float32), -65504.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)


@triton.jit
def exponent(scale):
    """Returns the exponent of each positive float32, -100 or more, as a float32."""
    power = tl.maximum(scale.to(tl.int32, bitcast=True) >> 23, 127 - 100)
    # As the mantissa of 2**23: a conversion is a slow instruction.
    return (power | 0x4B000000).to(tl.float32, bitcast=True) - (2.0**23 + 127)
