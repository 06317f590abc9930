"""Selects the implementation (Triton or jnp) of each operation.

`Recipe.kernels` names the implementation:

    auto        by the platform that a program is lowered for: kernels on CUDA, the reference
                elsewhere. Without a GPU or without jax-triton it is the reference, so that a
                program for a CPU contains no kernels that it cannot run.
    reference   kernels/reference
    exact       the reference with exactly summed products, also for gradients
    gpu         the kernels on any backend: for compiling for a GPU on a machine without one
    triton      as gpu, without the Mosaic kernel, which FP8 products of many rows take otherwise;
                the bits are the same (tests/gpu/test_gpu_matmul.py)
    mosaic      as gpu, and FP8 products of few rows and weights' gradients by Mosaic, too, by the
                same multiply-adds. It has run on no GPU yet (tests/gpu/test_gpu_layer.py)

Kernels and reference give different bits; rollout and learner must use the same one.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from fp8rl_jax.kernels import reference
from fp8rl_jax.kernels.arrays import K_BLOCK, rounded
from fp8rl_jax.kernels.machine import backend, takes_hopper_code
from fp8rl_jax.kernels.reference.matmul import EXACT, Way
from fp8rl_jax.kernels.reference.probe import cpu_way

# Values of the argument `implementation` below.
IMPLEMENTATIONS = ("auto", "reference", "exact", "gpu", "triton", "mosaic")


_DECODED = 8  # most queries for which a CPU reads a layer's keys in the arrays of all layers
_LONG = 256  # with so many keys or more a CPU takes attention's gradients by blocks


def triton_installed() -> bool:
    """Returns whether a GPU's kernels can run: Triton is installed, and jax-triton 0.4 or later.
    Imports neither.

    XLA captures no kernel of an older jax-triton into CUDA graphs, and the PTX of one needs a newer
    CUDA than the drivers of CUDA 13.0 have.
    """
    try:
        version = re.match(r"(\d+)\.(\d+)", importlib.metadata.version("jax-triton"))
    except importlib.metadata.PackageNotFoundError:
        return False
    new = version is not None and tuple(map(int, version.groups())) >= (0, 4)
    return new and importlib.util.find_spec("triton") is not None


def gpu_kernels():
    """Imports `kernels.gpu`, which needs Triton, when a program first uses a kernel."""
    from fp8rl_jax.kernels import gpu

    return gpu


def resolve(implementation: str) -> str:
    """Returns `implementation`, but ``reference`` for ``exact``, and for ``auto`` where no kernel
    can run."""
    assert implementation in IMPLEMENTATIONS, implementation
    if implementation == "exact":
        return "reference"
    if implementation == "auto" and not (backend() == "gpu" and triton_installed()):
        return "reference"
    return implementation


def by_platform(implementation: str, kernel: Callable, plain: Callable, *operands):
    """Runs ``kernel(*operands)`` or ``plain(*operands)``, by implementation and platform."""
    chosen = resolve(implementation)
    if chosen == "auto":
        return lax.platform_dependent(*operands, cuda=kernel, default=plain)
    return (plain if chosen == "reference" else kernel)(*operands)


def _way(implementation: str) -> Way:
    """Returns the reference's way of multiplying: this machine's, or the exact one."""
    return EXACT if implementation == "exact" else cpu_way()


def _products(implementation: str, x, weights, scales, dtype, stacked: bool):
    """Returns the file of kernels/gpu that computes products of the same rows.

    Args:
      implementation: one of `IMPLEMENTATIONS`, of a kernel.
      x: (M, K).
      weights: (K, N) each, or with `stacked` (L, K, N).
      scales: of each weight, or None.
      dtype: of the results.
      stacked: whether a layer of stacks is read in place.
    """
    if scales is None or implementation == "triton" or not takes_hopper_code():
        return gpu_kernels().matmul
    from fp8rl_jax.kernels.gpu import mosaic_decode, mosaic_matmul

    rows, depth = x.shape
    columns = [w.shape[-1] for w in weights]
    dtypes = x.dtype, weights[0].dtype, dtype
    by_block = scales[0].shape[-1] == -(-columns[0] // K_BLOCK)
    named = implementation == "mosaic"
    many = not stacked and mosaic_matmul.supports(rows, depth, columns[0], dtypes)
    if many and (by_block or named):
        return mosaic_matmul
    if named and by_block and mosaic_decode.supports(rows, depth, columns, dtypes):
        return mosaic_decode
    return gpu_kernels().matmul


def layer_kernels(implementation: str, x, stacks, layer, x_scale, scales, dtype, residual):
    """Computes `gpu.matmul.layer_matmuls` by the kernel that an implementation takes."""
    unit = _products(implementation, x, stacks, scales, dtype, stacked=True)
    return unit.layer_matmuls(x, stacks, layer, x_scale, scales, dtype, residual)


def block_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_scale: jax.Array | None = None,
    rhs_scale: jax.Array | None = None,
    *,
    implementation: str = "auto",
    dtype=jnp.float32,
    devices: int = 1,
) -> jax.Array:
    """Computes `reference.matmul.block_matmul` by an implementation, rounded once to `dtype`.

    Args:
      lhs, rhs, lhs_scale, rhs_scale: as for the reference.
      implementation: one of `IMPLEMENTATIONS`.
      dtype: dtype of the result, float32 or bf16.
      devices: number of devices over which XLA divides the rows; kernels ignore it, because they
        run on the rows of one device.

    Returns:
      (M, N) in `dtype`.
    """

    def kernel(lhs, rhs, lhs_scale, rhs_scale):
        scales = None if rhs_scale is None else [rhs_scale]
        unit = _products(implementation, lhs, [rhs], scales, dtype, stacked=False)
        return unit.matmul(lhs, rhs, lhs_scale, rhs_scale, dtype)

    def plain(lhs, rhs, lhs_scale, rhs_scale):
        product = reference.matmul.block_matmul(
            lhs, rhs, lhs_scale, rhs_scale, way=_way(implementation), devices=devices
        )
        return rounded(product, dtype)

    return by_platform(implementation, kernel, plain, lhs, rhs, lhs_scale, rhs_scale)


def matmul_at_once(x: jax.Array, w: jax.Array, implementation: str = "auto") -> jax.Array:
    """Multiplies x (M, K) by w (K, N), FP8, bf16 or float32, to float32. For gradients.

    By XLA in no fixed order, or with ``exact`` by `block_matmul`.
    """
    return reference.matmul.matmul_at_once(x, w, _way(implementation))


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    *,
    scale: float,
    implementation: str = "auto",
    keys_by_feature: bool = False,
    layer: jax.Array | None = None,
    dtype=jnp.float32,
    quantisation=None,
    **keywords: jax.Array | None,
):
    """Computes `reference.attention.attention` by an implementation, rounded once to `dtype`.

    Arguments and result are those of the reference. Only the reference takes `keys_by_feature`.
    With `layer` () int32 keys and values are those of several layers, one after another along the
    first axis, or with a table, then (L, B, N), anywhere; for the reference also (L, B, S, ...).
    `quantisation` is for the kernels alone.
    """

    def kernel(q, k, v, positions, layer, keywords):
        assert not keys_by_feature
        return gpu_kernels().attention.attention(
            q,
            k,
            v,
            positions,
            scale=scale,
            layer=layer,
            dtype=dtype,
            quantisation=quantisation,
            **keywords,
        )

    def plain(q, k, v, positions, layer, keywords):
        assert quantisation is None
        if layer is not None and v.ndim == 5 and q.shape[1] <= _DECODED:
            keywords = keywords | {"layer": layer}
        elif layer is not None:
            k, v, keywords = _of_layer((k, v, keywords), layer, q.shape[0])
        result = reference.attention.attention(
            q,
            k,
            v,
            positions,
            scale=scale,
            keys_by_feature=keys_by_feature,
            way=_way(implementation),
            **keywords,
        )
        return rounded(result, dtype)

    return by_platform(implementation, kernel, plain, q, k, v, positions, layer, keywords)


def _of_layer(cached, layer: jax.Array, batch: int):
    """Returns keys, values and the other arrays of a layer: its table, or slices."""
    k, v, keywords = cached
    if (table := keywords.get("table")) is not None:
        return k, v, keywords | {"table": lax.dynamic_index_in_dim(table, layer, keepdims=False)}

    def of_layer(x: jax.Array) -> jax.Array:
        if v.ndim == 5:
            return lax.dynamic_index_in_dim(x, layer, keepdims=False) if x.ndim else x
        return lax.dynamic_slice_in_dim(x, layer * batch, batch) if x.ndim else x

    names = ("k_scale", "v_scale", "k_rope")
    cut = {n: of_layer(x) for n, x in keywords.items() if n in names and x is not None}
    return of_layer(k), of_layer(v), keywords | cut


def attention_vjp(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    cotangent: jax.Array,
    *,
    scale: float,
    implementation: str = "auto",
    oldest: jax.Array | None = None,
    gap: jax.Array | None = None,
    sinks: jax.Array | None = None,
    **scales: jax.Array | None,
) -> tuple[jax.Array, ...]:
    """Computes `reference.attention_gradient.attention_vjp` by an implementation.

    Args:
      q, k, v, positions: as for `attention`.
      cotangent: gradient of its result.
      scale, implementation, sinks: as for `attention`.
      oldest, gap: slots that each query does not see, as for the reference, or None.
      scales: `q_scale`, `k_scale`, `v_scale` as for `attention`.

    Returns:
      Gradients with respect to the dequantised q, k and v, and to the sinks if given, float32.
    """

    def kernel(q, k, v, positions, cotangent, scales, oldest, gap, sinks):
        return gpu_kernels().attention_gradient.attention_vjp(
            q,
            k,
            v,
            positions,
            cotangent,
            scale=scale,
            oldest=oldest,
            gap=gap,
            sinks=sinks,
            **scales,
        )

    def plain(q, k, v, positions, cotangent, scales, oldest, gap, sinks):
        way = _way(implementation)
        run: Callable = functools.partial(reference.attention_gradient.attention_vjp, way=way)
        if k.shape[1] >= _LONG and not way.exact:
            run = reference.attention_gradient.attention_vjp_by_blocks
        return run(
            reference.attention.dequantized(q, scales.get("q_scale")),
            reference.attention.dequantized(k, scales.get("k_scale")),
            reference.attention.dequantized(v, scales.get("v_scale")),
            positions,
            cotangent,
            scale=scale,
            oldest=oldest,
            gap=gap,
            sinks=sinks,
        )

    return by_platform(
        implementation, kernel, plain, q, k, v, positions, cotangent, scales, oldest, gap, sinks
    )
