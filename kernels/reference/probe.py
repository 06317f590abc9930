"""Tests which ways of multiplying keep their order of summation on this machine; picks the first.

XLA documents no order of summation, and its libraries choose their code by the CPU, the number of
threads and the shape. So nothing is assumed: products of every number of rows and of columns up to
64, and of selected numbers up to some thousands, are compared with the way's order, number by
number, with this process's threads. If the order holds only for some numbers of rows or columns,
`product` pads to these (`Steps`); what it then multiplies is tested at every depth once more. A dot
of given operands compiles in half a millisecond.

The answer is stored in the user's cache, under a hash of the CPU's instructions, the number of
threads, environment variables, compiler settings, jaxlib's version and this code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from fp8rl_jax.kernels import machine
from fp8rl_jax.kernels.reference.matmul import (
    BF16_DEPTH,
    ELSEWHERE,
    EXACT,
    FLOAT32_SIZE,
    TURNED_SIZE,
    WAYS,
    Steps,
    Way,
    bf16_dot,
    dot,
    float32_dot,
    small_dot,
)
from fp8rl_jax.kernels.reference.orders import float32_order

_EACH = range(1, 65)
_ROWS = (*_EACH, 96, 97, 127, 128, 200, 255, 259, 510, 513, 515, 600, 1030, 2051)
_COLUMNS = (*_EACH, 80, 96, 97, 98, 100, 127, 145, 192, 193, 241, 255, 256)
# Every number of rows with two of columns, and every number of columns with a few of rows: with the
# first entries at the first depth, with the second ones at the other depths.
_FEW_COLUMNS = ((97, 256), (14, 49))
_FEW_ROWS = ((2, 9, 510), (3, 33, 600))
_BF16_DEPTHS = (BF16_DEPTH, 8, 384, 64, 128, 40, 256)  # each padded to `Way.depth_step`
_FLOAT32_DEPTHS = (128, 8, 64, 32, 40, 96)
_MANY_COLUMNS = (1000, 2048, 3001)  # for bf16
# Rounded to the steps that were found: what `product` multiplies.
_GIVEN_ROWS = (1, 3, 5, 7, 9, 13, 17, 33, 37, 65, 130, 514)
_GIVEN_COLUMNS = (1, 17, 33, 48, 50, 65, 97, 129, 200, 257, 300, 1025, 2048)
_STEPS = (1, 2, 4, 8, 16)  # candidates for steps and least numbers; of rows, two or more
_ROUNDINGS = 0 if np.finfo(np.longdouble).nmant > 60 else 1e-3  # allowed share, see orders.py
Size = tuple[int, int, int]  # rows, depth, columns


def knows(options: Mapping[str, bool | str]) -> bool:
    """Returns whether jaxlib knows the compiler options; an unknown one fails to compile."""
    try:
        jax.jit(lambda x: x + 1, compiler_options=dict(options)).lower(0).compile()
    except Exception as error:  # jaxlib raises different types for an unknown option
        if not any(name in str(error) for name in options):
            raise
        return False
    return True


def _sizes(depths: Sequence[int], most: int = 1 << 31) -> list[Size]:
    """Returns the sizes to test (see above), with right operands of at most `most` numbers."""
    sizes = []
    both = zip(_FEW_ROWS, _FEW_COLUMNS, (depths[:1], depths[1:]), strict=True)
    for few_rows, few_columns, some in both:
        by_row = itertools.product(_ROWS, few_columns)
        pairs = sorted({*by_row, *itertools.product(few_rows, _COLUMNS)})
        sizes += [
            (m, depth, n) for (m, n), depth in zip(pairs, itertools.cycle(some), strict=False)
        ]
    return [(m, depth, n) for m, depth, n in sizes if depth * n <= most]


class Numbers:
    """Operands of one dtype and depth with any number of rows and columns, and their product in a
    given order. They repeat 61 rows and 67 columns, so that each product can be compared fully."""

    _ROWS, _COLUMNS = 61, 67

    def __init__(self, order: Callable, dtype, depth: int, batch: tuple[int, ...] = ()):
        rng = np.random.default_rng(depth)
        shapes = (*batch, self._ROWS, depth), (*batch, depth, self._COLUMNS)
        self._x, self._w = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
        self._product = order(self._x.astype(np.float32), self._w.astype(np.float32))

    def operands(self, rows: int, columns: int) -> list[np.ndarray]:
        """Returns operands (..., rows, K) and (..., K, columns)."""
        x = self._x[..., np.arange(rows) % self._ROWS, :]
        return [x, np.ascontiguousarray(self._w[..., np.arange(columns) % self._COLUMNS])]

    def differ(self, found: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> bool:
        """Compares `found` (..., rows, columns), the product at `rows` and `columns`, with the same
        entries summed in the given order; returns True if more than a share `_ROUNDINGS` of the
        entries differ."""
        row, column = (rows % self._ROWS)[:, None], columns % self._COLUMNS
        return bool((found != self._product[..., row, column]).mean() > _ROUNDINGS)


def _wrong(
    way: Way,
    multiply: Callable,
    order: Callable,
    dtype,
    sizes: Sequence[Size],
    batch: tuple[int, ...] = (),
    layout: Callable = lambda x, w: (x, w),
) -> list[tuple[int, int]]:
    """Returns the (rows, columns) of the sizes whose product differs from the order's.

    `layout` transposes operands before they are passed to ``multiply(x, w)``: a dot of a program's
    arguments compiles fifty times faster than a dot of values that the program computes.
    """
    depths = {depth for _, depth, _ in sizes}
    numbers = {depth: Numbers(order, dtype, depth, batch) for depth in depths}
    given = [layout(*numbers[depth].operands(rows, columns)) for rows, depth, columns in sizes]

    def together(given):
        return [multiply(*operands) for operands in given]

    # Compiled ahead of time: this may run while something else is being traced.
    program = jax.jit(together, compiler_options=dict(way.options)).lower(given).compile()
    found = zip(sizes, program(given), strict=True)
    return [
        (rows, columns)
        for (rows, depth, columns), result in found
        if numbers[depth].differ(np.asarray(result), np.arange(rows), np.arange(columns))
    ]


def steps_that_hold(wrong: Iterable[tuple[int, int]]) -> Steps | None:
    """Returns the smallest steps that avoid all `wrong` (rows, columns); None if no steps do."""
    wrong = set(wrong)
    for numbers in itertools.product(_STEPS, _STEPS[1:], _STEPS, _STEPS):
        row_step, few_rows, column_step, few_columns = numbers
        steps = Steps(few_rows, row_step, few_columns, column_step)
        if not any((steps.rows(m), steps.columns(n)) == (m, n) for m, n in wrong):
            return steps
    return None


def _steps(
    test: Callable[[Sequence[Size]], list[tuple[int, int]]],
    sizes: Sequence[Size],
    depths: Iterable[int],
    most: int = 1 << 31,
    wrong: Sequence[tuple[int, int]] = (),
) -> Steps | None:
    """Returns the smallest steps that avoid what is wrong, and hold for what they give.

    Args:
      test: returns the (rows, columns) of sizes whose product is wrong.
      sizes: the sizes to begin with.
      depths: depths at which the rows and columns that the steps give are tested.
      most: most numbers of a right operand.
      wrong: (rows, columns) that other tests found wrong.
    """
    wrong = [*wrong, *test(sizes)]
    while steps := steps_that_hold(wrong):
        rows = {steps.rows(m) for m in _GIVEN_ROWS}
        columns = {steps.columns(n) for n in _GIVEN_COLUMNS}
        given = itertools.product(sorted(rows), sorted({*depths}), sorted(columns))
        more = test([(m, depth, n) for m, depth, n in given if depth * n <= most])
        if not more:
            return steps
        wrong += more
    return None


def _padded(way: Way, depths: Iterable[int]) -> list[int]:
    return [-(-depth // way.depth_step) * way.depth_step for depth in depths]


def _turned(x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.ascontiguousarray(x.T), np.ascontiguousarray(w.T)


def _bf16_steps(way: Way) -> Steps | None:
    order = way.bf16_order
    assert order
    depths = _padded(way, _BF16_DEPTHS)
    sizes = _sizes(depths)
    sizes += itertools.product((8, 64, 513), (128, BF16_DEPTH), _MANY_COLUMNS)
    turned = list(itertools.product((2, 3, 16, 520), (64, BF16_DEPTH), (64, 1504)))
    of_turned = lambda x, w: bf16_dot(x.T, w.T)
    test = functools.partial(_wrong, way, dot, order, jnp.bfloat16)
    wrong = _wrong(way, of_turned, order, jnp.bfloat16, turned, layout=_turned)
    return _steps(test, sizes, depths, wrong=wrong)


def _float32_steps(way: Way) -> Steps | None:
    """Tests products of float32, in the layout in which `float32_dot` passes its operands."""
    most, (axis, layout) = FLOAT32_SIZE, (1, lambda x, w: (x, w))
    if way.float32 == "turned":
        most, (axis, layout) = TURNED_SIZE, (0, lambda x, w: (np.ascontiguousarray(x.T), w))
    depths = _padded(way, _FLOAT32_DEPTHS)
    sizes = _sizes(depths, most)
    turned = list(itertools.product((2, 3, 48, 528), (64, 128), (64, 256)))
    of_turned = lambda x, w: float32_dot(way, x.T, w.T)
    alike = functools.partial(dot, axis=axis)
    test = functools.partial(_wrong, way, alike, float32_order, np.float32, layout=layout)
    wrong = _wrong(way, of_turned, float32_order, np.float32, turned, layout=_turned)
    return _steps(test, sizes, depths, most, wrong)


def _small_steps(way: Way) -> Steps | None:
    """Tests attention's products: with one batch axis, and with two, one of them after the rows."""
    sizes = [(m, d, n) for m, d, n in _sizes((64, 128, 32), FLOAT32_SIZE) if m <= 600]
    one = lambda x, w: small_dot(way, x, w, (((2,), (1,)), ((0,), (0,))))
    two = lambda x, w: small_dot(way, x, w, (((3,), (2,)), ((0, 2), (0, 1))))
    behind = lambda x, w: (np.ascontiguousarray(x.swapaxes(1, 2)), w)

    def test(some: Sequence[Size]) -> list[tuple[int, int]]:
        return _wrong(way, one, float32_order, np.float32, some[::2], (3,)) + _wrong(
            way, two, float32_order, np.float32, some[1::3], (2, 2), layout=behind
        )

    return _steps(test, sizes, (24, 64, 128), FLOAT32_SIZE)


