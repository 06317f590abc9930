"""Figures of GPUs and links from their data sheets, the share of each that is reached, and what is
known of this library's programs on a GPU: launches, instructions, bytes.

Shares of products, attention and memory, and the times of kernels, are those of Qwen3-8B on one
H200 (docs/kernels.md); shares of links are assumed. Launches and instructions are counted in
compiled programs (docs/scripts/gpu_counts.py).
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Data sheet of a GPU: NVIDIA H100 (SXM5) or H200 (SXM).

    Attributes:
      name: name in tables.
      memory: GB on the data sheet; plans take it for GiB, as `--memory-gb`.
      bf16, fp8, float32: FLOP/s of dense products, the latter without tensor cores.
      hbm: memory bandwidth, bytes/s.
      clock: boost clock, 1/s, of its 132 multiprocessors.
    """

    name: str
    memory: float
    bf16: float = 989e12
    fp8: float = 1979e12
    float32: float = 67e12
    hbm: float = 4.8e12
    clock: float = 1.98e9

    @property
    def speed(self) -> str:
        """The figures as text."""
        return (
            f"{self.bf16 / 1e12:,.0f} TFLOPS bf16, {self.fp8 / 1e12:,.0f} FP8, dense; "
            f"{self.hbm / 1e12:.2f} TB/s"
        )


def of_kind(kind: str) -> Gpu | None:
    """Returns the GPU of JAX's `device_kind` ('NVIDIA H100 80GB HBM3'), or None for another."""
    return next((gpu for gpu in GPUS.values() if gpu.name in kind.split()), None)


MULTIPROCESSORS = 132
GPUS = {"h100": Gpu("H100", 80.0, hbm=3.35e12), "h200": Gpu("H200", 141.0)}
NVLINK = 450e9  # bytes/s a GPU receives within a host (NVLink 4: 900 GB/s, both directions)
HOST_LINK = 64e9  # bytes/s between a GPU and its host's memory, each way (PCIe 5.0 x16)
NETWORK = 50e9  # bytes/s a GPU receives from other hosts (one 400 Gb/s adapter for each, as a DGX)
HOST_DEVICES = 8  # most GPUs of a host
# Shares of data sheets. Products and attention: of a layer's train step of 4,096 tokens, where they
# were 0.52, 0.77 and 0.21.
EFFICIENCY = {
    "FP8 products": 0.5,
    "bf16 products": 0.75,
    "float32 products": 0.5,  # assumed
    "attention": 0.2,
    "memory": 0.8,
    "links": 0.8,
}
# Bytes/s that the kernels of a decode step read. Measured on the H200 of 2026-11-26, at commit
# 9241ab6: FP8 products of 64 rows alone (1.7 to 2.0 TB/s in three shapes of Qwen3-8B), bf16
# products in a decode step, attention over 8,192 keys in FP8 alone and over 1,900 in bf16 in a
# step. Products wait for their own steps, so a slower memory changes nothing until they read
# DECODE_MEMORY of its bandwidth, the most of these. INT8 is assumed to be like FP8.
DECODE_RATES = {
    "FP8 products": 1.87e12,
    "bf16 products": 2.78e12,
    "attention in 8 bits": 3.6e12,
    "attention in bf16": 4.08e12,
}
DECODE_MEMORY = 0.85
# Seconds of a train step's kernel besides its work: assumed, near what decode steps took in all for
# each of theirs.
LAUNCH = 3e-6
# Seconds of a decode step's other kernel (norms, gates, quantisation, copies), all of it, and from
# one kernel's end to the next: means of a decode step's profile on that H200.
DECODE_KERNEL = 2.2e-6
DECODE_GAP = 0.2e-6
# Kernels of a layer in a decode step, by the kind of model (sandwich norms: Gemma 3, with windows;
# latent: assumed), and how many of them are products and attention; then kernels of a layer's
# forward and backward pass in a train step of a dense model, in bf16 and in FP8.
DECODE_LAUNCHES = {
    "dense": (11, 6),
    "sandwich norms": (25, 6),
    "experts": (43, 8),
    "latent": (50, 10),
}
TRAIN_LAUNCHES = {"bf16": 134, "FP8": 256}
STEP_LAUNCHES = 41  # of a decode step outside its layers
# Instructions that each of a multiprocessor's four schedulers issues for 64 keys of 128 features,
# by the dtypes of keys and values (None: bf16), and the share of the clock at which it does.
_E4M3 = jnp.dtype(jnp.float8_e4m3fn)
_INT8 = jnp.dtype(jnp.int8)
INSTRUCTIONS = {
    (None, None): 338,
    (_E4M3, _E4M3): 366,
    (_INT8, _INT8): 430,
    (_INT8, _E4M3): 398,
    (_E4M3, _INT8): 398,  # assumed
    (None, _E4M3): 480,
    (_E4M3, None): 457,
    (_INT8, None): 479,
    (None, _INT8): 480,  # assumed
}
ISSUED = 0.45
# Bytes of a token, layer and feature that kernels between products move in a train step: 2.1 MB for
# the 55,296 features of a layer of Qwen3-8B.
BETWEEN = 37
