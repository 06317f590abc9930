"""GGUF files of the architectures llama, qwen2 and qwen3: tensors and a tokenizer.

GGUF (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) is llama.cpp's format: metadata and
tensors in one file. Besides the names, two things differ from Hugging Face's format.
For llama, llama.cpp pairs neighbouring features in its rotary embedding, so the rows of the query
and key projections are permuted within each head; `GGUF.rows` undoes this. The tokenizer is a list
of tokens and merges, from which `GGUF.write_tokenizer` builds a tokenizer.json. Tensors of all
types that the `gguf` package dequantises are read as float32.

An unknown field of the architecture is refused unless its value changes nothing.

Not done: other architectures, rotary scaling (a tensor rope_freqs), SentencePiece vocabularies,
files in several parts.
"""

from __future__ import annotations

import json
import math
import pathlib
import re
import reprlib
from typing import Any

import numpy as np

from fp8rl_jax.base.errors import UserError, refused
from fp8rl_jax.models.arrays import EMBEDDING, HEAD, LAYER, MODEL
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.hf.config_json import read_config
from fp8rl_jax.models.hf.fields import Fields
from fp8rl_jax.models.hf.gguf_header import check_inside, read_header
from fp8rl_jax.models.hf.loader import load_from
from fp8rl_jax.models.hf.safetensors_file import Entry

