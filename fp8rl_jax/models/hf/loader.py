"""Loads Hugging Face checkpoints onto devices, a slice of a tensor at a time.

Memory: the result is allocated on its devices and filled by slices of at most SLICE_BYTES of the
files, or one of the experts that share a tensor. Besides the result the host holds a few slices,
whatever the model's size (measured in docs/checkpoints.md). Each of several processes reads only
the shards of its devices.
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

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.models.arrays import EMBEDDING, HEAD, SMALL, leaf_shapes
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.families.fields import read_fields
from fp8rl_jax.models.families.gemma import IMAGES
from fp8rl_jax.models.hf.blockwise import BLOCKS, MXFP4, SCALE_SUFFIX, quantisation_of, scale_shape
from fp8rl_jax.models.hf.config_json import read_config
from fp8rl_jax.models.hf.finite import count_bad_scales, count_not_finite
from fp8rl_jax.models.hf.mxfp4 import Unpacked
from fp8rl_jax.models.hf.placement import Filling
from fp8rl_jax.models.hf.reader import FP8, Checkpoint, Source, check, check_sizes
from fp8rl_jax.models.hf.safetensors_file import DTYPES, Entry
from fp8rl_jax.models.hf.tables import Piece, Tensor, model_tensors
from fp8rl_jax.models.stacks import Path
from fp8rl_jax.quant import QArray

SLICE_BYTES = 16 * 2**20
_ANOTHER_TYPE = (
    "load it with dtype='float32' or 'bfloat16' (as the base of adapters: lora.base=bf16)"
)
_DTYPES = dict(float32="float32", f32="float32", bfloat16="bfloat16", bf16="bfloat16", fp8="fp8")


def dtype_name(dtype: Any) -> str:
    """Returns 'float32', 'bfloat16' or 'fp8' for a name or a dtype.

    Raises:
      UserError: the name or dtype is not supported.
    """
    name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    if name not in _DTYPES:
        raise UserError(f"dtype is {name!r}; write one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def load(
    path: str | pathlib.Path,
    *,
    dtype: Any = "float32",
    shardings: Any = None,
    check_finite: bool = True,
) -> tuple[ModelConfig, Any]:
    """Reads a checkpoint of a family of models/families.

    Args:
      path: a local directory with config.json and one safetensors file, or shards and an index.
      dtype: type of the result. 'float32': masters; FP8 tensors are dequantised. 'bfloat16': the
        same with matrices in bfloat16; norms, routers and biases are float32. 'fp8': the types of
        the files: FP8 tensors become QArrays of the same bytes, other tensors keep BF16
        or F32 (F16 becomes float32, MXFP4 bfloat16).
      shardings: a tree of shardings like the parameters, or a function from their shapes to it:
        ``lambda shapes: fp8rl_jax.models.param_shardings(mesh, shapes)``. None: one device.
      check_finite: whether to refuse tensors with NaN or infinity, and non-positive scales.

    Returns:
      (ModelConfig, parameters with the tree and shapes of `init_params`).

    Raises:
      UserError: the model is not supported, files are missing, damaged or do not fit config.json,
        or weights are not finite; the message names field, tensor or file.
    """
    name = dtype_name(dtype)
    directory = pathlib.Path(path)
    fields = read_fields(directory)
    config = read_config(fields)
    method = quantisation_of(fields)
    source: Source = Checkpoint(directory)
    if method == MXFP4:
        source = Unpacked(source)
    if fields.values["model_type"] == IMAGES:
        source.entries = _of_text(source.entries)
    # DeepSeek's files hold such a layer whatever the field says, other types only with the field.
    further_layers = max(fields.get("num_nextn_predict_layers", int, 0), config.latent)
    check_sizes(source, config)
    tensors = model_tensors(config)
    check(source, config, tensors, method == "fp8", further_layers)
    if config.tie_word_embeddings and HEAD in source.entries:
        _check_tied(source, config)
    types = _leaf_types(source, tensors, name)
    tree = traverse_util.unflatten_dict(
        {path: _abstract(shape, types[path]) for path, shape in leaf_shapes(config).items()}
    )
    leaves = _allocate(tree, shardings(tree) if callable(shardings) else shardings)
    for tensor in tensors:
        scales = _scales(source, tensor, check_finite)
        counts = [
            _copy(source, tensor, piece, leaves[piece.path], scales, check_finite)
            for piece in tensor.pieces
        ]
        if any(bad for bad, _ in counts):
            raise _not_finite(source, tensor.name, counts, "NaN or infinite")
    return config, jax.tree.map(Filling.finish, traverse_util.unflatten_dict(leaves))


def _of_text(entries: dict[str, Entry]) -> dict[str, Entry]:
    """Returns the tensors of the text model in files that hold one of images too, under the names
    of a text model alone."""
    # Of published files; the last two of files that transformers 5 wrote.
    prefixes = {"language_model.": "", "model.language_model.": "model.", "lm_head.": "lm_head."}
    return {
        alone + name.removeprefix(prefix): entry
        for name, entry in entries.items()
        for prefix, alone in prefixes.items()
        if name.startswith(prefix)
    }


def read_model_config(path: str | pathlib.Path) -> ModelConfig:
    """Reads the shapes of a checkpoint from its config.json alone.

    Raises:
      UserError: config.json is missing or damaged, or the model is not supported.
    """
    return read_config(read_fields(pathlib.Path(path)))


def _leaf_types(source: Source, tensors: list[Tensor], dtype: str) -> dict[Path, np.dtype]:
    """Returns {path: dtype} of the result's leaves; FP8 means a QArray."""
    first: dict[Path, str] = {}
    types: dict[Path, np.dtype] = {}
    for tensor in tensors:
        stored = _dtype(source, tensor.name)
        for piece in tensor.pieces:
            if dtype != "fp8":
                single = dtype == "float32" or tensor.role in SMALL
                types[piece.path] = np.dtype(jnp.float32 if single else jnp.bfloat16)
                continue
            if stored == FP8 and piece.start % BLOCKS[0]:
                raise UserError(
                    f"{source.where}: tensor {tensor.name} is F8_E4M3 in blocks of {BLOCKS[0]} "
                    f"rows, which do not end where heads do (row {piece.start} to {piece.stop}): "
                    + _ANOTHER_TYPE
                )
            known = types.setdefault(piece.path, stored)
            before = first.setdefault(piece.path, tensor.name)
            if (known == FP8) != (stored == FP8):
                raise UserError(
                    f"{source.where}: of tensors {before} and {tensor.name} one is F8_E4M3 and the "
                    "other is not, so that a stack of layers cannot keep its bytes: "
                    + _ANOTHER_TYPE
                )
            if stored not in (FP8, known) or stored == np.float16:
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
    """Allocates a tree of shapes: {path: Filling, or a QArray of two Fillings}."""
    shapes, structure = jax.tree.flatten(tree)
    placed = [None] * len(shapes) if shardings is None else jax.tree.leaves(shardings)
    if len(placed) != len(shapes):
        raise UserError(
            f"shardings has {len(placed)} leaves, and the parameters {len(shapes)}: give a "
            "function that makes them of the parameters' shapes"
        )
    arrays = [Filling(x.shape, x.dtype, s) for x, s in zip(shapes, placed, strict=True)]
    return traverse_util.flatten_dict(jax.tree.unflatten(structure, arrays))


