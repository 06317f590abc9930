"""Special files, names, pickles and counts in a model's directory: refused at once, by file."""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import struct

import numpy as np
import pytest
import tiny_checkpoint
from fuzz import time_limit
from hf_checkpoints import CONFIGS, named, params_of, write

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.cli.main import run
from fp8rl_jax.config.model_source import identity, pretrained_config
from fp8rl_jax.data import PretrainedTokenizer, load_tokenizer
from fp8rl_jax.models.families.fields import read_fields
from fp8rl_jax.models.hf.config_json import config_json
from fp8rl_jax.models.hf.reader import Checkpoint
from fp8rl_jax.models.hf.safetensors_file import read_header
from fp8rl_jax.policy.source import directory_config, usual_temperature

_Q = "model.layers.1.self_attn.q_proj.weight"


def _replace(path: pathlib.Path, kind: str) -> None:
    """Puts a thing that is no regular file in the place of a file."""
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "loop":
        path.symlink_to(path.name)
    else:
        path.symlink_to(path.parent / "nowhere" / "at" / "all")


_KINDS = ("fifo", "directory", "device", "loop", "dangling")


def _refused(read, *words: str) -> str:
    with pytest.raises(UserError) as raised, time_limit():
        read()
    for word in words:
        assert word in str(raised.value), raised.value
    return str(raised.value)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> pathlib.Path:
    fields = config_json(CONFIGS["qwen3"], "bfloat16")
    tensors = named(CONFIGS["qwen3"], params_of("qwen3"))
    return write(tmp_path_factory.mktemp("good") / "model", fields, tensors, shards=2)


@pytest.fixture
def copy(model, tmp_path) -> pathlib.Path:
    import shutil

    return pathlib.Path(shutil.copytree(model, tmp_path / "copy"))


@pytest.mark.parametrize("kind", _KINDS)
def test_special_files_of_weights(kind, copy):
    shard = copy / "model-00002-of-00002.safetensors"
    _replace(shard, kind)
    _refused(lambda: Checkpoint(copy), str(copy), shard.name)
    _refused(lambda: read_header(shard), str(shard))
    _replace(copy / "model.safetensors.index.json", kind)
    _refused(lambda: Checkpoint(copy), str(copy))
    _replace(copy / "model.safetensors", kind)
    _refused(lambda: Checkpoint(copy), str(copy))
    _replace(copy / "config.json", kind)
    _refused(lambda: read_fields(copy), str(copy), "config.json")
    assert pretrained_config(copy) is None
    _refused(lambda: directory_config(str(copy)), str(copy))
    assert run(["convert", str(copy), str(copy.parent / "out"), "--dtype=bf16"]) == 2


@pytest.mark.parametrize("kind", _KINDS)
def test_special_files_of_a_tokenizer(kind, tmp_path):
    path = tiny_checkpoint.write(tmp_path / "model")
    for name in (
        "chat_template.jinja",
        "generation_config.json",
        "special_tokens_map.json",
        "tokenizer_config.json",
        "tokenizer.json",
    ):
        _replace(path / name, kind)
        _refused(lambda: PretrainedTokenizer(path), str(path), name)
        if name == "generation_config.json":
            _refused(lambda: directory_config(str(path)), name)


@pytest.mark.parametrize(
    "file",
    [
        "../secret.safetensors",
        "/dev/zero",
        "/etc/passwd",
        "sub/x.safetensors",
        "..",
        ".",
        "",
        "a" * 300,
        "x\0y",
        "\ud800",
        "model-00001-of-00002.safetensors/",
        3,
        None,
        ["x"],
    ],
)
def test_names_in_an_index(file, copy):
    index = copy / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][_Q] = file
    index.write_text(json.dumps(content))
    message = _refused(lambda: Checkpoint(copy), str(copy), _Q)
    assert message.isprintable()


class _Payload:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "model.safetensors", "tokenizer.json", "config.json"]
)
def test_pickles_are_never_opened(name, tmp_path):
    path = tiny_checkpoint.write(tmp_path / "model")
    if name not in ("tokenizer.json", "config.json"):
        (path / "model.safetensors").unlink()
    (path / name).write_bytes(pickle.dumps(_Payload(tmp_path / "run")))

    def read():
        read_fields(path)
        PretrainedTokenizer(path)
        Checkpoint(path)

    _refused(read, str(path))
    assert not (tmp_path / "run").exists()


def test_a_name_that_steers_a_terminal_is_written_out(tmp_path, capsys):
    tensors = named(CONFIGS["qwen3"], params_of("qwen3"))
    tensors["\x1b[2J\x1b]0;owned\x07\u202eevil\r"] = np.zeros(1, np.float32)
    fields = config_json(CONFIGS["qwen3"], "bfloat16") | {"more": "x"}
    path = write(tmp_path / "model", fields, tensors)
    assert run(["convert", str(path), str(tmp_path / "out"), "--dtype=bf16"]) == 2
    error = capsys.readouterr().err
    assert error.strip().isprintable() and r"\x1b[2J\x1b]0;owned\x07\u202eevil\r" in error


