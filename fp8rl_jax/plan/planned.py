"""`Planned`, the input of `fp8rl plan`: a checked configuration on devices that need not exist."""

from __future__ import annotations

import dataclasses
import math
import os

import ml_collections
from jax.sharding import AbstractMesh

from fp8rl_jax import sharding
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.jax_settings import USABLE
from fp8rl_jax.config import checks
from fp8rl_jax.config.resolve import resolve_config
from fp8rl_jax.config.resolved import Resolved
from fp8rl_jax.data import load_tokenizer
from fp8rl_jax.plan.gpus import GPUS, HOST_DEVICES, Gpu


@dataclasses.dataclass(frozen=True)
class Planned:
    """A configuration on devices.

    Attributes:
      resolved: the checked configuration, with its vocabulary.
      mesh: mesh of devices that need not exist.
      gpu: model of the devices.
      hosts: number of hosts, each with the same number of devices.
      memory: bytes of each device.
      rollout_mesh: mesh of the devices for rollouts alone; None if all devices do both.
    """

    resolved: Resolved
    mesh: AbstractMesh
    gpu: Gpu
    hosts: int
    memory: int
    rollout_mesh: AbstractMesh | None = None

    @property
    def sampling(self) -> Planned:
        """The configuration on the devices that sample."""
        return dataclasses.replace(self, mesh=self.rollout_mesh or self.mesh, rollout_mesh=None)

    @property
    def alone(self) -> bool:
        """Whether the devices do nothing but sample."""
        return self.config.mesh.rollout > 0 and self.rollout_mesh is None

    @property
    def config(self) -> ml_collections.FrozenConfigDict:
        return self.resolved.config

    @property
    def mesh_text(self) -> str:
        """The mesh in words."""
        return ", ".join(f"{name} {size}" for name, size in self.mesh.shape.items())

    @property
    def samples(self) -> int:
        """Responses of a step on each device."""
        return self.resolved.step_samples // self.mesh.size

    @property
    def usable(self) -> float:
        """Bytes of a device that a run may fill."""
        return USABLE * self.memory


def read_planned(
    config: ml_collections.ConfigDict,
    devices: int | None = None,
    hosts: int | None = None,
    gpu: Gpu = GPUS["h200"],
    memory_gb: float | None = None,
) -> Planned:
    """Checks a configuration on a mesh and returns both.

    Args:
      config: result of `load_config`. If the directory of `model.checkpoint` does not exist and
        `model.name` is given, the shapes are those of the name.
      devices: number of devices; by default the product of the mesh axes, an axis of -1 being 1.
      hosts: number of hosts; by default the least with at most eight devices each.
      gpu: model of the devices.
      memory_gb: GiB of each device; by default the GPU's.

    Raises:
      UserError: something in the configuration cannot work, or `hosts` does not divide the devices.
    """
    checkpoint = config.model.checkpoint
    if checkpoint and not os.path.isdir(checkpoint):
        if not config.model.name:
            raise UserError(
                f"fp8rl plan: model.checkpoint: {checkpoint} is no directory; name one, or plan "
                "with the shapes of a published model: --config.model.name=qwen3_8b"
            )
        config = config.copy_and_resolve_references()
        config.model.checkpoint = ""
    resolved = resolve_config(config)
    mesh, rollout_mesh = sharding.abstract_meshes(config.mesh.to_dict(), devices)
    checks.check_mesh(config, *map(sharding.batch_divisor, (mesh, rollout_mesh or mesh)))
    if not (config.model.checkpoint or config.model.name):
        resolved = resolved.with_vocabulary(load_tokenizer(config.data).vocab_size)
    if hosts is None:
        total = mesh.size + config.mesh.rollout
        least = math.ceil(total / HOST_DEVICES)
        hosts = next(n for n in range(least, mesh.size + 1) if not (mesh.size % n or total % n))
    if mesh.size % hosts or config.mesh.rollout % hosts:
        both = f" or the {config.mesh.rollout} for rollouts" if rollout_mesh else ""
        raise UserError(
            f"fp8rl plan: --hosts is {hosts}, which does not divide the {mesh.size} devices of the "
            f"mesh{both}: write a number that does"
        )
    return Planned(
        resolved=resolved,
        mesh=mesh,
        gpu=gpu,
        hosts=hosts,
        memory=int((memory_gb or gpu.memory) * 2**30),
        rollout_mesh=rollout_mesh,
    )
