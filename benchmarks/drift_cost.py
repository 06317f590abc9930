"""Benchmark `drift-cost`: what zero drift costs, by exact programs compared with naive ones.

The naive programs are those that one would write without the promise of zero drift: each product
(of linear layers, the output head and a router) is one dot over the full contraction (FP8 operands
are dequantised first), attention is one softmax over all keys, and XLA compiles with its default
options. Everything else is the same code; on a GPU the naive programs use no kernel of ours. They
drift; the table says by how much.

Both run in one process and take turns within each repetition; ratios are medians over repetitions
of exact over naive. Compile time is the first call's time minus the median of later calls, without
a compilation cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import ml_collections

from benchmarks.step_time import Subject, check
from fp8rl_jax.base import exact_jit
from fp8rl_jax.base.compilation_cache import without_compilation_cache
from fp8rl_jax.bench.table import record_table
from fp8rl_jax.kernels import K_BLOCK, dequantized, reference


def _spread(scale: jax.Array, axis: int, size: int) -> jax.Array:
    """Repeats scales per block of 128 along `axis` to one for each of `size` elements."""
    if scale.shape[axis] == size:
        return scale
    return jnp.take(jnp.repeat(scale, K_BLOCK, axis=axis), jnp.arange(size), axis=axis)


def naive_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_scale: jax.Array | None = None,
    rhs_scale: jax.Array | None = None,
    way: object = None,
    devices: int = 1,
) -> jax.Array:
    """Computes `reference.matmul.block_matmul` as one dot, up to the order of its sums."""
    depth, columns = rhs.shape
    if lhs_scale is not None:
        lhs = lhs.astype(jnp.float32) * _spread(lhs_scale, 1, depth)
    if rhs_scale is not None:
        rhs = rhs.astype(jnp.float32) * _spread(_spread(rhs_scale, 0, depth), 1, columns)
    return jnp.matmul(lhs, rhs, preferred_element_type=jnp.float32)


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
    q_rope: jax.Array | None = None,
    k_rope: jax.Array | None = None,
    table: jax.Array | None = None,
    window: jax.Array | None = None,
    sinks: jax.Array | None = None,
    keys_by_feature: bool = False,
    layer: jax.Array | None = None,
    way: object = None,
) -> jax.Array:
    """Computes `reference.attention.attention` as one softmax, up to the order of its sums."""
    if layer is not None:
        k, v = k[layer], v[layer]
        others = k_scale, v_scale, k_rope
        k_scale, v_scale, k_rope = (x if x is None or not x.ndim else x[layer] for x in others)

    def cached(x: jax.Array, s: jax.Array | None) -> jax.Array:
        x = dequantized(x, s)
        return x if table is None else x[table].reshape(len(table), -1, *x.shape[2:])

    batch, queries, heads, _ = q.shape
    q = dequantized(q, q_scale)
    k, v = cached(jnp.moveaxis(k, 3, 1) if keys_by_feature else k, k_scale), cached(v, v_scale)
    if q_rope is not None and k_rope is not None:
        q = jnp.concatenate([q, q_rope.astype(jnp.float32)], axis=-1)
        k = jnp.concatenate([k, cached(k_rope, None)], axis=-1)
    kv_heads = v.shape[2]
    q = q.reshape(batch, queries, kv_heads, heads // kv_heads, -1)
    score = jnp.einsum("bthgd,bshd->bhgts", q, k) * scale
    slot = jnp.arange(k.shape[1])[None, None]
    visible = slot <= positions[:, :, None]
    if window is not None:
        visible &= slot > positions[:, :, None] - window
    score = jnp.where(visible[:, None, None], score, -1e30)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.reshape(kv_heads, -1, 1, 1), (*score.shape[:4], 1))
        score = jnp.concatenate([score, sink], axis=-1)
    weight = jax.nn.softmax(score, axis=-1)[..., : k.shape[1]]
    out = jnp.einsum("bhgts,bshd->bthgd", weight, v)
    return out.reshape(batch, queries, heads, -1)


@contextlib.contextmanager
def naively() -> Iterator[None]:
    """Makes programs naive that are traced and compiled inside, if they use reference kernels."""
    # Measures what the library does not offer as an option, so it replaces functions.
    with (
        mock.patch.object(reference.matmul, "block_matmul", naive_matmul),
        mock.patch.object(reference.attention, "attention", naive_attention),
        mock.patch.object(exact_jit, "compiler_options", dict),
    ):
        yield


def drift_cost(
    config: ml_collections.ConfigDict, recipes: list[str], repeats: int
) -> list[dict[str, float | str]]:
    """Times exact and naive programs under each recipe.

    Args:
      config: shapes and batch sizes.
      recipes: names of recipes.
      repeats: timed repetitions after the one that compiles.

    Returns:
      One row per recipe: recipe; decode_ratio, train_ratio, compile_decode_ratio and
      compile_train_ratio (exact over naive); exact_decode_s, exact_train_s, compile_decode_s and
      compile_train_s (of the exact programs, seconds); exact_drift_max and naive_drift_max.
    """
    check(recipes, repeats)
    with without_compilation_cache():
        return [_row(config, recipe, repeats) for recipe in recipes]


def _row(config, recipe: str, repeats: int) -> dict[str, float | str]:
    exact = Subject(config, recipe, False, ", exact")
    exact.run()
    with naively():
        plain = config.copy_and_resolve_references()
        plain.precision.kernels = "reference"
        naive = Subject(plain, recipe, False, ", naive")
        naive.run()
    for _ in range(repeats):
        exact.run()
        naive.run()
    row: dict[str, float | str] = {"recipe": recipe}
    for phase in exact.times:
        compiled = exact.compile_seconds(phase)
        row[f"exact_{phase}_s"] = exact.seconds(phase)
        row[f"{phase}_ratio"] = exact.ratio(naive, phase)
        row[f"compile_{phase}_s"] = compiled
        row[f"compile_{phase}_ratio"] = compiled / naive.compile_seconds(phase)
    return row | {"exact_drift_max": exact.drift, "naive_drift_max": naive.drift}


_COLUMNS = {
    "recipe": "{recipe}",
    "rollout": "{decode_ratio:.2f}",
    "train step": "{train_ratio:.2f}",
    "compile rollout": "{compile_decode_ratio:.2f}",
    "compile train": "{compile_train_ratio:.2f}",
    "drift exact": "{exact}",
    "drift naive": "{naive}",
}


def format_cost_table(rows: list[dict]) -> str:
    """Returns the rows of `drift_cost` as text."""

    def drift(row: dict, form: str) -> str:
        largest = row[f"{form}_drift_max"]
        return "0 exactly" if largest == 0 else f"{largest:.1e}"

    records = [row | {form: drift(row, form) for form in ("exact", "naive")} for row in rows]
    return "\n".join(
        [
            *record_table(_COLUMNS, records),
            "times are ratios, exact over naive: above 1 is what zero drift costs",
            f"platform {jax.devices()[0].platform}",
        ]
    )
