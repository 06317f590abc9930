"""Loggers that get a run's numbers and samples besides its JSON-lines files: TensorBoard, Weights &
Biases, MLflow.

A run never depends on them: it resumes from its own files, and goes on if a logger raises or hangs
(`Outside`). TensorBoard's events are written anew at each start. The other two keep their records,
so the steps that a resumed run repeats appear there twice.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import queue
import shutil
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

from fp8rl_jax.base.errors import UserError, raised, visible
from fp8rl_jax.base.json_file import plain, read_bytes
from fp8rl_jax.base.whole_file import write_whole
from fp8rl_jax.config import flatten

_END_SECONDS = 60.0  # time for a logger to write its remaining records at the end of a run
_TEXTS = ("prompt", "response", "answer")  # fields of a sample
_MOST_SAMPLES = 12  # samples of an evaluation that loggers get; samples.jsonl has them all
_LONGEST_TEXT = 2000  # characters


class Sink(Protocol):
    """A logger of numbers and samples."""

    writes_anew: ClassVar[bool]  # whether it starts empty, also when a run is resumed

    def __init__(self, directory: pathlib.Path, config):
        """Opens the logger for the run in a directory."""

    def write(self, phase: str, numbers: dict[str, float], step: int) -> None:
        """Adds numbers {'phase/name': number} of a step of that phase."""

    def samples(self, phase: str, rows: list[dict[str, Any]], step: int) -> None:
        """Adds samples, a result of `_page`, of a step of that phase."""

    def close(self) -> None:
        """Writes all pending records and closes the logger."""


class TensorBoard:
    """An event file in DIRECTORY/tensorboard.

    It is not written by tensorboardX's SummaryWriter, whose thread dies on a full disk with a
    traceback; its callers then wait for ever.
    """

    writes_anew: ClassVar[bool] = True  # an event file cannot be truncated

    def __init__(self, directory: pathlib.Path, config):
        from tensorboardX.event_file_writer import EventsWriter

        place = directory.resolve() / "tensorboard"  # `s3:x` would be an address to tensorboardX
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        self._events = EventsWriter(str(place / "events"))

    def write(self, phase: str, numbers: dict[str, float], step: int) -> None:
        from tensorboardX.summary import scalar

        for name, value in numbers.items():
            self._add(scalar(name, value), step)

    def samples(self, phase: str, rows: list[dict[str, Any]], step: int) -> None:
        from tensorboardX.summary import text

        self._add(text(f"{phase}/samples", _markdown(rows)), step)

    def _add(self, summary, step: int) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._events.write_event(Event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        self._events.close()


class Wandb:
    """A run of Weights & Biases; WANDB_MODE=offline keeps it in DIRECTORY/wandb."""

    writes_anew: ClassVar[bool] = False

    def __init__(self, directory: pathlib.Path, config):
        import wandb

        self._run = wandb.init(
            project=config.run.project,
            name=directory.name,
            dir=str(directory),
            config=plain(config.to_dict()),
            id=_identity(directory),
            resume="allow",
        )

    def write(self, phase: str, numbers: dict[str, float], step: int) -> None:
        # Steps count within a phase; wandb's own count goes on over all phases.
        self._run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")
        self._run.log({**numbers, f"{phase}/step": step})

    def samples(self, phase: str, rows: list[dict[str, Any]], step: int) -> None:
        import wandb

        table = wandb.Table(columns=[*rows[0]], data=[[*row.values()] for row in rows])
        self.write(phase, {f"{phase}/samples": table}, step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow, at MLFLOW_TRACKING_URI."""

    writes_anew: ClassVar[bool] = False

    def __init__(self, directory: pathlib.Path, config):
        import mlflow

        self._mlflow = mlflow
        mlflow.set_experiment(config.run.project)
        file = directory / "mlflow_run"
        known = _kept_name(file)
        run = mlflow.start_run(run_id=known, run_name=None if known else directory.name)
        if not known:
            write_whole(file, run.info.run_id + "\n")
            mlflow.log_params({name: plain(value) for name, value in flatten(config).items()})

    def write(self, phase: str, numbers: dict[str, float], step: int) -> None:
        self._mlflow.log_metrics({self._name(k): v for k, v in numbers.items()}, step=step)

    def samples(self, phase: str, rows: list[dict[str, Any]], step: int) -> None:
        self._mlflow.log_text(_markdown(rows), f"samples/{self._name(phase)}/step_{step}.md")

    @staticmethod
    def _name(name: str) -> str:
        """Returns a name for MLflow, which accepts no '@', and on some systems no ':'."""
        return name.replace("@", "_at_").replace(":", "_")

    def close(self) -> None:
        self._mlflow.end_run()


