"""Weights & Biases and MLflow without a network: what a run writes is in their files."""

from __future__ import annotations

import pathlib
import re
import resource
import threading
import time
from typing import ClassVar

import pytest

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.config import default_config
from fp8rl_jax.training import sinks
from fp8rl_jax.training.logs import RunLogs, read_jsonl
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
    """TensorBoard's file cannot grow: one warning, and at the end what it has missed."""
    config = default_config()
    config.run.loggers = "tensorboard"
    notes: list[str] = []
    (sink,) = open_sinks(tmp_path, config, notes.append)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        for step in range(1000):
            sink.write("rl", {"rl/loss": 0.5}, step)
        sink.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    warning, missed = notes
    assert warning.startswith("warning: run.loggers: tensorboard fails (OSError: [Errno 27] File")
    assert re.fullmatch(
        r"tensorboard has missed \d+ of 1000 records, the first of rl step .*", missed
    )
    assert (tmp_path / "tensorboard").is_dir()


class _Service:
    """A logger that fails as $FAILS says, or waits for ever."""

    writes_anew = False
    fails: ClassVar[set] = set()
    wrote: ClassVar[list] = []

    def __init__(self, directory, config):
        self._at("open")

    def write(self, phase, numbers, step):
        self._at(step)
        self.wrote.append(step)

    def close(self):
        self._at("close")

    def _at(self, what):
        if what in self.fails:
            raise SystemExit("the service is away")
        if f"wait {what}" in self.fails:
            threading.Event().wait()


@pytest.mark.parametrize(
    ("fails", "wrote", "said"),
    [
        (set(), [1, 2, 3, 4, 5, 6], []),
        ({"open"}, [], ["cannot be opened", "missed 6 of 6 records, the first of rl step 1;"]),
        ({3}, [1, 2, 4, 5, 6], ["fails (SystemExit: the s", "missed 1 of 6 records, the first of"]),
        ({3, 4, 5, 6}, [1, 2], ["fails", "missed 4 of 6 records, the first of rl step 3;"]),
        ({"close"}, [1, 2, 3, 4, 5, 6], ["fails at its end"]),
        ({"wait open"}, [], ["does not end within", "missed 6 of 6"]),
        ({"wait 3"}, [1, 2], ["does not end within", "missed 4 of 6"]),
        ({"wait close"}, [1, 2, 3, 4, 5, 6], ["does not end within"]),
    ],
)  # fmt: skip
def test_a_service_that_is_away(fails, wrote, said, tmp_path, monkeypatch):
    """At the start, for a while, for good or at the end: the run's own files are whole, nothing is
    raised or waited for, one warning is said, and once what the service has missed."""
    monkeypatch.setattr(_Service, "fails", fails)
    monkeypatch.setattr(_Service, "wrote", [])
    monkeypatch.setitem(sinks._SINKS, "wandb", (_Service, "json"))
    monkeypatch.setattr(sinks, "_END_SECONDS", 0.2)
    config = default_config()
    config.run.loggers = "wandb"
    notes: list[str] = []
    logs = RunLogs(tmp_path, None, config, notes.append)
    for step in range(1, 7):
        logs.write("metrics", {"step": step, "loss": 0.5})
        while logs._sinks[0]._records.qsize() and not {"wait open", "wait 3"} & fails:
            time.sleep(0.001)
    logs.close()
    assert [record["step"] for record in read_jsonl(tmp_path / "metrics.jsonl")] == [*range(1, 7)]
    assert _Service.wrote == wrote
    assert all(word in note for word, note in zip(said, notes, strict=True))


@pytest.mark.parametrize("name", ["s3:x", "gs:x", "hdfs:x", "[a]", "a b"])
def test_tensorboard_in_a_directory_of_any_name(name, tmp_path, monkeypatch):
    """tensorboardX takes what is before a colon for a service."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    sink = sinks.TensorBoard(pathlib.Path(name), default_config())
    sink.write("rl", {"rl/loss": 0.5}, 1)
    sink.close()
    (events,) = (tmp_path / name / "tensorboard").iterdir()
    assert b"rl/loss" in events.read_bytes()


@pytest.mark.parametrize("content", [b"", b"\xff", b"x" * 5000])
def test_a_damaged_name_of_a_run(content, tmp_path):
    """Of wandb's own run in `run.dir`: as a service that cannot be opened, never a traceback."""
    (tmp_path / "wandb_run").write_bytes(content)
    if content:
        with pytest.raises((OSError, ValueError)):
            sinks._identity(tmp_path)
    else:
        assert sinks._identity(tmp_path) == sinks._identity(tmp_path) != ""


def test_names_are_checked():
    config = default_config()
    config.run.loggers = "tensorboard,wandbb"
    with pytest.raises(UserError, match=r"run.loggers: 'wandbb' is unknown; write tensorboard"):
        logger_names(config)
    config.run.loggers = ""
    assert logger_names(config) == []
