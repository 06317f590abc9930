"""Compiles programs for H200 GPUs, down to machine code, on a machine without a GPU.

JAX's CUDA plugin (`pip install 'jax[cuda13-local]'`, a part of the extra `gpu_proofs`) compiles for
a described device. The result shows the memory that a device needs, and the program's collectives
and kernels; it cannot run. XLA chooses its own kernels without timing them, so these may differ
from the ones on a real GPU; this library's kernels are the same.
"""

from __future__ import annotations

import collections
import re

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.sharding import MESH_AXES

# An H200 (SXM) in the terms of XLA's GpuTargetConfigProto. Sources: NVIDIA's H200 datasheet, the
# CUDA programming guide's table for compute capability 9.0. With a driver's version XLA puts
# kernels into CUDA graphs, as on a machine that has one.
H200 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  l2_cache_size: 62914560
  memory_bandwidth: 4800000000000
  clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
}
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 13 }
"""


def h200_mesh(axes: dict[str, int], hosts: int = 1) -> Mesh:
    """Returns a mesh of described H200s.

    Args:
      axes: {mesh axis: number of devices}; axes that are left out are 1.
      hosts: number of hosts, each with the same number of devices.

    Raises:
      UserError: JAX's CUDA plugin is not installed.
    """
    from jax._src import xla_bridge  # no public way to name the plugin's topologies
    from jax.experimental import topologies

    jax.devices()  # finds the plugins
    if "cuda" not in xla_bridge._topology_factories:  # one that sees no GPU may not register
        try:
            import jax_plugins.xla_cuda13

            jax_plugins.xla_cuda13.initialize()
        except ImportError:
            pass
        except RuntimeError as error:  # without JAX_PLATFORMS=cpu it looks for CUDA's libraries
            raise UserError(
                f"JAX's CUDA plugin does not start ({error}): set JAX_PLATFORMS=cpu to compile for "
                "a GPU that is not there"
            ) from None
    if "cuda" not in xla_bridge._topology_factories:
        raise UserError(
            "compiling for a GPU that is not there needs JAX's CUDA plugin: install it with "
            "pip install 'fp8rl_jax[gpu_proofs]', and set JAX_PLATFORMS=cpu"
        )
    sizes = [axes.get(name, 1) for name in MESH_AXES]
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=H200, topology=f"1x{hosts}x{int(np.prod(sizes)) // hosts}"
    )
    devices: np.ndarray = np.array(topology.devices).reshape(sizes)
    return Mesh(devices, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


_COLLECTIVES = (
    "all-reduce|all-gather|reduce-scatter|ragged-all-to-all|all-to-all|collective-permute"
)


def _plain(program: str) -> str:
    """Returns the text of a compiled program without comments, whose signs end a search."""
    return re.sub(r"/\*index=\d+\*/", "", program)


def collectives(program: str) -> dict[str, int]:
    """Counts the collectives in the text of a compiled program, such as {'all-gather u8': 3}."""
    calls = re.findall(rf" = \W*(\w+)\[[^=]*? ({_COLLECTIVES})(?:-start)?\(", _plain(program))
    counts = collections.Counter(f"{kind} {dtype}" for dtype, kind in calls)
    return dict(sorted(counts.items()))


def products(program: str) -> dict[str, list[str]]:
    """Returns {kernel: names of the JAX operations that it computes} of a program's products.

    'ours' are this library's, by Triton or Mosaic; 'dot', 'gemm fusion' and custom calls that begin
    with '__' are XLA's.
    """
    operations: dict[str, list[str]] = {}
    called = re.compile(r'custom_call_target="([\w$.]+)"')
    for line in program.splitlines():
        kind = None
        if match := called.search(line):
            kind = match.group(1)
            kind = "ours" if kind.startswith(("triton_kernel_call", "mosaic_gpu")) else kind
        elif re.search(r" = [^=]*? (dot|convolution)\(", line):
            kind = "dot"
        elif re.match(r"\s*(ROOT )?%gemm_fusion[\w.]* = .* fusion\(", line):
            kind = "gemm fusion"
        if kind:
            name = re.search(r'op_name="([^"]*)"', line)
            operations.setdefault(kind, []).append(name.group(1) if name else "")
    return operations


# Instructions of a compiled program that start nothing on the GPU.
_FREE = {
    "after-all",
    "bitcast",
    "constant",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "partition-id",
    "tuple",
}


def _instructions(text: str) -> list[tuple[str, str, str]]:
    """Returns (name, kind, line) of the instructions in the text of a program or computation."""
    # The type, in parentheses if there are several results, then the kind.
    form = r"^\s+(?:ROOT )?%?([\w.\-]+) = (?:\(.*?\)|\S+) ([\w\-]+)\(.*"
    return [(match[1], match[2], match[0]) for match in re.finditer(form, _plain(text), re.M)]


def launches(program: str, turns: int) -> list[tuple[str, str]]:
    """Returns what a GPU starts in each turn of the loop that is known to take `turns`: kernels of
    XLA and of this library, copies, and steps of loops and conditionals within.

    Args:
      program: text of a compiled program.
      turns: such as the number of layers of a scan.

    Returns:
      [(name of the instruction, JAX operation that it computes)], in order.
    """
    started = []
    loop = rf'body=%?([\w.\-]+).*?"known_trip_count":{{"n":"{turns}"}}'
    for body in re.findall(loop, program):
        start = re.search(rf"^(?:ENTRY )?%?{re.escape(body)} \(.*\n", program, re.M)
        inside = program[start.end() : program.index("\n}", start.end())] if start else ""
        for name, kind, line in _instructions(inside):
            if kind not in _FREE and not kind.endswith("-done"):  # what was started is counted
                operation = re.search(r'op_name="([^"]*)"', line)
                started.append((name, operation.group(1) if operation else ""))
    return started


def unknown_loops(program: str) -> int:
    """Counts loops whose number of turns XLA does not know, and conditionals: each makes the host
    wait for the GPU."""
    return sum(
        kind == "conditional" or (kind == "while" and "known_trip_count" not in line)
        for _, kind, line in _instructions(program)
    )


def sorts(program: str) -> int:
    """Counts the sorts of a compiled program."""
    return sum(kind == "sort" for _, kind, _ in _instructions(program))
