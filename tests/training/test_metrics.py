"""Logs are lines that survive a crash: a run can return to any position that it has synced."""

import json
import math
import os
import pathlib

import pytest
from tiny_run import TIME_PREFIXES, without_times

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.config import default_config
from fp8rl_jax.report import summarise
from fp8rl_jax.training import logs as run_logs
from fp8rl_jax.training.logs import JsonlWriter, RunLogs, read_jsonl


def test_a_line_is_readable_at_once(tmp_path):
    """A written record is in the file before the writer is closed or synced."""
    writer = JsonlWriter(tmp_path / "a.jsonl")
    for step in range(3):
        writer.write({"step": step, "loss": 0.1 * step})
        assert read_jsonl(tmp_path / "a.jsonl")[-1] == {"step": step, "loss": 0.1 * step}
    writer.close()
    assert (tmp_path / "a.jsonl").read_text().count("\n") == 3


def test_floats_come_back_bit_for_bit(tmp_path):
    """A float64 passes through the text unchanged, so files of two runs can be compared."""
    values = [0.1, 1 / 3, 5e-324, -0.0, 1.7976931348623157e308, 2**53 + 1.0]
    writer = JsonlWriter(tmp_path / "a.jsonl")
    writer.write({"values": values})
    writer.close()
    (record,) = read_jsonl(tmp_path / "a.jsonl")
    assert [v.hex() for v in record["values"]] == [v.hex() for v in values]


def test_every_line_is_strict_json(tmp_path):
    """What JSON has no number for is null, at any depth; a loss of NaN breaks no other reader."""
    writer = JsonlWriter(tmp_path / "a.jsonl")
    record = {"loss": math.nan, "rewards": [1.0, -math.inf, (math.inf,)], "step": 3, "text": "NaN"}
    writer.write(record)
    writer.close()

    def no_number(text):
        raise AssertionError(text)

    line = json.loads((tmp_path / "a.jsonl").read_text(), parse_constant=no_number)
    assert line == {"loss": None, "rewards": [1.0, None, [None]], "step": 3, "text": "NaN"}
    assert math.isnan(record["loss"])


def test_text_with_line_breaks_stays_one_line(tmp_path):
    """Line separators of any alphabet inside a value do not break the file into more lines."""
    text = "a\nb\r\nc\u2028d\x0be\x85f\x1cg ünïcödé"
    writer = JsonlWriter(tmp_path / "a.jsonl")
    writer.write({"response": text})
    writer.write({"response": "next"})
    writer.close()
    assert read_jsonl(tmp_path / "a.jsonl") == [{"response": text}, {"response": "next"}]


def test_opening_again_appends(tmp_path):
    """A second writer of the same file adds to it, and its size counts all of it."""
    path = tmp_path / "a.jsonl"
    for step in range(2):
        writer = JsonlWriter(path)
        writer.write({"step": step})
        assert writer.sync() == path.stat().st_size
        writer.close()
    assert [r["step"] for r in read_jsonl(path)] == [0, 1]


def test_truncate_returns_to_a_synced_position(tmp_path):
    """What was written after a position disappears, and writing goes on from there."""
    path = tmp_path / "a.jsonl"
    writer = JsonlWriter(path)
    positions = [writer.sync()]
    for step in range(4):
        writer.write({"step": step, "text": "x" * step})
        positions.append(writer.sync())
    assert positions == sorted(set(positions)) and positions[0] == 0
    writer.truncate(positions[2])
    assert [r["step"] for r in read_jsonl(path)] == [0, 1]
    assert writer.sync() == positions[2]
    writer.write({"step": 9})
    writer.close()
    assert [r["step"] for r in read_jsonl(path)] == [0, 1, 9]
    assert b"\0" not in path.read_bytes()


def test_read_of_a_missing_or_empty_file(tmp_path):
    """No file and an empty file hold no record."""
    assert read_jsonl(tmp_path / "none.jsonl") == []
    (tmp_path / "empty.jsonl").touch()
    assert read_jsonl(tmp_path / "empty.jsonl") == []


def test_a_cut_last_line_is_left_out(tmp_path):
    """Wherever a crash cut the last line, the lines before it are read and it is not."""
    whole = json.dumps({"step": 1, "loss": 0.5, "flags": [True, {"a": "}"}]})
    first = json.dumps({"step": 0})
    path = tmp_path / "a.jsonl"
    for size in range(len(whole)):
        path.write_text(first + "\n" + whole[:size])
        assert read_jsonl(path) == [{"step": 0}], whole[:size]
    path.write_text(first + "\n" + whole)
    assert len(read_jsonl(path)) == 2


