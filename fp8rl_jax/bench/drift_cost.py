"""`fp8rl bench drift-cost`: what zero drift costs, exact programs against naive ones.

The naive programs are those that one would write without the promise: each linear layer is one dot
over the whole contraction (FP8 operands are dequantised first), attention is one softmax over all
keys, and XLA compiles with its own options. Everything else is the same code. They drift; the table
says by how much.

Both run in one process and take turns within each repetition; ratios are medians over repetitions
of exact over naive. Compile time is that of the first call less a typical one, without a
compilation cache.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from fp8rl_jax import exact_jit, kernels
from fp8rl_jax.bench.step_time import Subject
from fp8rl_jax.errors import UserError
from fp8rl_jax.quant import get_recipe, products

_SCALE_BLOCK = kernels.K_BLOCK


def _spread(scale: jax.Array, axis: int, size: int) -> jax.Array:
    """Scales per block of 128 along `axis`, one for each of `size` elements."""
    if scale.shape[axis] == size:
        return scale
    return jnp.take(jnp.repeat(scale, _SCALE_BLOCK, axis=axis), jnp.arange(size), axis=axis)


def naive_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_scale: jax.Array | None = None,
    rhs_scale: jax.Array | None = None,
    *,
    implementation: str = "auto",
    dtype=jnp.float32,
) -> jax.Array:
    """`kernels.block_matmul` as one dot; arguments and result are the same."""
    del implementation
    depth, columns = rhs.shape
    if lhs_scale is not None:
        lhs = lhs.astype(jnp.float32) * _spread(lhs_scale, 1, depth)
    if rhs_scale is not None:
        rhs_scale = _spread(_spread(rhs_scale, 0, depth), 1, columns)
        rhs = rhs.astype(jnp.float32) * rhs_scale
    return kernels.rounded(jnp.matmul(lhs, rhs, preferred_element_type=jnp.float32), dtype)


def naive_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    *,
    scale: float,
    q_scale: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    implementation: str = "auto",
    table: jax.Array | None = None,
    keys_by_feature: bool = False,
) -> jax.Array:
    """`kernels.attention` as one softmax; arguments and result are the same."""
    del implementation

    def rows(x: jax.Array | None) -> jax.Array | None:
        if x is None or table is None or not x.ndim:
            return x
        return x[table].reshape(len(table), -1, *x.shape[2:])

    def dequantised(x: jax.Array, s: jax.Array | None) -> jax.Array:
        x = x.astype(jnp.float32)
        return x if s is None else x * (s[..., None] if s.ndim else s)

    batch, queries, heads, head_dim = q.shape
    kv_heads = v.shape[2]
    k = jnp.moveaxis(k, 3, 1) if keys_by_feature else k
    q = dequantised(q, q_scale)
    k, v = dequantised(rows(k), rows(k_scale)), dequantised(rows(v), rows(v_scale))
    q = q.reshape(batch, queries, kv_heads, heads // kv_heads, head_dim)
    score = jnp.einsum("bthgd,bshd->bhgts", q, k) * scale
    visible = jnp.arange(k.shape[1])[None, None] <= positions[:, :, None]
    score = jnp.where(visible[:, None, None], score, -1e30)
    out = jnp.einsum("bhgts,bshd->bthgd", jax.nn.softmax(score, axis=-1), v)
    return out.reshape(batch, queries, heads, head_dim)


@contextlib.contextmanager
def _naively() -> Iterator[None]:
    """Programs traced and compiled within are the naive ones."""
    replaced = (
        (products, "block_matmul", naive_matmul),
        (kernels, "attention", naive_attention),
        (exact_jit, "compiler_options", dict),
    )
    before = [getattr(module, name) for module, name, _ in replaced]
    for module, name, value in replaced:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(replaced, before, strict=True):
            setattr(module, name, value)


@contextlib.contextmanager
def _without_compilation_cache() -> Iterator[None]:
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)


def drift_cost(
    config: ml_collections.ConfigDict, recipes: list[str], repeats: int
) -> list[dict[str, float | str]]:
    """Times both programs under each recipe; see the module.

    Args:
      config: shapes and batch sizes.
      recipes: names.
      repeats: timed repetitions after the one that compiles.

    Returns:
      One row a recipe: recipe; decode_ratio, train_ratio, compile_decode_ratio and
      compile_train_ratio (exact over naive); exact_decode_s, exact_train_s, compile_decode_s and
      compile_train_s (of the exact programs, seconds); exact_drift_max and naive_drift_max.
    """
    if repeats < 1:
        raise UserError(f"--repeats is {repeats}; write at least 1")
    for recipe in recipes:
        get_recipe(recipe)
    with _without_compilation_cache():
        return [_row(config, recipe, repeats) for recipe in recipes]


def _row(config, recipe: str, repeats: int) -> dict[str, float | str]:
    measured = {}
    for name, context in (("exact", contextlib.nullcontext), ("naive", _naively)):
        with context():
            measured[name] = _Measured(config, recipe, name)
    with jax.set_mesh(measured["exact"].subject.runtime.mesh):
        for _ in range(repeats):
            for program in measured.values():
                program.once()
    exact, naive = measured["exact"], measured["naive"]
    row: dict[str, float | str] = {"recipe": recipe}
    for phase in ("decode", "train"):
        ours, theirs = np.array(exact.times[phase]), np.array(naive.times[phase])
        row[f"exact_{phase}_s"] = float(np.median(ours))
        row[f"{phase}_ratio"] = float(np.median(ours / theirs))
        compile_s = exact.first[phase] - float(np.median(ours))
        row[f"compile_{phase}_s"] = compile_s
        row[f"compile_{phase}_ratio"] = compile_s / (naive.first[phase] - np.median(theirs))
    return row | {f"{name}_drift_max": program.drift for name, program in measured.items()}


class _Measured:
    """One recipe's programs in one form, compiled, with their times."""

    def __init__(self, config, recipe: str, form: str):
        self.subject = Subject(config, recipe, False, name=f"{recipe}, {form}")
        self.times: dict[str, list[float]] = {"decode": [], "train": []}
        with jax.set_mesh(self.subject.runtime.mesh):
            start = time.perf_counter()
            rollout = self.subject.rollout()
            middle = time.perf_counter()
            self.batch = self.subject.batch(rollout)
            before = time.perf_counter()
            logp = self.subject.train(self.batch)
            self.first = {"decode": middle - start, "train": time.perf_counter() - before}
        mask = rollout[0].mask
        self.drift = float(np.abs(np.asarray(logp) - rollout[0].logprobs)[mask].max())

    def once(self) -> None:
        start = time.perf_counter()
        self.subject.rollout()
        middle = time.perf_counter()
        self.subject.train(self.batch)
        self.times["decode"].append(middle - start)
        self.times["train"].append(time.perf_counter() - middle)


def format_cost_table(rows: list[dict]) -> str:
    """The rows of `drift_cost` as text."""
    head = (
        "recipe", "rollout", "train step", "compile rollout", "compile train",
        "drift exact", "drift naive",
    )  # fmt: skip
    keys = ("decode_ratio", "train_ratio", "compile_decode_ratio", "compile_train_ratio")
    lines = ["".join(f"{text:>17}" for text in head)]
    for row in rows:
        cells = [row["recipe"], *(f"{row[key]:.2f}" for key in keys)]
        drift = (row["exact_drift_max"], row["naive_drift_max"])
        cells += ["0 exactly" if d == 0 else f"{d:.1e}" for d in drift]
        lines.append("".join(f"{cell:>17}" for cell in cells))
    lines.append("times are ratios, exact over naive: above 1 is what zero drift costs")
    lines.append(f"platform {jax.devices()[0].platform}")
    return "\n".join(lines)
