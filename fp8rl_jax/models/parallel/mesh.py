"""`Parallel`: the mesh as an argument, and the rows of a batch on each device.

No function that `forward` calls reads JAX's ambient mesh, except `check_context`, which refuses it:
the arguments alone decide the program, and two meshes can be used side by side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from fp8rl_jax.kernels import resolve, sum_rows
from fp8rl_jax.kernels.arrays import pad_to
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.quant import BoundWeight, Recipe
from fp8rl_jax.sharding import BATCH_AXES, batch_divisor

AXIS = "tensor"
EXPERT = "expert"
STORAGE = "fsdp"
WHOLE = PartitionSpec()


@dataclasses.dataclass(frozen=True)
class Parallel:
    """How the devices of a mesh share a computation. Made by `on`; `ONE_DEVICE` has no mesh.

    Attributes:
      mesh: the devices, or their description; None on a single device.
      tensor: number of devices that share the columns of a layer.
      inside: whether the code runs inside a shard_map over all axes, where arrays are local.
    """

    mesh: Mesh | AbstractMesh | None = None
    tensor: int = 1
    inside: bool = False

    @classmethod
    def on(cls, mesh: Mesh | AbstractMesh | None) -> Parallel:
        """Makes a `Parallel` for a mesh whose axes are among `sharding.MESH_AXES`, or for None."""
        return cls(mesh, 1 if mesh is None else mesh.shape.get(AXIS, 1))

    def within(self) -> Parallel:
        """Returns a copy for code inside a shard_map over all axes."""
        return dataclasses.replace(self, inside=True)

    @property
    def devices(self) -> int:
        """Number of devices over which XLA divides the rows of an array; 1 inside a shard_map."""
        return 1 if self.mesh is None or self.inside else self.mesh.size

    @property
    def row_devices(self) -> int:
        """Number of devices that share the rows of a batch."""
        return 1 if self.mesh is None else batch_divisor(self.mesh)

    def uses_shard_map(self, recipe: Recipe) -> bool:
        """Returns whether `forward` runs inside a shard_map.

        Sharded columns need it, and so do GPU kernels: XLA's partitioner cannot split them and
        would compute all rows on every device.
        """
        return self.devices > 1 and (self.tensor > 1 or resolve(recipe.kernels) != "reference")

    def expert_devices(self, config: ModelConfig) -> int:
        """Returns how many devices share a layer's experts; 1 if the axis does not divide them."""
        count = 1 if self.mesh is None else self.mesh.shape.get(EXPERT, 1)
        return count if config.num_experts and config.num_experts % count == 0 else 1

    def expert_spec(self, config: ModelConfig) -> PartitionSpec:
        """Returns the spec of the (E, ...) arrays of a layer's experts where they are read."""
        return PartitionSpec(EXPERT) if self.expert_devices(config) > 1 else WHOLE

    def rows(self, count: int) -> tuple[str, ...] | None:
        """Returns the mesh axes over which `count` rows are sharded; None if replicated."""
        assert self.mesh is not None
        shape = self.mesh.shape
        axes = tuple(name for name in BATCH_AXES if name in shape)
        return axes if count % self.row_devices == 0 else None

    def replicate(self, tree, spec: PartitionSpec = WHOLE):
        """Gathers sharded weights before use (FSDP); returns `tree` on a single device.

        XLA's partitioner alone would split the contraction over devices and add the parts in
        another order; with gathered weights the matmul is that of a single device. `spec` names
        what stays sharded on purpose (columns of the output head, experts).
        """
        if self.mesh is None or self.inside:
            return tree
        sharding = NamedSharding(self.mesh, spec)

        def gather(leaf):
            if isinstance(leaf, BoundWeight):  # the forward pass does not read the master
                return dataclasses.replace(leaf, value=gather(leaf.value))
            return jax.tree.map(lambda x: lax.with_sharding_constraint(x, sharding), leaf)

        return jax.tree.map(gather, tree, is_leaf=lambda x: isinstance(x, BoundWeight))

    def shard_map(self, run: Callable, in_specs, out_specs) -> Callable:
        """Wraps `run` in a `jax.shard_map` over the mesh."""
        return jax.shard_map(run, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)

    def by_own_rows(
        self, run: Callable, *by_row: Any, shared: tuple = (), spec: PartitionSpec = WHOLE
    ) -> Any:
        """Computes ``run(*by_row, *shared)``, each device on its own rows of the batch.

        For work that XLA must not split. If the devices do not divide the batch, every device
        computes all rows.

        Args:
          run: function that returns arrays (B, ...).
          by_row: arrays (B, ...), and None.
          shared: arguments sharded by `spec`, or replicated.
          spec: sharding of all of `shared`.
        """
        if self.devices == 1:
            return run(*by_row, *shared)
        rows = PartitionSpec(self.rows(by_row[0].shape[0]))
        specs = (*(rows,) * len(by_row), *(spec,) * len(shared))
        return self.shard_map(run, specs, rows)(*by_row, *shared)

    def sum_over_batch(self, recipe: Recipe, x: jax.Array) -> jax.Array:
        """Sums float32 (B, ..., N) over all axes but the last, (N,): over each row of the batch,
        then the rows' sums, which every device has, so that the order is that of any mesh. Where
        kernels run, over all of a device's rows at once; a shard_map adds the devices' sums."""
        if resolve(recipe.kernels) != "reference":
            return sum_rows(x.reshape(-1, x.shape[-1]))
        rows = pad_to(x.reshape(len(x), -1, x.shape[-1]), 1, 16)  # for `sum_rows` to divide
        return sum_rows(self.replicate(jax.vmap(sum_rows)(rows)))


ONE_DEVICE = Parallel()  # no mesh


def check_context(parallel: Parallel) -> None:
    """Refuses a mesh set by `jax.set_mesh` only: XLA would split products over its devices, which
    changes bits.

    Raises:
      ValueError: a mesh of several devices is set, and `parallel` has no mesh.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if parallel.mesh is None and not mesh.empty and mesh.size > 1 and not mesh.manual_axes:
        raise ValueError(
            f"a mesh {dict(mesh.shape)} is set, and forward was called for one device: pass "
            "parallel=Parallel.on(mesh)"
        )
