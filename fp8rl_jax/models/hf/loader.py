"""Hugging Face checkpoints -> parameters on devices, a slice of a tensor at a time.

Memory: the result is allocated where it will lie, and filled by slices of at most SLICE_BYTES of
the files. What the host holds beyond the result is a few slices, whatever the model's size
(docs/checkpoints.md has the measurement).
"""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import Sharding

from fp8rl_jax.errors import UserError
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.hf.blockwise import BLOCKS, SCALE_SUFFIX, grid, read_blocks
from fp8rl_jax.models.hf.config_json import read_config
from fp8rl_jax.models.hf.fields import Fields, read_fields
from fp8rl_jax.models.hf.placement import Filling
from fp8rl_jax.models.hf.reader import FP8, Checkpoint, Source, check
from fp8rl_jax.models.hf.tables import (
    EMBEDDING,
    HEAD,
    Path,
    Piece,
    Tensor,
    ignored,
    leaf_shapes,
    model_tensors,
    path_of,
)
from fp8rl_jax.quant import QArray

SLICE_BYTES = 16 * 2**20
_BIAS = "e_score_correction_bias"
_DTYPES = {
    "float32": "float32", "f32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16",
    "fp8": "fp8",
}  # fmt: skip


def dtype_name(dtype: Any) -> str:
    """'float32', 'bfloat16' or 'fp8' of a name or a dtype.

    Raises:
      UserError: another one.
    """
    name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    if name not in _DTYPES:
        raise UserError(f"dtype is {name!r}; write one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def load(
    path: str | pathlib.Path, *, dtype: Any = "float32", shardings: Any = None
) -> tuple[ModelConfig, Any]:
    """Reads a checkpoint of Qwen3, Qwen3-MoE, Llama or DeepSeek-V3 (and their relatives).

    Args:
      path: a local directory with config.json and one safetensors file, or shards and an index.
      dtype: of the result. 'float32': masters, FP8 tensors dequantised. 'bfloat16': the same in two
        bytes, but the router's correction bias, which stays float32. 'fp8': as the files have it:
        FP8 tensors become QArrays of the same bytes, others keep BF16 or F32 (F16 becomes float32).
      shardings: a tree of shardings like the parameters, or a function that makes it of their
        shapes: ``lambda shapes: fp8rl_jax.sharding.param_shardings(mesh, shapes)``. None: one
        device.

    Returns:
      (ModelConfig, parameters as `init_params` shapes them).

    Raises:
      UserError: one sentence that names field, tensor or file: a model that is not supported, or
        files that are missing, damaged, or not those of config.json.
    """
    directory = pathlib.Path(path)
    name, fields = dtype_name(dtype), read_fields(directory)
    config, blocks = read_config(fields), read_blocks(fields)
    source = Checkpoint(directory)
    tensors = model_tensors(config)
    check(source.entries, directory, tensors, ignored(config, _further_layers(fields)), blocks)
    return config, load_from(source, config, tensors, name, shardings, str(directory))


def read_model_config(path: str | pathlib.Path) -> ModelConfig:
    """The shapes of a checkpoint, from its config.json alone.

    Raises:
      UserError: it is missing or damaged, or the model is not supported.
    """
    return read_config(read_fields(pathlib.Path(path)))


def _further_layers(fields: Fields) -> int:
    return max(fields.integer("num_nextn_predict_layers", 1), 1)


def load_from(
    source: Source,
    config: ModelConfig,
    tensors: list[Tensor],
    dtype: str,
    shardings: Any,
    where: str,
) -> Any:
    """`load` from a source that has been checked.

    Args:
      source: of tensors.
      config: of the model.
      tensors: of the model.
      dtype: 'float32', 'bfloat16' or 'fp8'.
      shardings: as for `load`.
      where: name of the source, for errors.

    Raises:
      UserError: FP8 tensors that cannot be kept, or a head that is not the embedding it is tied to.
    """
    if config.tie_word_embeddings and source.has(HEAD):
        _check_tied(source, config, where)
    types = _leaf_types(source, tensors, dtype, where)
    shapes = {path: _abstract(s, types[path]) for path, s in leaf_shapes(config).items()}
    tree = traverse_util.unflatten_dict(shapes)
    if callable(shardings):
        shardings = shardings(tree)
    placed = jax.tree.map(lambda _: None, tree) if shardings is None else shardings
    leaves = _allocate(tree, placed)
    for tensor in tensors:
        for piece in tensor.pieces:
            if types[piece.path] == FP8:
                _copy_bytes(source, tensor, piece, leaves[piece.path])
            else:
                _copy_values(source, tensor, piece, leaves[piece.path][0])
    done = {path: [filling.finish() for filling in own] for path, own in leaves.items()}
    return traverse_util.unflatten_dict(
        {
            path: QArray(own[0], own[1], BLOCKS) if len(own) > 1 else own[0]
            for path, own in done.items()
        }
    )


