"""Products of experts' rows: against float64 and the dense kernel; gradients of their weights."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from gpu_checks import (
    BOUNDS,
    assert_bitwise_equal,
    assert_close,
    assert_finite,
    by_element,
    float64_product,
    some,
)

from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.bench.kernel_shapes import MODELS, Product, groups, matrices
from fp8rl_jax.bench.kernel_times import DTYPES, Source, blocks
from fp8rl_jax.kernels.gpu.matmul import grouped_matmul, grouped_wgrad, matmul

pytestmark = pytest.mark.gpu

CASES = (
    Product("experts", "fprop", "fp8", 64, 768, 384, 16, 4),
    Product("experts", "fprop", "bf16", 64, 384, 256, 16, 4),
    Product("experts", "fprop", "fp8", 700, 384, 256, 8, 2),
)
# Tiles of 128 rows, as the gradient needs them.
GRADIENTS = (CASES[2], dataclasses.replace(CASES[2], kind="bf16"))


def _scales(case: Product, source: Source, *shapes: tuple[int, ...]) -> tuple:
    return tuple(source.scales(*shape) if case.kind == "fp8" else None for shape in shapes)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products(case, source):
    """Some groups against float64, one against the dense kernel, and zeros for idle groups."""
    (ids, rows), deep = groups(case), blocks(case.depth)
    count, used = len(ids), int((ids < case.experts).sum())
    x = source.take(DTYPES[case.kind], count, rows, case.depth)
    w = source.take(DTYPES[case.kind], case.experts, case.columns, case.depth).swapaxes(1, 2)
    x_scale, w_scale = _scales(
        case, source, (count, rows, deep), (case.experts, deep, blocks(case.columns))
    )
    y = exact_jit(grouped_matmul)(x, w, jnp.asarray(ids), x_scale, w_scale)
    assert_finite(str(case), y)
    for group in some(used, 4):
        expert = ids[group]
        operands = x[group], w[expert]
        if case.kind == "fp8":
            operands += x_scale[group], w_scale[expert]
        want = float64_product(*operands)
        assert_close(f"{case}, group {group}", y[group], *want, BOUNDS[case.kind])
    alone = exact_jit(matmul)(*operands)
    assert_bitwise_equal(f"{case}: a group by the dense kernel", y[group], alone)
    assert not bool(jnp.any(y[used:] != 0)), f"{case}: groups without rows are not zero"


@pytest.mark.parametrize("case", GRADIENTS, ids=str)
def test_weight_gradients(case, source):
    """Two experts against float64; zeros for an expert without rows."""
    ids, tile = groups(case)
    # One expert loses its rows: its gradient must be zero.
    ids = np.sort(np.where(ids == 1, 0, ids)).astype(np.int32)
    count, high = len(ids), blocks(tile)
    values = [source.take(DTYPES[case.kind], count, tile, n) for n in (case.depth, case.columns)]
    scales = _scales(case, source, *((count, high, n) for n in (case.depth, case.columns)))
    run = exact_jit(lambda x, dy, ids, *s: grouped_wgrad(x, dy, ids, case.experts, *s))
    y = run(*values, jnp.asarray(ids), *scales)
    assert_finite(str(case), y)
    rows = some(case.depth, 48)
    for expert in sorted({0, int(ids[ids < case.experts][-1])}):
        mine = np.flatnonzero(ids == expert)
        left, right = (np.asarray(v[mine]).astype(np.float64) for v in values)
        if case.kind == "fp8":
            left, right = (
                v * by_element(s[mine], 1, tile) for v, s in zip((left, right), scales, strict=True)
            )
        left, right = left[..., rows].reshape(-1, len(rows)), right.reshape(-1, case.columns)
        want = float64_product(left.T, right)
        what = f"{case}, gradient of expert {expert}"
        assert_close(what, y[expert][rows], *want, BOUNDS[case.kind])
    assert not bool(jnp.any(y[1] != 0)), f"{case}: an expert without rows has a gradient"


@pytest.mark.parametrize("model", MODELS)
def test_published_matrices(model, source):
    """Every stack of experts of a model, decoding and in a train step."""
    stacks = [m for m in matrices(model) if m.experts]
    for m in stacks:
        case = Product(model, "fprop", "fp8", 16, m.depth, m.columns, m.experts, m.top_k)
        test_products(case, source)
        rows = 64 * m.experts // m.top_k + 1  # tiles of 128 rows
        test_weight_gradients(dataclasses.replace(case, rows=rows), source)
