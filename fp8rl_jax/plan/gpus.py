"""GPUs and their links by their data sheets, and the share of each that is assumed to be reached.

Nothing here was measured on a GPU.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet: NVIDIA H100 (SXM5) and H200 (SXM), dense products.

    Attributes:
      name: for tables.
      memory: GB on the data sheet, which `--memory-gb` takes for GiB.
      bf16, fp8: FLOP/s.
      hbm: memory bandwidth, bytes/s.
    """

    name: str
    memory: float
    bf16: float = 989e12
    fp8: float = 1979e12
    hbm: float = 4.8e12

    @property
    def speed(self) -> str:
        """The figures in words."""
        return (
            f"{self.bf16 / 1e12:,.0f} TFLOPS bf16, {self.fp8 / 1e12:,.0f} FP8, dense; "
            f"{self.hbm / 1e12:.2f} TB/s"
        )


GPUS = {"h100": Gpu("H100", 80.0, hbm=3.35e12), "h200": Gpu("H200", 141.0)}
NVLINK = 450e9  # bytes/s a GPU receives within a host (NVLink 4: 900 GB/s, both directions)
HOST_LINK = 64e9  # bytes/s between a GPU and its host's memory, each way (PCIe 5.0 x16)
NETWORK = 50e9  # bytes/s a GPU receives from other hosts (one 400 Gb/s adapter for each, as a DGX)
HOST_DEVICES = 8  # GPUs of a host
EFFICIENCY = {"products": 0.4, "attention": 0.4, "memory": 0.8, "links": 0.8}  # assumed
