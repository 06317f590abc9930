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

from fp8rl_jax.kernels import machine
from fp8rl_jax.kernels.reference import matmul, probe, traced
from fp8rl_jax.kernels.reference.matmul import (
    BF16_DEPTH,
    EXACT,
    FLOAT32_SIZE,
    WAYS,
    Steps,
    Way,
    in_bf16,
    product,
    small_product,
)
from fp8rl_jax.kernels.reference.orders import amx_order, float32_order, pairs_order

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="XLA's products on a CPU")

_ROWS = (8, 9, 31, 33, 64, 65, 130, 513, 2050)
_BY_NAME = {way.name: way for way in WAYS}


@functools.cache
def _tried(name: str) -> Way | None:
    kept = probe.cpu_way()
    if name == "own":
        return None if kept.exact else kept
    return kept if kept.name == name else probe.tried(_BY_NAME[name])


@pytest.fixture(params=["own", *map(slow, _BY_NAME)])
def way(request) -> Way:
    """This machine's way, and every other one that holds on it."""
    if (found := _tried(request.param)) is None:
        pytest.skip(f"this CPU does not multiply in the order of {request.param}")
    return found


@pytest.fixture
def bf16_way(way) -> Way:
    if way.bf16_order is None:
        pytest.skip("multiplies bf16 in float32")
    return way


def _jit(way: Way, fun):
    """Compiled as `exact_jit` does where the way is this machine's."""
    return jax.jit(fun, compiler_options=dict(way.options))


def _padded(way: Way, x, w):
    """`product` of any number of rows."""
    rows = x.shape[0]
    steps = way.bf16_steps if in_bf16(way, x.dtype, w.dtype) else way.float32_steps
    missing = steps.rows(rows) - rows
    return product(way, jnp.pad(x, ((0, missing), (0, 0))), w)[:rows]


def _multiply(way: Way):
    return _jit(way, functools.partial(_padded, way))


def _normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), jnp.bfloat16)


def _numbers(x: jax.Array) -> np.ndarray:
    return np.asarray(x).astype(np.float32)


def _all_equal(found, want: np.ndarray) -> None:
    """Nearly all where numpy has no wider float than float64: see orders.py."""
    assert (np.asarray(found) != want).mean() <= min(probe._ROUNDINGS, 1e-4)


@pytest.mark.parametrize("depth", [128, BF16_DEPTH, 328, slow(384)])
@pytest.mark.parametrize("columns", [200, *map(slow, (64, 1536))])
def test_order_of_bf16(bf16_way, depth, columns):
    x, w = _normal(65, depth), _normal(depth, columns)
    others = [o for o in (amx_order, pairs_order, float32_order) if o is not bf16_way.bf16_order]
    want = bf16_way.bf16_order(_numbers(x), _numbers(w))
    for other in others:
        assert (want != other(_numbers(x), _numbers(w))).mean() > 0.1
    _all_equal(_multiply(bf16_way)(x, w), want)


@pytest.mark.parametrize(("depth", "columns"), [(128, 96), slow(BF16_DEPTH, 512)])
def test_bf16_rows_do_not_see_each_other(bf16_way, depth, columns):
    x, w = _normal(_ROWS[-1], depth), _normal(depth, columns)
    multiply = _multiply(bf16_way)
    whole = np.asarray(multiply(x, w))
    for rows in _ROWS[:-1]:
        np.testing.assert_array_equal(multiply(x[:rows], w), whole[:rows])
        np.testing.assert_array_equal(multiply(x[-rows:], w), whole[-rows:])


