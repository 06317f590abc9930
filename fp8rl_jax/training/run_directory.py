"""A run directory and its config.json: one run each, under one configuration.

Where the shapes come from a checkpoint, model.json keeps them: the run's parameters are in its own
checkpoints, and the directory they came from may have changed since.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib

import ml_collections

from fp8rl_jax.config import checks, default_config, flatten
from fp8rl_jax.config.fields import REMOVED
from fp8rl_jax.config.model_source import model_shapes
from fp8rl_jax.errors import UserError
from fp8rl_jax.training.logs import RunLogs

# Fields that may differ between a run and its resumption.
_MAY_CHANGE = (
    "run.dir", "run.steps", "run.cache_dir", "run.compilation_cache", "run.keep_checkpoints",
    "precision.self_check",
)  # fmt: skip


def check_directory(config: ml_collections.ConfigDict, resume: bool) -> None:
    """Raises UserError if `run.dir` holds another configuration, or a run that `resume` was not
    asked for."""
    directory = pathlib.Path(config.run.dir)
    saved = directory / "config.json"
    if saved.exists():
        ours = json.loads(json.dumps(config.to_dict()))
        theirs = read_saved_config(saved)
        difference = first_difference(theirs, ours)
        if difference:
            name, before, now = difference
            raise UserError(
                f"run.dir: {directory} holds a run with another config ({name} was {before!r}, is "
                f"{now!r}): set it back, or choose another --config.run.dir"
            )
        _check_shapes(config, directory)
        if not resume:
            raise UserError(
                f"run.dir: {directory} already holds this run: add --resume to continue it, or "
                "choose another --config.run.dir"
            )
    else:
        names = ("checkpoints", "reference", "tensorboard", *(f"{n}.jsonl" for n in RunLogs.NAMES))
        found = next((name for name in names if (directory / name).exists()), None)
        if found:
            raise UserError(
                f"run.dir: {directory} has no config.json but holds {found}, which a run would "
                "replace: choose another --config.run.dir"
            )


def open_run(config: ml_collections.ConfigDict, resume: bool) -> pathlib.Path:
    """Prepares the run directory: writes its config.json.

    Raises:
      UserError: of `check_directory`, or the directory cannot be written.
    """
    check_directory(config, resume)
    directory = pathlib.Path(config.run.dir)
    saved = directory / "config.json"
    ours = json.loads(json.dumps(config.to_dict()))
    temporary = directory / "config.json.tmp"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if config.model.checkpoint:
            (directory / "model.json").write_text(json.dumps(_shapes(config), indent=2) + "\n")
        temporary.write_text(json.dumps(ours, indent=2) + "\n")
        os.replace(temporary, saved)
    except OSError as error:
        raise checks.no_room(directory, error) from None
    return directory


def _shapes(config: ml_collections.ConfigDict) -> dict:
    return dataclasses.asdict(model_shapes(config))


def _check_shapes(config: ml_collections.ConfigDict, directory: pathlib.Path) -> None:
    """Raises UserError if `model.checkpoint` has other shapes than when the run began."""
    saved = directory / "model.json"
    if not (config.model.checkpoint and saved.exists()):
        return
    before, now = read_saved_config(saved, sections=False), _shapes(config)
    for name, value in now.items():
        if before.get(name, value) != value:
            raise UserError(
                f"model.checkpoint: {config.model.checkpoint} has {name} = {value!r}, and the run "
                f"in {directory} began with {before[name]!r}: put the directory back, or choose "
                "another --config.run.dir"
            )


def read_saved_config(path: pathlib.Path, sections: bool = True) -> dict:
    """The config.json (or, without sections, model.json) of a run; UserError if it is damaged."""
    try:
        content = json.loads(path.read_text())
        if not all(isinstance(value, dict) or not sections for value in content.values()):
            raise ValueError("its sections are no objects")
        return content
    except (ValueError, AttributeError) as error:
        raise UserError(
            f"run.dir: {path} is damaged ({error}): put the file back, or choose another "
            "--config.run.dir"
        ) from None


def first_difference(theirs: dict, ours: dict):
    """(field, their value, our value) of the first field that differs, or None.

    A field that an older version did not write had its default; one that is gone has the value that
    is left of it.
    """
    defaults = flatten(default_config()) | REMOVED
    before, now = (flatten(ml_collections.ConfigDict(c)) for c in (theirs, ours))
    for name in sorted({*before, *now} - set(_MAY_CHANGE)):
        was, value = (fields.get(name, defaults.get(name)) for fields in (before, now))
        if was != value:
            return name, was, value
    return None
