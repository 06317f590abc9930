"""Weights & Biases and MLflow without a network: what a run writes is in their files."""

from __future__ import annotations

import json
import pathlib
import re
import resource
import threading
import time
from typing import ClassVar

import pytest
from tensorboardX.proto.event_pb2 import Event

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.config import default_config
from fp8rl_jax.training import sinks
from fp8rl_jax.training.logs import RunLogs, read_jsonl
from fp8rl_jax.training.sinks import Outside, logger_names

_RECORDS = {
    "metrics": {"step": 1, "loss": 0.25, "note": "text"},
    "eval": {"phase": "rl", "step": 1, "pass@1": 0.5},
}
_SAMPLES = [
    {
        "phase": "rl",
        "step": 1,
        "prompt": f"1 + {i}\n| <b>",
        "response": f"seen {i}\x1b" + "z" * i,
        "answer": "2",
        "reward": (1.0, None)[i % 2],
    }
    for i in (0, 1, *range(3000, 3020))
]
_LAST_SHOWN = 3009


def _written(directory, loggers: str):
    """Everything below a run directory, after two starts of a run that wrote one step."""
    config = default_config()
    config.run.loggers = loggers
    logs = RunLogs(directory, None, config)
    for name, record in _RECORDS.items():
        logs.write(name, record)
    logs.write("samples", *_SAMPLES)
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
    for name in (b"rl/loss", b"eval_rl/pass@1", b"eval_rl/samples", b"table-file"):
        assert name in b"".join(content)
    (table,) = (json.loads(path.read_text()) for path in tmp_path.rglob("samples*.table.json"))
    assert table["columns"] == ["prompt", "response", "answer", "reward"]
    assert table["data"][1] == ["1 + 1\n| <b>", "seen 1\\x1bz", "2", None]
    assert [row[0].split()[2] for row in table["data"]][-1] == str(_LAST_SHOWN)


@pytest.mark.slow
def test_mlflow_files(tmp_path, monkeypatch):
    """A second start goes on with the same run; metrics have their steps, texts are left out."""
    pytest.importorskip("mlflow", reason="the extra 'mlflow'")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'mlruns'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    files = _written(tmp_path, "tensorboard,mlflow")
    metrics = {path.name: path.read_text().split() for path in files if "metrics" in path.parts}
    assert {name: line[1:3] for name, line in metrics.items()} == {
        "loss": ["0.25", "1"],
        "pass_at_1": ["0.5", "1"],
    }
    (page,) = (path for path in files if path.suffix == ".md")
    assert page.parts[-3:] == ("samples", "eval_rl", "step_1.md")
    _check_page(page.read_text())


def _check_page(text: str) -> None:
    """Twelve samples as indented text, the long ones cut and said to be, nothing that a terminal
    obeys."""
    assert len(text) < 12 * 2500
    assert text.startswith(
        "**prompt**\n\n    1 + 0\n    | <b>\n\n**response**\n\n    seen 0\\x1b\n"
    )
    assert text.count("**prompt**") == 12 and str(_LAST_SHOWN) in text
    assert "z ... 1,010 characters left out\n" in text
    assert "\x1b" not in text


def test_tensorboard_samples(tmp_path):
    """Read back from the event file that a resumed run has written anew: each evaluation once."""
    _written(tmp_path, "tensorboard")
    (file,) = (tmp_path / "tensorboard").iterdir()
    data, found = file.read_bytes(), []
    while data:  # a record: 8 bytes of length, 4 of checksum, the event, 4 of checksum
        end = 12 + int.from_bytes(data[:8], "little")
        found.extend(Event.FromString(data[12:end]).summary.value)
        data = data[end + 4 :]
    assert [value.tag for value in found][-1] == "eval_rl/samples/text_summary"
    (text,) = found[-1].tensor.string_val
    assert len(found) == 3 and found[-1].metadata.plugin_data.plugin_name == "text"
    _check_page(text.decode())


def test_a_disk_that_is_full(tmp_path):
    """TensorBoard's file cannot grow: one warning, and at the end what it has missed."""
    config = default_config()
    config.run.loggers = "tensorboard"
    notes: list[str] = []
    sink = Outside("tensorboard", tmp_path, config, notes.append)
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

    def samples(self, phase, rows, step):
        self._at(f"{len(rows)} samples")
        self.wrote.append((phase, rows[-1]["prompt"]))

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
)
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


@pytest.mark.parametrize("fails", [set(), {"2 samples"}])
def test_samples_of_an_evaluation_go_together(fails, tmp_path, monkeypatch):
    """A record for each evaluation and set; one that the service refuses stops nothing."""
    monkeypatch.setattr(_Service, "fails", fails)
    monkeypatch.setattr(_Service, "wrote", [])
    monkeypatch.setitem(sinks._SINKS, "wandb", (_Service, "json"))
    config = default_config()
    config.run.loggers = "wandb"
    notes: list[str] = []
    logs = RunLogs(tmp_path, None, config, notes.append)
    where = [("sft", "a", 1), ("sft", "a", 1), ("sft", "b", 1), ("rl", "b", 1)]
    keys = ("phase", "set", "step")
    rows = [dict(zip(keys, w, strict=True)) | {"prompt": i} for i, w in enumerate(where)]
    logs.write_evaluations([(rows[0], rows, None)])
    while logs._sinks[0]._records.qsize():
        time.sleep(0.001)
    logs.close()
    pages = [("eval_sft/a", "1"), ("eval_sft/b", "2"), ("eval_rl/b", "3")]
    assert _Service.wrote == [1, *pages[bool(fails) :]]
    assert len(notes) == 2 * len(fails)
    assert len(read_jsonl(tmp_path / "samples.jsonl")) == 4


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
