"""Products on a CPU keep to their order, whatever the number of rows and however operands lie."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from marks import slow

from fp8rl_jax.exact_jit import exact_jit
from fp8rl_jax.kernels import block_matmul
from fp8rl_jax.kernels.reference import products
from fp8rl_jax.kernels.reference.products import (
    BF16_DEPTH,
    DOT_MODES,
    float32_order,
    padded_rows,
    product,
    small_product,
)

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="XLA's products on a CPU")

_ROWS = (8, 9, 31, 33, 64, 65, 130, 513, 2050)


@functools.cache
def _holds(name: str) -> bool:
    return products._knows(DOT_MODES[name].options) and products._holds(DOT_MODES[name])


@pytest.fixture(autouse=True, params=DOT_MODES)
def mode(request, monkeypatch):
    """Every mode that this machine has, also where it would take another one."""
    if not _holds(request.param):
        pytest.skip(f"this CPU does not multiply bf16 in the order of {request.param}")
    monkeypatch.setattr(products, "bf16_dot_mode", lambda: DOT_MODES[request.param])
    products.compiler_options.cache_clear()
    yield DOT_MODES[request.param]
    products.compiler_options.cache_clear()


@pytest.fixture
def multiply():
    """`product` of any number of rows, compiled; a new function, as it is traced for one mode."""

    def padded(x, w):
        rows = x.shape[0]
        return product(jnp.pad(x, ((0, padded_rows(rows) - rows), (0, 0))), w)[:rows]

    return exact_jit(padded)


def _normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), jnp.bfloat16)


def _numbers(x: jax.Array) -> np.ndarray:
    return np.asarray(x).astype(np.float32)


def _nearly_all_equal(found, want: np.ndarray) -> None:
    """One sum in 100,000 may be rounded twice in the float64 of `want`."""
    assert (np.asarray(found) != want).mean() < 1e-4


@pytest.mark.parametrize("depth", [128, BF16_DEPTH, slow(384)])
@pytest.mark.parametrize("columns", [200, *map(slow, (64, 1536))])
def test_order_of_bf16(mode, multiply, depth, columns):
    x, w = _normal(65, depth), _normal(depth, columns)
    others = [float32_order, *(other.order for other in DOT_MODES.values() if other is not mode)]
    want = mode.order(_numbers(x), _numbers(w))
    for other in others:
        assert (want != other(_numbers(x), _numbers(w))).mean() > 0.1
    _nearly_all_equal(multiply(x, w), want)


@pytest.mark.parametrize(("depth", "columns"), [(128, 96), slow(BF16_DEPTH, 512)])
def test_bf16_rows_do_not_see_each_other(multiply, depth, columns):
    x, w = _normal(_ROWS[-1], depth), _normal(depth, columns)
    whole = np.asarray(multiply(x, w))
    for rows in _ROWS[:-1]:
        np.testing.assert_array_equal(multiply(x[:rows], w), whole[:rows])
        np.testing.assert_array_equal(multiply(x[-rows:], w), whole[-rows:])


@pytest.mark.slow
def test_bf16_law_at_many_sizes(multiply):
    """Random numbers of rows and columns; 40 rows and columns of each product are looked at."""
    rng = np.random.default_rng(0)
    for _ in range(150):
        depth = int(rng.choice([128, 256, 384, BF16_DEPTH]))
        rows, columns = (int(2 ** rng.uniform(3, most)) for most in (11, 13))
        columns += -columns % int(rng.choice([1, 8, 128]))
        x, w = _normal(rows, depth), _normal(depth, columns)
        found = np.asarray(multiply(x, w))
        some = rng.integers(0, rows, 40), rng.integers(0, columns, 40)
        want = products.bf16_dot_mode().order(_numbers(x)[some[0]], _numbers(w)[:, some[1]])
        # Of 1,600 sums one is a rounding; a row or a column of another order is 40 of them.
        assert (found[np.ix_(*some)] != want).sum() <= 1, (rows, depth, columns)


def test_operands_may_lie_in_any_way():
    """Transposed, cut out of a stack, looked up, or made in the same program: the same bits."""
    x, w = _normal(48, 256), _normal(256, 192)
    want = np.asarray(exact_jit(product)(x, w))
    ways = {
        "w turned": (lambda x, w: product(x, w.T), (x, w.T)),
        "x turned": (lambda x, w: product(x.T, w), (x.T, w)),
        "both turned": (lambda x, w: product(x.T, w.T), (x.T, w.T)),
        "of a stack": (
            lambda x, w, i: product(x, lax.dynamic_index_in_dim(w, i, 0, keepdims=False)),
            (x, jnp.stack([w + 1, w]), 1),
        ),
        "of an axis": (lambda x, w: product(x, w[:, 1].T), (x, jnp.stack([w.T + 1, w.T], 1))),
        "rounded": (lambda x, w: product(x, lax.reduce_precision(w, 8, 7).astype(jnp.bfloat16)),
                    (x, w.astype(jnp.float32))),
        "padded": (lambda x, w: product(jnp.pad(x, ((0, 16), (0, 0))), w)[:48], (x, w)),
    }  # fmt: skip
    for name, (way, operands) in ways.items():
        np.testing.assert_array_equal(exact_jit(way)(*operands), want, err_msg=name)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_fp8_is_multiplied_as_bf16(multiply, dtype):
    x, w = (_normal(*shape).astype(dtype) for shape in ((24, 128), (128, 160)))
    as_bf16 = multiply(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16))
    np.testing.assert_array_equal(multiply(x, w), as_bf16)
    np.testing.assert_array_equal(multiply(x, w.astype(jnp.bfloat16)), as_bf16)


@pytest.mark.parametrize("rows", [8, 33, 600])
def test_float32_order(multiply, rows):
    """Also at widths at which YNNPACK would cut the contraction into parts."""
    rng = np.random.default_rng(rows)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, 128), (128, 1536)))
    _nearly_all_equal(multiply(x, w), float32_order(x, w))


@pytest.mark.parametrize("rows", [2, 65, *map(slow, (12, 514))])
@pytest.mark.parametrize(("depth", "columns"), [(64, 64), (64, 16), (128, 256), (64, 512)])
def test_small_float32_products(rows, depth, columns):
    """Attention's keep to the same order, by YNNPACK or not."""
    assert depth * columns <= products.FLOAT32_SIZE
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((2, 3, rows, depth)).astype(np.float32)
    w = rng.standard_normal((2, 3, depth, columns)).astype(np.float32)
    numbers = (((3,), (2,)), ((0, 1), (0, 1)))
    found = exact_jit(lambda x, w: small_product(x, w, numbers))(x, w)
    _nearly_all_equal(found, float32_order(x, w))
    # As weights and values come: the axis of chunks behind that of rows.
    numbers = (((3,), (2,)), ((0, 2), (0, 1)))
    found = exact_jit(lambda x, w: small_product(x, w, numbers))(x.swapaxes(1, 2), w)
    _nearly_all_equal(found, float32_order(x, w))


