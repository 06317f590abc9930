"""Calls of jax-triton, by its version; no other file uses it.

jax-triton 0.3 names its arguments `out_shape` and `enable_fp_fusion`, 0.4 `out_type` and
`backend_options`; 0.4 reads constants of Triton's driver that Triton 3.6 does not have yet.
jax-triton and the driver are imported when a kernel is first called, because importing them needs
JAX's CUDA plugin, which a machine without a GPU lacks.

Fused multiply-adds are written out in the kernels (`tl.fma`), and the compiler's own fusing is off:
Triton's default for it differs between versions and would change bits.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fp8rl_jax.kernels.arrays import pad_to, varying_as
from fp8rl_jax.kernels.machine import backend

_TMA_TF32 = 11  # CUtensorMapDataType's value, from CUDA's cuda.h
_PTX = 90  # of CUDA 13.0, the oldest that JAX supports; Triton's default may be newer


def per_load(dtype) -> int:
    """Returns how many numbers a 16-byte load has; rows are padded to multiples of this."""
    return 16 // jnp.dtype(dtype).itemsize


def align(x: jax.Array) -> jax.Array:
    """Pads the last axis with zeros, so that every row starts where a 16-byte load may start."""
    return pad_to(x, x.ndim - 1, per_load(x.dtype))


@functools.cache
def _jax_triton() -> Any:
    import triton.backends.nvidia.driver as driver

    if not hasattr(driver, "TMA_TF32"):
        driver.TMA_TF32 = _TMA_TF32
    import jax_triton

    return jax_triton


def with_placeholders(xs: Sequence, one) -> list:
    """Returns operands, or shapes of results, with `one` in the place of None."""
    return [one if x is None else x for x in xs]


def shapes_of(xs: Sequence) -> list:
    """Returns shape and dtype of each array, None for None."""
    return [None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs]


def triton_call(
    kernel,
    *arrays: jax.Array | None,
    out: tuple[jax.ShapeDtypeStruct | None, ...],
    grid: tuple[int, ...],
    warps: int,
    stages: int,
    in_place: int = 0,
    registers: int | None = None,
    **constants: int | float | bool | str,
) -> tuple:
    """Calls a Triton kernel on arrays and returns the arrays that it writes.

    Args:
      kernel: a `triton.jit` function of pointers to `arrays`, then to the results, then to the
        arrays written in place once more, then of the constants by name.
      arrays: row-major operands; None for one that the kernel does not use.
      in_place: how many of the last arrays the kernel writes in place; they are results, too,
        behind those of `out`.
      out: shape and dtype of each result; None for one that the kernel does not use.
      grid: number of programs along up to three axes.
      warps, stages: warps of a program, and stages of its software pipeline.
      registers: most registers of a thread, what does not fit goes to memory; None for no bound.
        Decides speed, not bits; jax-triton 0.3 has no such option.
      constants: values of the kernel's `tl.constexpr` parameters.

    Returns:
      The results; None where `out`, or an array written in place, is None.
    """
    library = _jax_triton()
    version = tuple(int(part) for part in library.__version__.split(".")[:2])
    first = len(arrays) - in_place
    results = [*out, *shapes_of(arrays[first:])]
    operands = with_placeholders(arrays, jnp.zeros((1,), jnp.float32))
    shapes = with_placeholders(results, jax.ShapeDtypeStruct((1,), jnp.float32))
    written = [i for i in range(in_place) if arrays[first + i] is not None]
    keywords: dict[str, Any] = {}
    if written:
        keywords["input_output_aliases"] = {first + i: len(out) + i for i in written}
    if version >= (0, 4):
        options = {"enable_fp_fusion": False, "ptx_version": _PTX, "maxnreg": registers}
        keywords |= {"out_type": tuple(shapes), "backend_options": options}
        # Here such a result has no parameter: the kernel's, which it does not read, get a number.
        names = [name for name in kernel.arg_names if name not in constants]
        keywords |= dict.fromkeys((names[len(arrays) + len(out) + i] for i in written), 0)
    else:
        keywords |= {"out_shape": tuple(shapes), "enable_fp_fusion": False}
    with warnings.catch_warnings(), jax.named_scope(kernel.fn.__name__):  # its name in profiles
        warnings.filterwarnings("ignore", "input_output_aliases is deprecated")
        found = library.triton_call(
            *operands,
            kernel=kernel,
            grid=grid,
            num_warps=warps,
            num_stages=stages,
            # None queries the GPU; 90 is Hopper's, for a machine that only compiles for one.
            compute_capability=None if backend() == "gpu" else 90,
            **keywords,
            **constants,
        )
    # Under shard_map jax-triton types its results as equal on every device.
    found = varying_as(tuple(found), operands)
    return tuple(None if shape is None else x for shape, x in zip(results, found, strict=True))