def test_without_times_drops_times_and_rates_only():
    """What remains is what two runs of one configuration must share."""
    record = {
        "step": 3,
        "time_step": 1.0,
        "time_rollout": 2.0,
        "tokens_per_s_learner": 3.0,
        "mean_time": 4.0,
        "loss": math.pi,
        "fp8_saturated_frac/weights": 0.0,
    }
    kept = {"step": 3, "mean_time": 4.0, "loss": math.pi, "fp8_saturated_frac/weights": 0.0}
    assert without_times(record) == kept
    assert "time_step" in record, "the argument was changed"
    assert all(without_times({f"{prefix}x": 1.0}) == {} for prefix in TIME_PREFIXES)


def _fill(logs: RunLogs, steps: range) -> None:
    for step in steps:
        logs.write("metrics", {"step": step, "loss": 1.0 / (step + 1), "time_step": 0.1})
        logs.write("sft", {"step": step, "loss": 2.0})
        logs.write("eval", {"step": step, "phase": "rl", "accuracy_greedy": 0.5})
        logs.write("samples", {"step": step, "phase": "rl", "prompt": "1 + 1", "reward": 1.0})
        logs.write("rewards", {"step": step, "rewards": [[1.0]]})
        logs.write("digests", {"step": step, "phase": "rl", "state": "0" * 16, "chain": "1"})


def _steps(directory) -> dict[str, list[int]]:
    files = {name: read_jsonl(directory / f"{name}.jsonl") for name in RunLogs.NAMES}
    return {name: [record["step"] for record in records] for name, records in files.items()}


def test_run_logs_are_cut_to_their_offsets(tmp_path):
    """A resumed run finds each of its files as long as when the checkpoint was written."""
    logs = RunLogs(tmp_path, None, default_config())
    _fill(logs, range(3))
    offsets = logs.offsets()
    before = {name: (tmp_path / f"{name}.jsonl").read_bytes() for name in RunLogs.NAMES}
    _fill(logs, range(3, 5))
    logs.write("metrics", {"step": 5})
    logs.close()
    assert set(offsets) == set(RunLogs.NAMES)
    assert all(offsets[name] == len(before[name]) for name in RunLogs.NAMES)
    assert _steps(tmp_path)["metrics"] == [0, 1, 2, 3, 4, 5]

    logs = RunLogs(tmp_path, offsets, default_config())
    for name in RunLogs.NAMES:
        assert (tmp_path / f"{name}.jsonl").read_bytes() == before[name]
    assert logs.offsets() == offsets
    _fill(logs, range(3, 4))
    logs.close()
    assert set(map(tuple, _steps(tmp_path).values())) == {(0, 1, 2, 3)}


def test_run_logs_without_offsets_start_empty(tmp_path):
    """A run that starts anew keeps the lines of one that left no checkpoint aside, each time."""
    former = {}
    for number in (1, 2):
        logs = RunLogs(tmp_path, None, default_config())
        assert logs.moved_to == (None if number == 1 else tmp_path / "earlier-1")
        _fill(logs, range(2 * number))
        logs.close()
        (tmp_path / "drift.json").write_text(str(number))
        former[number] = _steps(tmp_path)
    logs = RunLogs(tmp_path, None, default_config())
    logs.close()
    assert logs.moved_to == tmp_path / "earlier-2"
    assert not any(_steps(tmp_path).values())
    assert not (tmp_path / "drift.json").exists()
    assert [(tmp_path / f"earlier-{k}" / "drift.json").read_text() for k in (1, 2)] == ["1", "2"]
    assert {k: _steps(tmp_path / f"earlier-{k}") for k in (1, 2)} == former
    assert RunLogs(tmp_path, {}, default_config()).moved_to is None


def test_run_logs_write_tensorboard_events(tmp_path):
    """Numbers and samples reach the event file under the phase's prefix."""
    logs = RunLogs(tmp_path, None, default_config())
    _fill(logs, range(2))
    logs.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    content = events.read_bytes()
    for tag in (b"rl/loss", b"sft/loss", b"eval_rl/accuracy_greedy", b"eval_rl/samples"):
        assert tag in content


