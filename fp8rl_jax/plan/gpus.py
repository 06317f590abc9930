"""Figures of GPUs and links from their data sheets, and the share of each assumed to be reached.

Nothing here was measured on a GPU.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Data sheet of a GPU: NVIDIA H100 (SXM5) or H200 (SXM).

    Attributes:
      name: name in tables.
      memory: GB on the data sheet; plans take it for GiB, as `--memory-gb`.
      bf16, fp8: FLOP/s of dense products.
      hbm: memory bandwidth, bytes/s.
    """

    name: str
    memory: float
    bf16: float = 989e12
    fp8: float = 1979e12
    hbm: float = 4.8e12

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


GPUS = {"h100": Gpu("H100", 80.0, hbm=3.35e12), "h200": Gpu("H200", 141.0)}
NVLINK = 450e9  # bytes/s a GPU receives within a host (NVLink 4: 900 GB/s, both directions)
HOST_LINK = 64e9  # bytes/s between a GPU and its host's memory, each way (PCIe 5.0 x16)
NETWORK = 50e9  # bytes/s a GPU receives from other hosts (one 400 Gb/s adapter for each, as a DGX)
HOST_DEVICES = 8  # most GPUs of a host
EFFICIENCY = {"products": 0.4, "attention": 0.4, "memory": 0.8, "links": 0.8}  # assumed
