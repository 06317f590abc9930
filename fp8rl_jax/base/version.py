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
    """Returns the commit of the checkout that this package is imported from. Where git knows none,
    returns the variable FP8RL_COMMIT, which can be set for a copy of the files; else ''."""
    root = pathlib.Path(__file__).resolve().parents[2]
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
            if name := done.stdout.strip():
                return name
    return os.environ.get("FP8RL_COMMIT", "")