@pytest.mark.slow
def test_bf16_law_at_many_sizes(bf16_way):
    """Random numbers of rows and columns; 40 rows and columns of each product are looked at."""
    rng, multiply = np.random.default_rng(0), _multiply(bf16_way)
    for _ in range(150):
        depth = int(rng.choice([128, 256, 384, BF16_DEPTH]))
        rows, columns = (int(2 ** rng.uniform(3, most)) for most in (11, 13))
        columns += -columns % int(rng.choice([1, 8, 128]))
        x, w = _normal(rows, depth), _normal(depth, columns)
        found = np.asarray(multiply(x, w))
        some = rng.integers(0, rows, 40), rng.integers(0, columns, 40)
        want = bf16_way.bf16_order(_numbers(x)[some[0]], _numbers(w)[:, some[1]])
        _all_equal(found[np.ix_(*some)], want)


def test_operands_may_lie_in_any_way(way):
    """Transposed, cut out of a stack, looked up, or made in the same program: the same bits."""
    depth = 256 if way.bf16_order else 128
    x, w = _normal(48, depth), _normal(depth, 192)
    multiply = functools.partial(product, way)
    want = np.asarray(_jit(way, multiply)(x, w))
    ways = {
        "w turned": (lambda x, w: multiply(x, w.T), (x, w.T)),
        "x turned": (lambda x, w: multiply(x.T, w), (x.T, w)),
        "both turned": (lambda x, w: multiply(x.T, w.T), (x.T, w.T)),
        "of a stack": (
            lambda x, w, i: multiply(x, lax.dynamic_index_in_dim(w, i, 0, keepdims=False)),
            (x, jnp.stack([w + 1, w]), 1),
        ),
        "of an axis": (lambda x, w: multiply(x, w[:, 1].T), (x, jnp.stack([w.T + 1, w.T], 1))),
        "rounded": (
            lambda x, w: multiply(x, lax.reduce_precision(w, 8, 7).astype(jnp.bfloat16)),
            (x, w.astype(jnp.float32)),
        ),
        "padded": (lambda x, w: multiply(jnp.pad(x, ((0, 16), (0, 0))), w)[:48], (x, w)),
    }
    for name, (lies, operands) in ways.items():
        np.testing.assert_array_equal(_jit(way, lies)(*operands), want, err_msg=name)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_fp8_is_multiplied_as_bf16(way, dtype):
    x, w = (_normal(*shape).astype(dtype) for shape in ((24, 128), (128, 160)))
    multiply = _multiply(way)
    as_bf16 = multiply(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16))
    np.testing.assert_array_equal(multiply(x, w), as_bf16)
    np.testing.assert_array_equal(multiply(x, w.astype(jnp.bfloat16)), as_bf16)


@pytest.mark.parametrize("columns", [49, 1536, slow(14), slow(97)])
@pytest.mark.parametrize("rows", [2, 8, 33, 600])
def test_float32_order(way, rows, columns):
    """Also at widths at which YNNPACK would cut the contraction into parts."""
    rng = np.random.default_rng(rows)
    shapes = (rows, 128), (128, columns)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    found = _jit(way, functools.partial(matmul.block_matmul, way=way))(x, w)
    _all_equal(found, float32_order(x, w))


_BATCHED = (((3,), (2,)), ((0, 1), (0, 1)))
_CHUNKS_BEHIND_ROWS = (((3,), (2,)), ((0, 2), (0, 1)))  # as weights and values come


@pytest.mark.parametrize("rows", [2, 65, *map(slow, (12, 514))])
@pytest.mark.parametrize(
    ("depth", "columns"), [(64, 64), (64, 14), (64, 16), (128, 256), (64, 512)]
)
def test_small_float32_products(way, rows, depth, columns):
    assert depth * columns <= FLOAT32_SIZE
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((2, 3, rows, depth)).astype(np.float32)
    w = rng.standard_normal((2, 3, depth, columns)).astype(np.float32)
    for numbers, lies in ((_BATCHED, x), (_CHUNKS_BEHIND_ROWS, x.swapaxes(1, 2))):
        found = _jit(way, lambda x, w, numbers=numbers: small_product(way, x, w, numbers))(lies, w)
        _all_equal(found, float32_order(x, w))


