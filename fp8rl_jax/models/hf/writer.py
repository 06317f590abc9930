"""Writes parameters as a checkpoint in Hugging Face's format, completely or not at all.

A temporary directory next to the destination is filled, a tensor at a time, and renamed at the end;
a failure before that leaves nothing. Types::

    dtype        linear layers            embedding, head    norms, routers       correction bias
    'float32'    F32                      F32                F32                  F32
    'bfloat16'   BF16                     BF16               BF16                 F32
    'fp8'        F8_E4M3 and scales       BF16               as the leaf: F32,    F32
                                                             or BF16

FP8 bytes are `quantize` of the weight rounded to bf16, in blocks of 128x128, as in the sampler.
Norms and routers, float32 in every form of our parameters, stay so under 'fp8'. QArray leaves keep
their bytes under 'fp8' and are dequantised otherwise.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.kernels import round_bf16
from fp8rl_jax.models.arrays import LINEAR, SMALL, leaf_shapes
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.families.fields import CONFIG
from fp8rl_jax.models.hf.blockwise import BLOCKS, SCALE_SUFFIX, quantization_config, scale_shape
from fp8rl_jax.models.hf.config_json import config_json
from fp8rl_jax.models.hf.finite import count_not_finite
from fp8rl_jax.models.hf.loader import dtype_name
from fp8rl_jax.models.hf.reader import FP8, INDEX, SINGLE
from fp8rl_jax.models.hf.safetensors_file import Output, write_file
from fp8rl_jax.models.hf.tables import Piece, Tensor, model_tensors
from fp8rl_jax.models.stacks import Path, path_of
from fp8rl_jax.quant import QArray, quantize


@dataclasses.dataclass(frozen=True)
class Unread:
    """A parameter array that `save` reads only when it writes it.

    Attributes:
      shape, dtype: shape and dtype of the array.
      read: function that returns the array.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Beside:
    """What a checkpoint holds beside the shapes and weights of a model.

    Attributes:
      fields: further fields of config.json, such as eos_token_id and max_position_embeddings.
      add_files: function that is called with the directory before it is renamed, to add files.
    """

    fields: Mapping[str, Any] | None = None
    add_files: Callable[[pathlib.Path], None] = lambda directory: None


_BF16 = np.dtype(jnp.bfloat16)
_F32 = np.dtype(np.float32)
_BIAS = "mlp.gate.e_score_correction_bias"


def save(
    path: str | pathlib.Path,
    config: ModelConfig,
    params: Any,
    *,
    dtype: Any = "bfloat16",
    max_shard_gb: float = 5.0,
    beside: Beside = Beside(),
    check_finite: bool = True,
) -> pathlib.Path:
    """Writes config.json and safetensors files that transformers and inference engines read.

    Args:
      path: the directory to make; it must not exist.
      config: shapes.
      params: tree as from `load` or `init_params`: arrays, QArrays for linear layers, or `Unread`
        arrays, of which only those of one tensor are in memory at a time.
      dtype: 'float32', 'bfloat16' or 'fp8'; see the module.
      max_shard_gb: largest size of a file in 10^9 bytes; several files get an index.
      beside: further fields of config.json, and further files.
      check_finite: whether to refuse tensors with NaN or infinity, also after rounding to `dtype`.

    Returns:
      The directory.

    Raises:
      UserError: the directory exists or cannot be made, no model type has the rules of `config`, or
        the parameters do not fit `config`, or are not finite.
    """
    name = dtype_name(dtype)
    target = pathlib.Path(path)
    check_target(target, max_shard_gb)
    tensors = model_tensors(config)
    about = config_json(config, "float32" if name == "float32" else "bfloat16", beside.fields)
    check_type(config, name)
    if name == "fp8":
        about["quantization_config"] = quantization_config(tensors)
    # Tensors of one stack of layers follow each other, so that it is read once.
    tensors = sorted(tensors, key=lambda tensor: tensor.pieces[0].path)
    leaves = _Leaves(_checked_leaves(config, params))
    outputs = [_output(tensor, leaves, name, check_finite) for tensor in tensors]

    def fill(directory: pathlib.Path) -> None:
        (directory / CONFIG).write_text(json.dumps(about, indent=2) + "\n")
        _write_shards(directory, outputs, max_shard_gb * 1e9)
        beside.add_files(directory)

    return make_directory(target, fill)


