"""Defines `exact_jit`, which the library uses instead of `jax.jit` for every top-level program.

On CPUs, XLA's YNNPACK fusions choose kernels by the number of rows: the largest source of drift
between a decode step and a train step. The compiler options here restrict YNNPACK to single
products, all summed in one order (kernels/reference/matmul.py). JAX refuses options in a nested
jit, so only this module sets them. Eager calls and users' own jits have no zero-drift promise.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from typing import Any

import jax

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.kernels.reference.probe import compiler_options

_FAST_MATH = re.compile(
    r"--(xla_(?:cpu|gpu)_(?:enable_fast_math|enable_fast_min_max))"
    r"(?:=(\S*))?(?=\s|$)"
)


def exact_jit(fun: Callable, **kwargs) -> Callable:
    """Calls `jax.jit(fun, **kwargs)` with the compiler options that zero drift needs."""
    return jax.jit(fun, compiler_options=compiler_options(), **kwargs)


def exact_when_called(fun: Callable, **kwargs) -> Callable:
    """Returns a function that calls `exact_jit(fun, **kwargs)`, made at the first call: to know the
    options JAX must start, which the import of a module that defines a program must not do."""
    program = functools.cache(lambda: exact_jit(fun, **kwargs))

    @functools.wraps(fun)
    def call(*args: Any) -> Any:
        return program()(*args)

    return call


def check_xla_flags() -> None:
    """Refuses XLA flags under which equal programs give unequal bits.

    Raises:
      UserError: a fast-math flag is switched on in XLA_FLAGS.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if flags and not flags.lstrip().startswith("-") and os.path.isfile(flags):
        with open(flags) as file:  # XLA accepts the name of a file
            flags = file.read()
    for name, value in _FAST_MATH.findall(flags):
        if value.lower() not in ("false", "0"):
            raise UserError(
                f"XLA_FLAGS holds --{name}, under which rollout and learner round differently "
                "(measured mean drift 0.11 per token): remove the flag, or set "
                "precision.zero_drift='report'"
            )
