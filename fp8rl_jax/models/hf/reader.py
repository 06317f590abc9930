"""Reads a checkpoint's files and checks that their tensors are those of the model.

All checks come before any tensor is read: files against the index, headers against the files'
sizes, names, shapes and types against the model's table. Each error message names the tensor and
the file.
"""

from __future__ import annotations

import math
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.json_file import read_json
from fp8rl_jax.models.arrays import EMBEDDING, HEAD, LINEAR
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.hf.blockwise import SCALE_SUFFIX, scale_shape
from fp8rl_jax.models.hf.safetensors_file import DTYPES, Entry, read_header, read_rows
from fp8rl_jax.models.hf.tables import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Names of weight files of other programs, or of adapters.
_OTHER_WEIGHTS = re.compile(
    r".*\.(safetensors|gguf|ggml|h5|msgpack)|(pytorch_model|adapter_model|model|consolidated).*"
    r"\.(bin|pth|pt)"
)
FP8 = DTYPES["F8_E4M3"]
_LONGEST_INDEX = 100_000_000  # bytes, as a header


class Source(Protocol):
    """A source of tensors for the loader.

    Attributes:
      where: the directory or file, for errors.
      entries: {name: Entry} of the tensors.
    """

    where: pathlib.Path
    entries: dict[str, Entry]

    def rows(
        self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None
    ) -> np.ndarray:
        """Returns rows start..stop, or some columns of them, of a tensor that passed `check`."""


class Checkpoint:
    """The safetensors files of a directory, as a `Source`.

    Args:
      directory: contains `model.safetensors`, or shards and `model.safetensors.index.json`.

    Raises:
      UserError: files are missing, are damaged, do not fit the index, or the directory contains a
        second set of weights.
    """

    def __init__(self, directory: pathlib.Path):
        self.where = directory
        self.entries = {}
        index = directory / INDEX
        if index.is_file():
            weights = _weight_map(index)
            self._check_alone(INDEX, set(weights.values()))
            self._read_shards(index, weights)
        elif (directory / SINGLE).is_file():
            self._check_alone(SINGLE, {SINGLE})
            self.entries = read_header(directory / SINGLE)
        else:
            self._refuse()

    def rows(
        self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None
    ) -> np.ndarray:
        return read_rows(self.entries[name], start, stop, columns)

    def _check_alone(self, name: str, files: set[str]) -> None:
        """Raises UserError if there are weights besides `files`, which `name` lists."""
        for other in _names(self.where):
            if other not in files and _OTHER_WEIGHTS.fullmatch(other):
                raise UserError(
                    f"{self.where} has two sets of weights, {name} and {other}: keep the one that "
                    "is meant in this directory (an adapter is merged first)"
                )

    def _refuse(self) -> None:
        """Raises UserError of a directory without weights that are read."""
        names = _names(self.where)
        gguf = [name for name in names if name.endswith(".gguf")]
        if gguf:
            raise UserError(
                f"{self.where} has no {SINGLE} and no {INDEX}, but {', '.join(gguf)}, which are "
                "not read: take the model's safetensors checkpoint, or write one by transformers "
                "(docs/checkpoints.md, GGUF)"
            )
        if any(name.endswith(".safetensors") for name in names):
            raise UserError(
                f"{self.where} has safetensors files but neither {SINGLE} nor {INDEX}, which "
                "says what is in them: download the index too"
            )
        if any(name.endswith((".bin", ".pth", ".pt")) for name in names):
            raise UserError(
                f"{self.where} has weights in torch's own format only: save them again as "
                "safetensors (transformers' save_pretrained does)"
            )
        raise UserError(f"{self.where} has no {SINGLE} and no {INDEX}: download the weights")

    def _read_shards(self, index: pathlib.Path, weights: dict[str, str]) -> None:
        held: dict[str, dict[str, Entry]] = {}
        for name, file in weights.items():
            if file not in held:
                if not os.path.isfile(self.where / file):  # False for impossible names
                    raise UserError(
                        f"{self.where} lacks the file {file}, which {INDEX} names for tensor "
                        f"{name}: download it"
                    )
                held[file] = read_header(self.where / file)
            if name not in held[file]:
                raise UserError(
                    f"{index} places tensor {name} in {file}, which does not hold it: download "
                    "both again"
                )
            self.entries[name] = held[file][name]
        for file, entries in held.items():
            for name in entries:
                if weights.get(name) != file:
                    raise UserError(
                        f"{self.where / file} holds tensor {name}, which {INDEX} does not "
                        "place there: download both again"
                    )


