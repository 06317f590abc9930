"""GGUF files of the architectures llama, qwen2, qwen3 and gemma3: configuration and tensors.

GGUF (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) is llama.cpp's format: metadata and
tensors in one file. Besides the names, this differs from Hugging Face's format, and is undone here:

* llama: neighbouring features are rotated together, so the rows of the query and key projections
  are permuted within each head. Of a scaled rotary embedding the file has the divisors of the
  frequencies alone, as a tensor.
* gemma3: norms are stored as 1 + weight. Which layers have a window, and the factor of the scores,
  stand in llama.cpp's code.

`gguf_tokenizer` writes the tokenizer. Tensors of all types that the `gguf` package dequantises are
read as float32. An unknown field of the architecture is refused unless its value changes nothing.

Not done: other architectures, files in several parts.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.models.arrays import EMBEDDING, HEAD, LAYER, MODEL
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.hf.config_json import read_config
from fp8rl_jax.models.hf.fields import Fields
from fp8rl_jax.models.hf.gguf_header import check_inside, read_header
from fp8rl_jax.models.hf.loader import load_from
from fp8rl_jax.models.hf.safetensors_file import Entry
from fp8rl_jax.models.rope import frequencies

INSTEAD = "take the model's safetensors checkpoint"
_MODEL = {array.gguf: array.hf for array in MODEL}
_GEMMA3, _LAYERS_OF_27B = "gemma3", 62
_FREQUENCIES = "rope_freqs.weight"
# Of the bands of Llama 3.1 and 3.2, whose factor alone differs between models.
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_SHAPES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "context_length": "max_position_embeddings",
}
_GEMMA3_SHAPES = {
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",  # 6 where it is absent
    "rope.freq_base_swa": "rope_local_base_freq",
}
_SCALING = "gemma3.rope.scaling."
# Further fields of the architecture, with the values that change nothing; None: any value.
_PASSED_OVER: dict[str, tuple[Any, ...] | None] = {
    "vocab_size": None,
    "tensor_data_layout": None,
    "rope.dimension_count": None,  # checked below
    "attention.value_length": None,  # checked below
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
    "rope.scaling.type": ("none", "linear"),  # with the factor below
    "rope.scaling.factor": (0.0, 1.0),
    "rope.scale_linear": (0.0, 1.0),  # old name of the factor
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.finetuned": (False,),
    "rope.scaling.original_context_length": None,  # read only with a factor
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "attention.sliding_window": (0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "attention.scale": (0.0,),
    "use_parallel_residual": (False,),
    "pooling_type": (0,),
}
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>")
TOKENS = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
_ARCHITECTURES = {  # {llama.cpp's: Hugging Face's model type}
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    _GEMMA3: "gemma3_text",
}


class GGUF:
    """A GGUF file as a `Source` of tensors, under Hugging Face's names.

    Args:
      path: the file.

    Raises:
      UserError: the package gguf is missing, or the file is damaged or of another architecture.
    """

    def __init__(self, path: pathlib.Path):
        try:
            import gguf
        except ImportError:
            raise UserError(
                f"{path} is a GGUF file, and reading it needs the package gguf: "
                "pip install 'fp8rl_jax[gguf]'"
            ) from None
        self.where, self._dequantize = path, gguf.quants.dequantize
        try:
            self._metadata, tensors = read_header(path)
            self.get = self._metadata.get  # a value of the metadata, or None
            self._data = np.memmap(path, np.uint8, "r")
            self._names = _names(self.get("general.architecture"))
            self._rows = {}  # {name: (type, bytes of a row)}
            for tensor in tensors:
                kind = gguf.GGMLQuantizationType(tensor.kind)
                block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
                row = check_inside(tensor, block, block_bytes, self._data.size)
                self._rows[self._name(tensor.name)] = kind, row
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}): fix its name") from None
        except ValueError as error:
            raise UserError(
                f"{path} is no whole GGUF file ({error}): name another, or download it again"
            ) from None
        self._tensors = {self._name(tensor.name): tensor for tensor in tensors}
        self.entries = {
            name: Entry(path, "F32", tensor.shape, 0, 0)
            for name, tensor in self._tensors.items()
            if name != _FREQUENCIES
        }
        self._last: tuple[str, np.ndarray] | None = None
        self._check_supported()

    def _name(self, name: str) -> str:
        """Maps 'blk.3.attn_k.weight' to 'model.layers.3.self_attn.k_proj.weight'; keeps others."""
        part = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        if part and part[2] in self._names:
            return f"model.layers.{part[1]}.{self._names[part[2]]}"
        return _MODEL.get(name, name)

    def _check_supported(self) -> None:
        """Raises UserError if this library does not support the model."""
        self._kind = kind = self.get("general.architecture")
        known = isinstance(kind, str) and kind in _ARCHITECTURES
        if not known or self.get(f"{kind}.expert_count"):
            what = f"{kind} with experts" if known else reprlib.repr(kind)
            raise UserError(
                f"{self.where} is of the architecture {what}, and only {', '.join(_ARCHITECTURES)} "
                f"without experts are supported: {INSTEAD}"
            )
        parts = self.get("split.count")
        if parts not in (None, 0, 1):
            raise UserError(
                f"{self.where} is one of {parts} parts: join them with llama.cpp's "
                f"llama-gguf-split --merge, or {INSTEAD}"
            )
        if _FREQUENCIES in self._tensors and kind != "llama":
            raise UserError(
                f"{self.where}: {_FREQUENCIES} scales the rotary embedding, which is supported in "
                f"the architecture llama alone: {INSTEAD}"
            )
        self._shapes = {**_SHAPES, **(_GEMMA3_SHAPES if kind == _GEMMA3 else {})}
        read = set(self._shapes)
        if kind == _GEMMA3 and self.get(f"{_SCALING}type") == "linear":
            read.add("rope.scaling.factor")
        for name, value in self._metadata.items():
            field = name.removeprefix(f"{self._kind}.")
            if field == name or field in read:
                continue
            neutral = _PASSED_OVER.get(field, ())
            if neutral is not None and value not in neutral:
                raise UserError(
                    f"{self.where}: {name} is {reprlib.repr(value)}, and a model with it is not "
                    f"supported: {INSTEAD}"
                )

    def fields(self) -> Fields:
        """Returns the metadata as the fields of a config.json."""
        values: dict[str, Any] = {"model_type": _ARCHITECTURES[str(self._kind)]}
        for theirs, name in self._shapes.items():
            value = self.get(f"{self._kind}.{theirs}")
            if value is None:
                continue
            if not isinstance(value, (int, float)):
                raise UserError(
                    f"{self.where}: {self._kind}.{theirs} is {reprlib.repr(value)}, and only one "
                    f"number for all layers is supported: {INSTEAD}"
                )
            values[name] = value
        # GGUF stores a float32; the model was published with the shortest decimal for it.
        if isinstance(values.get("rms_norm_eps"), float):
            values["rms_norm_eps"] = float(str(np.float32(values["rms_norm_eps"])))
        for theirs, name in TOKENS.items():
            values[name] = self.get(f"tokenizer.ggml.{theirs}_token_id")
        turn = self.end_of_turn()
        if turn not in (None, values["eos_token_id"]):  # documents and turns end differently
            ends = (values["eos_token_id"], turn)
            values["eos_token_id"] = [end for end in ends if end is not None]
        table = self._tensors.get(EMBEDDING)
        if table is not None and table.shape:
            values["vocab_size"] = table.shape[0]
        values["tie_word_embeddings"] = HEAD not in self._tensors
        if self._kind == _GEMMA3:
            values |= self._gemma3_fields(values)
        if _FREQUENCIES in self._tensors:
            factor = float(self._divisors().max(initial=1.0))
            values["rope_scaling"] = {**_LLAMA3, "factor": factor}
        return Fields(values, str(self.where))

    def end_of_turn(self) -> int | None:
        """Returns the token that ends a turn: the stated one, else, as llama.cpp, by its text."""
        stated, tokens = (self.get(f"tokenizer.ggml.{name}") for name in ("eot_token_id", "tokens"))
        if stated is not None or not isinstance(tokens, list):
            return stated
        return next((tokens.index(text) for text in _TURN_ENDS if text in tokens), None)

    def _gemma3_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what stands in llama.cpp's code or in several fields."""
        found: dict[str, Any] = {"hidden_activation": "gelu_pytorch_tanh"}
        found["sliding_window"] = values.get("sliding_window", 0)  # absent: no layer has one
        factor = self.get(f"{_SCALING}factor")
        if self.get(f"{_SCALING}type") == "linear" and factor:
            found["rope_scaling"] = {"rope_type": "linear", "factor": factor}
        found["query_pre_attn_scalar"] = values.get("head_dim")
        heads, width = values.get("num_attention_heads"), values.get("hidden_size")
        if values.get("num_hidden_layers") == _LAYERS_OF_27B and heads and width:
            found["query_pre_attn_scalar"] = width // heads
        return found

    def _divisors(self) -> np.ndarray:
        """Returns what the frequencies of the rotary embedding are divided by, (head_dim / 2,)."""
        tensor = self._tensors[_FREQUENCIES]
        if len(tensor.shape) != 1 or not tensor.shape[0]:
            raise UserError(f"{self.where}: {_FREQUENCIES} is no list of divisors: {INSTEAD}")
        return self.rows(_FREQUENCIES, 0, tensor.shape[0])

    def _check_frequencies(self, config: ModelConfig) -> None:
        """Raises UserError if the bands of Llama 3.1 do not give the file's frequencies."""
        plain = frequencies(dataclasses.replace(config, rope_type="default"))
        divisors = plain / frequencies(config)
        found = self._divisors()
        if found.shape != divisors.shape or not np.allclose(found, divisors, rtol=1e-4):
            raise UserError(
                f"{self.where}: {_FREQUENCIES} has other bands than Llama 3.1 and 3.2: {INSTEAD}"
            )

    def load(self, dtype: str) -> tuple[ModelConfig, Any]:
        """Reads the model's configuration and parameters, in the form of `loader.load`.

        Raises:
          UserError: a tensor is missing, superfluous, of a wrong shape or of an unknown type.
        """
        config = read_config(self.fields())
        for name in ("rope.dimension_count", "attention.value_length"):
            size = self.get(f"{self._kind}.{name}")
            if size not in (None, config.head_dim):
                raise UserError(
                    f"{self.where}: {self._kind}.{name} is {size}, and heads have "
                    f"{config.head_dim} features; whole heads of one size are supported here: "
                    f"{INSTEAD}"
                )
        if _FREQUENCIES in self._tensors:
            self._check_frequencies(config)
        self._heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
        return config, load_from(self, config, dtype)

    def rows(
        self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None
    ) -> np.ndarray:
        if self._last is None or self._last[0] != name:
            tensor, (kind, row) = self._tensors[name], self._rows[name]
            size = math.prod(tensor.shape[:-1]) * row
            data = self._data[tensor.start : tensor.start + size]
            try:
                with np.errstate(all="ignore"):  # the loader counts NaN and infinity
                    value = self._dequantize(data.reshape(*tensor.shape[:-1], row), kind)
            except NotImplementedError:
                raise UserError(
                    f"{self.where}: tensor {tensor.name} has type {kind.name}, which "
                    f"the package gguf does not dequantise: {INSTEAD}"
                ) from None
            part = re.search(r"self_attn\.([qk])_proj", name)
            if part and self._kind == "llama":  # neighbouring pairs of a head -> paired halves
                pairs = value.reshape(self._heads[part[1]], -1, 2, value.shape[1])
                value = pairs.swapaxes(1, 2).reshape(value.shape)
            value = value.astype(np.float32)
            if self._kind == _GEMMA3 and name.endswith("norm.weight"):
                value -= 1
            self._last = name, value
        rows = self._last[1][start:stop]
        return rows if columns is None else rows[:, slice(*columns)]


def _names(architecture: Any) -> dict[str, str]:
    """Returns {llama.cpp's name: Hugging Face's} of a layer's tensors."""
    other = "one_norm" if architecture == _GEMMA3 else "sandwich"  # two norms, or four, of one name
    return {row.gguf: row.hf for row in LAYER if row.gguf and row.sizes != other}
