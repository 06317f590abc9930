"""GGUF files of the llama architecture, as a source of tensors and of a tokenizer.

GGUF (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) is llama.cpp's format: metadata and
tensors in one file. Two things differ from a checkpoint in Hugging Face's format beside the names.
llama.cpp pairs neighbouring features in its rotary embedding, so the rows of q_proj and k_proj are
in another order within each head, which is undone here; and the tokenizer is a list of tokens and
merges, from which a tokenizer.json is built. Tensors of every type that the `gguf` package
dequantises are read, as float32.

Not done: other architectures, rotary scaling (a tensor rope_freqs), SentencePiece vocabularies.
"""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import numpy as np

from fp8rl_jax.errors import UserError
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.hf.config_json import read_config
from fp8rl_jax.models.hf.fields import Fields
from fp8rl_jax.models.hf.loader import load_from
from fp8rl_jax.models.hf.safetensors_file import Entry
from fp8rl_jax.models.hf.tables import EMBEDDING, HEAD

_INSTEAD = "take the model's safetensors checkpoint"
_MODEL = {"token_embd": EMBEDDING, "output_norm": "model.norm.weight", "output": HEAD}
_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
_SHAPES = {
    "block_count": "num_hidden_layers", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta",
    "context_length": "max_position_embeddings",
}  # fmt: skip
_TOKENS = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
# How text is cut before merging, by the name that llama.cpp gives it: digits apart, or not.
_DIGITS_APART = {"smollm": True, "gpt-2": False, "default": False}
_CONTROL, _USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type


