"""The environment that a run's bits depend on: versions, devices, files outside its directory.

`environment.json` has an entry for each start of the run; a resumption is compared with the last
entry.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import pathlib
import platform
from collections.abc import Iterable
from typing import Any

import jax
import ml_collections

from fp8rl_jax.base import processes
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.jax_settings import hold_settings, recorded_settings
from fp8rl_jax.base.json_file import read_json
from fp8rl_jax.base.user_cache import files_of_functions, library_digest, machine
from fp8rl_jax.base.version import installed
from fp8rl_jax.base.whole_file import write_whole
from fp8rl_jax.config.functions import named_functions
from fp8rl_jax.data import tokenizer_files

_NAME = "environment.json"
_STARTED = datetime.datetime.now().replace(microsecond=0)
_LIBRARIES: tuple[str, ...] = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
_LIBRARIES += ("numpy", "ml_dtypes", "tokenizers")
_COMPARED = ("versions", "devices", "settings")


def _digests(files: Iterable[pathlib.Path]) -> dict[str, str]:
    return {
        str(file): hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        for file in files
        if file.is_file()
    }


def environment(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """Returns the environment of this process: texts by name, and hashes of files by path."""
    device = jax.devices()[0]
    return {
        "versions": {
            "python": platform.python_version(),
            **{name: installed(name) or "not installed" for name in _LIBRARIES},
            "fp8rl_jax": library_digest()[:16],
        },
        "devices": {
            "platform": device.platform,
            "kind": device.device_kind,
            "machine": machine(),
            "layout": layout(),
        },
        "settings": recorded_settings(),
        "tokenizer": _digests(
            file
            for file in tokenizer_files(config.data.tokenizer, config.model.checkpoint)
            if file.name != "config.json"  # the model's shapes are compared elsewhere
        ),
        "functions": _digests(files_of_functions(named_functions(config))),
    }


def layout() -> str:
    """Returns the numbers of devices, processes and hosts as text."""
    found = jax.devices()
    return f"{len(found)} {found[0].platform} device(s){processes.described()}"


def check_process() -> None:
    """Gives JAX the settings that runs rely on (`hold_settings`).

    Raises:
      UserError: a setting is refused, or JAX finds no device.
    """
    hold_settings()
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        asked = os.environ.get("JAX_PLATFORMS", "")
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f"JAX finds no device (JAX_PLATFORMS={asked!r}: {reason}): write JAX_PLATFORMS=cpu, "
            "or install the plugin of that platform"
        ) from None


def begun(directory: pathlib.Path) -> datetime.datetime:
    """Returns when the run in `directory` was first started, or, if it has no readable record of
    that, when this process was started."""
    try:
        return datetime.datetime.fromisoformat(_read(directory)[0]["started"])
    except (IndexError, KeyError, TypeError, ValueError):
        return _STARTED


def check_environment(directory: pathlib.Path, now: dict[str, Any]) -> str | None:
    """Returns a line on changes since the run's last start that may change its bits; None if
    nothing has changed or the run is new. `now` is the `environment` of this start.

    Raises:
      UserError: the tokenizer has changed.
    """
    starts = _read(directory)
    if not starts:
        return None
    before = starts[-1]
    changed = [
        f"{name} was {was.get(name)}, is {value}"
        for was, values in ((_part(before, part), now[part]) for part in _COMPARED)
        for name, value in values.items()
        if name in was and was[name] != value
    ]
    for part in ("tokenizer", "functions"):
        was = _part(before, part)
        for name, digest in now[part].items():
            if was.get(name, digest) == digest:
                continue
            if part == "tokenizer":
                raise UserError(
                    f"data.tokenizer: {name} has changed since the run in {directory} began: put "
                    "it back, or choose another --config.run.dir"
                )
            changed.append(f"{name} has changed")
    if not changed:
        return None
    return f"since the last start: {'; '.join(changed)}; bits may differ from a run in one piece"


def keep_environment(directory: pathlib.Path, now: dict[str, Any]) -> None:
    """Adds an entry for this start, with its `environment`, to environment.json."""
    started = {"started": _STARTED.isoformat(" "), "process": os.getpid()}
    write_whole(directory / _NAME, json.dumps([*_read(directory), started | now], indent=2) + "\n")


def _read(directory: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the entries; [] if the file, which no run needs, is missing or damaged."""
    try:
        starts = read_json(directory / _NAME)
    except (OSError, ValueError):
        return []
    known = isinstance(starts, list) and all(isinstance(start, dict) for start in starts)
    return starts if known else []


def _part(start: dict[str, Any], name: str) -> dict[str, Any]:
    part = start.get(name)
    return part if isinstance(part, dict) else {}
