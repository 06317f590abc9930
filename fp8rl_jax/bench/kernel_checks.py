"""Correctness of the matmul kernels: against float64, row by row, tile by tile.

Four kinds of check, each on fresh seeded data, each an `Outcome`:

* a product against float64 numpy, on random rows and columns of it: the largest error in units of
  the sum of its terms' magnitudes, so that cancellation does not count as an error;
* rows: a call of few rows gives the bits of the same rows in a call of many;
* tiles: every tile of kernels/gpu/tiles.py gives the bits of every other;
* experts: a grouped product gives the bits of a dense one per group, and zeros for idle groups.

Bounds. In float32, and in bf16 without rounding of the result, products are added in float32. FP8
on Hopper is another matter: within the tensor core an FP8 sum keeps about 14 bits (DeepSeek-V3,
arXiv:2412.19437, 3.3.2), so a term may lose 2^-13 of the largest of its 32. For normal numbers that
adds to less than 2^-11 of the sum of magnitudes at any K; the wrong scale of a single block gives
about four times that at K = 4096. The reference, and Triton's interpreter, add in float32.

Checks run few rows, which take other tiles than many do: that tiles give equal bits carries a
result over to the tiles that were not compared with float64.

Results of a jitted call cannot be poisoned beforehand; that every element of a result is finite is
checked instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from fp8rl_jax.bench.kernel_data import Source
from fp8rl_jax.bench.kernel_shapes import Case, groups
from fp8rl_jax.exact_jit import exact_jit
from fp8rl_jax.kernels import K_BLOCK, block_matmul
from fp8rl_jax.kernels.gpu.matmul import grouped_matmul, grouped_wgrad, matmul
from fp8rl_jax.kernels.gpu.tiles import (
    BF16_FEW_ROWS,
    BF16_MANY_ROWS,
    FP8_FEW_ROWS,
    FP8_MANY_ROWS,
    Tile,
)

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
DTYPES = {"fp8": E4M3, "bf16": jnp.bfloat16, "float32": jnp.float32}
# Largest error over the sum of magnitudes. bf16's tensor core may cut where float32 rounds.
_BOUNDS = {"fp8": 2.0**-11, "bf16": 2e-6, "float32": 3e-7}
_BOUND_OF_REFERENCE = 3e-7
_HALF_BF16 = 1.001 * 2.0**-8  # of a value: what rounding it to bf16 may change
ROWS = (1, 7, 64, 65, 128, 129, 1000, 4096)
TILES: dict[str, tuple[Tile, ...]] = {
    "fp8": tuple(dict.fromkeys(FP8_FEW_ROWS + FP8_MANY_ROWS)),
    "bf16": tuple(dict.fromkeys(BF16_FEW_ROWS + BF16_MANY_ROWS)),
}  # of 'wgrad' and 'float32' there is one each: nothing to compare


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a check found.

    Attributes:
      check: 'float64', 'rows', 'tiles' or 'experts'.
      case: what was computed.
      ok: whether it holds.
      error, bound: of 'float64', over the sum of magnitudes; None for promises of equal bits.
      detail: what is wrong, or ''.
    """

    check: str
    case: str
    ok: bool
    error: float | None = None
    bound: float | None = None
    detail: str = ""