class GGUF:
    """A file; a `Source` of its tensors under the names of a checkpoint.

    Args:
      path: of the file.

    Raises:
      UserError: the package is missing, or the file is not one, or of another architecture.
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
            reader = gguf.GGUFReader(path)
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}): fix its name") from None
        except (ValueError, IndexError, KeyError, OverflowError):
            raise UserError(
                f"{path} is no whole GGUF file: name another, or download it again"
            ) from None
        self._metadata = reader.fields
        self._tensors = {_name(tensor.name): tensor for tensor in reader.tensors}
        self.entries = {
            name: Entry(path, "F32", tuple(int(n) for n in tensor.shape[::-1]), 0, 0)
            for name, tensor in self._tensors.items()
        }
        self._last: tuple[str, np.ndarray] | None = None
        architecture = self.get("general.architecture")
        if architecture != "llama" or self.get("llama.expert_count"):
            kind = "llama with experts" if architecture == "llama" else repr(architecture)
            raise UserError(
                f"{path} is of the architecture {kind}, and llama alone is supported: {_INSTEAD}"
            )
        scaling = self.get("llama.rope.scaling.type")
        if "rope_freqs.weight" in self._tensors or scaling not in (None, "none"):
            raise UserError(f"{path} has scaled rotary embeddings: {_INSTEAD}")

    def get(self, name: str) -> Any:
        """A value of the metadata, None where it is absent."""
        field = self._metadata.get(name)
        return None if field is None else field.contents()

    def fields(self) -> Fields:
        """The config.json that the metadata amounts to."""
        values: dict[str, Any] = {"model_type": "llama"}
        for theirs, name in _SHAPES.items():
            value = self.get("llama." + theirs)
            if value is not None:
                values[name] = value
        # A float32 there; the nearest decimal is what the model was published with.
        if "rms_norm_eps" in values:
            values["rms_norm_eps"] = float(str(np.float32(values["rms_norm_eps"])))
        for theirs, name in _TOKENS.items():
            values[name] = self.get(f"tokenizer.ggml.{theirs}_token_id")
        table = self._tensors.get(EMBEDDING)
        if table is not None:
            values["vocab_size"] = int(table.shape[-1])
        values["tie_word_embeddings"] = HEAD not in self._tensors
        return Fields(values, str(self.where))

    def load(self, dtype: str) -> tuple[ModelConfig, Any]:
        """The model's configuration and parameters, as `load` gives them.

        Raises:
          UserError: a tensor is missing, one too many, wrongly shaped, or of an unknown type.
        """
        config = read_config(self.fields())
        rotated = self.get("llama.rope.dimension_count")
        if rotated not in (None, config.head_dim):
            raise UserError(
                f"{self.where}: llama.rope.dimension_count is {rotated}, and heads have "
                f"{config.head_dim} features; only whole heads are rotated here: {_INSTEAD}"
            )
        self._heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
        return config, load_from(self, config, dtype)

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        if self._last is None or self._last[0] != name:
            tensor = self._tensors[name]
            try:
                value = self._dequantize(tensor.data, tensor.tensor_type)
            except NotImplementedError:
                raise UserError(
                    f"{self.where}: tensor {tensor.name} has type {tensor.tensor_type.name}, which "
                    f"the package gguf does not dequantise: {_INSTEAD}"
                ) from None
            part = re.search(r"self_attn\.([qk])_proj", name)
            if part:
                value = _halves_paired(value, self._heads[part[1]])
            self._last = name, value.astype(np.float32)
        return self._last[1][start:stop]

    def write_tokenizer(self, directory: pathlib.Path) -> None:
        """Writes tokenizer.json, and tokenizer_config.json with special tokens and chat template.

        Raises:
          UserError: a vocabulary of another kind.
        """
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        kind, cut = self.get("tokenizer.ggml.model"), self.get("tokenizer.ggml.pre") or "default"
        if kind != "gpt2" or cut not in _DIGITS_APART:
            raise UserError(
                f"{self.where}: tokenizer.ggml.model is {kind!r} and tokenizer.ggml.pre {cut!r}; "
                f"only gpt2 with {', '.join(_DIGITS_APART)} is supported: {_INSTEAD}"
            )
        tokens = self.get("tokenizer.ggml.tokens")
        merges = [tuple(pair.split(" ", 1)) for pair in self.get("tokenizer.ggml.merges") or ()]
        unknown = self.get("tokenizer.ggml.unknown_token_id")
        vocabulary = {token: number for number, token in enumerate(tokens)}
        model = models.BPE(
            vocabulary, merges, unk_token=None if unknown is None else tokens[unknown]
        )
        tokenizer = Tokenizer(model)
        steps: list[Any] = (
            [pre_tokenizers.Digits(individual_digits=True)] if _DIGITS_APART[cut] else []
        )
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        tokenizer.decoder = decoders.ByteLevel()
        types = self.get("tokenizer.ggml.token_type") or [1] * len(tokens)
        for token, number in zip(tokens, types, strict=True):
            if number in (_CONTROL, _USER_DEFINED):
                special = number == _CONTROL
                added = AddedToken(token, special=special, normalized=False)
                (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([added])
        tokenizer.save(str(directory / "tokenizer.json"))
        about = {"tokenizer_class": "PreTrainedTokenizerFast"}
        for theirs, name in _TOKENS.items():
            number = self.get(f"tokenizer.ggml.{theirs}_token_id")
            if number is not None:
                about[name.removesuffix("_id")] = tokens[number]
        template = self.get("tokenizer.chat_template")
        if template is not None:
            about["chat_template"] = template
        (directory / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")


def _name(name: str) -> str:
    """'blk.3.attn_q.weight' -> 'model.layers.3.self_attn.q_proj.weight'; others unchanged."""
    module, _, kind = name.rpartition(".")
    if kind == "weight" and module in _MODEL:
        return _MODEL[module]
    part = re.fullmatch(r"blk\.(\d+)\.(\w+)", module)
    if kind == "weight" and part and part[2] in _LAYER:
        return f"model.layers.{part[1]}.{_LAYER[part[2]]}.weight"
    return name


def _halves_paired(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a head with neighbours paired -> with the two halves of the head paired."""
    apart = rows.reshape(heads, -1, 2, rows.shape[1])
    return apart.swapaxes(1, 2).reshape(rows.shape)