def _leaf_types(
    source: Source, tensors: list[Tensor], dtype: str, where: str
) -> dict[Path, np.dtype]:
    """The type of every leaf of the result; FP8 stands for a QArray."""
    first: dict[Path, str] = {}
    types: dict[Path, np.dtype] = {}
    for tensor in tensors:
        own = source.dtype(tensor.name)
        for piece in tensor.pieces:
            if dtype != "fp8":
                single = dtype == "float32" or piece.path[-1] == _BIAS
                types[piece.path] = np.dtype(jnp.float32 if single else jnp.bfloat16)
                continue
            if own == FP8:
                _check_borders(tensor, piece, where)
            known = types.setdefault(piece.path, own)
            before = first.setdefault(piece.path, tensor.name)
            if (known == FP8) != (own == FP8):
                raise UserError(
                    f"{where}: of tensors {before} and {tensor.name} one is F8_E4M3 and the other "
                    "is not, so that a stack of layers cannot keep its bytes: load it with "
                    "dtype='float32' or 'bfloat16'"
                )
            if own not in (FP8, known) or own == np.float16:
                types[piece.path] = np.dtype(np.float32)
    return types


def _check_borders(tensor: Tensor, piece: Piece, where: str) -> None:
    """Whether a piece of an FP8 matrix consists of whole blocks."""
    if piece.start % BLOCKS[0] or (piece.stop % BLOCKS[0] and piece.stop != tensor.shape[0]):
        raise UserError(
            f"{where}: tensor {tensor.name} is F8_E4M3 in blocks of {BLOCKS[0]} rows, which do not "
            f"end where heads do (row {piece.start} to {piece.stop}): load it with dtype='float32' "
            "or 'bfloat16'"
        )


def _abstract(shape: tuple[int, ...], dtype: np.dtype) -> Any:
    if dtype != FP8:
        return jax.ShapeDtypeStruct(shape, dtype)
    scale = jax.ShapeDtypeStruct((*shape[:-2], *grid(shape[-2:], BLOCKS)), jnp.float32)
    return QArray(jax.ShapeDtypeStruct(shape, FP8), scale, BLOCKS)  # type: ignore[arg-type]


def _allocate(tree: Any, shardings: Any) -> dict[Path, list[Filling]]:
    """Arrays to fill, of every leaf; of a QArray two."""

    def empty(x: Any) -> bool:
        return x is None or isinstance(x, Sharding)

    shapes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, QArray))
    given = jax.tree.leaves(shardings, is_leaf=empty)
    arrays = jax.tree.leaves(tree)
    if len(given) != len(arrays):
        raise UserError(
            f"shardings has {len(given)} leaves, and the parameters {len(arrays)}: give a function "
            "that makes them of the parameters' shapes"
        )
    places = iter(given)
    leaves: dict[Path, list[Filling]] = {}
    for keys, leaf in shapes:
        parts = jax.tree.leaves(leaf)
        leaves[path_of(keys)] = [Filling(x.shape, x.dtype, next(places)) for x in parts]
    return leaves


def _slices(start: int, stop: int, row_bytes: int, multiple: int = 1):
    """(start, stop) of slices of at most SLICE_BYTES, of a multiple of rows."""
    step = max(SLICE_BYTES // max(row_bytes, 1) // multiple, 1) * multiple
    for first in range(start, stop, step):
        yield first, min(first + step, stop)


def _row_bytes(source: Source, tensor: Tensor) -> int:
    return int(np.prod(tensor.shape[1:], dtype=np.int64)) * source.dtype(tensor.name).itemsize


def _copy_values(source: Source, tensor: Tensor, piece: Piece, leaf: Filling) -> None:
    """A piece's values, dequantised."""
    scales = None
    if source.dtype(tensor.name) == FP8:
        count = -(-tensor.shape[0] // BLOCKS[0])
        scales = source.rows(tensor.module + SCALE_SUFFIX, 0, count).astype(np.float32)
    for start, stop in _slices(piece.start, piece.stop, _row_bytes(source, tensor)):
        rows = source.rows(tensor.name, start, stop)
        own = None if scales is None else scales[np.arange(start, stop) // BLOCKS[0]]
        leaf.write(piece.index, start - piece.start, rows, piece.transposed, own)


def _copy_bytes(source: Source, tensor: Tensor, piece: Piece, leaf: list[Filling]) -> None:
    """A piece's FP8 bytes, and its scales."""
    values, scales = leaf
    for start, stop in _slices(piece.start, piece.stop, _row_bytes(source, tensor)):
        rows = source.rows(tensor.name, start, stop)
        values.write(piece.index, start - piece.start, rows, piece.transposed)
    first, last = piece.start // BLOCKS[0], -(-piece.stop // BLOCKS[0])
    rows = source.rows(tensor.module + SCALE_SUFFIX, first, last).astype(np.float32)
    scales.write(piece.index, 0, rows, piece.transposed)


def _check_tied(source: Source, config: ModelConfig, where: str) -> None:
    """A head that is tied may be in the files, if it is the embedding."""
    row_bytes = config.hidden_size * 4
    for start, stop in _slices(0, config.vocab_size, row_bytes):
        head, table = (source.rows(name, start, stop) for name in (HEAD, EMBEDDING))
        if (head.astype(np.float32) != table.astype(np.float32)).any():
            raise UserError(
                f"{where}: tensor {HEAD} is not the embedding, and config.json ties the two: set "
                "tie_word_embeddings to false there, or remove the tensor"
            )
