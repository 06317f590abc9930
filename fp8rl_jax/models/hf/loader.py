"""Hugging Face checkpoints -> parameters on devices, a slice of a tensor at a time.

Memory: the result is allocated where it will be, and filled by slices of at most SLICE_BYTES of
the files. What the host holds beyond the result is a few slices, whatever the model's size
(docs/checkpoints.md has the measurement).
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from fp8rl_jax.errors import UserError
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.hf.blockwise import (
    BLOCKS,
    SCALE_SUFFIX,
    is_fp8,
    scale_shape,
)
from fp8rl_jax.models.hf.config_json import read_config
from fp8rl_jax.models.hf.fields import read_fields
from fp8rl_jax.models.hf.placement import Filling
from fp8rl_jax.models.hf.reader import FP8, Checkpoint, Source, check
from fp8rl_jax.models.hf.safetensors_file import DTYPES
from fp8rl_jax.models.hf.tables import EMBEDDING, HEAD, Piece, Tensor, leaf_shapes, model_tensors
from fp8rl_jax.models.stacks import Path
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
    config, fp8 = read_config(fields), is_fp8(fields)
    further_layers = max(fields.get("num_nextn_predict_layers", int, 1), 1)
    source = Checkpoint(directory)
    return config, load_from(source, config, name, shardings, fp8, further_layers)


def read_model_config(path: str | pathlib.Path) -> ModelConfig:
    """The shapes of a checkpoint, from its config.json alone.

    Raises:
      UserError: it is missing or damaged, or the model is not supported.
    """
    return read_config(read_fields(pathlib.Path(path)))


def load_from(
    source: Source,
    config: ModelConfig,
    dtype: str,
    shardings: Any = None,
    fp8: bool = False,
    further_layers: int = 0,
) -> Any:
    """Parameters from a source of tensors.

    Args:
      source: of tensors.
      config: of the model.
      dtype: 'float32', 'bfloat16' or 'fp8'.
      shardings: as for `load`.
      fp8, further_layers: as for `reader.check`.

    Raises:
      UserError: as `load`.
    """
    tensors = model_tensors(config)
    check(source, config, tensors, fp8, further_layers)
    if config.tie_word_embeddings and HEAD in source.entries:
        _check_tied(source, config)
    types = _leaf_types(source, tensors, dtype)
    shapes = {path: _abstract(s, types[path]) for path, s in leaf_shapes(config).items()}
    tree = traverse_util.unflatten_dict(shapes)
    leaves = _allocate(tree, shardings(tree) if callable(shardings) else shardings)
    for tensor in tensors:
        for piece in tensor.pieces:
            _copy(source, tensor, piece, leaves[piece.path])
    return jax.tree.map(Filling.finish, traverse_util.unflatten_dict(leaves))


def _leaf_types(source: Source, tensors: list[Tensor], dtype: str) -> dict[Path, np.dtype]:
    """The type of every leaf of the result; FP8 stands for a QArray."""
    first: dict[Path, str] = {}
    types: dict[Path, np.dtype] = {}
    for tensor in tensors:
        own = _dtype(source, tensor.name)
        for piece in tensor.pieces:
            if dtype != "fp8":
                single = dtype == "float32" or piece.path[-1] == _BIAS
                types[piece.path] = np.dtype(jnp.float32 if single else jnp.bfloat16)
                continue
            if own == FP8 and piece.start % BLOCKS[0]:
                raise UserError(
                    f"{source.where}: tensor {tensor.name} is F8_E4M3 in blocks of {BLOCKS[0]} "
                    f"rows, which do not end where heads do (row {piece.start} to {piece.stop}): "
                    "load it with dtype='float32' or 'bfloat16'"
                )
            known = types.setdefault(piece.path, own)
            before = first.setdefault(piece.path, tensor.name)
            if (known == FP8) != (own == FP8):
                raise UserError(
                    f"{source.where}: of tensors {before} and {tensor.name} one is F8_E4M3 and the "
                    "other is not, so that a stack of layers cannot keep its bytes: load it with "
                    "dtype='float32' or 'bfloat16'"
                )
            if own not in (FP8, known) or own == np.float16:
                types[piece.path] = np.dtype(np.float32)
    return types


def _dtype(source: Source, name: str) -> np.dtype:
    return DTYPES[source.entries[name].dtype]


def _abstract(shape: tuple[int, ...], dtype: np.dtype) -> Any:
    if dtype != FP8:
        return jax.ShapeDtypeStruct(shape, dtype)
    scale = jax.ShapeDtypeStruct((*shape[:-2], *scale_shape(shape[-2:])), jnp.float32)
    return QArray(jax.ShapeDtypeStruct(shape, FP8), scale, BLOCKS)  # type: ignore[arg-type]


def _allocate(tree: Any, shardings: Any) -> dict[Path, Any]:
    """{path: Filling} of a tree of shapes; QArrays have two."""
    shapes, structure = jax.tree.flatten(tree)
    given = [None] * len(shapes) if shardings is None else jax.tree.leaves(shardings)
    if len(given) != len(shapes):
        raise UserError(
            f"shardings has {len(given)} leaves, and the parameters {len(shapes)}: give a function "
            "that makes them of the parameters' shapes"
        )
    arrays = [Filling(x.shape, x.dtype, s) for x, s in zip(shapes, given, strict=True)]
    return traverse_util.flatten_dict(jax.tree.unflatten(structure, arrays))


def _slices(source: Source, name: str, start: int, stop: int) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, rows) of slices of at most SLICE_BYTES."""
    row_bytes = math.prod(source.entries[name].shape[1:]) * _dtype(source, name).itemsize
    step = max(SLICE_BYTES // max(row_bytes, 1), 1)
    for first in range(start, stop, step):
        yield first, source.rows(name, first, min(first + step, stop))


def _copy(source: Source, tensor: Tensor, piece: Piece, leaf: Any) -> None:
    """Fills a piece of a leaf: with values, dequantised, or in a QArray with bytes and scales."""
    spread = None  # scales of blocks of rows, to multiply by
    if _dtype(source, tensor.name) == FP8:
        count = -(-tensor.shape[0] // BLOCKS[0])
        scales = source.rows(tensor.module + SCALE_SUFFIX, 0, count).astype(np.float32)
        if isinstance(leaf, QArray):
            own = slice(piece.start // BLOCKS[0], -(-piece.stop // BLOCKS[0]))
            leaf.scale.write(piece.index, 0, scales[own], piece.transposed)  # type: ignore[attr-defined]
            leaf = leaf.qvalue
        else:
            spread = scales
    for start, rows in _slices(source, tensor.name, piece.start, piece.stop):
        blocks = np.arange(start, start + len(rows)) // BLOCKS[0]
        own_scales = None if spread is None else spread[blocks]
        leaf.write(piece.index, start - piece.start, rows, piece.transposed, own_scales)


def _check_tied(source: Source, config: ModelConfig) -> None:
    """A head that is tied may be in the files, if it is the embedding."""
    for start, head in _slices(source, HEAD, 0, config.vocab_size):
        table = source.rows(EMBEDDING, start, start + len(head))
        if (head.astype(np.float32) != table.astype(np.float32)).any():
            raise UserError(
                f"{source.where}: tensor {HEAD} is not the embedding, and config.json ties the "
                "two: set tie_word_embeddings to false there, or remove the tensor"
            )
