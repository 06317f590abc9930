"""Weights & Biases and MLflow without a network: what a run writes is in their files."""

from __future__ import annotations

import resource
import threading

import pytest

from fp8rl_jax.config import default_config
from fp8rl_jax.errors import UserError
from fp8rl_jax.training.logs import RunLogs
from fp8rl_jax.training.sinks import logger_names, open_sinks

_RECORDS = {"metrics": {"step": 1, "loss": 0.25, "note": "text"},
            "eval": {"phase": "rl", "step": 1, "pass@1": 0.5}}  # fmt: skip


def _written(directory, loggers: str):
    """Everything below a run directory, after two starts of a run that wrote one step."""
    config = default_config()
    config.run.loggers = loggers
    logs = RunLogs(directory, None, config)
    for name, record in _RECORDS.items():
        logs.write(name, record)
    offsets = logs.offsets()
    logs.close()
    RunLogs(directory, offsets, config).close()
    return [path for path in directory.rglob("*") if path.is_file()]


@pytest.mark.slow
def test_wandb_offline(tmp_path, monkeypatch):
    """One run identity for both starts; the numbers are in its file, once."""
    pytest.importorskip("wandb", reason="the extra 'wandb'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    files = [path for path in _written(tmp_path, "wandb") if path.suffix == ".wandb"]
    assert len(files) == 2 and len({path.name for path in files}) == 1
    content = [path.read_bytes() for path in sorted(files)]
    for name in (b"rl/loss", b"eval_rl/pass@1"):
        assert name in b"".join(content)


@pytest.mark.slow
def test_mlflow_files(tmp_path, monkeypatch):
    """A second start goes on with the same run; metrics have their steps, texts are left out."""
    pytest.importorskip("mlflow", reason="the extra 'mlflow'")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'mlruns'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    files = _written(tmp_path, "tensorboard,mlflow")
    metrics = {path.name: path.read_text().split() for path in files if "metrics" in path.parts}
    assert {name: line[1:3] for name, line in metrics.items()} == {
        "loss": ["0.25", "1"], "pass_at_1": ["0.5", "1"],
    }  # fmt: skip


def test_a_disk_that_is_full(tmp_path):
    """TensorBoard's file cannot grow: whoever hands over numbers gets the error, and there is no
    thread that could die with a traceback or let the run wait."""
    config = default_config()
    config.run.loggers = "tensorboard"
    threads = threading.active_count()
    (sink,) = open_sinks(tmp_path, config)
    assert threading.active_count() == threads
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            for step in range(1000):
                sink.write("rl", {"rl/loss": 0.5}, step)
        with pytest.raises(OSError, match="File too large"):
            sink.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def test_names_are_checked():
    config = default_config()
    config.run.loggers = "tensorboard,wandbb"
    with pytest.raises(UserError, match=r"run.loggers: 'wandbb' is unknown; write tensorboard"):
        logger_names(config)
    config.run.loggers = ""
    assert logger_names(config) == []
