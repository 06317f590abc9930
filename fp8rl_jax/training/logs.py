"""A run's JSON-lines files, which survive a crash, and loggers that get the same numbers."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fp8rl_jax.base import processes
from fp8rl_jax.base.errors import UserError, refused_by_system
from fp8rl_jax.base.json_file import LONGEST, parse_json, strict_json
from fp8rl_jax.base.paths import open_regular
from fp8rl_jax.base.whole_file import write_whole
from fp8rl_jax.report.metrics import FILES, GAP
from fp8rl_jax.training.sinks import Outside, logger_names

_WAYS = "put the file back, or move it away, and --resume goes on with a gap in it"


def _gap(size: int) -> bytes:
    """Returns lines of `size` bytes in the place of a log that is gone, so that sizes which
    checkpoints have noted stay positions in it."""
    line = strict_json({"step": 0, GAP: "the records that were here are missing"})
    most = LONGEST // 2
    lengths = [most] * (size // most - 1) + [size % most + most] if size > most else [size]
    return b"".join(line.ljust(length - 1).encode() + b"\n" for length in lengths)


class JsonlWriter:
    """Appends JSON objects, one a line; the file's size is a position that a run can return to."""

    def __init__(self, path: pathlib.Path):
        """Opens the file; UserError if it is not a regular file that can be written."""
        self.path = path
        remedy = "move it away, or choose another --config.run.dir"
        with refused_by_system(f"{path} cannot be written", remedy):
            file = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._file = os.fdopen(file, "ab")

    def write(self, record: dict[str, Any]) -> None:
        """Writes one line of strict JSON and flushes it to the operating system."""
        self._file.write((strict_json(record) + "\n").encode())
        self._file.flush()

    def sync(self) -> int:
        """Syncs the file to disk; returns its size in bytes."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def truncate(self, size: int) -> None:
        """Cuts the file to `size` bytes."""
        self._file.truncate(size)
        self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        self._file.close()


def read_jsonl(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the records of a file, up to the first damaged line; [] if there is no file."""
    records: list[dict[str, Any]] = []
    with contextlib.suppress(FileNotFoundError, ValueError):
        for record in _records(path):
            records.append(record)
    return records


