"""Maps tensors of a checkpoint to their places in our parameter tree.

A checkpoint holds a matrix per layer and expert, as torch's (out, in); our leaves are (in, out),
stacked over layers and experts. So a tensor of the checkpoint is one `Piece` of a leaf: an index
into its leading axes, and a transposition. There are two exceptions:

* latent attention's ``kv_b_proj``, whose rows are ordered by head, keys before values within a
  head: two pieces a head;
* the packed experts of gpt-oss: one tensor (E, in, out) for all experts, in which gate and up take
  the even and the odd columns, and (E, out) for their biases.

The names come from models/arrays.py, and where a family has others, from its `Family.tensors`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from fp8rl_jax.models.arrays import LINEAR, MODEL, Array, layer_arrays, leaf_shapes
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.families import nearest
from fp8rl_jax.models.stacks import Path, layer_spec, layer_stacks


@dataclasses.dataclass(frozen=True)
class Piece:
    """The place in our tree of some rows of a checkpoint's tensor.

    Attributes:
      path: path of the leaf.
      index: index into the leaf's leading axes: layer, expert or head.
      start, stop: range of rows in the checkpoint's tensor.
      transposed: whether the leaf holds these rows as columns.
      packed: for packed experts, whose rows are experts: the columns of the row that are the
        piece's; else None.
    """

    path: Path
    index: tuple[int, ...]
    start: int
    stop: int
    transposed: bool
    packed: slice | None = None

    def of(self, rows: np.ndarray) -> np.ndarray:
        """Returns the piece's part of rows start..stop of its tensor, a view."""
        return rows if self.packed is None else rows[0][..., self.packed]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor that a checkpoint of a model holds.

    Attributes:
      name: its name in the checkpoint.
      shape: its shape in the checkpoint.
      role: role of its `Array`; LINEAR may be FP8.
      pieces: its parts, by ascending rows, without gaps; those of packed experts share rows.
    """

    name: str
    shape: tuple[int, ...]
    role: str
    pieces: tuple[Piece, ...]

    @property
    def packed(self) -> bool:
        """Whether it holds all experts of a layer."""
        return self.pieces[0].packed is not None

    @property
    def module(self) -> str:
        """Name of its module: the tensor's name without the last part."""
        return self.name.rpartition(".")[0]


def _name(config: ModelConfig, array: Array) -> tuple[str, slice | None]:
    """Returns the tensor that holds an array of a layer, and the columns of packed experts."""
    return nearest(config).tensors.get(array.hf, (array.hf, None))


def model_tensors(config: ModelConfig) -> list[Tensor]:
    """Returns every tensor of a model's checkpoint, in the order of its layers."""
    shapes = leaf_shapes(config)
    tensors = [_plain(a.hf, a, a.path, (), shapes[a.path]) for a in MODEL if a.path in shapes]
    layer = 0
    for stack, count in layer_stacks(config).items():
        arrays_of: dict[str, list[Array]] = {}
        for array in layer_arrays(layer_spec(config, stack)):
            if (stack, *array.path) in shapes:
                arrays_of.setdefault(_name(config, array)[0], []).append(array)
        for index in range(count):
            for name, arrays in arrays_of.items():
                name = f"model.layers.{layer}.{name}"
                tensors += _layer_tensors(config, name, arrays, stack, index, shapes)
            layer += 1
    covered = {piece.path for tensor in tensors for piece in tensor.pieces}
    assert covered == set(shapes), covered ^ set(shapes)
    return tensors


def _layer_tensors(
    config: ModelConfig, name: str, arrays: list[Array], stack: str, index: int, shapes
) -> Iterator[Tensor]:
    array = arrays[0]
    path = (stack, *array.path)
    if _name(config, array)[1] is not None:
        yield _packed_experts(config, name, arrays, stack, index, shapes)
    elif len(arrays) == 2:
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
    inner = shape[len(index) :]
    inner = inner[::-1] if array.transposed else inner
    return Tensor(name, inner, array.role, (Piece(path, index, 0, inner[0], array.transposed),))


def _packed_experts(
    config: ModelConfig, name: str, arrays: list[Array], stack: str, index: int, shapes
) -> Tensor:
    """Returns a tensor of all experts, (E, in, out) or (E, out)."""
    *first, width = shapes[(stack, *arrays[0].path)][1:]
    pieces = tuple(
        Piece((stack, *a.path), (index, e), e, e + 1, False, _name(config, a)[1])
        for e in range(config.num_experts)
        for a in arrays
    )
    return Tensor(name, (*first, len(arrays) * width), arrays[0].role, pieces)


def _keys_and_values(config: ModelConfig, name: str, paths: list[Path], index: int) -> Tensor:
    """Returns latent attention's kv_b_proj (H * (nope + v), R): for each head keys, then values."""
    keys, values = paths
    pieces = []
    stop = 0
    for head in range(config.num_attention_heads):
        start = stop
        middle = start + config.qk_nope_head_dim
        stop = middle + config.v_head_dim
        pieces.append(Piece(keys, (index, head), start, middle, transposed=False))
        pieces.append(Piece(values, (index, head), middle, stop, transposed=True))
    return Tensor(name, (stop, config.kv_lora_rank), LINEAR, tuple(pieces))
