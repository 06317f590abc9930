"""Meshes, and the table that shards parameters: logical axis -> mesh axis.

A single device runs the same program on a mesh of size 1.

Mesh axes: `data` (batch), `fsdp` (batch, and storage of parameters and optimiser state), `tensor`
(output features of every matrix, and attention heads), `expert` (batch, and experts; must be 1 for
dense models).

Over `data`, `fsdp` and `expert` computation is by rows: each layer gathers its weights before use
and every device multiplies its rows of the batch (`models.parallel.mesh`). Routed experts are not
gathered over `expert`: rows are sent to them (`models.parallel.experts`). Over `tensor` computation
is by columns: every device multiplies its rows by its columns of each matrix, inside a shard_map
(`models.parallel.columns`). No contraction is ever split, so on any mesh the bits of
log-probabilities are those of a single device (tested).

Storage: a parameter's input features are sharded over `fsdp`, its output features over `tensor`;
experts over `expert`, and also over `fsdp` if the product of both sizes divides their number; no
expert is split. The sampler's weights are replicated over `data` and `fsdp`; its experts are
sharded over `expert`, its other weights over `tensor` if their products are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from fp8rl_jax.base.errors import UserError

MESH_AXES = ("data", "fsdp", "tensor", "expert")
_TYPES = (AxisType.Auto,) * len(MESH_AXES)
BATCH_AXES = ("data", "fsdp", "expert")  # devices that split the rows of a batch
# Logical axis of a parameter (models/arrays.py) -> choices of mesh axes; `stored_over` takes the
# choice with the most devices that divides the axis. 'embed' and 'wide' are the input and output
# features of a layer. No expert or head is split: a block of 128 on two devices could not be
# quantised where it is stored.
RULES: dict[str, tuple[tuple[str, ...], ...]] = {
    "embed": (("fsdp",),),
    "wide": (("tensor",),),
    "vocab": (("tensor",),),
    "layers": (),
    "experts": (("expert", "fsdp"), ("expert",)),
    "heads": (("fsdp",),),
}


def _sizes(axes: dict[str, int], devices: int | None) -> tuple[int, ...]:
    """Returns the size of every mesh axis; `devices` None takes as many as the axes ask for."""
    sizes = [axes[name] for name in MESH_AXES]
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise UserError(f"mesh {axes}: sizes are at least 1, and at most one of them is -1")
    known = math.prod(size for size in sizes if size != -1)
    devices = devices or known
    if -1 in sizes:
        sizes[sizes.index(-1)] = max(devices // known, 1)
    if math.prod(sizes) != devices:
        shape = dict(zip(MESH_AXES, sizes, strict=True))
        left = f" (mesh.rollout has {axes['rollout']} others)" if axes.get("rollout") else ""
        raise UserError(
            f"mesh {shape} has {math.prod(sizes)} places for {devices} devices{left}; "
            "set mesh.data, mesh.fsdp, mesh.tensor and mesh.expert so that they multiply to that "
            "number"
        )
    return tuple(sizes)


def make_mesh(axes: dict[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns a mesh over `devices`, by default all; an axis of -1 takes all devices that the other
    axes leave.

    Raises:
      UserError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    return jax.make_mesh(_sizes(axes, len(devices)), MESH_AXES, axis_types=_TYPES, devices=devices)


def make_meshes(axes: dict[str, int]) -> tuple[Mesh, Mesh | None]:
    """Returns the meshes of learner and rollout over all devices; `axes["rollout"]` devices are the
    rollout's alone, the last ones of every process. None if it has no devices of its own.

    Raises:
      UserError: the sizes do not multiply to the number of devices, or a process has no device for
        one of both sides.
    """
    own = axes.get("rollout", 0)
    if not own:
        return make_mesh(axes), None
    devices = jax.devices()
    processes = jax.process_count()
    _left(len(devices), own)
    each = own // processes
    if own % processes or each >= jax.local_device_count():
        raise UserError(
            f"mesh.rollout is {own}: each of {processes} processes gives an equal number of its "
            f"{jax.local_device_count()} devices, and keeps at least one for the learner"
        )
    sides: tuple[list[jax.Device], list[jax.Device]] = ([], [])
    for process in range(processes):
        of_process = [device for device in devices if device.process_index == process]
        sides[0].extend(of_process[:-each])
        sides[1].extend(of_process[-each:])
    mesh = make_mesh(axes, sides[0])
    parts = mesh.shape["tensor"] * mesh.shape["expert"]
    left = jax.local_device_count() - each
    if processes > 1 and left % parts:
        raise UserError(
            f"mesh.rollout is {own}, which leaves the learner {left} devices of each process, and "
            f"mesh.tensor x mesh.expert = {parts} does not divide them: weights for rollouts are "
            "copied within a process"
        )
    return mesh, make_mesh(_rollout_axes(mesh, own), sides[1])


def abstract_mesh(axes: dict[str, int], devices: int | None = None) -> AbstractMesh:
    """Returns a mesh of `devices` devices that need not exist; by default an axis of -1 has size 1.

    Raises:
      UserError: the sizes do not multiply to the number of devices.
    """
    return AbstractMesh(_sizes(axes, devices), MESH_AXES, axis_types=_TYPES)


def abstract_meshes(
    axes: dict[str, int], devices: int | None = None
) -> tuple[AbstractMesh, AbstractMesh | None]:
    """Returns the meshes of `make_meshes` as `abstract_mesh` does."""
    own = axes.get("rollout", 0)
    if not own:
        return abstract_mesh(axes, devices), None
    mesh = abstract_mesh(axes, devices and _left(devices, own))
    return mesh, abstract_mesh(_rollout_axes(mesh, own))


def _left(devices: int, own: int) -> int:
    """Returns how many devices the learner has if the rollout has `own`."""
    if own >= devices:
        remedy = f"at most {devices - 1}, or 0 if all devices do both" if devices > 1 else "0"
        raise UserError(
            f"mesh.rollout is {own}, which leaves the learner none of {devices} device"
            f"{'s' * (devices > 1)}: write {remedy}"
        )
    return devices - own


def _rollout_axes(mesh: Mesh | AbstractMesh, own: int) -> dict[str, int]:
    """Returns the axes of the rollout's mesh beside the learner's `mesh`: experts and columns are
    sharded alike, and nothing over `fsdp`, which shards no weights of a sampler."""
    tensor, expert = mesh.shape["tensor"], mesh.shape["expert"]
    if own % (tensor * expert):
        raise UserError(
            f"mesh.rollout is {own}, which mesh.tensor x mesh.expert = {tensor * expert} does not "
            "divide: write a multiple"
        )
    return {"data": own // (tensor * expert), "fsdp": 1, "tensor": tensor, "expert": expert}


def between_hosts(mesh: Mesh, axis: str, hosts: Sequence[str]) -> bool:
    """Returns whether an axis has devices on several hosts; `hosts`: the host of each process."""
    place = np.vectorize(lambda device: hosts[device.process_index])(mesh.devices)
    along = np.moveaxis(place, mesh.axis_names.index(axis), 0)
    return bool((along != along[:1]).any())


def batch_divisor(mesh: Mesh | AbstractMesh) -> int:
    """Returns the number of devices that share the rows of a batch."""
    return math.prod(mesh.shape.get(axis, 1) for axis in BATCH_AXES)


def together(batches: np.ndarray, devices: int) -> np.ndarray:
    """Returns the rows of `batches` (V, N, ...), of V batches, as (V * N, ...) with an equal part
    of each batch, in their order, on each device: a device's rows follow each other."""
    most, rows = batches.shape[:2]
    parts = batches.reshape(most, devices, rows // devices, *batches.shape[2:])
    return np.ascontiguousarray(parts.swapaxes(0, 1).reshape(most * rows, *batches.shape[2:]))


def apart(rows: np.ndarray, most: int, devices: int) -> np.ndarray:
    """Returns the batches of which `together` returned the rows; `most` is V."""
    size = len(rows) // most
    parts = rows.reshape(devices, most, size // devices, *rows.shape[1:])
    return parts.swapaxes(0, 1).reshape(most, size, *rows.shape[1:])


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array that every device holds in full."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh, axis: int = 0) -> NamedSharding:
    """Returns the sharding of batch rows, along `axis`, over `data`, `fsdp` and `expert`."""
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, BATCH_AXES))


def named(mesh: Mesh | AbstractMesh, specs):
    """Returns a tree of PartitionSpecs as NamedShardings."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def laid_out(shapes, shardings):
    """Returns ShapeDtypeStructs of `shapes` with `shardings`: one for all arrays, or a tree."""
    if isinstance(shardings, NamedSharding):
        shardings = jax.tree.map(lambda _: shardings, shapes)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )


def stored_over(logical: str, size: int, mesh: Mesh | AbstractMesh) -> tuple[str, ...] | None:
    """Returns the mesh axes over which a parameter's axis is sharded; None if replicated."""

    def devices(axes: tuple[str, ...]) -> int:
        return math.prod(mesh.shape[name] for name in axes)

    return max((a for a in RULES[logical] if size % devices(a) == 0), key=devices, default=None)
