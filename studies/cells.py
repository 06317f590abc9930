"""Cells: measurements of a study that are made once and kept, one line of JSON each.

`DIRECTORY/STUDY.jsonl.gz` holds the cells of a study. A cell is written completely or not at all,
and is found by its name. Its key holds everything but the code that its numbers depend on: model,
tokens, recipes. Commit, CPU and versions are recorded but not compared, so cells of one commit
serve later commits; study.json names the commits of all cells it used.
"""

from __future__ import annotations

import functools
import gzip
import importlib.metadata
import json
import pathlib
import platform
import subprocess
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import filelock
import numpy as np

import fp8rl_jax
from fp8rl_jax.base.errors import UserError, refused_by_system
from fp8rl_jax.base.json_file import parse_json, read_bytes
from fp8rl_jax.base.whole_file import write_whole
from fp8rl_jax.quant import Recipe
from fp8rl_jax.quant.qarray import E4M3

_LIBRARIES = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes")
_PARTS = {"name", "key", "numbers", "commit", "cpu", "versions"}
_LARGEST = 1 << 30  # most bytes of a file of cells


class Cell(NamedTuple):
    """A measurement of a study, which may be finished already.

    Attributes:
      name: name in the study's file.
      key: everything that the numbers depend on; JSON.
      measure: function that returns the numbers; JSON.
    """

    name: str
    key: dict[str, Any]
    measure: Callable[[], dict[str, Any]]


class Cells:
    """The finished cells in a directory, which is made when the first one is written."""

    def __init__(self, directory: pathlib.Path, resume: bool):
        """`resume`: whether finished cells may be used.

        Raises:
          UserError: there are finished cells that may not be used, or `directory` is a file.
        """
        self.directory = directory
        if directory.exists() and not directory.is_dir():
            raise UserError(f"--cells={directory} is a file; name a directory")
        if any(directory.glob("*-seed*.json")):
            raise UserError(
                f"{directory} holds cells as single .json files, as an earlier version wrote them: "
                "name another directory"
            )
        if not resume and any(directory.glob("*.jsonl.gz")):
            raise UserError(
                f"{directory} holds finished cells: add --resume to use them, or name another "
                "directory"
            )

    def get(self, study: str, cell: Cell) -> dict[str, Any]:
        """Returns the finished cell (`key`, `numbers`, `origin`), and measures it if missing.

        Raises:
          UserError: the study's file is damaged, or the finished cell has another key.
        """
        path = self.directory / f"{study}.jsonl.gz"
        key = json.loads(json.dumps(cell.key))
        if cell.name not in _read(path):
            made = {"name": cell.name, "key": key, "numbers": cell.measure(), **origin()}
            self.directory.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(self.directory / ".lock"):  # processes may share the directory
                before = path.read_bytes() if path.exists() else b""
                line = f"{json.dumps(made, sort_keys=True)}\n".encode()
                write_whole(path, before + gzip.compress(line, mtime=0))
        found = _read(path)[cell.name]
        if found["key"] != key:
            names = [n for n in sorted({*found["key"], *key}) if found["key"].get(n) != key.get(n)]
            raise UserError(
                f"the cell {cell.name} in {path} is of another configuration ({', '.join(names)} "
                "differ): name another directory, or delete its line"
            )
        return found


def _read(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Returns {name: cell} of a study's file; {} without a file."""
    if not path.exists():
        return {}
    with refused_by_system(f"the cells in {path} cannot be read"):
        compressed = read_bytes(path, _LARGEST)
    return _parse(path, compressed)


@functools.lru_cache(maxsize=1)  # a study reads its file for each of its cells
def _parse(path: pathlib.Path, compressed: bytes) -> dict[str, dict[str, Any]]:
    cells = {}
    try:
        content = gzip.decompress(compressed)
    except (EOFError, OSError, zlib.error) as error:
        raise UserError(f"the cells in {path} are damaged ({error}): delete the file") from None
    for number, line in enumerate(content.splitlines(), 1):
        damaged = f"line {number} of the cells in {path} is damaged"
        try:
            cell = parse_json(line)
        except ValueError as error:
            reason = " ".join(str(error).split())
            raise UserError(f"{damaged} ({reason}): delete it") from None
        kinds = {"name": str, "key": dict, "numbers": dict}
        parts = isinstance(cell, dict) and set(cell) >= _PARTS
        if not parts or not all(isinstance(cell[part], kind) for part, kind in kinds.items()):
            raise UserError(f"{damaged} (parts are missing): delete it")
        cells[cell["name"]] = cell
    return cells


def rounded(values: np.ndarray) -> Any:
    """Returns an array as nested lists with five significant digits; whole numbers as integers."""

    def short(x: float) -> float:
        return int(x) if float(x).is_integer() else float(f"{x:.5g}")

    return np.vectorize(short, otypes=[object])(values).tolist()


def described(recipe: Recipe) -> dict[str, str]:
    """Returns a recipe's fields as text that is the same in every process: policies by name."""
    operands = {
        name: f"{o.dtype} {o.block[0]}x{o.block[1]} {o.policy.name}"
        for name, o in recipe.operands.items()
    }
    fields = "name compute_dtype fake first_layers last_layers bf16_modules kv fp8_attention"
    found = operands | {name: str(getattr(recipe, name)) for name in fields.split()}
    found["kv_policy"] = recipe.kv_policy.name
    # What only some recipes have, so that the cells of others stay valid.
    if recipe.backward == "dequantized":
        found["backward"] = recipe.backward
    if recipe.head is not None:
        found["head"] = str(recipe.head)
    stored = {f"{name}_dtype": recipe.stored_dtype(name) for name in "kv"}
    if recipe.kv_quantized and set(stored.values()) != {E4M3}:
        found |= {name: str(dtype) for name, dtype in stored.items()}
    return found


def origin() -> dict[str, Any]:
    """Returns commit, CPU and versions of numbers that are measured now."""
    return {
        "commit": _commit(),
        "cpu": _cpu(),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in _LIBRARIES},
        },
    }


def _commit() -> str:
    """Returns the commit of the library's checkout; 'unknown' for an installed package."""
    here = pathlib.Path(fp8rl_jax.__file__).parent
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _cpu() -> str:
    """Returns the CPU's name from /proc/cpuinfo, else from `platform`."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
