"""`exact_jit`: the one helper that makes every top-level jit of the program.

On CPU, XLA's fusions by YNNPACK choose kernels by the number of rows, which is the largest source
of drift between a decode step and a train step. Here it may compile only single products, and must
sum all of them in one order (kernels/reference/matmul.py), per compilation. Options cannot be set
inside another jit (JAX raises), so nothing within the library calls `jax.jit` with options but
this. Eager calls and other people's jits carry no zero-drift promise.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import jax

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.kernels.reference.probe import compiler_options

_FAST_MATH = re.compile(
    r"--(xla_(?:cpu|gpu)_(?:enable_fast_math|enable_fast_min_max))"
    r"(?:=(\S*))?(?=\s|$)"
)


def exact_jit(fun: Callable, **kwargs) -> Callable:
    """`jax.jit` with the compiler options of the zero-drift promise. Takes jax.jit's keywords."""
    return jax.jit(fun, compiler_options=compiler_options(), **kwargs)


def check_xla_flags() -> None:
    """Refuses XLA flags under which equal programs give unequal bits.

    Raises:
      UserError: a fast-math flag is switched on in XLA_FLAGS.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if flags and not flags.lstrip().startswith("-") and os.path.isfile(flags):
        with open(flags) as file:  # XLA takes the name of a file, too
            flags = file.read()
    for name, value in _FAST_MATH.findall(flags):
        if value.lower() not in ("false", "0"):
            raise UserError(
                f"XLA_FLAGS holds --{name}, under which rollout and learner round differently "
                "(measured mean drift 0.11 per token): remove the flag, or set "
                "precision.zero_drift='report'"
            )
