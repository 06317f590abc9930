"""The version, importable without the rest of the package (setup.cfg reads it)."""

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
    """Returns the commit of the checkout that this package is imported from. Without git it is
    what FP8RL_COMMIT says, which who copies the files to another machine can set; else ''."""
    root = pathlib.Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return os.environ.get("FP8RL_COMMIT", "")
    try:
        found = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            check=False,
            timeout=5,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""
