"""No bytes in a run's config.json, model.json or checkpoints are a traceback (helpers/fuzz.py)."""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import pytest
from fuzz import FEW, MANY, fuzz
from hf_checkpoints import CONFIGS
from marks import slow

from fp8rl_jax.config import default_config
from fp8rl_jax.training import checkpoint
from fp8rl_jax.training.run_directory import as_saved, read_saved_config, run_config


@pytest.mark.parametrize("count", [FEW, slow(MANY)])
def test_saved_config(count, tmp_path):
    config = as_saved(default_config())
    older = {"warmup": config["sft"], "algo": {"normalize_std": True, "tis_cap": 2.0}}
    good = [json.dumps(content).encode() for content in (config, older)]

    def read(content: bytes) -> None:
        (tmp_path / "config.json").write_bytes(content)
        run_config(tmp_path)

    fuzz("config.json of a run", read, good, count)


@pytest.mark.parametrize("count", [slow(MANY)])
def test_model_json(count, tmp_path):
    file = tmp_path / "model.json"

    def read(content: bytes) -> None:
        file.write_bytes(content)
        read_saved_config(file, sections=False)

    fuzz("model.json", read, [json.dumps(dataclasses.asdict(CONFIGS["qwen3"])).encode()], count)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("count", [slow(MANY)])
def test_metadata(count, tmp_path, monkeypatch):
    """As they are, and with a digest that fits them."""
    checkpoints = checkpoint.Checkpoints(tmp_path / "checkpoints", keep=1)
    checkpoints.save(1, {"x": jnp.zeros(3)}, {"phase": "rl", "step": 1, "offsets": {"metrics": 3}})
    file = tmp_path / "checkpoints" / "1" / "meta" / "metadata"
    good = file.read_bytes()

    def read(content: bytes) -> None:
        file.write_bytes(content)
        checkpoints.read_meta(1)

    fuzz("metadata", read, [good], count // 2)
    monkeypatch.setattr(checkpoint, "_digest", lambda meta: meta.get("digest"))
    fuzz("metadata with a digest", read, [good], count // 2)
    checkpoints.close()