def _order_of(way: Way, dtype):
    if way.exact:
        return _rounded_once
    return way.bf16_order if dtype == jnp.bfloat16 and way.bf16_order else float32_order


def _differing_sizes(way: Way, sides: list[tuple[int, int]]) -> set[tuple[str, int, int]]:
    """(operands, rows, columns) whose product is not in the written order: products of bf16 and of
    float32, and attention's."""
    rng, depth, differ = np.random.default_rng(0), 96, set()
    most = max(max(side) for side in sides)
    axes, few = (((2,), (1,)), ((0,), (0,))), way.small_steps.few_rows
    kinds = {
        "bf16": (jnp.bfloat16, lambda x, w: matmul.block_matmul(x[0], w[0], way=way)[None]),
        "float32": (np.float32, lambda x, w: matmul.block_matmul(x[0], w[0], way=way)[None]),
        "small": (np.float32, lambda x, w: small_product(way, x, w, axes)),
    }
    for kind, (dtype, multiply) in kinds.items():
        shapes = (2, most, depth), (2, depth, most)
        x, w = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
        order = _order_of(way, dtype)
        want = np.stack([order(_numbers(a), _numbers(b)) for a, b in zip(x, w, strict=True)])
        given = [
            (x[:, : m if kind != "small" else max(m, few)], np.ascontiguousarray(w[..., :n]))
            for m, n in sides
        ]
        program = _jit(way, lambda given, multiply=multiply: [multiply(*each) for each in given])
        for (m, n), found in zip(sides, program(given), strict=True):
            found = np.asarray(found)[:, :m]
            if (found != want[: len(found), :m, :n]).mean() > probe._ROUNDINGS:
                differ.add((kind, m, n))
    return differ


@pytest.mark.parametrize("step", [12, slow(1)])
def test_every_number_of_rows_and_columns(step):
    """1 to 64 of each, as this machine multiplies; quickly every twelfth, and ends of tiles."""
    rng = np.random.default_rng(0)
    numbers = sorted({*range(1, 65, step), 2, 7, 31, 64})
    sides = [(m, int(rng.integers(1, 65))) for m in numbers]
    sides += [(int(rng.integers(1, 65)), n) for n in numbers]
    assert not _differing_sizes(probe.cpu_way(), sides)


_FAULTS = {  # a library's: which rows and columns of a product it adds up in the opposite order
    "row tails": lambda m, n: (np.arange(m) >= m - m % 7)[:, None],
    "column tails": lambda m, n: np.arange(n) >= n - n % 11,
    "permuted depth": lambda m, n: np.ones((1, 1), bool),
    "many rows": lambda m, n: np.full((1, 1), m > 60),
}


@pytest.mark.parametrize("fault", _FAULTS)
def test_a_planted_fault_is_found(monkeypatch, fault):
    """By the probe, by the comparison of a program's own products, and by the test above."""
    way, honest = probe.cpu_way(), matmul.dot_general
    if way.exact:
        pytest.skip("no order to break")

    def planted(x, w, numbers):
        ((of_x,), (of_w,)), _ = numbers
        good, bad = honest(x, w, numbers), honest(jnp.flip(x, of_x), jnp.flip(w, of_w), numbers)
        return jnp.where(_FAULTS[fault](*good.shape[-2:]), bad, good)

    monkeypatch.setattr(matmul, "dot_general", planted)
    few = {
        "_ROWS": (*range(2, 14), 16, 64, 70),
        "_COLUMNS": (10, 14, 16, 17),
        "_MANY_COLUMNS": (),
        "_FEW_ROWS": ((8,), (64,)),
        "_FEW_COLUMNS": ((13,), (32,)),
    }
    for name, sizes in few.items():
        monkeypatch.setattr(probe, name, sizes)
    assert probe.tried(way) is None
    dot = traced.Dot((64, 128), (128, 48), jnp.dtype(np.float32), (((1,), (0,)), ((), ())))
    assert traced.dots_that_differ(way, [dot]) == [dot]
    assert _differing_sizes(way, [(64, 48), (63, 32)])