def read_log(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the records of a file that a run has written.

    Raises:
      UserError: the file cannot be read, or a line is no record of a run.
    """
    try:
        return [_checked(record) for record in _records(path, b"\n")]
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
    except ValueError as error:
        what = f"is damaged ({error})"
    raise UserError(f"{path} {what}: {_WAYS}")


def _records(path: pathlib.Path, end: bytes = b"") -> Iterator[dict[str, Any]]:
    """Yields the JSON objects of a file, one a line; each line must end with `end`.

    Raises:
      OSError: the file cannot be read, or is no regular file.
      ValueError: a line is no JSON object, or has another end.
    """
    with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
        number = 0
        while line := file.readline(LONGEST):
            number += 1
            try:
                record = parse_json(line)
            except ValueError:
                record = None
            if not isinstance(record, dict) or not line.endswith(end):
                raise ValueError(f"line {number} is no record")
            yield record


def _checked(record: dict[str, Any]) -> dict[str, Any]:
    """Returns the record; ValueError if its step, phase or set has another type."""
    step = record.get("step")
    texts = [record.get(name, "") for name in ("phase", "set")]
    if type(step) is not int or step < 0 or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"it has a record of step {step!r}, phase {texts[0]!r}, set {texts[1]!r}")
    return record


class RunLogs:
    """The logs of a run directory, those of `report.metrics.FILES`; and `run.loggers`.

    In a run of several processes only the first one opens and writes them.
    """

    NAMES = (*FILES,)

    def __init__(
        self,
        directory: pathlib.Path,
        offsets: dict[str, int] | None,
        config,
        note: Callable[[str], None] = print,
    ):
        """Opens the files; cuts them to `offsets` (sizes in bytes by name).

        With None they start empty; files of a former run, its drift analysis included, move to the
        directory `earlier-1`, `earlier-2`, ..., which `moved_to` names. A file that is not there
        begins with a gap, which `note` says.

        `config` names the loggers, which receive it; `note` is called with lines on their failures.

        Raises:
          UserError: a file is too short, or not written by a run.
        """
        self.moved_to: pathlib.Path | None = None
        self.digests: list[dict[str, Any]] = []  # what digests.jsonl has, in the first process
        self._writers: dict[str, JsonlWriter] = {}
        self._sinks: list[Outside] = []
        if processes.first():
            self._open(directory, offsets, config, note)

    def _open(self, directory: pathlib.Path, offsets: dict[str, int] | None, config, note) -> None:
        self.moved_to = self._move_away(directory) if offsets is None else None
        for name, size in (offsets or {}).items():
            path = directory / f"{name}.jsonl"
            if size and not os.path.lexists(path):
                write_whole(path, _gap(size))
                note(f"warning: {path} is missing, so it begins with a gap up to the checkpoint")
        self._writers = {name: JsonlWriter(directory / f"{name}.jsonl") for name in self.NAMES}
        for name, writer in self._writers.items():
            size = (offsets or {}).get(name, 0)
            if writer.path.stat().st_size < size:
                raise UserError(
                    f"{writer.path} is shorter than it was when the checkpoint was written "
                    f"({size} bytes): {_WAYS}"
                )
            writer.truncate(size)
        written = {name: read_log(writer.path) for name, writer in self._writers.items()}
        self.digests = written["digests"]
        self._sinks = [Outside(name, directory, config, note) for name in logger_names(config)]
        for name, records in written.items():
            self._show(name, [r for r in records if GAP not in r], again=True)

    def _move_away(self, directory: pathlib.Path) -> pathlib.Path | None:
        """Moves the files of a former run; returns their new directory, or None without files."""
        names = (directory / f"{name}.jsonl" for name in self.NAMES)
        former = [path for path in names if path.exists() and path.stat().st_size]
        if not former:
            return None
        numbers = (directory / f"earlier-{number}" for number in itertools.count(1))
        target = next(path for path in numbers if not path.exists())
        target.mkdir()
        of_drift = (directory / name for name in ("drift.json", "drift.html"))
        for path in (*former, *filter(os.path.lexists, of_drift)):
            path.rename(target / path.name)
        return target

    def write(self, name: str, *records: dict[str, Any]) -> None:
        """Appends records to one of NAMES, and sends their numbers or samples to the loggers."""
        if not processes.first():
            return
        for record in records:
            self._writers[name].write(record)
        self._show(name, records)

    def write_evaluations(
        self, evaluations: Iterable[tuple[dict[str, Any], list[dict], Any]]
    ) -> None:
        """Appends the evaluations that `evaluate` returns."""
        for record, samples, _ in evaluations:
            self.write("eval", record)
            self.write("samples", *samples)

    def _show(self, name: str, records: Iterable[dict[str, Any]], again: bool = False) -> None:
        """Sends records to the loggers, samples of one evaluation together, but no digests and
        single rewards; `again`: the records were written before a resumption."""
        if name in ("digests", "rewards"):
            return
        sinks = [sink for sink in self._sinks if sink.writes_anew or not again]

        def phase_and_step(record: dict[str, Any]) -> tuple[str, int]:
            phase = {"metrics": "rl", "sft": "sft"}.get(name) or f"eval_{record.get('phase')}"
            return f"{phase}/{record['set']}" if "set" in record else phase, record["step"]

        for (phase, step), group in itertools.groupby(records, phase_and_step):
            rows = list(group)
            for sink in sinks:
                if name == "samples":
                    sink.samples(phase, rows, step)
                    continue
                for row in rows:
                    numbers = {
                        f"{phase}/{key}": value
                        for key, value in row.items()
                        if key != "step" and isinstance(value, int | float)
                    }
                    sink.write(phase, numbers, step)

    def offsets(self) -> dict[str, int]:
        """Syncs the files to disk; returns their sizes in bytes by name."""
        return {name: writer.sync() for name, writer in self._writers.items()}

    def close(self) -> None:
        """Closes all files and loggers, even if one fails; then raises a failure."""
        with contextlib.ExitStack() as stack:
            for sink in reversed(self._sinks):
                stack.callback(sink.close)
            for writer in reversed(self._writers.values()):
                stack.callback(writer.close)
