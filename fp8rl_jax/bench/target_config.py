"""What XLA knows of the device that it compiles for, beside what `deviceless` tells it.

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

# Path of field numbers to GpuDeviceInfoProto in a serialised topology: details, value, target
# config, device.
_DEVICE = (9, 2, 8, 1)
_NAMES = {
    1: "threads_per_block_limit", 2: "threads_per_warp", 3: "shared_memory_per_block",
    4: "shared_memory_per_core", 5: "threads_per_core_limit", 6: "core_count", 7: "fpus_per_core",
    8: "block_dim_limit_x", 9: "block_dim_limit_y", 10: "block_dim_limit_z",
    11: "memory_bandwidth", 12: "l2_cache_size", 13: "clock_rate_ghz", 14: "device_memory_size",
    15: "shared_memory_per_block_optin", 18: "registers_per_core_limit",
    19: "registers_per_block_limit",
}  # fmt: skip


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
            number, wire = tag >> 3, tag & 7
            if wire == 0:
                value: Any
                value, at = _varint(data, at)
            elif wire == 2:
                length, at = _varint(data, at)
                value, at = data[at : at + length], at + length
            elif wire in (1, 5):
                width = 8 if wire == 1 else 4
                value = struct.unpack("<d" if wire == 1 else "<f", data[at : at + width])[0]
                at += width
            else:
                raise ValueError(f"wire type {wire}")
            yield number, value
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
        name = _NAMES.get(number, f"field {number}")
        if isinstance(value, bytes):
            value = value.decode() if value.isascii() and value.isalnum() else repr(value)[2:-1]
        found[name] = round(value, 4) if isinstance(value, float) else value
    if not found:
        raise ValueError("the topology holds no description of a device")
    return found


def described(text: str) -> dict[str, str]:
    """{name: value} of `gpu_device_info` in a target config's text."""
    return dict(re.findall(r"^  (\w+): (\S+)$", text, re.M))


def attached() -> dict[str, Any]:
    """The first device: attributes; topology (base64) and info, or an error that says why not."""
    device = jax.devices()[0]
    attributes = {}
    for name in dir(device):
        if name.startswith("_") or name == "client":
            continue
        try:
            value = getattr(device, name)
        except Exception as error:  # some attributes exist for other platforms alone
            value = f"{type(error).__name__}"
        if isinstance(value, (bool, int, float, str)):
            attributes[name] = value
    found: dict[str, Any] = {"attributes": attributes}
    found["platform_version"] = device.client.platform_version
    try:
        from jax.experimental import topologies

        topology = topologies.get_attached_topology().serialize()
        found["topology"] = base64.b64encode(topology).decode()
        found["info"] = device_info(topology)
    except Exception as error:  # JAX 0.10 has no way; a later one may build it otherwise
        found["error"] = f"{type(error).__name__}: {error}"[:300]
    return found


def compare(info: dict[str, Any], text: str) -> list[tuple[str, str, str]]:
    """Rows (name, of the device, in `deviceless`) of every name that either has."""
    ours = described(text)
    names = [*info, *(name for name in ours if name not in info)]
    return [(name, str(info.get(name, "-")), ours.get(name, "-")) for name in names]
