"""Models and data sets by their names on Hugging Face's Hub, in a cache laid out as the Hub's."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from hf_checkpoints import CONFIGS, named, params_of, write

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.paths import hub_repository
from fp8rl_jax.cli.main import run
from fp8rl_jax.config import load_config
from fp8rl_jax.config.model_source import load_params, read_model
from fp8rl_jax.envs.sources import read_rows
from fp8rl_jax.models.hf.config_json import config_json

_EMPTY = "import ml_collections\n\nget_config = ml_collections.ConfigDict\n"
_COMMITS = {"main": "a" * 40, "v1": "b" * 40}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The cache's directory, with a function that makes a repository of files in a folder: blobs,
    a snapshot of links to them for each revision, and the revisions' names."""
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))

    def add(kind, name, folder, revision="main"):
        root = cache / f"{kind}s--{name.replace('/', '--')}"
        commit = _COMMITS[revision]
        for part in ("blobs", "refs"):
            (root / part).mkdir(parents=True, exist_ok=True)
        (root / "refs" / revision).write_text(commit)
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            blob = root / "blobs" / f"{commit[0]}{len(list((root / 'blobs').iterdir()))}"
            blob.write_bytes(file.read_bytes())
            link = root / "snapshots" / commit / file.relative_to(folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(blob)
        return cache

    return add


def _model(directory, name, seed=0):
    config = CONFIGS[name]
    write(directory, config_json(config, "float32"), named(config, params_of(name, seed)))
    return directory


def _config(*fields):
    return load_config("configs/tiny_arithmetic.py", [f"--config.{field}" for field in fields])


def test_a_model(hub, tmp_path, capsys):
    for seed, revision in enumerate(_COMMITS):
        hub("model", "acme/tiny", _model(tmp_path / revision, "qwen2", seed), revision)
    (tmp_path / "empty.py").write_text(_EMPTY)
    for seed, name in enumerate(("hf:acme/tiny", "hf:acme/tiny@v1")):
        config = load_config(str(tmp_path / "empty.py"), [f"--config.model.checkpoint={name}"])
        commit = _COMMITS["main" if name == "hf:acme/tiny" else "v1"]
        assert hub_repository(config.model.checkpoint) == ("acme/tiny", commit)
        assert read_model(config)[0] == CONFIGS["qwen2"]
        ours, theirs = map(jax.tree.leaves, (load_params(config), params_of("qwen2", seed)))
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(np.asarray(one), other)
    assert run(["convert", "hf:acme/tiny", str(tmp_path / "out"), "--dtype=bf16"]) == 0
    assert (tmp_path / "out" / "config.json").exists()


def test_a_data_set(hub, tmp_path):
    rows = [{"question": f"{i} + 1", "answer": str(i + 1)} for i in range(8)]
    folder = tmp_path / "rows" / "data"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    hub("dataset", "acme/sums", tmp_path / "rows")
    config = _config("env.task=hf:acme/sums")
    assert [row["answer"] for *_, row in read_rows(config.env.task, config.env).rows["train"]] == [
        str(i + 1) for i in range(8)
    ]


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("model.checkpoint=hf:acme/absent", "run `hf download acme/absent` first"),
        ("model.checkpoint=hf:acme/absent@v2", "run `hf download acme/absent --revision v2` first"),
        ("model.checkpoint=hf:absent", "write hf:ORG/NAME or hf:ORG/NAME@REVISION"),
        ("data.tokenizer=hf:../x/y", "write hf:ORG/NAME"),
    ],
)
def test_what_is_not_there_is_named(hub, field, words):
    with pytest.raises(UserError) as error:
        read_model(_config(field))
    assert words in str(error.value) and field.partition("=")[0] in str(error.value)


def test_an_absent_data_set(hub):
    config = _config("env.task=hf:acme/absent")
    with pytest.raises(UserError, match="run `hf download acme/absent --repo-type dataset` first"):
        read_rows(config.env.task, config.env)


def test_a_snapshot_without_weights(hub, tmp_path):
    folder = _model(tmp_path / "model", "qwen2")
    next(folder.glob("*.safetensors")).unlink()
    hub("model", "acme/tiny", folder)
    (tmp_path / "empty.py").write_text(_EMPTY)
    config = load_config(str(tmp_path / "empty.py"), ["--config.model.checkpoint=hf:acme/tiny"])
    with pytest.raises(UserError, match="safetensors"):
        load_params(config)