_INSTEAD = "take the model's safetensors checkpoint"
_MODEL = {array.gguf: array.hf for array in MODEL}
_LAYER = {array.gguf: array.hf for array in LAYER if array.gguf}
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
_TOKENS = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
_ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Hugging Face's model types, too
# llama.cpp's name of a pre-tokenizer -> what it cuts before the words of GPT-2: nothing, digits, or
# what a pattern matches, instead of these words (Qwen2's tokenizer.json).
_DIGITS = "digits"
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CUTS = {"smollm": _DIGITS, "gpt-2": "", "default": "", "qwen2": _QWEN2}
_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type


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
            self._data = np.memmap(path, np.uint8, "r")
            self._rows = {}  # {name: (type, bytes of a row)}
            for tensor in tensors:
                kind = gguf.GGMLQuantizationType(tensor.kind)
                block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
                row = check_inside(tensor, block, block_bytes, self._data.size)
                self._rows[_name(tensor.name)] = kind, row
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}): fix its name") from None
        except ValueError as error:
            raise UserError(
                f"{path} is no whole GGUF file ({error}): name another, or download it again"
            ) from None
        self.get = self._metadata.get  # a value of the metadata, or None
        self._tensors = {_name(tensor.name): tensor for tensor in tensors}
        self.entries = {
            name: Entry(path, "F32", tensor.shape, 0, 0) for name, tensor in self._tensors.items()
        }
        self._last: tuple[str, np.ndarray] | None = None
        self._check_supported()

    def _check_supported(self) -> None:
        """Raises UserError if this library does not support the model."""
        self._kind = kind = self.get("general.architecture")
        if kind not in _ARCHITECTURES or self.get(f"{kind}.expert_count"):
            kind = f"{kind} with experts" if kind in _ARCHITECTURES else repr(kind)
            raise UserError(
                f"{self.where} is of the architecture {kind}, and only {', '.join(_ARCHITECTURES)} "
                f"without experts are supported: {_INSTEAD}"
            )
        parts = self.get("split.count")
        if parts not in (None, 0, 1):
            raise UserError(
                f"{self.where} is one of {parts} parts: join them with llama.cpp's "
                f"llama-gguf-split --merge, or {_INSTEAD}"
            )
        if "rope_freqs.weight" in self._tensors:
            raise UserError(f"{self.where} has scaled rotary embeddings: {_INSTEAD}")
        for name, value in self._metadata.items():
            field = name.removeprefix(f"{self._kind}.")
            if field == name or field in _SHAPES:
                continue
            neutral = _PASSED_OVER.get(field, ())
            if neutral is not None and value not in neutral:
                raise UserError(
                    f"{self.where}: {name} is {reprlib.repr(value)}, and a model with it is not "
                    f"supported: {_INSTEAD}"
                )

    def fields(self) -> Fields:
        """Returns the metadata as the fields of a config.json."""
        values: dict[str, Any] = {"model_type": self._kind}
        for theirs, name in _SHAPES.items():
            value = self.get(f"{self._kind}.{theirs}")
            if value is not None:
                values[name] = value
        # GGUF stores a float32; the model was published with the shortest decimal for it.
        if isinstance(values.get("rms_norm_eps"), float):
            values["rms_norm_eps"] = float(str(np.float32(values["rms_norm_eps"])))
        for theirs, name in _TOKENS.items():
            values[name] = self.get(f"tokenizer.ggml.{theirs}_token_id")
        turn = self.get("tokenizer.ggml.eot_token_id")
        if turn not in (None, values["eos_token_id"]):  # documents and turns end differently
            ends = (values["eos_token_id"], turn)
            values["eos_token_id"] = [end for end in ends if end is not None]
        table = self._tensors.get(EMBEDDING)
        if table is not None and table.shape:
            values["vocab_size"] = table.shape[0]
        values["tie_word_embeddings"] = HEAD not in self._tensors
        return Fields(values, str(self.where))

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
                    f"{_INSTEAD}"
                )
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
                    f"the package gguf does not dequantise: {_INSTEAD}"
                ) from None
            part = re.search(r"self_attn\.([qk])_proj", name)
            if part and self._kind == "llama":  # neighbouring pairs of a head -> paired halves
                pairs = value.reshape(self._heads[part[1]], -1, 2, value.shape[1])
                value = pairs.swapaxes(1, 2).reshape(value.shape)
            self._last = name, value.astype(np.float32)
        rows = self._last[1][start:stop]
        return rows if columns is None else rows[:, slice(*columns)]

    def write_tokenizer(self, directory: pathlib.Path) -> None:
        """Writes tokenizer.json, and tokenizer_config.json with special tokens and chat template.

        Raises:
          UserError: the vocabulary is of an unsupported kind, or damaged.
        """
        from tokenizers import (
            AddedToken,
            Regex,
            Tokenizer,
            decoders,
            models,
            normalizers,
            pre_tokenizers,
            processors,
        )

        kind, cut = self.get("tokenizer.ggml.model"), self.get("tokenizer.ggml.pre") or "default"
        if kind != "gpt2" or not isinstance(cut, str) or cut not in _CUTS:
            raise UserError(
                f"{self.where}: tokenizer.ggml.model is {kind!r} and tokenizer.ggml.pre {cut!r}; "
                f"only gpt2 with {', '.join(_CUTS)} is supported: {_INSTEAD}"
            )
        tokens = self._list("tokens", str)
        types = self._list("token_type", int) or [1] * len(tokens)
        merges = [pair.split(" ", 1) for pair in self._list("merges", str)]
        if len(types) != len(tokens) or any(len(pair) != 2 for pair in merges):
            raise UserError(
                f"{self.where}: tokenizer.ggml.token_type does not fit its tokens, or a merge is "
                f"no pair: {_INSTEAD}"
            )
        named = {name.removesuffix("_id"): self._token(kind) for kind, name in _TOKENS.items()}
        vocabulary = {token: number for number, token in enumerate(tokens)}
        with refused(f"{self.where} has a vocabulary that cannot be used"):
            model = models.BPE(
                vocabulary, list(map(tuple, merges)), unk_token=self._token("unknown")
            )
            tokenizer = Tokenizer(model)
        steps: list[Any] = []
        if _CUTS[cut] == _DIGITS:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        elif _CUTS[cut]:
            steps.append(pre_tokenizers.Split(Regex(_CUTS[cut]), "isolated"))
            tokenizer.normalizer = normalizers.NFC()
        words = _CUTS[cut] in ("", _DIGITS)  # as GPT-2 cuts them
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        tokenizer.decoder = decoders.ByteLevel()
        for token, number in zip(tokens, types, strict=True):
            if number in (_CONTROL, _USER_DEFINED):
                special = number == _CONTROL
                added = AddedToken(token, special=special, normalized=False)
                (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([added])
        begin = self._token("bos")
        if self.get("tokenizer.ggml.add_bos_token") and begin is not None:
            with refused(f"{self.where} has a first token that cannot be used"):
                tokenizer.post_processor = processors.TemplateProcessing(
                    single=[begin, "$A"], special_tokens=[(begin, vocabulary[begin])]
                )
        tokenizer.save(str(directory / "tokenizer.json"))
        about = {"tokenizer_class": "PreTrainedTokenizerFast"}
        about |= {name: token for name, token in named.items() if token is not None}
        template = self.get("tokenizer.chat_template")
        if isinstance(template, str):
            about["chat_template"] = template
        (directory / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")

    def _list(self, name: str, kind: type) -> list[Any]:
        """Returns the list tokenizer.ggml.NAME, or [] if it is absent."""
        values = self.get(f"tokenizer.ggml.{name}")
        if values is None:
            return []
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise UserError(f"{self.where}: tokenizer.ggml.{name} is no such list: {_INSTEAD}")
        return values

    def _token(self, kind: str) -> str | None:
        """Returns the token with id tokenizer.ggml.KIND_token_id, or None if that is absent."""
        number, tokens = self.get(f"tokenizer.ggml.{kind}_token_id"), self._list("tokens", str)
        if number is None:
            return None
        if not isinstance(number, int) or not 0 <= number < len(tokens):
            raise UserError(
                f"{self.where}: tokenizer.ggml.{kind}_token_id is {number!r}, and there are "
                f"{len(tokens)} tokens: {_INSTEAD}"
            )
        return tokens[number]


def _name(name: str) -> str:
    """Maps 'blk.3.attn_norm.weight' to 'model.layers.3.input_layernorm.weight'; keeps others."""
    part = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    if part and part[2] in _LAYER:
        return f"model.layers.{part[1]}.{_LAYER[part[2]]}"
    return _MODEL.get(name, name)
