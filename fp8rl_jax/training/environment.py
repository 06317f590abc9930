"""What a run's bits depend on beside its configuration: versions, devices, files outside it.

`environment.json` has an entry for each start of the run; a resumption is compared with the entry
before it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import time
from typing import Any

import jax
import ml_collections

from fp8rl_jax.data import tokenizer_files
from fp8rl_jax.envs import reward_names
from fp8rl_jax.errors import UserError
from fp8rl_jax.user_cache import files_of_functions, machine, source_digest

_NAME = "environment.json"
_LIBRARIES = (
    "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "ml_dtypes", "tokenizers",
)  # fmt: skip
_FUNCTION = re.compile(r"(?!tfds:)[A-Za-z_][\w.]*:\w+")


def _functions(config: ml_collections.ConfigDict) -> list[str]:
    """The user's functions that a configuration names."""
    algo, env = config.algo, config.env
    names = [*reward_names(env.reward), env.task, *env.eval_task.split(","), algo.loss,
             *algo.correction.split(","), *config.precision.values()]  # fmt: skip
    texts = (name.strip() for name in names if isinstance(name, str))
    return [text for text in texts if _FUNCTION.fullmatch(text)]


def _digests(files: list[pathlib.Path]) -> dict[str, str]:
    return {
        str(file): hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        for file in files
        if file.is_file()
    }


def environment(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """What this process would add to the run: text by name, and hashes of files by path."""
    device = jax.devices()[0]
    return {
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in _LIBRARIES},
            "fp8rl_jax": source_digest()[:16],
        },
        "devices": {
            "platform": device.platform,
            "kind": device.device_kind,
            "machine": machine(),
            "flags": os.environ.get("XLA_FLAGS", ""),
        },
        "tokenizer": _digests(tokenizer_files(config.data.tokenizer, config.model.checkpoint)),
        "functions": _digests(files_of_functions(_functions(config))),
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def check_environment(directory: pathlib.Path, config: ml_collections.ConfigDict) -> str | None:
    """What has changed since the run's last start and may change its bits, as a line; None if
    nothing has, or the run is new.

    Raises:
      UserError: the tokenizer has changed.
    """
    starts = _read(directory)
    if not starts:
        return None
    before, now = starts[-1], environment(config)
    changed = [
        f"{name} was {was.get(name)}, is {value}"
        for was, values in ((_part(before, part), now[part]) for part in ("versions", "devices"))
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


def keep_environment(directory: pathlib.Path, config: ml_collections.ConfigDict) -> None:
    """Adds an entry for this start."""
    started = {"started": time.strftime("%Y-%m-%d %H:%M:%S"), "process": os.getpid()}
    starts = [*_read(directory), started | environment(config)]
    temporary = directory / f"{_NAME}.tmp"
    temporary.write_text(json.dumps(starts, indent=2) + "\n")
    os.replace(temporary, directory / _NAME)


def _read(directory: pathlib.Path) -> list[dict[str, Any]]:
    """The entries; none where the file is missing or damaged: it is a record, not needed to run."""
    try:
        starts = json.loads((directory / _NAME).read_text())
    except (OSError, ValueError, RecursionError):
        return []
    known = isinstance(starts, list) and all(isinstance(start, dict) for start in starts)
    return starts if known else []


def _part(start: dict[str, Any], name: str) -> dict[str, Any]:
    part = start.get(name)
    return part if isinstance(part, dict) else {}
