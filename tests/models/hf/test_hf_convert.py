"""`fp8rl convert`: weights in another format, the tokenizer's files beside them."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from hf_checkpoints import CONFIGS, bf16, fp8_tensors, named, params_of, write

from fp8rl_jax.cli.main import run
from fp8rl_jax.models import hf
from fp8rl_jax.models.hf.config_json import config_json


def _source(tmp_path):
    fields = config_json(CONFIGS["qwen3"], "bfloat16") | {
        "eos_token_id": 7,
        "rope_parameters": None,
    }
    params = named(CONFIGS["qwen3"], params_of("qwen3"))
    source = write(tmp_path / "source", fields, {k: bf16(v) for k, v in params.items()})
    (source / "tokenizer.json").write_text("{}")
    (source / "README.md").write_text("not copied")
    return source


def _equal(a, b) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_there_and_back(tmp_path, capsys):
    """bf16 -> fp8 is what the library quantises; fp8 -> fp8 keeps it, fp8 -> bf16 rounds values."""
    source = _source(tmp_path)
    assert run(["convert", str(source), str(tmp_path / "fp8"), "--dtype", "fp8"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "fp8")
    names = {path.name for path in (tmp_path / "fp8").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json"}
    fields = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert fields["eos_token_id"] == 7 and fields["quantization_config"]["fmt"] == "e4m3"
    config, params = hf.load(tmp_path / "fp8", dtype="fp8")
    hand = write(tmp_path / "hand", fields, fp8_tensors("qwen3"))
    _equal(params, hf.load(hand, dtype="fp8")[1])  # norms stay bf16, as in the source

    again = ["convert", str(tmp_path / "fp8"), str(tmp_path / "fp8_2"), "--dtype=fp8"]
    assert run([*again, "--max-shard-gb=0.0001"]) == 0
    _equal(params, hf.load(tmp_path / "fp8_2", dtype="fp8")[1])
    assert run(["convert", str(tmp_path / "fp8"), str(tmp_path / "bf16"), "--dtype=bf16"]) == 0
    back, values = hf.load(tmp_path / "bf16", dtype="bfloat16")
    assert back == config
    assert "quantization_config" not in json.loads((tmp_path / "bf16/config.json").read_text())
    _equal(values, hf.load(tmp_path / "fp8", dtype="bfloat16")[1])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["fp8rl convert SRC DST --dtype"]),
        (["a", "b"], ["--dtype"]),
        (["a", "b", "--dtype=int8"], ["--dtype", "int8", "bf16"]),
        (["a", "b", "c", "--dtype=fp8"], ["SRC DST"]),
        (["a", "b", "--dtype=fp8", "--config.run.seed=1"], ["--config.run.seed"]),
        (["nowhere", "b", "--dtype=fp8"], ["nowhere", "no directory"]),
        (["a/b.c", "b", "--dtype=fp8"], ["no directory", "hf download a/b.c --local-dir"]),
        (["SOURCE", "SOURCE", "--dtype=fp8"], ["source", "exists already"]),
        (["SOURCE", "new", "--dtype=fp8", "--max-shard-gb=-1"], ["max_shard_gb", "-1"]),
    ],
)
def test_refusals_are_one_sentence(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    source = str(_source(tmp_path))
    assert run(["convert", *(source if a == "SOURCE" else a for a in arguments)]) == 2
    out, error = capsys.readouterr()
    assert not out and error.startswith("error: ") and error.count("\n") == 1
    for word in words:
        assert word in error
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


_SIZES = dict(of__block_count=2, of__embedding_length=96, of__attention__head_count=4)