def _slices(
    source: Source, name: str, start: int, stop: int, columns: tuple[int, int] | None = None
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (first row, values) of slices of at most SLICE_BYTES of rows start..stop, restricted
    to `columns`."""
    width = columns[1] - columns[0] if columns else math.prod(source.entries[name].shape[1:])
    step = max(SLICE_BYTES // max(width * _dtype(source, name).itemsize, 1), 1)
    for first in range(start, stop, step):
        yield first, source.rows(name, first, min(first + step, stop), columns)


def _scales(source: Source, tensor: Tensor, check_finite: bool) -> np.ndarray | None:
    """Reads the float32 scales of an FP8 tensor's blocks; None for a tensor of another type.

    Raises:
      UserError: with `check_finite`, if a scale is not finite and positive.
    """
    if _dtype(source, tensor.name) != FP8:
        return None
    name = tensor.module + SCALE_SUFFIX
    scales = source.rows(name, 0, -(-tensor.shape[0] // BLOCKS[0])).astype(np.float32)
    if check_finite and (bad := count_bad_scales(scales)):
        raise _not_finite(source, name, [(bad, scales.size)], "not finite and positive")
    return scales


def _copy(
    source: Source,
    tensor: Tensor,
    piece: Piece,
    leaf: Any,
    scales: np.ndarray | None,
    check_finite: bool,
) -> tuple[int, int]:
    """Fills a piece of a leaf with dequantised values, or of a QArray with bytes and scales.

    Returns:
      (number of NaN or infinite elements, 0 without `check_finite`; number of elements read).
    """
    if isinstance(leaf, QArray):
        assert scales is not None
        leaf.scale.write(  # type: ignore[attr-defined]
            piece.index,
            (0, 0),
            scales[piece.start // BLOCKS[0] : -(-piece.stop // BLOCKS[0])],
            piece.transposed,
        )
        leaf = leaf.qvalue
        scales = None
    if piece.packed is not None:
        return _copy_expert(source, tensor, piece, leaf, check_finite)
    held = leaf.held(piece.index, (piece.stop - piece.start, *tensor.shape[1:]), piece.transposed)
    if held is None:
        return 0, 0
    first, last = held[0]
    columns = held[1] if len(held) == 2 else None  # a vector has none
    bad = read = 0
    for start, values in _slices(
        source, tensor.name, first + piece.start, last + piece.start, columns
    ):
        read += values.size
        bad += count_not_finite(values) if check_finite else 0
        blocks = np.arange(start, start + len(values)) // BLOCKS[0]
        row = start - piece.start
        leaf.write(
            piece.index,
            (row,) if columns is None else (row, columns[0]),
            values,
            piece.transposed,
            None if scales is None else scales[blocks],
        )
    return bad, read


def _copy_expert(
    source: Source, tensor: Tensor, piece: Piece, leaf: Filling, check_finite: bool
) -> tuple[int, int]:
    """Does what `_copy` does, of a piece of packed experts."""
    if leaf.held(piece.index, leaf.shape[len(piece.index) :], False) is None:
        return 0, 0
    values = piece.of(source.rows(tensor.name, piece.start, piece.stop))
    leaf.write(piece.index, (0,) * values.ndim, values, False)
    return count_not_finite(values) if check_finite else 0, values.size


def _not_finite(source: Source, name: str, counts: list[tuple[int, int]], fault: str) -> UserError:
    """Returns the UserError that says how many of a tensor's elements have a fault; `counts` has
    (bad elements, elements read) for each piece."""
    bad, read = map(sum, zip(*counts, strict=True))
    entry = source.entries[name]
    here = "" if read == math.prod(entry.shape) else " that this process reads"
    return UserError(
        f"{entry.file}: {bad:,} of the {read:,} elements of tensor {name}{here} are "
        f"{fault}: take a checkpoint without, or allow it with model.check_finite=False "
        "(hf.load: check_finite=False)"
    )


def _check_tied(source: Source, config: ModelConfig) -> None:
    """Raises UserError if the files hold a tied head that differs from the embedding."""
    for start, head in _slices(source, HEAD, 0, config.vocab_size):
        table = source.rows(EMBEDDING, start, start + len(head)).astype(np.float32)
        head = head.astype(np.float32)
        same = (head == table) | ((head != head) & (table != table))  # the loader counts NaN later
        if not same.all():
            raise UserError(
                f"{source.where}: tensor {HEAD} is not the embedding, and config.json ties the "
                "two: set tie_word_embeddings to false there, or remove the tensor"
            )
