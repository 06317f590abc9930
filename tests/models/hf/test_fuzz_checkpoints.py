"""No bytes in a model's files are a traceback, a hang or a full machine: see helpers/fuzz.py."""

from __future__ import annotations

import json

import pytest
from fuzz import FEW, MANY, fuzz
from hf_checkpoints import CONFIGS, fp8_tensors, named, params_of, write
from marks import slow

from fp8rl_jax.models.families.fields import read_fields
from fp8rl_jax.models.hf import reader
from fp8rl_jax.models.hf.blockwise import quantisation_of
from fp8rl_jax.models.hf.config_json import config_json, read_config
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