def _page(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the first `_MOST_SAMPLES` samples: prompt, response and answer, each cut after
    `_LONGEST_TEXT` characters, and reward (None if the response was not scored)."""
    page = []
    for sample in samples[:_MOST_SAMPLES]:
        texts = {name: _cut(str(sample.get(name, ""))) for name in _TEXTS}
        reward = sample.get("reward")
        page.append(texts | {"reward": reward if isinstance(reward, int | float) else None})
    return page


def _cut(text: str) -> str:
    left_out = len(text) - _LONGEST_TEXT
    end = f" ... {left_out:,} characters left out" if left_out > 0 else ""
    return visible(text[:_LONGEST_TEXT]) + end


def _markdown(rows: list[dict[str, Any]]) -> str:
    """Formats samples as Markdown, with their texts as indented code, which shows them verbatim."""
    return "\n\n".join(
        f"**{name}**\n\n" + textwrap.indent(str(value), "    ", lambda line: True)
        for row in rows
        for name, value in row.items()
    )


def _identity(directory: pathlib.Path) -> str:
    """Returns the id of wandb's run; keeps a new id in the run directory for resumptions."""
    import uuid

    file = directory / "wandb_run"
    if known := _kept_name(file):
        return known
    write_whole(file, (name := uuid.uuid4().hex[:12]) + "\n")
    return name


def _kept_name(file: pathlib.Path) -> str | None:
    """Returns the name in a file of a run directory; None if the file is missing or empty."""
    if not os.path.lexists(file):
        return None
    return read_bytes(file, most=1000).decode().strip() or None


# Name in `run.loggers` -> its sink, and the package that the sink needs.
_SINKS: dict[str, tuple[type[Sink], str]] = {
    "tensorboard": (TensorBoard, "tensorboardX"),
    "wandb": (Wandb, "wandb"),
    "mlflow": (MLflow, "mlflow"),
}


def logger_names(config) -> list[str]:
    """Returns the names in `run.loggers`, checked.

    Raises:
      UserError: a name is unknown, or its package is not installed.
    """
    names = [name.strip() for name in config.run.loggers.split(",") if name.strip()]
    for name in names:
        if name not in _SINKS:
            raise UserError(f"run.loggers: {name!r} is unknown; write {', '.join(_SINKS)}")
        package = _SINKS[name][1]
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"run.loggers names {name!r}, and {package} is not installed: pip install {package}"
            )
    return names


class Outside:
    """A sink in its own thread, which cannot disturb the run: its errors become one warning, the
    number of records that it missed is reported at the end, and only `close` waits for it.

    Args:
      name: name of the sink in `run.loggers`.
      directory, config: directory and configuration of the run.
      note: function called with a line to show.
    """

    def __init__(self, name: str, directory: pathlib.Path, config, note: Callable[[str], None]):
        self._kind = _SINKS[name][0]
        self._name = name
        self._directory = directory
        self._config = config
        self._note = note
        self.writes_anew = self._kind.writes_anew
        self._records: queue.SimpleQueue = queue.SimpleQueue()
        self._given = self._taken = 0
        self._first_missed = ""
        self._warned = self._failing = False
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=f"logger {name}", daemon=True)
        self._thread.start()

    def write(self, phase: str, numbers: dict[str, float], step: int) -> None:
        """Queues numbers for `Sink.write`."""
        self._give("write", phase, numbers, step)

    def samples(self, phase: str, samples: Sequence[dict[str, Any]], step: int) -> None:
        """Queues samples, records of samples.jsonl, for `Sink.samples`."""
        self._give("samples", phase, _page(samples), step)

    def _give(self, *record) -> None:
        self._given += 1
        self._records.put(record)

    def close(self) -> None:
        """Waits until all records are written, at most `_END_SECONDS`; reports missing records."""
        self._ends.set()
        self._records.put(None)
        self._thread.join(_END_SECONDS)
        if self._thread.is_alive():
            self._warn(f"does not end within {_END_SECONDS:.0f} s")
        if missed := self._given - self._taken:
            first = f", the first of {self._first_missed}" if self._first_missed else ""
            self._note(
                f"{self._name} has missed {missed} of {self._given} records{first}; the .jsonl "
                f"files in {self._directory} have them"
            )

    def _serve(self) -> None:
        sink = self._try("cannot be opened", lambda: self._kind(self._directory, self._config))
        while record := self._records.get():
            method, *what = record
            # At the end, do not wait for a failing service once per record.
            gone = sink is None or (self._failing and self._ends.is_set())
            if not gone and self._try(
                "fails", lambda m=method, w=what: getattr(sink, m)(*w) or True
            ):
                self._taken += 1
            elif not self._first_missed:
                self._first_missed = f"{what[0]} step {what[2]}"
        if sink is not None:
            self._try("fails at its end", sink.close)

    def _try(self, what: str, call: Callable):
        """Returns the result of `call`; warns and returns None if it raises anything."""
        try:
            value = call()
        except BaseException as error:  # a service's package may raise anything, SystemExit too
            self._failing = True
            self._warn(f"{what} ({raised(error)})")
            return None
        self._failing = False
        return value

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            self._note(f"warning: run.loggers: {self._name} {what}; the run goes on without it")
