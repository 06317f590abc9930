"""Norm, gate and quantiser: fused and plain, rows alone and all at once, and against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_checks import assert_bitwise_equal, assert_close, print_time, reports

from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.kernels.gpu import norm
from fp8rl_jax.quant import quantize

pytestmark = pytest.mark.gpu

EPS = 1e-6
_BOUND = 4e-6  # float32 roundings, of a value, before the one to bf16
FEW = (1, 7, 64)  # rows at a time
ROWS, WIDTHS = 333, (128, 1000, 4096)
NAMES = ("rms_norm", "gated_activation")


def kernel(name: str, **more):
    settings = (EPS,) if name == "rms_norm" else ()
    return lambda x, y: getattr(norm, name)(x, y, *settings, **more)


def operands(name: str, source, rows: int, width: int) -> tuple:
    """A bf16 (rows, width), and the norm's weight (width,) or the gate's other half."""
    x = source.take(jnp.bfloat16, rows, width)
    return x, source.scales(width) if name == "rms_norm" else source.take(jnp.bfloat16, rows, width)


def float64(name: str, x, y) -> np.ndarray:
    x, y = (np.asarray(v).astype(np.float64) for v in (x, y))
    if name == "gated_activation":
        return x / (1 + np.exp(-x)) * y
    return x / np.sqrt((x * x).mean(1, keepdims=True) + EPS) * y


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NAMES)
def test_rows_and_quantisation(name, width, source, rows=ROWS):
    """Against float64; quantised at once or after, and a few rows alone, the bits are the same."""
    given = operands(name, source, rows, width)
    plain = exact_jit(kernel(name))
    whole, what = plain(*given), f"{name} {rows} x {width}"
    want = float64(name, *given)
    assert_close(what, whole, want, np.abs(want), _BOUND)
    fused = exact_jit(kernel(name, quantisation=norm.Quantisation()))(*given)
    assert_bitwise_equal(
        f"{what}: quantised at once", fused, (whole, *exact_jit(norm.quantize_rows)(whole))
    )
    for few in FEW:
        part = slice(rows // 3, rows // 3 + few)
        alone = plain(*(x[part] if len(x) == rows else x for x in given))
        assert_bitwise_equal(f"{what}: {few} rows alone", alone, whole[part])


@reports
@pytest.mark.parametrize("width", WIDTHS)
def test_quantiser(width, source, rows=ROWS):
    """Against the library's own: XLA's divisions, and its own rounding to E4M3."""

    def library(x):
        q = quantize(x, (1, 128))
        return q.qvalue, q.scale.T

    x = source.take(jnp.bfloat16, rows, width)
    ours = exact_jit(norm.quantize_rows)(x)
    assert_bitwise_equal(f"quantise {rows} x {width}", ours, exact_jit(library)(x))


@reports
@pytest.mark.parametrize("name", NAMES)
def test_speed(name, source, rows=4096, width=12_288):
    """With quantisation, beside XLA's fusions."""

    def library(x, y):
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        if name == "gated_activation":
            z = jax.nn.silu(x) * y
        else:
            z = x * jax.lax.rsqrt((x * x).mean(1, keepdims=True) + EPS) * y
        z = z.astype(jnp.bfloat16)
        q = quantize(z, (1, 128))
        return z, q.qvalue, q.scale

    def make():
        return operands(name, source, rows, width)

    arrays = jax.tree.leaves((make(), jax.eval_shape(library, *make())))
    fused = kernel(name, quantisation=norm.Quantisation())
    moved = sum(x.size * x.dtype.itemsize for x in arrays)
    print_time(f"{name} {rows} x {width}, quantised", 0.0, moved, make, fused, XLA=library)