def test_long_values_are_cut_in_sentences(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x" * 10**6}))
    from fp8rl_jax.models.hf.config_json import read_config

    assert len(_refused(lambda: read_config(read_fields(tmp_path)), "model_type")) < 5000


def _header(header: object, data: int = 0) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


def _entry(**changes) -> dict:
    return {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | changes}


@pytest.mark.parametrize(
    "content",
    [
        _header(b"[" * 200_000),
        _header(b'{"a":' * 200_000),
        _header(b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}"),
        _header(_entry(shape=[10**4000] * 3000), 4),
        _header(_entry(shape=[1] * 10**6), 4),
        _header(_entry(shape=[0, 2**63], data_offsets=[0, 0])),
        _header(_entry(shape={"1": 1}), 4),
        _header(_entry(data_offsets=[0, 2**63]), 4),
        _header(_entry(data_offsets=[0.0, 4.0]), 4),
        _header(_entry(data_offsets=[0, float("nan")]), 4),
        _header(_entry(dtype=["F32"]), 4),
        _header(b'{"a": "\xff\xfe"}'),
        _header(b'{"__metadata__": {}} trailing'),
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 10**8) + b"{}",
    ],
)
def test_headers(content, tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    _refused(lambda: read_header(file), str(file))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"top_k": float("nan")}, "top_k is nan"),
        ({"top_p": float("inf")}, "top_p is inf"),
        ({"top_k": 10**30}, "top_k is"),
        ({"temperature": 1e400}, "temperature is inf"),
    ],
)
def test_settings_are_finite(changes, words, tmp_path):
    path = tiny_checkpoint.write(tmp_path / "m", generation_config={"do_sample": True} | changes)
    _refused(lambda: usual_temperature(directory_config(str(path))), str(path), words)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", b""),
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer.json", b'{"a":' * 100_000),
        ("tokenizer.json", b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}'),
        ("tokenizer_config.json", b'{"chat_template": "\\ud800", "eos_token": "\\ud800"}'),
        ("tokenizer_config.json", b'{"a":' * 100_000),
        ("tokenizer_config.json", b" " * 2**24 + b"{}"),
        ("special_tokens_map.json", b"[1"),
        ("generation_config.json", b"\x80{}"),
        ("chat_template.jinja", b"\xff"),
        ("chat_template.jinja", b"{{ " + b"(" * 10_000 + b" }}"),
        ("chat_template.jinja", b"{% if 1 %}" * 500 + b"{% endif %}" * 500),
    ],
)
def test_files_of_a_tokenizer(file, content, tmp_path):
    path = tiny_checkpoint.write(tmp_path / "model")
    (path / file).write_bytes(content)
    message = _refused(lambda: PretrainedTokenizer(path), str(path))
    assert file in message or file == "chat_template.jinja"


def test_a_tokenizer_that_fills_texts_up(tmp_path):
    path = tiny_checkpoint.write(tmp_path / "model")
    content = json.loads((path / "tokenizer.json").read_text())
    content["padding"] = {
        "strategy": {"Fixed": 2**40},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 3,
        "pad_type_id": 0,
        "pad_token": "<|pad|>",
    }
    (path / "tokenizer.json").write_text(json.dumps(content))
    with time_limit():
        assert len(PretrainedTokenizer(path).encode("the cat")) < 8


def test_a_library_that_panics(tmp_path):
    """A panic of Rust's is no Exception."""
    path = tiny_checkpoint.write(tmp_path / "model")
    content = json.loads((path / "tokenizer.json").read_text())
    content["model"]["continuing_subword_prefix"] = "longer than any token of it"
    (path / "tokenizer.json").write_text(json.dumps(content))
    _refused(lambda: PretrainedTokenizer(path), "tokenizer.json", "out of range")


def test_names_of_a_tokenizer_that_cannot_be():
    import types

    for name in ("a" * 5000, "/dev/zero", "x\0y", "\ud800"):
        config = types.SimpleNamespace(tokenizer=name, bos_token="", eos_token="", pad_token="")
        _refused(lambda config=config: load_tokenizer(config), "data.tokenizer")


def test_identity_passes_over_links_to_nowhere(copy):
    before = identity(str(copy))
    (copy / "other.safetensors").symlink_to(copy / "nowhere")
    assert identity(str(copy)) == before


@pytest.mark.parametrize("target", ["SRC/sub", "SRC/a/b", "LINK/sub", "SRC/../copy/sub"])
def test_convert_stays_out_of_its_source(target, copy, capsys):
    link = copy.parent / "link"
    link.symlink_to(copy)
    before = sorted(copy.iterdir())
    path = target.replace("SRC", str(copy)).replace("LINK", str(link))
    assert run(["convert", str(copy), path, "--dtype=bf16"]) == 2
    assert "is within" in capsys.readouterr().err
    assert sorted(copy.iterdir()) == before


def test_convert_a_run_without_its_config(tmp_path, capsys):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for kind in (None, "fifo", "device"):
        if kind:
            _replace(tmp_path / "run" / "config.json", kind)
        with time_limit():
            arguments = ["convert", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype=bf16"]
            assert run(arguments) == 2
        error = capsys.readouterr().err
        assert "run/config.json cannot be read" in error and error.count("\n") == 1


@pytest.mark.parametrize(("size", "status"), [("inf", 0), ("1e300", 0), ("nan", 2), ("0", 2)])
def test_sizes_of_shards(size, status, copy):
    out = copy.parent / "out"
    arguments = ["convert", str(copy), str(out), "--dtype=bf16", f"--max-shard-gb={size}"]
    assert run(arguments) == status
    assert not status or not out.exists()
    assert status or [p.name for p in out.glob("*.safetensors*")] == ["model.safetensors"]
