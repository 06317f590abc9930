"""What XLA knows of the device, beside the H200 that fp8rl_jax/plan/h200.py describes, and how fast
it reads.

JAX shows a device's description only as a serialised topology. `fields` reads protobuf's wire
format without a schema; the names are those of XLA's GpuDeviceInfoProto, told apart by compiling
for a described device and finding its values again.
"""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from gpu_checks import print_kernels, reports

from fp8rl_jax.plan import h200

pytestmark = pytest.mark.gpu

# Path of field numbers to GpuDeviceInfoProto in a serialised topology: details, value, target
# config, device.
_DEVICE = (9, 2, 8, 1)
_NAMES = {
    1: "threads_per_block_limit",
    2: "threads_per_warp",
    3: "shared_memory_per_block",
    4: "shared_memory_per_core",
    5: "threads_per_core_limit",
    6: "core_count",
    7: "fpus_per_core",
    8: "block_dim_limit_x",
    9: "block_dim_limit_y",
    10: "block_dim_limit_z",
    11: "memory_bandwidth",
    12: "l2_cache_size",
    13: "clock_rate_ghz",
    14: "device_memory_size",
    15: "shared_memory_per_block_optin",
    18: "registers_per_core_limit",
    19: "registers_per_block_limit",
}


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value) of a serialised message: int, float (fixed 32 bits) or bytes.

    Raises:
      ValueError: it is none.
    """
    at = 0
    try:
        while at < len(data):
            tag, at = _varint(data, at)
            value: Any
            if tag & 7 == 0:
                value, at = _varint(data, at)
            elif tag & 7 == 2:
                length, at = _varint(data, at)
                value, at = data[at : at + length], at + length
            elif tag & 7 in (1, 5):
                form = "<d" if tag & 7 == 1 else "<f"
                (value,) = struct.unpack_from(form, data, at)
                at += struct.calcsize(form)
            else:
                raise ValueError(f"wire type {tag & 7}")
            yield tag >> 3, value
    except (IndexError, struct.error) as error:
        raise ValueError(f"no protobuf message: {error}") from None


def device_info(topology: bytes) -> dict[str, Any]:
    """{name, or 'field N': value} of the device in a serialised topology.

    Raises:
      ValueError: the topology is built otherwise.
    """
    message = topology
    for number in _DEVICE:
        message = next((v for n, v in fields(message) if n == number), b"")
    found: dict[str, Any] = {}
    for number, value in fields(message):
        if isinstance(value, bytes):
            value = value.decode() if value.isascii() and value.isalnum() else repr(value)[2:-1]
        name = _NAMES.get(number, f"field {number}")
        found[name] = round(value, 4) if isinstance(value, float) else value
    if not found:
        raise ValueError("the topology holds no description of a device")
    return found


def compare(info: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Rows (name, of the device, in `plan.h200`) of every name that either has, but for versions,
    which are the machine's."""
    ours = dict(re.findall(r"^  (\w+): (\d\S*)$", h200.H200, re.M))
    return [(name, str(info.get(name, "-")), ours.get(name, "-")) for name in info | ours]


@reports
def test_device(record_property):
    from jax.experimental import topologies

    print(jax.devices()[0].client.platform_version)
    topology = topologies.get_attached_topology().serialize()  # JAX 0.10 has none
    record_property("topology", base64.b64encode(topology).decode())
    rows = compare(device_info(topology))
    for name, here, ours in rows:
        print(f"{name}: here {here}, in fp8rl_jax/plan/h200.py {ours}")
    assert all(here == ours for _, here, ours in rows if "-" not in (here, ours))


@reports
def test_speed_of_reading(tmp_path, size=2**32):
    """The most that a kernel can hope for: numbers that are read, each once, and not written."""
    largest = jax.jit(lambda x: jnp.max(x.reshape(-1, 2**14), axis=1))
    calls = [(jnp.ones(size // 4, jnp.int32),)] * 3
    print_kernels(f"reading {size / 1e9:.1f} GB", size, calls, largest, tmp_path)
