"""Facts about this machine and its environment; other files of the kernels read neither."""

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
# JAX's settings that affect compilation.
COMPILER_SETTINGS = (
    "jax_compiler_enable_remat_pass",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
    "jax_memory_fitting_level",
    "jax_optimization_level",
)


def backend() -> str:
    """Returns the platform that JAX runs on by default: "cpu", "gpu", or another."""
    return jax.default_backend()


@functools.cache
def cpu_features() -> str:
    """Returns the CPU's instruction sets, as the system lists them; '' if it lists none."""
    try:
        with open("/proc/cpuinfo") as file:
            return next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        return ""


def has_bf16_instructions() -> bool:
    """Returns whether the CPU multiplies bf16; True if the system lists no instructions.

    False if oneDNN's ONEDNN_MAX_CPU_ISA makes the CPU multiply like an older one without bf16.
    """
    if os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in _WITHOUT_BF16:
        return False
    features = cpu_features().split()
    return not features or not _BF16_INSTRUCTIONS.isdisjoint(features)


def available_cores() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads() -> int:
    """Returns the number of threads that XLA multiplies with."""
    for name in ("PJRT_NPROC", "NPROC"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return available_cores()


def surroundings() -> list:
    """Returns what XLA's products depend on besides code: the CPU's instructions, the number of
    threads, environment variables and compiler settings."""
    settings = (str(jax.config.values.get(name)) for name in COMPILER_SETTINGS)
    return [cpu_features(), threads(), *(os.environ.get(name) for name in VARIABLES), *settings]


def takes_hopper_code() -> bool:
    """Returns whether this machine's GPU is a Hopper; True without a GPU, where programs are only
    compiled for one."""
    device = jax.devices()[0]
    return device.platform != "gpu" or getattr(device, "compute_capability", "9.0") == "9.0"


def user_cache() -> pathlib.Path | None:
    """Makes and returns this project's directory in $XDG_CACHE_HOME or ~/.cache; None if it cannot
    be written."""
    home = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    path = pathlib.Path(home, "fp8rl_jax")
    if not path.is_absolute():
        return None
    with contextlib.suppress(OSError):
        path.mkdir(parents=True, exist_ok=True)
    return path if os.access(path, os.W_OK | os.X_OK) else None
