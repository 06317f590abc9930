"""The kind of CPU that a test ran on, for its message and for the end of a session."""

from __future__ import annotations

from fp8rl_jax.kernels.reference import probe

_TOLD = ("fma", "avx2", "avx512f", "avx512_bf16", "amx_bf16")


def kind_of_cpu() -> str:
    """Such as 'avx2, avx512f; ONEDNN_MAX_CPU_ISA=AVX2; 2 threads: products by way of float32'."""
    has = set(probe.cpu_features().split())
    _, threads, *variables = probe.surroundings()
    known = ", ".join(name for name in _TOLD if name in has) or "no instructions known"
    set_here = [f"{n}={v}" for n, v in zip(probe.VARIABLES, variables, strict=True) if v]
    told = "; ".join([known, *set_here, f"{threads} thread(s)"])
    return f"{told}: products by way of {probe.cpu_way().name}"
