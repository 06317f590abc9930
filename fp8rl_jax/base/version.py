"""The version, importable without the rest of the package (setup.cfg reads it)."""

import contextlib
import importlib.metadata
import os
import pathlib
import subprocess

__version__ = "0.1.0"


def installed(name: str) -> str | None:
    """Returns the version of an installed package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """Returns the commit of the checkout that this package is imported from. Where git does not
    tell it is what FP8RL_COMMIT says, which who copies the files elsewhere can set; else ''."""
    root = pathlib.Path(__file__).resolve().parents[2]
    command, found = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"], ""
    if (root / ".git").exists():
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
            found = done.stdout.strip()
    return found or os.environ.get("FP8RL_COMMIT", "")