def make_directory(target: pathlib.Path, fill: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """Makes a directory whole or not at all: `fill` gets another one, which is then renamed.

    Raises:
      UserError: it cannot be made.
    """
    partial = target.parent / f".{target.name}.{os.getpid()}"
    try:
        partial.mkdir(parents=True)
        fill(partial)
        os.rename(partial, target)
    except OSError as error:
        raise UserError(
            f"{target} cannot be written ({error.strerror}): make room for it, or name another "
            "directory"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def check_target(target: pathlib.Path, max_shard_gb: float = 1.0) -> None:
    """Checks the target of `save`; callers do so before a long load.

    Raises:
      UserError: the directory exists, or `max_shard_gb` is not above 0.
    """
    if os.path.lexists(target):
        raise UserError(f"{target} exists already; name another directory, or remove it")
    if not max_shard_gb > 0:
        raise UserError(f"max_shard_gb is {max_shard_gb}; write a number above 0")


def check_type(config: ModelConfig, dtype: str) -> None:
    """Checks that a model can be written as `dtype` (`save`); callers do so before a long load.

    Raises:
      UserError: 'fp8', and one tensor holds all experts of a layer.
    """
    if dtype == "fp8" and config.moe_bias:
        raise UserError(
            "dtype is 'fp8', and files of gpt-oss hold all experts of a layer in one tensor, which "
            "has no FP8 form in Hugging Face's format: write 'bf16'"
        )


def _checked_leaves(config: ModelConfig, params: Any) -> dict[Path, Any]:
    """Returns {path: array, QArray or Unread}, checked against the shapes of the model."""
    leaves = {
        path_of(keys): leaf
        for keys, leaf in jax.tree_util.tree_leaves_with_path(
            params, is_leaf=lambda x: isinstance(x, QArray | Unread)
        )
        if all(hasattr(key, "key") for key in keys)
    }
    shapes = leaf_shapes(config)
    for path in [*shapes, *leaves]:
        name = ".".join(path)
        if path not in leaves:
            raise UserError(
                f"params has no leaf {name}, which a model of this config has: give the tree of "
                "`init_params`, not one that is cut into runs of layers or bound to scales"
            )
        if path not in shapes:
            raise UserError(f"params has a leaf {name}, for which this config has no place")
        leaf = leaves[path]
        if leaf.shape != shapes[path]:
            raise UserError(
                f"params: leaf {name} has shape {leaf.shape}, and this config makes it "
                f"{shapes[path]}; give the config of these parameters"
            )
        if not all(getattr(x, "is_fully_addressable", True) for x in jax.tree.leaves(leaf)):
            raise UserError(
                f"params: leaf {name} is on devices of several processes: gather it to one first"
            )
        if isinstance(leaf, QArray) and (leaf.block_shape, leaf.qvalue.dtype) != (BLOCKS, FP8):
            raise UserError(
                f"params: leaf {name} is {leaf.qvalue.dtype} in blocks of {leaf.block_shape}, "
                f"and checkpoints hold float8_e4m3fn in blocks of {BLOCKS}: save the masters"
            )
    return leaves


class _Leaves:
    """Parameters by path; reads `Unread` ones and keeps those of the last tensor in memory."""

    def __init__(self, leaves: dict[Path, Any]):
        self._leaves = leaves
        self._read: dict[Path, Any] = {}

    def __getitem__(self, path: Path) -> Any:
        """Returns the leaf that `save` was given, perhaps `Unread`."""
        return self._leaves[path]

    def of(self, tensor: Tensor) -> dict[Path, Any]:
        """Returns {path: array or QArray} for the pieces of a tensor."""
        paths = {piece.path for piece in tensor.pieces}
        self._read = {path: self._read[path] for path in paths & set(self._read)}
        for path in paths - set(self._read):
            leaf = self._leaves[path]
            self._read[path] = leaf.read() if isinstance(leaf, Unread) else leaf
        return self._read


def _output(tensor: Tensor, leaves: _Leaves, dtype: str, check_finite: bool) -> Output:
    """Returns the `Output` of a tensor: names, shapes and dtypes, and a function that makes the
    values, with scales if written as FP8."""

    def checked(value: np.ndarray) -> np.ndarray:
        if check_finite and (bad := count_not_finite(value)):
            raise UserError(
                f"params: {bad:,} of the {value.size:,} elements of tensor {tensor.name} are NaN "
                f"or infinite as {value.dtype}, so nothing is written: take weights from before "
                "they became so (hf.save: check_finite=False writes them)"
            )
        return value

    def rounded(dtype: np.dtype) -> np.ndarray:
        arrays = leaves.of(tensor)
        return checked(_joined(tensor, lambda p: _take(arrays[p.path], p.index, dtype)))

    if dtype != "fp8" or tensor.role != LINEAR:
        written = _type(tensor, leaves, dtype)
        parts = {tensor.name: (tensor.shape, written)}
        return Output(parts, lambda: (rounded(written),))
    scales = tensor.module + SCALE_SUFFIX
    parts = {tensor.name: (tensor.shape, FP8), scales: (scale_shape(tensor.shape), _F32)}
    if not isinstance(leaves[tensor.pieces[0].path], QArray):
        return Output(parts, lambda: tuple(map(np.asarray, _quantiser()(rounded(_BF16)))))
    for piece in tensor.pieces:
        if piece.start % BLOCKS[0]:
            raise UserError(
                f"params: leaf {'.'.join(piece.path)} is FP8 by head, and tensor {tensor.name} has "
                f"blocks of {BLOCKS[0]} rows across heads: save the masters"
            )

    def stored(part: str) -> np.ndarray:
        return _joined(tensor, lambda p: _take(getattr(leaves[p.path], part), p.index, None))

    return Output(parts, lambda: (checked(stored("qvalue")), checked(stored("scale"))))


def _type(tensor: Tensor, leaves: _Leaves, dtype: str) -> np.dtype:
    if dtype == "float32" or tensor.name.endswith(_BIAS):
        return _F32
    if dtype == "fp8" and tensor.role in SMALL:
        return _BF16 if leaves[tensor.pieces[0].path].dtype == _BF16 else _F32
    return _BF16


def _joined(tensor: Tensor, take: Callable[[Piece], np.ndarray]) -> np.ndarray:
    """Joins the pieces of a tensor, in a checkpoint's orientation."""
    if tensor.packed:
        first, *_ = values = [take(piece) for piece in tensor.pieces]
        whole = np.empty(tensor.shape, first.dtype)
        for piece, value in zip(tensor.pieces, values, strict=True):
            piece.of(whole[piece.start : piece.stop])[...] = value
        return whole
    parts = [take(piece).T if piece.transposed else take(piece) for piece in tensor.pieces]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _take(leaf: Any, index: tuple[int, ...], dtype: np.dtype | None) -> np.ndarray:
    """Returns a matrix of a stack in `dtype`; shards are joined on the host."""
    if isinstance(leaf, QArray):
        return np.asarray(_program(dtype)(jax.tree.map(lambda x: _take(x, index, None), leaf), ()))
    if isinstance(leaf, np.ndarray):
        return np.asarray(_program(dtype)(leaf[index], ()))
    if isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1:
        return _take_from_shards(leaf, index, dtype)
    return np.asarray(_program(dtype)(leaf, tuple(np.int32(i) for i in index)))


def _take_from_shards(
    leaf: jax.Array, index: tuple[int, ...], dtype: np.dtype | None
) -> np.ndarray:
    matrix = np.empty(leaf.shape[len(index) :], dtype or leaf.dtype)
    for shard in leaf.addressable_shards:
        spans = [s.indices(n)[:2] for s, n in zip(shard.index, leaf.shape, strict=True)]
        front = spans[: len(index)]
        held = all(start <= i < stop for i, (start, stop) in zip(index, front, strict=True))
        if held and shard.replica_id == 0:
            in_shard = tuple(i - start for i, (start, _) in zip(index, front, strict=True))
            inner = tuple(slice(start, stop) for start, stop in spans[len(index) :])
            matrix[inner] = _take(shard.data, in_shard, dtype)
    return matrix


@functools.cache
def _program(dtype: np.dtype | None):
    """Returns the program that takes a matrix out of a stack, dequantised, in `dtype`."""

    def take(leaf, index):
        for axis in index:
            leaf = lax.dynamic_index_in_dim(leaf, axis, keepdims=False)
        value = leaf.dequantize() if isinstance(leaf, QArray) else leaf
        if dtype is None:
            return value
        return round_bf16(value) if dtype == _BF16 else value.astype(dtype)

    return exact_jit(take)


@functools.cache
def _quantiser():
    """Returns the program that quantises a bf16 matrix (out, in) to E4M3 bytes, float32 scales."""
    return exact_jit(lambda matrix: jax.tree.leaves(quantize(matrix, BLOCKS)))


def _write_shards(directory: pathlib.Path, outputs: list[Output], limit: float) -> None:
    """Writes files of at most `limit` bytes of tensors, or one tensor; several get an index."""
    shards: list[list[Output]] = [[]]
    size = 0
    for output in outputs:
        if shards[-1] and size + output.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(output)
        size += output.nbytes
    if len(shards) == 1:
        write_file(directory / SINGLE, shards[0])
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_file(directory / file, shard)
        places |= {name: file for output in shard for name in output.parts}
    index = {
        "metadata": {"total_size": sum(output.nbytes for output in outputs)},
        "weight_map": places,
    }
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