def test_what_is_compiled(mode):
    """bf16 is multiplied as bf16 by YNNPACK; float32 is kept away from it if it is large, or if
    YNNPACK keeps to no order of it."""

    def compiled(dtype) -> str:
        x, w = jnp.ones((32, 128), dtype), jnp.ones((1536, 128), dtype)
        return exact_jit(lambda x, w: product(x, w.T)).lower(x, w).compile().as_text()

    bf16, float32 = compiled(jnp.bfloat16), compiled(jnp.float32)
    (operands,) = re.findall(r"%fused_computation[^\n]*\((.*)\) -> f32\[32,1536\] \{\n", bf16)
    assert "__ynn_fusion" in bf16 and "f32" not in operands and operands.count("bf16") == 2
    assert "__ynn_fusion" not in float32 and " dot(" in float32

    numbers, x, w = (((2,), (1,)), ((0,), (0,))), jnp.ones((4, 16, 64)), jnp.ones((4, 64, 64))
    small = exact_jit(lambda x, w: small_product(x, w, numbers)).lower(x, w).compile().as_text()
    assert ("__ynn_fusion" in small) == mode.float32


def test_long_contractions_are_sums_of_blocks():
    x, w = _normal(16, 1536), _normal(1536, 96)
    parts = [slice(start, start + BF16_DEPTH) for start in range(0, 1536, BF16_DEPTH)]
    partial = [np.asarray(exact_jit(product)(x[:, part], w[part])) for part in parts]
    want = (partial[0] + partial[1]) + partial[2]
    found = exact_jit(lambda x, w: block_matmul(x, w))(x, w)  # traced anew, see `multiply`
    np.testing.assert_array_equal(found, want)


