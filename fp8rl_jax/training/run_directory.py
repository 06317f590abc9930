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

from fp8rl_jax.config import default_config, flatten
from fp8rl_jax.config.load import upgraded
from fp8rl_jax.config.resolve import Resolved
from fp8rl_jax.errors import UserError
from fp8rl_jax.training.disk import no_room
from fp8rl_jax.training.logs import RunLogs

# Fields that may differ between a run and its resumption.
_MAY_CHANGE = (
    "run.dir", "run.steps", "run.cache_dir", "run.compilation_cache", "run.keep_checkpoints",
    "precision.self_check", "env.data_dir", "env.download",
)  # fmt: skip


def check_directory(resolved: Resolved, resume: bool) -> None:
    """Raises UserError if `run.dir` holds another configuration, or a run that `resume` was not
    asked for."""
    config = resolved.config
    directory = pathlib.Path(config.run.dir)
    saved = directory / "config.json"
    if saved.exists():
        ours = as_saved(config)
        theirs = read_saved_config(saved)
        difference = first_difference(theirs, ours)
        if difference:
            name, before, now = difference
            raise UserError(
                f"run.dir: {directory} holds a run with another config ({name} was {before!r}, is "
                f"{now!r}): set it back, or choose another --config.run.dir"
            )
        _check_shapes(resolved, directory)
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


def open_run(resolved: Resolved, resume: bool) -> pathlib.Path:
    """Prepares the run directory: writes its config.json.

    Raises:
      UserError: of `check_directory`, or the directory cannot be written.
    """
    check_directory(resolved, resume)
    config = resolved.config
    directory = pathlib.Path(config.run.dir)
    saved = directory / "config.json"
    ours = as_saved(config)
    temporary = directory / "config.json.tmp"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if config.model.checkpoint:
            (directory / "model.json").write_text(
                json.dumps(dataclasses.asdict(resolved.model), indent=2) + "\n"
            )
        temporary.write_text(json.dumps(ours, indent=2) + "\n")
        os.replace(temporary, saved)
    except OSError as error:
        raise no_room(directory, error) from None
    return directory


def _check_shapes(resolved: Resolved, directory: pathlib.Path) -> None:
    """Raises UserError if `model.checkpoint` has other shapes than when the run began."""
    saved, checkpoint = directory / "model.json", resolved.config.model.checkpoint
    if not (checkpoint and saved.exists()):
        return
    before, now = read_saved_config(saved, sections=False), dataclasses.asdict(resolved.model)
    for name, value in now.items():
        if before.get(name, value) != value:
            raise UserError(
                f"model.checkpoint: {checkpoint} has {name} = {value!r}, and the run "
                f"in {directory} began with {before[name]!r}: put the directory back, or choose "
                "another --config.run.dir"
            )


def as_saved(config: ml_collections.ConfigDict) -> dict:
    """The sections of a configuration as config.json holds them."""
    return json.loads(json.dumps(config.to_dict()))


def read_saved_config(path: pathlib.Path, sections: bool = True) -> dict:
    """The config.json (or, without sections, model.json) of a run; UserError if it is damaged."""
    try:
        content = json.loads(path.read_text())
        if not all(isinstance(value, dict) or not sections for value in content.values()):
            raise ValueError("its sections are no objects")
        return upgraded(content, str(path)) if sections else content
    except (ValueError, AttributeError) as error:
        raise UserError(
            f"run.dir: {path} is damaged ({error}): put the file back, or choose another "
            "--config.run.dir"
        ) from None


def first_difference(theirs: dict, ours: dict):
    """(field, their value, our value) of the first field that differs, or None.

    A field that an older version did not write had its default.
    """
    defaults = flatten(default_config())
    before, now = (flatten(ml_collections.ConfigDict(c)) for c in (theirs, ours))
    for name in sorted({*before, *now} - set(_MAY_CHANGE)):
        was, value = (fields.get(name, defaults.get(name)) for fields in (before, now))
        if was != value:
            return name, was, value
    return None
