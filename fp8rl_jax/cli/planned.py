"""What the halves of `fp8rl plan` start from: a checked configuration on devices that need not be
there."""

from __future__ import annotations

import dataclasses
import os

import ml_collections
from jax.sharding import AbstractMesh

from fp8rl_jax import sharding
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.config import checks
from fp8rl_jax.config.resolve import resolve_config
from fp8rl_jax.config.resolved import Resolved
from fp8rl_jax.data import load_tokenizer


@dataclasses.dataclass(frozen=True)
class Planned:
    """A configuration on a mesh.

    Attributes:
      config: the whole configuration.
      resolved: what it stands for, with its vocabulary.
      mesh: of devices that need not be there.
    """

    config: ml_collections.ConfigDict
    resolved: Resolved
    mesh: AbstractMesh

    @property
    def mesh_text(self) -> str:
        """The mesh in words."""
        return ", ".join(f"{name} {size}" for name, size in self.mesh.shape.items())


def read_planned(config: ml_collections.ConfigDict, devices: int | None = None) -> Planned:
    """Checks a configuration against a mesh.

    Args:
      config: of `load_config`. Where the directory of `model.checkpoint` is not there, and
        `model.name` is given, the shapes are those of the name.
      devices: of the mesh; by default as many as its axes ask for, and one for an axis of -1.

    Raises:
      UserError: something in the configuration cannot work.
    """
    config = _with_shapes(config)
    resolved = resolve_config(config)
    mesh = sharding.abstract_mesh(config.mesh.to_dict(), devices)
    checks.check_mesh(config, sharding.batch_divisor(mesh))
    if not (config.model.checkpoint or config.model.name):
        resolved = resolved.with_vocabulary(load_tokenizer(config.data).vocab_size)
    return Planned(config, resolved, mesh)


def _with_shapes(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """The config with shapes that can be read: of the name, where the checkpoint is missing."""
    checkpoint = config.model.checkpoint
    if not checkpoint or os.path.isdir(checkpoint):
        return config
    if not config.model.name:
        raise UserError(
            f"fp8rl plan: model.checkpoint: {checkpoint} is no directory; name one, or plan with "
            "the shapes of a published model: --config.model.name=qwen3_8b"
        )
    config = config.copy_and_resolve_references()
    config.model.checkpoint = ""
    return config