def _rounded_once(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return (x.astype(np.longdouble) @ w.astype(np.longdouble)).astype(np.float32)


def test_what_is_compiled(way):
    """bf16 is multiplied as bf16 by YNNPACK; float32 is kept away from it where it keeps to no
    order of it."""

    def compiled(dtype, columns: int) -> str:
        x, w = jnp.ones((32, 128), dtype), jnp.ones((columns, 128), dtype)
        return _jit(way, lambda x, w: product(way, x, w.T)).lower(x, w).compile().as_text()

    if way.bf16_order:
        text = compiled(jnp.bfloat16, 1536)
        (operands,) = re.findall(r"%fused_computation[^\n]*\((.*)\) -> f32\[32,1536\] \{\n", text)
        assert "__ynn_fusion" in text and "f32" not in operands and operands.count("bf16") == 2
    float32 = compiled(jnp.float32, 256)
    assert ("__ynn_fusion" in float32) == (way.float32 == "pieces") and " dot(" in float32

    numbers, x, w = (((2,), (1,)), ((0,), (0,))), jnp.ones((4, 16, 64)), jnp.ones((4, 64, 64))
    small = _jit(way, lambda x, w: small_product(way, x, w, numbers)).lower(x, w).compile()
    assert ("__ynn_fusion" in small.as_text()) == (way.float32 == "pieces")


def test_long_contractions_are_sums_of_blocks(bf16_way):
    x, w = _normal(16, 1536), _normal(1536, 96)
    parts = [slice(start, start + BF16_DEPTH) for start in range(0, 1536, BF16_DEPTH)]
    multiply = _jit(bf16_way, functools.partial(product, bf16_way))
    partial = [np.asarray(multiply(x[:, part], w[part])) for part in parts]
    want = (partial[0] + partial[1]) + partial[2]
    found = _jit(bf16_way, functools.partial(matmul.block_matmul, way=bf16_way))(x, w)
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn])
def test_what_is_left_of_k_and_n_is_as_if_padded(way, dtype):
    """576 and 4,500 are no multiples of 128: the same bits as with zeros behind, which no program
    makes of the weights; 4,500 columns of float32 are multiplied in a loop."""
    x, w = _normal(9, 576).astype(dtype), _normal(576, 4500).astype(dtype)
    scales = [None, None]
    if dtype == jnp.float8_e4m3fn:
        rng = np.random.default_rng(0)
        scales = [jnp.asarray(rng.uniform(1, 2, s), jnp.float32) for s in ((9, 5), (5, 36))]
    program = _jit(way, functools.partial(matmul.block_matmul, way=way)).lower(x, w, *scales)
    assert not re.search(r"pad.*576x4\d\d\dx|pad.*640x", program.as_text())
    padded = (jnp.pad(x, ((0, 0), (0, 64))), jnp.pad(w, ((0, 64), (0, 108))))
    want = _jit(way, functools.partial(matmul.block_matmul, way=way))(*padded, *scales)
    np.testing.assert_array_equal(program.compile()(x, w, *scales), want[:, :4500])


def test_float16_is_not_bf16():
    """It has more digits: multiplied in float32."""
    way = probe.cpu_way()
    x, w = (_normal(*shape).astype(jnp.float16) for shape in ((16, 128), (128, 64)))
    want = _multiply(way)(x.astype(jnp.float32), w.astype(jnp.float32))
    np.testing.assert_array_equal(_multiply(way)(x, w), want)


def _backwards(order):
    return lambda x, w: order(x[..., ::-1], w[..., ::-1, :])


