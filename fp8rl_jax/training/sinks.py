"""Places that a run's numbers go to beside its JSON lines: TensorBoard, Weights & Biases, MLflow.

None of them decides anything: a run resumes from its own files. TensorBoard's events are written
anew at each start; the services keep what they have, so that steps after the checkpoint that a
resumed run continues from appear there twice.
"""

from __future__ import annotations

import importlib.util
import pathlib
import shutil
import time
from typing import ClassVar, Protocol

from fp8rl_jax.errors import UserError
from fp8rl_jax.whole_file import write_whole


class Sink(Protocol):
    """A place for numbers."""

    writes_anew: ClassVar[bool]  # whether it starts empty, also when a run is resumed

    def write(self, phase: str, numbers: dict[str, float], step: int) -> None:
        """Adds numbers, by 'phase/name', of a step of that phase."""

    def close(self) -> None:
        """Hands over everything."""


class TensorBoard:
    """An event file in DIRECTORY/tensorboard.

    Written here, not by the thread of tensorboardX's SummaryWriter: that one dies on a full disk
    with a traceback, and then whoever hands it numbers waits for ever.
    """

    writes_anew: ClassVar[bool] = True  # events cannot be cut

    def __init__(self, directory: pathlib.Path, config):
        from tensorboardX.event_file_writer import EventsWriter

        del config
        shutil.rmtree(directory / "tensorboard", ignore_errors=True)
        (directory / "tensorboard").mkdir()
        self._events = EventsWriter(str(directory / "tensorboard" / "events"))

    def write(self, phase: str, numbers: dict[str, float], step: int) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        now = time.time()
        for name, value in numbers.items():
            summary = scalar(name, value)
            self._events.write_event(Event(wall_time=now, step=step, summary=summary))

    def close(self) -> None:
        self._events.close()


class Wandb:
    """A run of Weights & Biases; WANDB_MODE=offline keeps it in DIRECTORY/wandb."""

    writes_anew: ClassVar[bool] = False

    def __init__(self, directory: pathlib.Path, config):
        import wandb

        self._run = wandb.init(
            project=config.run.project, name=directory.name, dir=str(directory),
            config=config.to_dict(), id=_identity(directory), resume="allow",
        )  # fmt: skip

    def write(self, phase: str, numbers: dict[str, float], step: int) -> None:
        # Steps count within a phase; wandb's own count goes on over all of them.
        self._run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")
        self._run.log({**numbers, f"{phase}/step": step})

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
        known = file.read_text().strip() if file.exists() else None
        run = mlflow.start_run(run_id=known, run_name=None if known else directory.name)
        if not known:
            write_whole(file, run.info.run_id + "\n")
            flat = {
                f"{s}.{k}": v for s, fields in config.to_dict().items() for k, v in fields.items()
            }
            mlflow.log_params(flat)

    def write(self, phase: str, numbers: dict[str, float], step: int) -> None:
        # MLflow's names hold no '@', and of some systems no ':'.
        named = {k.replace("@", "_at_").replace(":", "_"): v for k, v in numbers.items()}
        self._mlflow.log_metrics(named, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def _identity(directory: pathlib.Path) -> str:
    """A name for wandb's run, which a resumption finds again."""
    import uuid

    file = directory / "wandb_run"
    if not file.exists():
        write_whole(file, uuid.uuid4().hex[:12] + "\n")
    return file.read_text().strip()


# Name in `run.loggers` -> sink, and the package that it needs.
_SINKS: dict[str, tuple[type[Sink], str]] = {
    "tensorboard": (TensorBoard, "tensorboardX"),
    "wandb": (Wandb, "wandb"),
    "mlflow": (MLflow, "mlflow"),
}


def logger_names(config) -> list[str]:
    """The names in `run.loggers`, checked.

    Raises:
      UserError: one is unknown, or its package is not installed.
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


def open_sinks(directory: pathlib.Path, config) -> list[Sink]:
    """The sinks of `run.loggers`; packages are imported now, when a run writes.

    Raises:
      UserError: a service cannot be reached or refuses.
    """
    sinks = []
    for name in logger_names(config):
        try:
            sinks.append(_SINKS[name][0](directory, config))
        except Exception as error:  # whatever a service's package raises
            text = " ".join(str(error).split())[:200]
            raise UserError(
                f"run.loggers: {name} cannot be opened ({type(error).__name__}: {text}): set it "
                "up, or leave it out"
            ) from None
    return sinks
