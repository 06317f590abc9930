"""A run directory and its config.json: each directory holds one run under one configuration.

If the model's shapes come from `model.checkpoint`, model.json keeps them: the run's parameters are
in its checkpoints, and that directory may have changed since.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import shlex
import shutil
import tempfile
import time
from collections.abc import Collection
from typing import Any

import ml_collections

from fp8rl_jax.base import processes
from fp8rl_jax.base.errors import UserError, did_you_mean, limit_reached, refused_by_system
from fp8rl_jax.base.json_file import plain, read_bytes, read_json
from fp8rl_jax.base.user_cache import user_cache
from fp8rl_jax.base.whole_file import write_whole
from fp8rl_jax.config import default_config, flatten, saved_config, sections_config
from fp8rl_jax.config.functions import permit
from fp8rl_jax.config.resolved import Resolved
from fp8rl_jax.plan.bytes import state_bytes
from fp8rl_jax.sharding import MESH_AXES, abstract_mesh
from fp8rl_jax.training.environment import check_environment, keep_environment
from fp8rl_jax.training.logs import RunLogs

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM)
_LIMITS = (errno.EFBIG, errno.EMFILE, errno.ENFILE)
STORE_ERRORS = (*_FULL, *_FORBIDDEN, *_LIMITS, errno.EROFS, errno.EIO)
# Errors of a write that the user can fix; any other OSError is a bug.
WRITE_ERRORS = (*STORE_ERRORS, errno.ENAMETOOLONG, errno.EISDIR)
# Error -> its meaning, and a remedy besides another directory.
_CAUSES = {
    **dict.fromkeys(_FULL, ("no room is left", "free some, or ")),
    **dict.fromkeys(_FORBIDDEN, ("it may not be written", "change its permissions, or ")),
    errno.EROFS: ("it is mounted read-only", "mount it writable, or "),
    errno.ENAMETOOLONG: ("the name is too long", ""),
    errno.ENOTDIR: ("a part of the name is a file", ""),
    errno.EEXIST: ("it is a file", ""),
}
# Fields that may differ between a run and its resumption.
_MAY_CHANGE = (
    "run.dir",
    "run.steps",
    "run.cache_dir",
    "run.compilation_cache",
    "run.keep_checkpoints",
    "run.keep_every",
    "eval.average_last",
    "run.loggers",
    "run.project",
    "mesh.data",
    "mesh.fsdp",
    "model.check_finite",
    "precision.self_check",
    "env.reward_timeout",
    "env.reward_memory_gb",
)
_DIGEST = "data.sha256"
# Files that a run writes besides its logs, which `RunLogs` checks.
FILES_OF_START = ("model.json", _DIGEST)  # beside config.json and environment.json
_FILES: tuple[str, ...] = ("config.json", "environment.json", *FILES_OF_START)
_FILES += ("report.html", "drift.json", "drift.html")
_DIRECTORIES = ("checkpoints", "reference")
_SHARED_SECONDS = 10.0  # time for a network file system to show a new file


def continues(directory: str, resume: bool | str) -> bool:
    """Returns whether the run in a directory is to be continued.

    Args:
      directory: `run.dir`.
      resume: whether an existing run is; 'auto': if the directory exists.

    Raises:
      UserError: there is no directory, and `resume` is True: its name may be wrong.
    """
    there = os.path.lexists(directory)
    if resume is True and not there:
        parent, name = os.path.split(os.path.abspath(directory))
        beside = list[str]()
        with contextlib.suppress(OSError):
            beside = os.listdir(parent)
        hint = did_you_mean(name, beside, "correct the name", form="{!r}")
        raise UserError(
            f"run.dir: {directory} does not exist, so there is nothing to resume ({hint}): leave "
            "--resume out to start a run, or write --auto-resume (resume='auto') to start or "
            "continue one"
        )
    return there if resume == "auto" else bool(resume)


def check_run(resolved: Resolved, resume: bool, digest: str, now: dict[str, Any]) -> str | None:
    """Checks that a run may start in `run.dir`; returns a line on changes since its last start.

    Args:
      resolved: the configuration.
      resume: whether an existing run may be continued.
      digest: hash of the data set's rows; '' without a data set.
      now: the `environment` of this start.

    Raises:
      UserError: `run.dir` holds another run, or one that cannot be continued.
    """
    directory = pathlib.Path(resolved.config.run.dir)
    lines = [_check_directory(resolved, resume)]
    _check_unchanged(directory, digest)
    return "; ".join(filter(None, [*lines, check_environment(directory, now)])) or None


def _check_directory(resolved: Resolved, resume: bool) -> str:
    """Raises UserError if `run.dir` holds another configuration, or a run without `resume`; returns
    a warning if its configuration is not known."""
    config = resolved.config
    directory = pathlib.Path(config.run.dir)
    for name in (*_FILES, *_DIRECTORIES):
        path = directory / name
        wanted = "directory" if name in _DIRECTORIES else "file"
        if os.path.lexists(path) and path.is_dir() != (wanted == "directory"):
            raise UserError(
                f"run.dir: {path} is no {wanted}, and a run writes one there: move it away, or "
                "choose another --config.run.dir"
            )
    saved = directory / "config.json"
    if saved.exists():
        try:
            known = read_saved_config(saved)
        except UserError as error:
            if not resume:
                raise
            remedy = "or move it away and give every override with which the run began"
            raise UserError(f"{error}, {remedy}") from None
        if changed := differences(known, as_saved(config)):
            raise UserError(
                f"run.dir: {directory} holds a run with another config {as_options(changed)}, or "
                "choose another --config.run.dir"
            )
        _check_shapes(resolved, directory)
        if not resume:
            raise UserError(
                f"run.dir: {directory} already holds this run: add --resume to continue it, or "
                "choose another --config.run.dir"
            )
    elif resume and any(path.name.isdecimal() for path in directory.glob("checkpoints/*")):
        return (
            f"warning: {saved} is gone and is written again, unchecked: give every override with "
            "which the run began"
        )
    else:
        names = ("checkpoints", "reference", "tensorboard", *(f"{n}.jsonl" for n in RunLogs.NAMES))
        found = next((name for name in names if (directory / name).exists()), None)
        if found:
            raise UserError(
                f"run.dir: {directory} has no config.json but holds {found}, which a run would "
                "replace: choose another --config.run.dir, or, to go on from a checkpoint there, "
                "add --resume to all that the run began with"
            )
    return ""


def open_run(resolved: Resolved, digest: str, now: dict[str, Any]) -> None:
    """Writes the first files of a directory that `check_run` has accepted; same arguments.

    Raises:
      UserError: the directory cannot be written.
    """
    config = resolved.config
    directory = pathlib.Path(config.run.dir)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if config.model.checkpoint:
            write_whole(
                directory / "model.json",
                json.dumps(dataclasses.asdict(resolved.model), indent=2) + "\n",
            )
        write_whole(directory / "config.json", json.dumps(as_saved(config), indent=2) + "\n")
        if digest:
            write_whole(directory / _DIGEST, digest + "\n")
    except OSError as error:
        raise no_room(directory, error) from None
    keep_environment(directory, now)


def _check_unchanged(directory: pathlib.Path, digest: str) -> None:
    """Raises UserError if the run in `directory` began with other rows of its data set."""
    saved = directory / _DIGEST
    if not digest or not os.path.lexists(saved):
        return
    remedy = "put the file back, or choose another --config.run.dir"
    with refused_by_system(f"run.dir: {saved} cannot be read", remedy):
        before = read_bytes(saved, most=1000).decode(errors="replace").strip()
    if before != digest:
        raise UserError(
            f"env.task: the data set has changed since the run in {directory} began: put it back, "
            "or choose another --config.run.dir"
        )


def _check_shapes(resolved: Resolved, directory: pathlib.Path) -> None:
    """Raises UserError if `model.checkpoint` has other shapes than when the run began."""
    saved = directory / "model.json"
    checkpoint = resolved.config.model.checkpoint
    if not (checkpoint and saved.exists()):
        return
    before = read_saved_config(saved, sections=False)
    for name, value in dataclasses.asdict(resolved.model).items():
        if before.get(name, value) != value:
            raise UserError(
                f"model.checkpoint: {checkpoint} has {name} = {value!r}, and the run "
                f"in {directory} began with {before[name]!r}: put the directory back, or choose "
                "another --config.run.dir"
            )


def as_saved(config: ml_collections.ConfigDict) -> dict:
    """Returns the sections of a configuration as config.json stores them."""
    return json.loads(json.dumps(plain(config.to_dict())))


def read_saved_config(path: pathlib.Path, sections: bool = True) -> dict:
    """Reads the config.json (without sections: model.json) of a run; UserError if damaged."""
    try:
        content = read_json(path)
        if not all(isinstance(value, dict) or not sections for value in content.values()):
            raise ValueError("its sections are no objects")
        sections_config(content)  # refuses names that no field can have
        return content
    except OSError as error:
        raise UserError(
            f"run.dir: {path} cannot be read ({error.strerror}): put the file back, or name "
            "another run"
        ) from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"run.dir: {path} is damaged ({error}): put the file back, or choose another "
            "--config.run.dir"
        ) from None


def training_config(
    directory: pathlib.Path,
    permitted: Collection[str] = (),
    needed: Collection[str] = ("precision",),
) -> ml_collections.ConfigDict:
    """Returns the configuration of the run in a directory.

    Args:
      directory: directory of the run.
      permitted: functions or modules that the configuration may name; see `permit`.
      needed: sections whose functions will be called, 'env' for evaluation.

    Raises:
      UserError: its config.json is damaged, has an unknown field, or names a function that is not
        permitted.
    """
    saved = directory / "config.json"
    config = saved_config(read_saved_config(saved), str(saved))
    permit(config, permitted, str(saved), needed)
    return config


def run_config(
    directory: pathlib.Path,
    permitted: Collection[str] = (),
    needed: Collection[str] = ("precision",),
) -> ml_collections.ConfigDict:
    """Returns `training_config` for programs that do not train, which need no teacher and no second
    mesh."""
    config = training_config(directory, permitted, needed).copy_and_resolve_references()
    config.algo.teacher = ""
    config.mesh.rollout = 0
    if config.algo.loss == "none":
        config.algo.loss = "ppo"
    return config


def differences(theirs: dict, ours: dict) -> dict[str, tuple[Any, Any]]:
    """Returns {field: (their value, our value)} of the fields that differ.

    A field that `theirs`, from an older version, lacks has its default, or what that version did.
    """
    before = _whole(theirs)
    now = _whole(ours)
    truncated = before["rollout.top_k"] > 0 or before["rollout.top_p"] < 1.0
    if truncated and "truncated_sampling" not in theirs.get("algo", {}):
        before["algo.truncated_sampling"] = "whole"
    return {
        name: (before.get(name), now.get(name))
        for name in sorted(_lasting_names(before | now))
        if before.get(name) != now.get(name)
    }


def lasting(saved: dict) -> dict[str, Any]:
    """Returns {field: value} of a saved configuration, without fields that a resumption may
    change."""
    fields = _whole(saved)
    return {name: fields[name] for name in sorted(_lasting_names(fields))}


def _whole(saved: dict) -> dict[str, Any]:
    return flatten(default_config()) | flatten(sections_config(saved))


def _lasting_names(fields: dict[str, Any]) -> set[str]:
    names = set(fields) - set(_MAY_CHANGE)
    if fields.get("optimizer.end_fraction", 1.0) < 1:  # the decay ends at the last step
        names.add("run.steps")
    return names


def as_options(changed: dict[str, tuple[Any, Any]]) -> str:
    """Returns '(what changed): the options that set it back', for the end of an error."""
    was = ", ".join(f"{name} was {before!r}, is {now!r}" for name, (before, now) in changed.items())
    options = [shlex.quote(f"--config.{name}={before}") for name, (before, _) in changed.items()]
    return f"({was}): give {' '.join(options)}"


def cache_root(config) -> pathlib.Path | None:
    """Returns the directory of cached results; None without a cache."""
    return pathlib.Path(config.run.cache_dir) if config.run.cache_dir else user_cache()


def check_rooms(resolved: Resolved) -> None:
    """Raises UserError if `run.dir`, or the directory of cached fine-tuning, cannot be written or
    lacks room for a run's checkpoints."""
    one_device = abstract_mesh(dict.fromkeys(MESH_AXES, 1))
    size = state_bytes(resolved, one_device).checkpoint
    _check_room(pathlib.Path(resolved.config.run.dir), _bytes_to_write(resolved, size))
    if resolved.config.sft.steps and (cache := cache_root(resolved.config)):
        _check_room(cache, size, "run.cache_dir")


