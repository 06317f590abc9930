"""Maps tensors of a checkpoint to their places in our parameter tree.

A checkpoint holds a matrix per layer and expert, as torch's (out, in); our leaves are (in, out),
stacked over layers and experts. So a tensor of the checkpoint is one `Piece` of a leaf: an index
into its leading axes, and a transposition. The exception is latent attention's ``kv_b_proj``, whose
rows are ordered by head, keys before values within a head: two pieces a head.

The names come from models/arrays.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from fp8rl_jax.models.arrays import LINEAR, MODEL, Array, layer_arrays, leaf_shapes
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.stacks import Path, layer_spec, layer_stacks


@dataclasses.dataclass(frozen=True)
class Piece:
    """The place in our tree of some rows of a checkpoint's tensor.

    Attributes:
      path: path of the leaf.
      index: index into the leaf's leading axes: layer, expert or head.
      start, stop: range of rows in the checkpoint's tensor.
      transposed: whether the leaf holds these rows as columns.
    """

    path: Path
    index: tuple[int, ...]
    start: int
    stop: int
    transposed: bool


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor that a checkpoint of a model holds.

    Attributes:
      name: its name in the checkpoint.
      shape: its shape in the checkpoint.
      role: role of its `Array`; LINEAR may be FP8.
      pieces: its parts, by ascending rows, without gaps.
    """

    name: str
    shape: tuple[int, ...]
    role: str
    pieces: tuple[Piece, ...]

    @property
    def module(self) -> str:
        """Name of its module: the tensor's name without the last part."""
        return self.name.rpartition(".")[0]


def model_tensors(config: ModelConfig) -> list[Tensor]:
    """Returns every tensor of a model's checkpoint, in the order of its layers."""
    shapes, layer = leaf_shapes(config), 0
    found = [_plain(a.hf, a, a.path, (), shapes[a.path]) for a in MODEL if a.path in shapes]
    for stack, count in layer_stacks(config).items():
        arrays = [a for a in layer_arrays(layer_spec(config, stack)) if (stack, *a.path) in shapes]
        tensors = {a.hf: [b for b in arrays if b.hf == a.hf] for a in arrays}
        for index in range(count):
            for name, parts in tensors.items():
                name = f"model.layers.{layer}.{name}"
                found += _layer_tensors(config, name, parts, stack, index, shapes)
            layer += 1
    covered = {piece.path for tensor in found for piece in tensor.pieces}
    assert covered == set(shapes), covered ^ set(shapes)
    return found


def _layer_tensors(
    config: ModelConfig, name: str, arrays: list[Array], stack: str, index: int, shapes
) -> Iterator[Tensor]:
    array, path = arrays[0], (stack, *arrays[0].path)
    if len(arrays) == 2:
        yield _keys_and_values(config, name, [(stack, *a.path) for a in arrays], index)
    elif "{}" in name:
        for expert in range(config.num_experts):
            yield _plain(name.format(expert), array, path, (index, expert), shapes[path])
    else:
        yield _plain(name, array, path, (index,), shapes[path])


def _plain(
    name: str, array: Array, path: Path, index: tuple[int, ...], shape: tuple[int, ...]
) -> Tensor:
    """Returns a tensor that is one piece of a leaf."""
    own = shape[len(index) :]
    own = own[::-1] if array.transposed else own
    return Tensor(name, own, array.role, (Piece(path, index, 0, own[0], array.transposed),))


def _keys_and_values(config: ModelConfig, name: str, paths: list[Path], index: int) -> Tensor:
    """Returns latent attention's kv_b_proj (H * (nope + v), R): for each head keys, then values."""
    nope, v = config.qk_nope_head_dim, config.v_head_dim
    keys, values = paths
    pieces = []
    for head in range(config.num_attention_heads):
        start = head * (nope + v)
        middle, stop = start + nope, start + nope + v
        pieces.append(Piece(keys, (index, head), start, middle, transposed=False))
        pieces.append(Piece(values, (index, head), middle, stop, transposed=True))
    return Tensor(name, (pieces[-1].stop, config.kv_lora_rank), LINEAR, tuple(pieces))
