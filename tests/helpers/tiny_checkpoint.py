"""A Hugging Face directory made by a test: a small Qwen3 with random weights, a trained BPE
tokenizer, a chat template."""

from __future__ import annotations

import json
import pathlib

import jax
import numpy as np
import tokenizers
from hf_checkpoints import named
from oracles.decoder_oracle import random_params
from safetensors.numpy import save_file
from tokenizers import decoders, pre_tokenizers, trainers

from fp8rl_jax import models
from fp8rl_jax.models import hf

SENTENCES = [
    "Calculate 12 + 7 and 3 + 4.",
    "the cat sat on the mat",
    "a naïve café: 漢字 and 🦜 Ω",
    "What is 5 + 6? The answer is 11.",
]
SPECIAL = ["<|end|>", "<|turn|>", "<|stop|>", "<|pad|>"]
# Turns as Qwen3 writes them: named roles between markers, a generation prompt, a variable.
TEMPLATE = """\
{%- if messages[0].role == 'system' %}
    {{- '<|turn|>system\\n' + messages[0].content + '<|stop|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or message.role == 'assistant' %}
        {{- '<|turn|>' + message.role + '\\n' + message.content | trim + '<|stop|>\\n' }}
    {%- elif message.role != 'system' or not loop.first %}
        {{- raise_exception('role ' + message.role + ' is not known') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|turn|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


def byte_level(vocab_size: int = 320) -> tokenizers.Tokenizer:
    """Byte-level BPE over every byte, with SPECIAL."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    return tokenizer


def write(directory: pathlib.Path, **changes) -> pathlib.Path:
    """Writes the directory; `changes` are entries of its files by file name, None takes one out.

    The model has 32 rows more than the tokenizer has tokens, as published models have.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level()
    tokenizer.save(str(directory / "tokenizer.json"))
    files = {
        "config": {
            "model_type": "qwen3",
            "vocab_size": tokenizer.get_vocab_size() + 32,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "rope_theta": 10_000.0,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "max_position_embeddings": 128,
        },
        "tokenizer_config": {
            "eos_token": "<|stop|>",
            "pad_token": {"content": "<|pad|>"},
            "bos_token": None,
            "chat_template": TEMPLATE,
        },
        "generation_config": {"eos_token_id": [tokenizer.token_to_id("<|end|>"), 2]},
    }
    for name, content in files.items():
        content |= changes.get(name, {})
        content = {key: value for key, value in content.items() if value is not None}
        (directory / f"{name}.json").write_text(json.dumps(content))
    config = hf.read_config(directory)
    shapes = jax.eval_shape(
        lambda: models.init_params(config, jax.random.key(0, impl="threefry2x32"))
    )
    weights = named(config, random_params(shapes, 0))
    weights = {name: np.ascontiguousarray(value) for name, value in weights.items()}
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


LOADED: list[str] = []


def record_loads(monkeypatch) -> None:
    """From now on LOADED names every directory whose weights are read."""
    load = hf.load

    def recording(path, **options):
        LOADED.append(str(path))
        return load(path, **options)

    monkeypatch.setattr(hf, "load", recording)
    LOADED.clear()
