"""No bytes in a model's files are a traceback, a hang or a full machine: see helpers/fuzz.py."""

from __future__ import annotations

import json

import numpy as np
import pytest
from fuzz import FEW, MANY, fuzz
from hf_checkpoints import CONFIGS, fp8_tensors, named, params_of, write, write_gguf
from marks import slow

from fp8rl_jax.models.hf import reader
from fp8rl_jax.models.hf.blockwise import quantisation_of
from fp8rl_jax.models.hf.config_json import config_json, read_config
from fp8rl_jax.models.hf.fields import read_fields
from fp8rl_jax.models.hf.gguf_file import GGUF
from fp8rl_jax.models.hf.gguf_tokenizer import write_tokenizer
from fp8rl_jax.models.hf.safetensors_file import DTYPES, read_rows
from fp8rl_jax.models.hf.tables import model_tensors


def _check(source, config, fp8: bool) -> None:
    """What comes between the files and the first allocation."""
    reader.check_sizes(source, config)
    reader.check(source, config, model_tensors(config), fp8, further_layers=1)


@pytest.mark.parametrize("count", [slow(MANY)])
def test_safetensors(count, tmp_path):
    file = tmp_path / "model.safetensors"

    def read(content: bytes) -> None:
        file.write_bytes(content)
        source = reader.Checkpoint(tmp_path)
        for entry in source.entries.values():
            if entry.dtype in DTYPES and entry.shape:
                read_rows(entry, 0, min(entry.shape[0], 4))
        _check(source, CONFIGS["qwen3"], fp8=True)

    good = []
    for name, tensors in (
        ("f32", named(CONFIGS["qwen3"], params_of("qwen3"))),
        ("fp8", fp8_tensors("qwen3")),
    ):
        path = write(tmp_path / name, {}, tensors)
        good.append((path / "model.safetensors").read_bytes())
    fuzz("safetensors", read, good, count)


@pytest.mark.parametrize("count", [slow(MANY)])
def test_index(count, tmp_path):
    write(tmp_path / "model", {}, fp8_tensors("qwen3"), shards=2)
    file = tmp_path / "model" / reader.INDEX
    good = [file.read_bytes()]

    def read(content: bytes) -> None:
        file.write_bytes(content)
        reader.Checkpoint(tmp_path / "model")

    fuzz("index", read, good, count)


@pytest.mark.parametrize("count", [FEW, slow(MANY)])
def test_config_json(count, tmp_path):
    good = []
    for name in ("qwen3", "llama", "qwen3_moe", "deepseek_v3", "gpt_oss"):
        fields = config_json(CONFIGS[name], "bfloat16") | {"eos_token_id": 1}
        good.append(json.dumps(fields).encode())
    source = reader.Checkpoint(write(tmp_path / "model", {}, fp8_tensors("deepseek_v3")))

    def read(content: bytes) -> None:
        (tmp_path / "config.json").write_bytes(content)
        fields = read_fields(tmp_path)
        config = read_config(fields)
        quantisation_of(fields)
        config_json(config, "bfloat16", fields.values)
        reader.check_sizes(source, config)

    fuzz("config.json", read, good, count)


@pytest.mark.parametrize("count", [slow(MANY)])
def test_gguf(count, tmp_path):
    file = tmp_path / "model.gguf"
    good = []
    for kind in ("F32", "Q8_0"):
        write_gguf(file, kind)
        good.append(file.read_bytes())
    spm = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0] * 60}
    write_gguf(file, architecture="gemma3", fields=spm)
    good.append(file.read_bytes())
    bands = np.linspace(1, 8, 16, dtype=np.float32)
    write_gguf(file, **{"rope_freqs.weight": bands})
    good.append(file.read_bytes())

    def read(content: bytes) -> None:
        file.write_bytes(content)
        source = GGUF(file)
        config = read_config(source.fields())
        write_tokenizer(source, tmp_path)
        _check(source, config, fp8=False)
        for name in source.entries:
            if "q_proj" not in name and "k_proj" not in name:  # these need the model's heads
                source.rows(name, 0, 4)

    fuzz("gguf", read, good, count)