def blocks(count: int) -> int:
    return -(-count // K_BLOCK)


def bound(kind: str, implementation: str) -> float:
    return _BOUND_OF_REFERENCE if implementation == "reference" else _BOUNDS[kind]


def guarded(check: str, case: str, run: Callable[[], Outcome]) -> Outcome:
    """`run()`; a failed one if it raises, so that one kernel does not end the others' checks."""
    try:
        return run()
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return Outcome(check, case, False, detail=text[:300])


def difference(one, other) -> str:
    """Where two arrays first differ in a bit, and in how many places; '' if nowhere."""
    one, other = np.asarray(one), np.asarray(other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{one.dtype}{one.shape} against {other.dtype}{other.shape}"
    bits = np.dtype(f"u{one.dtype.itemsize}")
    unequal = np.ascontiguousarray(one).view(bits) != np.ascontiguousarray(other).view(bits)
    if not unequal.any():
        return ""
    place = tuple(int(i) for i in np.argwhere(unequal)[0])
    return (
        f"{int(unequal.sum())} of {unequal.size} elements differ, first at {place}: "
        f"{float(one[place])!r} against {float(other[place])!r}"
    )


def _some(count: int, most: int, rng: np.random.Generator) -> np.ndarray:
    """Random places, the first and the last always among them."""
    inside = rng.choice(count, min(count, most), replace=False)
    return np.unique(np.concatenate([[0, count - 1], inside]))


def _per_column(scale: np.ndarray, columns: int) -> np.ndarray:
    """Scales (KB, columns) of (KB, ceil(columns / 128)) or of themselves."""
    return scale if scale.shape[1] == columns else np.repeat(scale, K_BLOCK, 1)[:, :columns]


def _float64(lhs, rhs, lhs_scale=None, rhs_scale=None) -> tuple[np.ndarray, np.ndarray]:
    """The product of (dequantised) operands, and the sum of its terms' magnitudes."""
    left, right = (np.asarray(x).astype(np.float64) for x in (lhs, rhs))
    depth = left.shape[1]
    if lhs_scale is not None:
        left = left * np.repeat(lhs_scale.astype(np.float64), K_BLOCK, 1)[:, :depth]
        right = right * np.repeat(rhs_scale.astype(np.float64), K_BLOCK, 0)[:depth]
    return left @ right, np.abs(left) @ np.abs(right)


def judge(case: str, got, want: np.ndarray, size: np.ndarray, limit: float, finite) -> Outcome:
    """Compares part of a result with float64; `finite`: whether all of the result is."""
    got = np.asarray(got)
    rounded = got.dtype != np.float32
    off = np.abs(got.astype(np.float64) - want)
    excess = off - np.abs(want) * _HALF_BF16 if rounded else off
    size = np.maximum(size, np.finfo(np.float32).tiny)
    error = float((np.maximum(excess, 0) / size).max())  # NaN stays NaN
    ok = bool(finite) and error <= limit
    detail = "" if ok else "not finite" if not finite else "too large an error"
    return Outcome("float64", case, ok, error, limit, detail)


@dataclasses.dataclass(frozen=True)
class Dense:
    """A dense product to check.

    Attributes:
      kind: of the operands.
      rows, depth, columns: of the product.
      dtype: of the result.
      by_column: a scale for every column of the second operand (wgrad), not one per 128.
      left: dtype of the first operand instead of the kind's (E5M2 gradients).
    """

    kind: str
    rows: int
    depth: int
    columns: int
    dtype: str = "float32"
    by_column: bool = False
    left: str = ""

    def __str__(self) -> str:
        extra = [x for x in (self.left, "a scale per column" if self.by_column else "") if x]
        shape = f"{self.rows} x {self.depth} x {self.columns} -> {self.dtype}"
        return ", ".join([f"{self.kind} {shape}", *extra])

    def operands(self, source: Source, rows: int | None = None) -> tuple:
        """(lhs, rhs, lhs_scale, rhs_scale), scales None where the kind has none."""
        rows, wide = rows or self.rows, self.columns if self.by_column else blocks(self.columns)
        left = jnp.dtype(self.left or DTYPES[self.kind])
        lhs = source.take(left, rows, self.depth)
        rhs = source.take(DTYPES[self.kind], self.columns, self.depth).T
        if self.kind != "fp8":
            return lhs, rhs, None, None
        deep = blocks(self.depth)
        return lhs, rhs, source.scales(rows, deep), source.scales(deep, wide)


def _product(implementation: str, dtype: str, tile: Tile | None = None) -> Callable:
    """Jitted (lhs, rhs, lhs_scale, rhs_scale) -> (result, whether all of it is finite)."""

    def run(*operands):
        if tile is not None:
            y = matmul(*operands, dtype=jnp.dtype(dtype), tile=tile)
        else:
            y = block_matmul(*operands, implementation=implementation, dtype=jnp.dtype(dtype))
        return y, jnp.isfinite(y).all()

    return exact_jit(run)


def check_dense(case: Dense, source: Source, implementation: str, seed: int = 0) -> Outcome:
    """A dense product against float64, on random rows and columns."""

    def run() -> Outcome:
        lhs, rhs, *scales = case.operands(source)
        y, finite = _product(implementation, case.dtype)(lhs, rhs, *scales)
        rng = np.random.default_rng(seed)
        rows, columns = _some(case.rows, 24, rng), _some(case.columns, 384, rng)
        parts = [np.asarray(lhs[rows]), np.asarray(rhs[:, columns])]
        if scales[0] is not None:
            right = _per_column(np.asarray(scales[1]), case.columns)[:, columns]
            parts += [np.asarray(scales[0])[rows], right]
        got = np.asarray(y[rows][:, columns])
        return judge(str(case), got, *_float64(*parts), bound(case.kind, implementation), finite)

    return guarded("float64", str(case), run)


def check_rows(
    case: Dense, counts: Sequence[int], source: Source, implementation: str, seed: int = 0
) -> Iterator[Outcome]:
    """Calls of every number of rows in `counts` against the same rows of one call of the largest.

    The rows are taken from anywhere in the large call, so that a row changes its place in a tile.
    """
    most, rng = max(counts), np.random.default_rng(seed)
    lhs, rhs, lhs_scale, rhs_scale = case.operands(source, most)
    product = _product(implementation, case.dtype)
    name = f"{case.kind} {case.depth} x {case.columns} -> {case.dtype}"
    whole: list[np.ndarray] = []

    def run(count: int) -> Outcome:
        if not whole:
            whole.append(np.asarray(product(lhs, rhs, lhs_scale, rhs_scale)[0]))
        start = int(rng.integers(most - count + 1))
        rows = slice(start, start + count)
        scale = None if lhs_scale is None else lhs_scale[rows]
        part, finite = product(lhs[rows], rhs, scale, rhs_scale)
        detail = difference(part, whole[0][rows]) or ("" if finite else "not finite")
        return Outcome("rows", f"{name}, {count} rows of {most}", not detail, detail=detail)

    for count in counts:
        yield guarded("rows", f"{name}, {count} rows of {most}", lambda n=count: run(n))


def check_tiles(case: Dense, source: Source) -> Iterator[Outcome]:
    """Every tile of the kind against the first."""
    operands = case.operands(source)
    first: list[np.ndarray] = []

    def run(tile: Tile, name: str) -> Outcome:
        y, finite = _product("triton", case.dtype, tile)(*operands)
        first.append(np.asarray(y)) if not first else None
        detail = difference(y, first[0]) or ("" if finite else "not finite")
        return Outcome("tiles", name, not detail, detail=detail)

    base = TILES[case.kind][0]
    for tile in TILES[case.kind]:
        name = f"{case}: {tile.rows} x {tile.columns} against {base.rows} x {base.columns}"
        yield guarded("tiles", name, lambda t=tile, n=name: run(t, n))


def _grouped_operands(case: Case, source: Source, seed: int):
    tiles = groups(case, seed)
    count, deep = len(tiles.experts), blocks(case.depth)
    x = source.take(DTYPES[case.kind], count, tiles.rows, case.depth)
    w = source.take(DTYPES[case.kind], case.experts, case.columns, case.depth).swapaxes(1, 2)
    scales: tuple = (None, None)
    if case.kind == "fp8":
        scales = (
            source.scales(count, tiles.rows, deep),
            source.scales(case.experts, deep, blocks(case.columns)),
        )
    return tiles, x, w, scales


def check_grouped(case: Case, source: Source, seed: int = 0) -> Iterator[Outcome]:
    """The grouped kernel against float64, and against the dense kernel bit for bit."""

    def exact() -> Outcome:
        limit = bound(case.kind, "triton")
        worst = Outcome("float64", str(case), True, 0.0, limit)
        for group in _some(used, 4, np.random.default_rng(seed)):
            expert = tiles.experts[group]
            parts = [np.asarray(x[group]), np.asarray(w[expert])]
            if scales[0] is not None:
                right = _per_column(np.asarray(scales[1][expert]), case.columns)
                parts += [np.asarray(scales[0][group]), right]
            found = judge(str(case), result[0][group], *_float64(*parts), limit, result[1])
            worst = max(worst, found, key=lambda o: (not o.ok, o.error))
        return worst

    def equal() -> Outcome:
        group = used - 1
        expert = tiles.experts[group]
        own = (None, None) if scales[0] is None else (scales[0][group], scales[1][expert])
        alone = _product("triton", "float32")(x[group], w[expert], *own)[0]
        detail = difference(result[0][group], alone)
        if not detail and bool(jnp.any(result[0][used:] != 0)):
            detail = "groups without rows are not zero"
        return Outcome("experts", str(case), not detail, detail=detail)

    def multiply(x, w, experts, x_scale, w_scale):
        y = grouped_matmul(x, w, experts, x_scale, w_scale)
        return y, jnp.isfinite(y).all()

    try:
        tiles, x, w, scales = _grouped_operands(case, source, seed)
        used = int((tiles.experts < case.experts).sum())
        result = exact_jit(multiply)(x, w, jnp.asarray(tiles.experts), *scales)
        jax.block_until_ready(result)
    except Exception as error:
        yield Outcome("float64", str(case), False, detail=f"{type(error).__name__}: {error}"[:300])
        return
    yield guarded("float64", str(case), exact)
    yield guarded("experts", str(case), equal)


def check_grouped_wgrad(case: Case, source: Source, seed: int = 0) -> Outcome:
    """The grouped weight gradient against float64; zeros for experts without rows."""
    name = f"{dataclasses.replace(case, gemm='wgrad')}"

    def run() -> Outcome:
        tiles = groups(case, seed)
        # One expert loses its rows: its gradient must be zero.
        ids = np.where(tiles.experts == 1, 0, tiles.experts)
        ids = np.sort(ids).astype(np.int32)
        count, dtype = len(ids), DTYPES[case.kind]
        x = source.take(dtype, count, tiles.rows, case.depth)
        dy = source.take(dtype, count, tiles.rows, case.columns)
        scales: tuple = (None, None)
        if case.kind == "fp8":
            high = blocks(tiles.rows)
            scales = tuple(source.scales(count, high, n) for n in (case.depth, case.columns))
        run = exact_jit(lambda x, dy, ids, *s: grouped_wgrad(x, dy, ids, case.experts, *s))
        y = run(x, dy, jnp.asarray(ids), *scales)
        limit, finite = bound(case.kind, "triton"), jnp.isfinite(y).all()
        rows = _some(case.depth, 48, np.random.default_rng(seed))
        worst = Outcome("float64", name, True, 0.0, limit)
        for expert in sorted({0, int(ids[ids < case.experts][-1])}):
            mine = np.flatnonzero(ids == expert)
            left, right = (np.asarray(v[mine]).astype(np.float64) for v in (x, dy))
            if scales[0] is not None:
                left, right = (
                    v * np.repeat(np.asarray(s[mine]).astype(np.float64), K_BLOCK, 1)
                    for v, s in zip((left, right), scales, strict=True)
                )
            left, right = left[..., rows].reshape(-1, len(rows)), right.reshape(-1, case.columns)
            parts = left.T @ right, np.abs(left).T @ np.abs(right)
            found = judge(name, y[expert][rows], *parts, limit, finite)
            worst = max(worst, found, key=lambda o: (not o.ok, o.error))
        if bool(jnp.any(y[1] != 0)):
            return dataclasses.replace(worst, ok=False, detail="an expert without rows has some")
        return worst

    return guarded("float64", name, run)


def format_outcomes(outcomes: Sequence[Outcome]) -> str:
    """Failures one by one, the others by kind: how many, and the largest error over its bound."""
    lines = [f"FAILED {o.check}: {o.case}: {_finding(o)}" for o in outcomes if not o.ok]
    for check in dict.fromkeys(o.check for o in outcomes):
        held = [o for o in outcomes if o.check == check and o.ok]
        total = sum(o.check == check for o in outcomes)
        line = f"{check}: {len(held)} of {total} hold"
        measured = [o for o in held if o.error is not None and o.bound]
        if measured:
            worst = max(measured, key=lambda o: o.error / o.bound)
            line += f"; nearest to its bound: {worst.case}: {_finding(worst)}"
        lines.append(line)
    return "\n".join(lines)


def _finding(outcome: Outcome) -> str:
    if outcome.error is None:
        return outcome.detail or "equal bits"
    text = f"error {outcome.error:.2g}, bound {outcome.bound:.2g}"
    return f"{text} ({outcome.detail})" if outcome.detail else text
