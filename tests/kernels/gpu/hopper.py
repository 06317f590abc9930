"""Programs for a Hopper GPU on a machine without one: lowering, for tests."""

from __future__ import annotations

import contextlib
import re

import jax


def _device():
    """JAX 0.11 lowers for CUDA only where a mesh names the device; 0.10 needs nothing."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def lower(function, *arguments) -> str:
    """StableHLO of a function for CUDA."""
    with _device():
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    return lowered.as_text()


def products(text: str) -> dict[str, int]:
    """How often each custom call and each kind of dot stands in StableHLO or HLO text."""
    names = re.findall(r"custom_call @([\w$.]+)|custom_call_target=\"([\w$.]+)\"", text)
    names = [(one or other).removesuffix("_ffi") for one, other in names]  # jax-triton 0.4's name
    names += re.findall(r"\b(dot_general|dot|convolution)\b(?=[( ])", text)
    return {name: names.count(name) for name in names}
