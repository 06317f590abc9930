"""Finds a config file and calls its `get_config()`.

A file may build on another: it can import modules from its folder and from the current directory,
and the configs of this package by name (`from fp8rl_jax.configs import tiny_arithmetic`).
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import inspect
import os
import pathlib
import sys
from collections.abc import Iterator
from importlib import resources
from typing import Any

from fp8rl_jax.base.errors import UserError, raised
from fp8rl_jax.config.cases import CASES


def packaged() -> dict[str, pathlib.Path]:
    """Returns {name: file} of the configs that are part of this package; what they share, in files
    whose names begin with _, is none."""
    paths = [pathlib.Path(str(path)) for path in resources.files("fp8rl_jax.configs").iterdir()]
    return {path.stem: path for path in sorted(paths) if path.match("[!_]*.py")}


def read_config_file(path: str) -> tuple[Any, dict[str, str]]:
    """Returns what a config file's get_config() returns, and the `precision` fields of a case.

    Args:
      path: path of the file, or a name of `packaged`. In `FILE:TEXT` the text is the argument of
        get_config(), or a precision case if get_config() takes none.

    Raises:
      UserError: there is no such file or case, or the file fails or has no get_config.
    """
    named = packaged()
    file = path
    colon = text = ""
    if not os.path.exists(path) and path not in named:
        name, colon, text = path.rpartition(":")
        file = name if colon else file
    if not os.path.isfile(file):
        file = str(named.get(file, file))
    if not os.path.isfile(file):
        raise UserError(f"--config: {path} is no file; {_instead(file)}")
    spec = importlib.util.spec_from_file_location("fp8rl_user_config", file)
    if spec is None or spec.loader is None:
        raise UserError(f"--config: {path} is no Python file; name one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    try:
        with _importable(os.path.dirname(os.path.abspath(file))):
            spec.loader.exec_module(module)
            if not callable(getattr(module, "get_config", None)):
                raise UserError(f"--config: {path} has no function get_config(); add one")
            if colon and inspect.signature(module.get_config).parameters:
                return module.get_config(text), {}
            changes = module.get_config()
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # whatever a user's file raises
        raise UserError(
            f"--config: {path} fails with {raised(error)}; fix the file so that "
            "get_config() takes no argument (or the text after a colon) and returns a ConfigDict"
        ) from None
    if colon and text not in CASES:
        raise UserError(
            f"--config: {file} has no precision case {text!r}; after the colon write one of "
            + ", ".join(CASES)
        )
    return changes, CASES[text] if colon else {}


def _instead(file: str) -> str:
    """Returns the remedy for a file that does not exist."""
    near = difflib.get_close_matches(pathlib.Path(file).stem, packaged(), 1, 0.75)
    if near:
        return f"write --config {near[0]} for the one that is part of the package"
    return "name a config of your own, or one of the package, such as tiny_arithmetic"


@contextlib.contextmanager
def _importable(folder: str) -> Iterator[None]:
    """Adds a folder and the current directory to the import path."""
    before = list(sys.path)
    sys.path[:] = [folder, os.getcwd(), *before]
    try:
        yield
    finally:
        sys.path[:] = before