def _names(directory: pathlib.Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def _weight_map(index: pathlib.Path) -> dict[str, str]:
    """Reads {tensor: file} from an index; raises UserError if it is not valid."""
    try:
        weights = read_json(index, _LONGEST_INDEX)["weight_map"]
        items = list(weights.items())
    except OSError as error:
        raise UserError(f"{index} cannot be read ({error.strerror}): fix its permissions") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{index} is no index with a weight_map: download it again") from None
    for name, file in items:
        if not isinstance(file, str) or pathlib.PurePath(file).name != file:
            raise UserError(
                f"{index} places tensor {name} in {file!r}, which is no name of a file beside it: "
                "download it again"
            )
    return weights


def check_sizes(source: Source, config: ModelConfig) -> None:
    """Refuses a model that is larger than the files, before its tensors are listed one by one.

    Layers share no matrices, so one matrix of all layers together has at most as many elements as
    the files. This bounds time and memory of all later steps, whatever a config.json says.

    Raises:
      UserError: the model needs more elements; the message names the fields.
    """
    shapes = [entry.shape for entry in source.entries.values() if entry.dtype in DTYPES]
    held = sum(map(math.prod, shapes))
    width = config.hidden_size
    layers = config.num_hidden_layers
    sparse = layers - config.dense_layers if config.num_experts else 0
    heads = config.num_attention_heads
    needed = {
        "vocab_size and hidden_size": config.vocab_size * width,
        "num_hidden_layers": layers * width,
    }
    if config.latent:
        features = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
        latents = config.kv_lora_rank + config.q_lora_rank + config.qk_rope_head_dim
        needed["num_hidden_layers and the ranks of latents"] = layers * width * latents
        needed["num_attention_heads and the widths of heads"] = layers * max(
            features * (config.q_lora_rank or width),
            heads * config.v_head_dim * width,
            heads * (config.qk_nope_head_dim + config.v_head_dim) * config.kv_lora_rank,
        )
    else:
        features = heads * config.head_dim
        needed["num_attention_heads and head_dim"] = layers * width * features
    needed["intermediate_size"] = (layers - sparse) * width * config.intermediate_size
    experts = max(config.num_experts, 1) + config.n_shared_experts
    needed["num_experts and moe_intermediate_size"] = (
        sparse * experts * width * config.moe_intermediate_size
    )
    for names, count in needed.items():
        if count > held:
            for name, entry in source.entries.items():
                if entry.dtype not in DTYPES:  # not counted above: the likely reason
                    _check_type(entry, name, may_be_fp8=True)
            raise UserError(
                f"{source.where}: {names} of config.json make a model of {count:,} numbers or "
                f"more, and the files hold {held:,}: download all files again, or take the "
                "config.json that belongs to them"
            )


def check(
    source: Source, config: ModelConfig, tensors: list[Tensor], fp8: bool, further_layers: int
) -> None:
    """Checks that a source has exactly the tensors of a model.

    Args:
      source: the tensors to check.
      config, tensors: shapes and expected tensors of the model.
      fp8: whether config.json declares FP8 linear layers.
      further_layers: number of multi-token prediction layers that the files may also hold.

    Raises:
      UserError: a tensor is missing or superfluous, or has a wrong shape or type.
    """
    entries = source.entries
    scales = set()
    for tensor in tensors:
        entry = entries.get(tensor.name)
        if entry is None:
            raise UserError(
                f"{source.where} has no tensor {tensor.name}, which a model of its config.json "
                "needs: download all files again, or fix config.json"
            )
        _check_type(entry, tensor.name, tensor.role == LINEAR)
        _check_shape(entry, tensor.name, tensor.shape)
        if DTYPES[entry.dtype] == FP8:
            scales.add(_check_scale(entries, entry, tensor, fp8))
    known = {tensor.name for tensor in tensors} | scales
    if HEAD in entries and HEAD not in known:  # tied: the loader compares it with the embedding
        _check_type(entries[HEAD], HEAD, may_be_fp8=False)
        _check_shape(entries[HEAD], HEAD, entries[EMBEDDING].shape)
    for name, entry in entries.items():
        if name not in known and not _passed_over(name, config, further_layers):
            raise UserError(
                f"{entry.file} holds tensor {name}, for which the model of config.json has no "
                "place: take the config.json that belongs to these files, or remove the tensor"
            )


def _passed_over(name: str, config: ModelConfig, further_layers: int) -> bool:
    """Returns whether a tensor that the model does not need is allowed.

    Allowed are rotary frequencies, which follow from config.json; a tied head, which equals the
    embedding; and the multi-token prediction layers of DeepSeek and GLM, numbered after the
    model's.
    """
    if name.endswith("rotary_emb.inv_freq") or (name == HEAD and config.tie_word_embeddings):
        return True
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    after = range(config.num_hidden_layers, config.num_hidden_layers + further_layers)
    return bool(layer and int(layer[1]) in after)


def _check_type(entry: Entry, name: str, may_be_fp8: bool) -> None:
    allowed = [dtype for dtype in DTYPES if may_be_fp8 or DTYPES[dtype] != FP8]
    if entry.dtype not in allowed:
        raise UserError(
            f"{entry.file}: tensor {name} has type {entry.dtype}, and {', '.join(allowed)} are "
            "supported there: take a checkpoint in one of these"
        )


def _check_shape(entry: Entry, name: str, shape: tuple[int, ...]) -> None:
    if entry.shape != shape:
        raise UserError(
            f"{entry.file}: tensor {name} has shape {list(entry.shape)}, and config.json makes it "
            f"{list(shape)}: take the config.json that belongs to these files"
        )


def _check_scale(entries: Mapping[str, Entry], entry: Entry, tensor: Tensor, fp8: bool) -> str:
    """Checks the scales of an FP8 tensor and returns their name."""
    if not fp8:
        raise UserError(
            f"{entry.file}: tensor {tensor.name} is F8_E4M3, but config.json has no "
            "quantization_config that gives its blocks: take the config.json that belongs to it"
        )
    name = tensor.module + SCALE_SUFFIX
    scale = entries.get(name)
    if scale is None:
        raise UserError(
            f"{entry.file}: tensor {tensor.name} is F8_E4M3, and there is no {name} with its "
            "scales: download all files again"
        )
    if scale.dtype not in ("F32", "BF16"):
        raise UserError(
            f"{scale.file}: scales {name} have type {scale.dtype}, and F32 and BF16 are supported: "
            "take a checkpoint with one of these"
        )
    _check_shape(scale, name, scale_shape(tensor.shape))
    return name
