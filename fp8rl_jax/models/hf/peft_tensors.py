"""The tensors of a file in PEFT's format, and the adapters that they hold.

A linear layer has a pair of tensors, of torch's (out, in)::

    base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight    (r, K), our A transposed
    base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight    (N, r), our B transposed

Behind `base_model.model.` is the name of the layer in transformers' class of the base. Experts have
two forms::

    ...mlp.experts.5.down_proj.lora_A    a pair for each expert: the names of checkpoints, and the
                                         modules of transformers 4
    ...mlp.experts.base_layer.lora_A     packed (E r, K): all experts of gate_up_proj, in which gate
    ...mlp.experts.lora_A                and up are one matrix, and those of down_proj: the
                                         parameters of transformers 5, and of gpt-oss in both

Row `e r + j` of a packed A and column `j E + e` of a packed B are of expert e. PEFT wraps the
module of the experts once for each parameter, and `base_layer` is the inner wrapper; a file with
one of the two parameters calls it `mlp.experts`. Gate and up of different A are one matrix of twice
the rank: the rows of both A, and a B of two blocks.

What PEFT (0.21) applies of a file is decided by adapter_config.json: `target_modules`, and
`target_parameters` by the names of parameters. On transformers 5 it converts pairs of each expert
to packed ones while it loads them, for the model types qwen3_moe, glm4_moe and deepseek_v3, and

* takes *every* name in `target_modules` that ends in gate_proj, up_proj or down_proj for one of
  experts; so these layers outside the experts are named in `target_parameters`;
* packs gate and up together, inside down; so if one of these has adapters, all three have, with
  zeros.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from fp8rl_jax.models.arrays import FACTORS, HEADS, LINEAR, Array, layer_arrays, leaf_shapes
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.stacks import Path, layer_spec, layer_stacks

# Where layers are in transformers' class of a text model, and in that of Gemma 3 with images: since
# transformers 4.52, and before.
TEXT = "base_model.model.model.layers"
BESIDE_IMAGES = "base_model.model.model.language_model.layers"
BESIDE_IMAGES_BEFORE = "base_model.model.language_model.model.layers"
# Parameter of packed experts -> the layers that are side by side in it; inner wrappers first.
PACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
GATE_UP = r".*\.gate_up_proj"  # PEFT's own key of it in rank_pattern and alpha_pattern
_EXPERTS = "mlp.experts"
_MLP = tuple(name for names in PACKED.values() for name in names)


@dataclasses.dataclass(frozen=True)
class Part:
    """The place in our adapters of a part of a pair.

    Attributes:
      layer: path of the linear layer in the adapters.
      index: index into its leaves: (layer,) or (layer, expert).
      columns: the outputs of the pair that are the layer's.
    """

    layer: Path
    index: tuple[int, ...]
    columns: slice


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two tensors of a file: A (E r, K) and B (N, r E).

    Attributes:
      name: their name, without `.lora_A.weight` and `.lora_B.weight`.
      module: the part of the name that is alike in all layers of the model.
      parameter: the entry of `target_parameters` that takes its place; '' if none does.
      experts: E, number of packed experts; 1 for one matrix.
      inputs, outputs: K, N.
      layers: names of the linear layers side by side in the outputs.
      parts: those of the layers that have adapters; B is zero in the columns of others.
    """

    name: str
    module: str
    parameter: str
    experts: int
    inputs: int
    outputs: int
    layers: tuple[str, ...]
    parts: tuple[Part, ...]

    @property
    def tensors(self) -> tuple[str, str]:
        """Names of A and B."""
        return f"{self.name}.lora_A.weight", f"{self.name}.lora_B.weight"

    def shapes(self, ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of A and B at a rank of the pair."""
        return (self.experts * ranks, self.inputs), (self.outputs, ranks * self.experts)

    def ranks(self, rank: int) -> int:
        """Returns the rank of the pair that holds adapters of a rank."""
        return rank * max(1, len(self.parts))

    def places(self, ranks: int, rank: int) -> list[tuple[Part, slice]]:
        """Returns each part with its rows among the pair's `ranks`. If these are more than the
        adapters' `rank`, the parts have rows of their own, one after the other; else all rows."""
        if ranks <= rank:
            return [(part, slice(0, ranks)) for part in self.parts]
        starts = range(0, rank * len(self.parts), rank)
        return [(part, slice(n, n + rank)) for part, n in zip(self.parts, starts, strict=True)]

    def joined(self, leaves: Mapping[Path, Any], rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns A and B, float32, of adapters with these leaves, {path: array}, and rank."""
        ranks = self.ranks(rank)
        a = np.zeros((self.experts, ranks, self.inputs), np.float32)
        b = np.zeros((self.experts, ranks, self.outputs), np.float32)
        for part, rows in self.places(ranks, rank):
            ours = [np.asarray(leaves[*part.layer, name][part.index]) for name in FACTORS]
            a[:, rows] = ours[0].reshape(self.experts, self.inputs, rank).swapaxes(1, 2)
            b[:, rows, part.columns] = ours[1].reshape(self.experts, rank, -1)
        shape_a, shape_b = self.shapes(ranks)
        return a.reshape(shape_a), b.transpose(2, 1, 0).reshape(shape_b)

    def spread(
        self, a: np.ndarray, b: np.ndarray, leaves: Mapping[Path, np.ndarray], rank: int
    ) -> None:
        """Writes A and B into leaves of adapters of a rank, in place. Where the pair's rank is
        smaller, they are the first rows and columns of the adapters."""
        a = a.reshape(self.experts, -1, self.inputs)
        b = self._by_expert(b)
        for part, rows in self.places(b.shape[1], rank):
            count = rows.stop - rows.start
            ours = [leaves[*part.layer, name][part.index] for name in FACTORS]  # views
            ours_a = ours[0].reshape(self.experts, self.inputs, rank)
            ours_b = ours[1].reshape(self.experts, rank, -1)
            ours_a[..., :count] = a[:, rows].swapaxes(1, 2)
            ours_b[:, :count] = b[:, rows, part.columns]

    def is_whole(self, ranks: int, rank: int) -> bool:
        """Returns whether every element of a B of this rank has a place in adapters of a rank."""
        return len(self.parts) == len(self.layers) and ranks <= rank

    def loses(self, b: np.ndarray, rank: int) -> bool:
        """Returns whether B has elements without a place in adapters of a rank, and not zero."""
        rest = self._by_expert(b).copy()
        for part, rows in self.places(rest.shape[1], rank):
            rest[:, rows, part.columns] = 0
        return bool(rest.any())

    def _by_expert(self, b: np.ndarray) -> np.ndarray:
        """Returns a view (E, r, N) of B."""
        return b.reshape(self.outputs, -1, self.experts).transpose(2, 1, 0)


def linear_layers(config: ModelConfig) -> dict[Path, Array]:
    """Returns {path: row of the kernel} of the linear layers that may have adapters."""
    shapes = leaf_shapes(config)
    return {
        (stack, *array.path[:-1]): array
        for stack in layer_stacks(config)
        for array in layer_arrays(layer_spec(config, stack))
        if array.role == LINEAR and array.axes != HEADS and (stack, *array.path) in shapes
    }


def pairs(
    config: ModelConfig,
    adapted: Collection[Path],
    start: str = TEXT,
    packed: Collection[str] | None = None,
) -> Iterator[Pair]:
    """Yields the pairs of a file.

    Args:
      config: shapes of the model.
      adapted: paths of the linear layers with adapters.
      start: the layers' name, such as TEXT.
      packed: the keys of PACKED under which the file holds experts; None: a pair for each expert.
    """
    first = 0
    for stack, count in layer_stacks(config).items():
        layers = {p: a for p, a in linear_layers(config).items() if p[0] == stack}
        experts = {p[-1]: p for p, a in layers.items() if "{}" in a.hf}
        if not any(path in adapted for path in experts.values()):
            experts = {}
        plain = {p: a for p, a in layers.items() if "{}" not in a.hf and p in adapted}
        for index in range(count):
            name = f"{start}.{first + index}"
            for path, array in plain.items():
                yield _plain(config, name, path, array, index)
            if experts and packed is None:
                yield from _by_expert(config, name, experts, adapted, index)
            elif experts and packed is not None:
                yield from _packed(config, name, experts, adapted, index, packed)
        first += count


def _plain(config: ModelConfig, name: str, path: Path, array: Array, index: int) -> Pair:
    """Returns the pair of a layer outside the experts."""
    module = array.hf.removesuffix(".weight")
    named = path[-1] in _MLP and (config.num_experts or config.latent)  # see the module
    inputs, outputs = leaf_shapes(config)[*path, "kernel"][-2:]
    return Pair(
        name=f"{name}.{module}",
        module=module,
        parameter=f"{module}.weight" if named else "",
        experts=1,
        inputs=inputs,
        outputs=outputs,
        layers=(path[-1],),
        parts=(Part(path, (index,), slice(0, outputs)),),
    )


def _by_expert(
    config: ModelConfig, name: str, experts: dict[str, Path], adapted: Collection[Path], index: int
) -> Iterator[Pair]:
    """Yields the pairs of a layer's experts; if gate or up have adapters, all three have pairs."""
    gated = any(experts[layer] in adapted for layer in PACKED["gate_up_proj"])
    for layer, path in experts.items():
        if not gated and path not in adapted:
            continue
        inputs, outputs = leaf_shapes(config)[*path, "kernel"][-2:]
        for expert in range(config.num_experts):
            module = f"{_EXPERTS}.{expert}.{layer}"
            part = Part(path, (index, expert), slice(0, outputs))
            yield Pair(
                name=f"{name}.{module}",
                module=module,
                parameter="",
                experts=1,
                inputs=inputs,
                outputs=outputs,
                layers=(layer,),
                parts=(part,) if path in adapted else (),
            )


def _packed(
    config: ModelConfig,
    name: str,
    experts: dict[str, Path],
    adapted: Collection[Path],
    index: int,
    packed: Collection[str],
) -> Iterator[Pair]:
    """Yields the pairs of a layer's experts where these are one matrix for each parameter."""
    outer_first = [parameter for parameter in reversed(PACKED) if parameter in packed]
    for outer, parameter in enumerate(outer_first):
        layers = PACKED[parameter]
        inputs, outputs = leaf_shapes(config)[*experts[layers[0]], "kernel"][-2:]
        parts = []
        for number, layer in enumerate(layers):
            columns = slice(number * outputs, (number + 1) * outputs)
            if config.moe_bias:  # gpt-oss: in turns
                columns = slice(number, None, len(layers))
            if experts[layer] in adapted:
                parts.append(Part(experts[layer], (index,), columns))
        module = _EXPERTS + ".base_layer" * outer
        yield Pair(
            name=f"{name}.{module}",
            module=module,
            parameter=f"{_EXPERTS}.{parameter}",
            experts=config.num_experts,
            inputs=inputs,
            outputs=len(layers) * outputs,
            layers=layers,
            parts=tuple(parts),
        )