def test_float16_is_not_bf16():
    """It has more digits: multiplied in float32."""
    x, w = (_normal(*shape).astype(jnp.float16) for shape in ((16, 128), (128, 64)))
    want = exact_jit(product)(x.astype(jnp.float32), w.astype(jnp.float32))
    np.testing.assert_array_equal(exact_jit(product)(x, w), want)


@pytest.mark.parametrize("case", ["bf16", "float32"])
def test_another_order_is_noticed(mode, monkeypatch, case):
    """Each order by itself: sums in the opposite order are not it."""
    order = mode.order if case == "bf16" else float32_order
    backwards = lambda x, w: order(x[..., ::-1], w[..., ::-1, :])
    if case == "bf16":
        mode = dataclasses.replace(mode, order=backwards)
    else:
        monkeypatch.setattr(products, "float32_order", backwards)
    assert not products._holds(mode)


def test_the_first_way_that_holds_is_taken(monkeypatch):
    monkeypatch.undo()
    held = [mode for name, mode in DOT_MODES.items() if _holds(name)]
    assert products.bf16_dot_mode() is held[0]
    assert products.compiler_options() == held[0].options


@pytest.fixture
def _without_bf16(monkeypatch):
    """A machine on which no order holds."""
    monkeypatch.undo()
    monkeypatch.setattr(products, "_holds", lambda mode: False)
    for found in (products.bf16_dot_mode, products.compiler_options):
        found.cache_clear()
    yield
    monkeypatch.undo()
    for found in (products.bf16_dot_mode, products.compiler_options):
        found.cache_clear()


def test_without_the_law_everything_is_float32(_without_bf16):
    assert not products.multiplies_bf16()
    assert products.compiler_options() == {"xla_cpu_experimental_ynn_fusion_type": ""}
    x, w = _normal(40, 512), _normal(512, 192)
    multiply = exact_jit(lambda x, w: block_matmul(x, w))  # not what is compiled already
    blocks = [float32_order(_numbers(x[:, k : k + 128]), _numbers(w[k : k + 128]))
              for k in range(0, 512, 128)]  # fmt: skip
    want = ((blocks[0] + blocks[1]) + blocks[2]) + blocks[3]
    _nearly_all_equal(multiply(x, w), want)
    np.testing.assert_array_equal(multiply(x[:9], w), multiply(x, w)[:9])
    assert "__ynn_fusion" not in multiply.lower(x, w).compile().as_text()


def test_without_bf16_instructions_everything_is_float32(monkeypatch):
    """YNNPACK would multiply bf16 there too, at half of Eigen's speed."""
    monkeypatch.undo()
    monkeypatch.setattr(products, "_has_bf16_instructions", lambda: False)
    for found in (products.bf16_dot_mode, products.compiler_options):
        found.cache_clear()
    try:
        assert products.bf16_dot_mode() is None
        assert products.compiler_options() == {"xla_cpu_experimental_ynn_fusion_type": ""}
    finally:
        monkeypatch.undo()
        for found in (products.bf16_dot_mode, products.compiler_options):
            found.cache_clear()