def _offsets_of_three(directory: pathlib.Path) -> dict[str, int]:
    """Of logs of three records each, which are written and closed."""
    logs = RunLogs(directory, None, default_config())
    _fill(logs, range(3))
    offsets = logs.offsets()
    logs.close()
    return offsets


@pytest.mark.parametrize("name", RunLogs.NAMES)
def test_run_logs_shorter_than_their_offset_are_refused(tmp_path, name):
    """A log that lost lines since the checkpoint is reported, never filled up with zero bytes."""
    offsets = _offsets_of_three(tmp_path)
    path = tmp_path / f"{name}.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UserError, match=name):
        RunLogs(tmp_path, offsets, default_config()).close()
    assert b"\0" not in path.read_bytes()


def test_a_log_that_was_moved_away_begins_with_a_gap(tmp_path, monkeypatch):
    """It is said, and sizes stay what checkpoints have noted: at the next resumption as well."""
    monkeypatch.setattr(run_logs, "LONGEST", 2**8)
    offsets = _offsets_of_three(tmp_path)
    for name in RunLogs.NAMES:
        (tmp_path / f"{name}.jsonl").unlink()
    notes = list[str]()
    resumed = RunLogs(tmp_path, offsets, default_config(), notes.append)
    assert resumed.offsets() == offsets and len(notes) == len(offsets)
    assert all("jsonl is missing, so it begins with a gap" in note for note in notes)
    _fill(resumed, range(3, 4))
    later = resumed.offsets()
    resumed.close()
    for sizes in (later, offsets):
        notes.clear()
        RunLogs(tmp_path, sizes, default_config(), notes.append).close()
        assert not notes
        gap, *records = read_jsonl(tmp_path / "metrics.jsonl")
        assert "are missing" in gap["gap"]
        assert [r["step"] for r in records if "gap" not in r] == [3] * (sizes is later)
    (tmp_path / "config.json").write_text("{}")
    notes = summarise(tmp_path)["notes"]
    assert "metrics.jsonl has a gap: its records up to a checkpoint were lost." in notes


def _damaged(content: bytes) -> dict[str, bytes]:
    """A log of three lines, damaged in ways that leave its size."""
    lines, size = content.splitlines(keepends=True), len(content)
    return {
        "zeros": bytes(size),
        "bytes": b"\xff" * size,
        "a line": lines[0] + b"x" * (len(lines[1]) - 1) + b"\n" + lines[2],
        "a list": lines[0] + b"[1]".ljust(len(lines[1]) - 1) + b"\n" + lines[2],
        "a key": content.replace(b'"step"', b'"stop"'),
        "a step": content.replace(b'"step": 1', b'"step":[]'),
        "an end": content[:-1] + b" ",
        "depth": b"[" * (size - 1) + b"\n",
    }


@pytest.mark.parametrize("name", RunLogs.NAMES)
def test_a_damaged_log_of_the_right_size(tmp_path, name):
    """One sentence with the file; its bytes stay, and no logger is opened."""
    offsets = _offsets_of_three(tmp_path)
    path = tmp_path / f"{name}.jsonl"
    for how, content in _damaged(path.read_bytes()).items():
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"{name}.jsonl is damaged .*put the file back"):
            RunLogs(tmp_path, offsets, default_config())
        assert path.read_bytes() == content, how


@pytest.mark.parametrize("resumed", [True, False])
@pytest.mark.parametrize("kind", ["link", "fifo", "device", "directory"])
def test_a_log_that_is_no_file(tmp_path, kind, resumed):
    """Nothing is waited for, and what a link points to is neither cut nor written."""
    (tmp_path / "run").mkdir()
    path, victim = tmp_path / "run" / "metrics.jsonl", tmp_path / "victim"
    victim.write_text("")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else victim)
    words = {"fifo": "no regular file", "directory": "a directory"}.get(kind, "a symbolic link")
    offsets = dict.fromkeys(RunLogs.NAMES, 0) if resumed else None
    if kind == "directory" and not resumed:  # moves to earlier-1
        RunLogs(tmp_path / "run", offsets, default_config()).close()
        return
    with pytest.raises(UserError, match=f"metrics.jsonl cannot be written .*{words}"):
        RunLogs(tmp_path / "run", offsets, default_config())
    assert victim.read_text() == ""