def _bytes_to_write(resolved: Resolved, size: int) -> int:
    """Returns the bytes that a run adds to `run.dir` with checkpoints of `size` bytes. A checkpoint
    replaces an older one once it is complete; a reference policy stays."""
    run = resolved.config.run
    checkpoints = os.path.join(run.dir, "checkpoints")
    names = os.listdir(checkpoints) if os.path.isdir(checkpoints) else []
    there = [int(name) for name in names if name.isdecimal()]
    has_reference = os.path.isdir(os.path.join(run.dir, "reference"))
    stays = resolved.algorithm.needs_reference and not has_reference
    sft = resolved.config.sft
    left = run.steps - max([0, *(number - sft.steps for number in there)])
    saves = 1 + -(-left // run.checkpoint_every) + (0 if there else sft.steps and sft.evaluations)
    more = max(1, min(run.keep_checkpoints + 1 - len(there), saves))
    more += left // run.keep_every if run.keep_every else 0
    return more * size + (size // 3 if stays else 0)


def _check_room(directory: pathlib.Path, bytes_needed: int, field: str = "run.dir") -> None:
    """Raises UserError if `directory` cannot be made or written, or its disk is too full."""
    try:
        str(directory).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{field}: the name {os.fsencode(directory)!r} is no UTF-8 in this locale: set "
            "PYTHONUTF8=1 or LC_ALL=C.UTF-8, or take another name"
        ) from None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise no_room(directory, error, field) from None
    free = shutil.disk_usage(directory).free
    if free < bytes_needed:
        raise UserError(
            f"{field}: {directory} has {free / 1e6:.0f} MB of room and the checkpoints need "
            f"{bytes_needed / 1e6:.0f} MB; free some, or set {field} elsewhere"
        )


def check_shared(directory: pathlib.Path) -> None:
    """Raises UserError if a process does not see what the first one writes in `directory`."""
    if processes.count() == 1:
        return

    def write() -> str:
        return os.path.basename(tempfile.mkstemp(prefix=".shared-", dir=directory)[1])

    probe = directory / processes.decided(write)  # a relative path may differ between processes

    def look() -> None:
        deadline = time.monotonic() + _SHARED_SECONDS
        while not probe.exists():
            if time.monotonic() > deadline:
                raise UserError(
                    f"run.dir: process {processes.number()} does not see what process 0 writes in "
                    f"{directory}: name a directory on a file system that all hosts share"
                )
            time.sleep(0.2)
            with contextlib.suppress(OSError):
                os.listdir(directory)  # makes a network file system refresh its cache

    try:
        processes.everywhere(look)
    finally:
        if processes.first():
            probe.unlink()


def no_room(directory: pathlib.Path, error: OSError, field: str = "run.dir") -> UserError:
    """Returns the error for a write that failed."""
    if limit := limit_reached(error):
        return UserError(f"{field}: cannot write in {directory}: {limit}: raise that limit")
    if error.errno == errno.EISDIR:
        reason = f"{error.filename2 or error.filename} is a directory"
        remedy = "move it away, or "
    else:
        reason, remedy = _CAUSES.get(error.errno or 0, (error.strerror or str(error), ""))
    return UserError(
        f"{field}: cannot write in {directory}: {reason}; {remedy}set {field} elsewhere"
    )
