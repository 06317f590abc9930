"""The kind of CPU that a test ran on, for its message and for the end of a session."""

from __future__ import annotations

import os

from fp8rl_jax.kernels import machine
from fp8rl_jax.kernels.reference import probe

_TOLD = ("fma", "avx2", "avx512f", "avx512_bf16", "amx_bf16")


def kind_of_cpu() -> str:
    """Such as 'avx2, avx512f; ONEDNN_MAX_CPU_ISA=AVX2; 2 threads: products by way of float32'."""
    has = set(machine.cpu_features().split())
    known = ", ".join(name for name in _TOLD if name in has) or "no instructions known"
    set_here = [f"{n}={os.environ[n]}" for n in machine.VARIABLES if os.environ.get(n)]
    told = "; ".join([known, *set_here, f"{machine.threads()} thread(s)"])
    return f"{told}: products by way of {probe.cpu_way().name}"