def tried(way: Way) -> Way | None:
    """Returns the way with the steps that hold on this machine; None if its order never holds."""
    if not knows(way.options):
        return None
    any_steps = [(rows, 128, 64) for rows in (16, 64)]
    if way.bf16_order and _wrong(way, dot, way.bf16_order, jnp.bfloat16, any_steps):
        return None  # a quick test first
    probes = {"float32_steps": _float32_steps, "small_steps": _small_steps}
    if way.bf16_order:
        probes = {"bf16_steps": _bf16_steps} | probes
    found = {}
    for name, probe in probes.items():
        if (steps := probe(way)) is None:
            return None
        found[name] = steps
    if found["small_steps"].row_step > 1:  # attention has any number of rows
        return None
    return dataclasses.replace(way, **found)


def _kept(cache: pathlib.Path) -> pathlib.Path:
    """Returns the file that stores the answer for this machine, environment, version and code."""
    files = [*sorted(pathlib.Path(__file__).parent.glob("*.py")), pathlib.Path(machine.__file__)]
    depends_on = [*machine.surroundings(), importlib.metadata.version("jaxlib")]
    depends_on += [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    digest = hashlib.sha256(json.dumps(depends_on).encode()).hexdigest()
    return cache / f"cpu-products-{digest[:20]}.json"


def _read(path: pathlib.Path) -> Way | None:
    """Reads the stored way; None if there is none, or the file is damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, StopIteration):
        kept = json.loads(path.read_text())
        name = kept.pop("name")
        way = next(way for way in (*WAYS, EXACT) if way.name == name)
        return dataclasses.replace(way, **{name: Steps(**steps) for name, steps in kept.items()})
    return None


def _write(path: pathlib.Path, way: Way) -> None:
    names = ("bf16_steps", "float32_steps", "small_steps")
    content = {name: dataclasses.asdict(getattr(way, name)) for name in names}
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    with contextlib.suppress(OSError):  # then the next process tries again
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"name": way.name} | content))
        os.replace(temporary, path)


def choose() -> Way:
    """Returns the first of `WAYS` that holds on this machine, with its steps, else `EXACT`.

    Ways that multiply bf16 operands are tested only if the CPU has an instruction for it.
    """
    ways = (way for way in WAYS if machine.has_bf16_instructions() or way.bf16_order is None)
    return next((found for way in ways if (found := tried(way))), EXACT)


@functools.cache
def cpu_way() -> Way:
    """Returns this process's way of multiplying: the stored one, or the result of `choose`."""
    if machine.backend() != "cpu":
        return ELSEWHERE
    cache = machine.user_cache()
    if cache is None:
        return choose()
    path = _kept(cache)
    if way := _read(path):
        return way
    way = choose()
    _write(path, way)
    return way


def wide_type(dtype) -> jnp.dtype:
    """Returns the type in which FP8 of `dtype` is multiplied on this machine."""
    way = cpu_way()
    if way.exact:
        return jnp.dtype(dtype)
    return jnp.dtype(jnp.bfloat16 if way.bf16_order else jnp.float32)


@functools.cache
def compiler_options() -> dict[str, bool | str]:
    """Returns the options of XLA:CPU that the way needs; {} on other platforms, or if jaxlib lacks
    them. The names are those of jaxlib 0.10 and 0.11."""
    options = dict(cpu_way().options)
    return options if options and knows(options) else {}
