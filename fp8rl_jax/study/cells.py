"""Cells: the finished parts of a study, each a small JSON file.

A cell is written whole or not at all, and found again by its key, which holds everything that its
numbers depend on but the code: model, tokens, recipes. Commit, CPU and versions stand beside the
numbers and are not compared, so cells that were committed serve later commits; study.json names
the commits of all cells it used.
"""

from __future__ import annotations

import importlib.metadata
import json
import pathlib
import platform
import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np

import fp8rl_jax
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.json_file import read_json
from fp8rl_jax.base.whole_file import write_whole
from fp8rl_jax.quant import Recipe

_LIBRARIES = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes")
_PARTS = {"key", "numbers", "commit", "cpu", "versions"}


class Cells:
    """The cells in a directory.

    Attributes:
      directory: made when the first is written.
    """

    def __init__(self, directory: pathlib.Path, resume: bool):
        """`resume`: whether cells that are there may be used.

        Raises:
          UserError: there are some, and they may not; or it is a file.
        """
        self.directory = directory
        if directory.exists() and not directory.is_dir():
            raise UserError(f"--cells={directory} is a file; name a directory")
        if not resume and any(directory.glob("*.json")):
            raise UserError(
                f"{directory} holds finished cells: add --resume to use them, or name another "
                "directory"
            )

    def get(self, name: str, key: dict[str, Any], measure: Callable[[], dict]) -> dict[str, Any]:
        """The cell of that name, measured and written if it is missing.

        Args:
          name: of the file, without its ending.
          key: what the numbers depend on; JSON.
          measure: the numbers; JSON.

        Raises:
          UserError: the file is damaged, or its key is another.
        """
        path = self.directory / f"{name}.json"
        key = json.loads(json.dumps(key))
        if path.exists():
            return _read(path, key)
        cell = {"key": key, "numbers": measure(), **origin()}
        self.directory.mkdir(parents=True, exist_ok=True)
        write_whole(path, _text(cell))
        return _read(path, key)


def _read(path: pathlib.Path, key: dict[str, Any]) -> dict[str, Any]:
    try:
        cell = read_json(path)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"the cell {path} is damaged ({reason}): delete it") from None
    parts = isinstance(cell, dict) and set(cell) >= _PARTS
    if not parts or not all(isinstance(cell[part], dict) for part in ("key", "numbers")):
        raise UserError(f"the cell {path} is damaged (parts are missing): delete it")
    if cell["key"] != key:
        names = [n for n in sorted({*cell["key"], *key}) if cell["key"].get(n) != key.get(n)]
        raise UserError(
            f"the cell {path} is of another configuration ({', '.join(names)} differ): name "
            "another directory, or delete it"
        )
    return cell


def _text(cell: dict[str, Any]) -> str:
    """JSON with a line for each part and each list of numbers."""
    lines = [f' "{name}": {json.dumps(cell[name], sort_keys=True)}' for name in cell]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def rounded(values: np.ndarray) -> Any:
    """Nested lists of an array, to five significant digits; whole numbers as they are."""

    def short(x: float) -> float:
        return int(x) if float(x).is_integer() else float(f"{x:.5g}")

    return np.vectorize(short, otypes=[object])(values).tolist()


def described(recipe: Recipe) -> dict[str, str]:
    """The fields of a recipe as text that is the same in every process: policies by name."""
    operands = {
        name: f"{o.dtype} {o.block[0]}x{o.block[1]} {o.policy.name}"
        for name, o in recipe.operands.items()
    }
    others = (
        "name",
        "compute_dtype",
        "fake",
        "first_layers",
        "last_layers",
        "bf16_modules",
        "kv",
        "fp8_attention",
    )
    found = operands | {name: str(getattr(recipe, name)) for name in others}
    return found | {"kv_policy": recipe.kv_policy.name}


def origin() -> dict[str, Any]:
    """Where numbers that are measured now come from: commit, CPU and versions."""
    return {
        "commit": _commit(),
        "cpu": _cpu(),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in _LIBRARIES},
        },
    }


def _commit() -> str:
    """Of the checkout that the library is imported from; 'unknown' for an installed one."""
    here = pathlib.Path(fp8rl_jax.__file__).parent
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _cpu() -> str:
    """The CPU's name, as Linux gives it."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