@pytest.mark.parametrize("case", ["bf16", slow("float32")])
def test_another_order_is_noticed(way, monkeypatch, case):
    """Each order by itself: sums in the opposite order are not it."""
    if case == "bf16" and way.bf16_order:
        way = dataclasses.replace(way, bf16_order=_backwards(way.bf16_order))
    else:
        monkeypatch.setattr(probe, "float32_order", _backwards(float32_order))
    assert probe.tried(way) is None


def _wrong_rows(rows: range, columns=range(1, 200)):
    return [(m, n) for m in rows for n in columns]


@pytest.mark.parametrize(
    ("wrong", "steps"),
    [
        ([], Steps()),
        ([(m, 1) for m in range(1, 99)], Steps(few_columns=2)),
        ([(m, n) for m in range(1, 99) if m % 8 for n in range(1, 99)], Steps(row_step=8)),
        ([(m, n) for m in (2, 3) for n in (2, 3)], Steps(few_columns=4)),
        ([(m, n) for m in (9, 33) for n in (49, 97, 145)], Steps(column_step=2)),
        ([(m, n) for m in (16, 32) for n in (16, 48)], None),
    ],
)
def test_steps_follow_from_what_is_wrong(wrong, steps):
    assert probe.steps_that_hold(wrong) == steps


@pytest.mark.parametrize("columns", [1, 2, 3, 14, 49, 256, 257, 513, 1000])
@pytest.mark.parametrize("steps", [Steps(), Steps(few_columns=2), Steps(2, 1, 16, 2)])
def test_ranges_of_columns(steps, columns):
    """They cover every column once or more, none is too wide, and each holds."""
    ranges = steps.column_ranges(columns, 256)
    covered = 0
    for start, width in ranges:
        assert start <= covered and width <= 256 and steps.columns(width) == width
        covered = start + width
    assert covered == columns or (len(ranges) == 1 and covered == steps.columns(columns))


def test_the_first_way_that_holds_is_taken():
    can_bf16 = machine.has_bf16_instructions()
    names = (way.name for way in WAYS if can_bf16 or way.bf16_order is None)
    assert probe.cpu_way() == next(filter(None, map(_tried, names)), EXACT)
    assert probe.compiler_options() == probe.cpu_way().options


def test_where_no_order_holds_products_are_exact(monkeypatch):
    monkeypatch.setattr(probe, "tried", lambda way: None)
    way = probe.choose()
    assert way is EXACT
    x, w = _normal(40, 512), _normal(512, 192)
    multiply = _jit(way, functools.partial(matmul.block_matmul, way=way))
    blocks = [
        _rounded_once(_numbers(x[:, k : k + 128]), _numbers(w[k : k + 128]))
        for k in range(0, 512, 128)
    ]
    np.testing.assert_array_equal(multiply(x, w), ((blocks[0] + blocks[1]) + blocks[2]) + blocks[3])
    np.testing.assert_array_equal(multiply(x[:1], w), multiply(x, w)[:1])


def test_without_bf16_instructions_everything_is_float32(monkeypatch):
    """YNNPACK would multiply bf16 there too, at half of the speed."""
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(machine, "cpu_features", lambda: "flags : avx2 fma")
    monkeypatch.setattr(probe, "tried", lambda way: way)
    assert probe.choose().name == "float32"
    monkeypatch.setattr(machine, "cpu_features", lambda: "flags : avx2 fma avx512_bf16")
    assert probe.choose().bf16_order
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "avx2")
    assert probe.choose().name == "float32"


def test_the_answer_is_kept(monkeypatch, tmp_path):
    """By what it depends on; a damaged file is tried again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tries, way = [], probe.cpu_way()
    monkeypatch.setattr(probe, "choose", lambda: tries.append(1) or way)
    ask = probe.cpu_way.__wrapped__
    assert [ask(), ask()] == [way, way] and len(tries) == 1
    monkeypatch.setenv("NPROC", "7")
    assert ask() == way and len(tries) == 2
    for file in tmp_path.rglob("*.json"):
        file.write_text("{")
    assert ask() == way and len(tries) == 3
