"""This machine and its environment; the kernels read both in this file only."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib

import jax

_BF16_INSTRUCTIONS = {"amx_bf16", "avx512_bf16", "bf16"}  # the last one is ARM's
_WITHOUT_BF16 = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI"}
VARIABLES = (
    "XLA_FLAGS",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "NPROC",
    "PJRT_NPROC",
    "TENSORFLOW_USE_CUSTOM_CONTRACTION_KERNEL",
)
# Of JAX: what a program is compiled with.
COMPILER_SETTINGS = (
    "jax_compiler_enable_remat_pass",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
    "jax_memory_fitting_level",
    "jax_optimization_level",
)


def backend() -> str:
    """The platform that JAX runs on by default: "cpu", "gpu", or another."""
    return jax.default_backend()


@functools.cache
def cpu_features() -> str:
    """The CPU's instructions, as the system lists them; '' where it lists none."""
    try:
        with open("/proc/cpuinfo") as file:
            return next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        return ""


def has_bf16_instructions() -> bool:
    """Whether the CPU multiplies bf16; True if the system does not list its instructions.

    False under a cap by oneDNN's ONEDNN_MAX_CPU_ISA, which makes a CPU multiply as an older one.
    """
    if os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in _WITHOUT_BF16:
        return False
    features = cpu_features().split()
    return not features or not _BF16_INSTRUCTIONS.isdisjoint(features)


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads() -> int:
    """Threads that XLA multiplies with."""
    for name in ("PJRT_NPROC", "NPROC"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return available_cores()


def surroundings() -> list:
    """Everything but the code that XLA's products depend on: the CPU's instructions, the number of
    threads, variables of the environment and settings of the compiler."""
    settings = (str(jax.config.values.get(name)) for name in COMPILER_SETTINGS)
    return [cpu_features(), threads(), *(os.environ.get(name) for name in VARIABLES), *settings]


def user_cache() -> pathlib.Path | None:
    """This project's directory in $XDG_CACHE_HOME or ~/.cache; None if it cannot be made there."""
    home = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    path = pathlib.Path(home, "fp8rl_jax")
    if not path.is_absolute():
        return None
    with contextlib.suppress(OSError):
        path.mkdir(parents=True, exist_ok=True)
    return path if os.access(path, os.W_OK | os.X_OK) else None
