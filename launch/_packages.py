"""Tells what the Python of a bare machine lacks; needs nothing but pytest's own packages.

    python launch/_packages.py wheels DIR        wheels of packages that are not installed
    python launch/_packages.py lacking NAME ...  which of these packages, and of all that they
                                                 require, are not installed

Versions are not compared: what a machine has is what its GPU was set up with.
"""

from __future__ import annotations

import importlib.metadata
import pathlib
import sys
from collections.abc import Iterable

# What a machine with a GPU may have in builds of its own, which require other packages elsewhere.
_AS_THEY_ARE = (
    "flax",
    "jax",
    "jaxlib",
    "optax",
    "orbax-checkpoint",
    "torch",
    "transformers",
    "triton",
)


def requirements(name: str) -> list[str] | None:
    """Returns the names of the packages that an installed one requires here, None if it is not."""
    try:
        texts = importlib.metadata.requires(name) or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    if name in _AS_THEY_ARE or not texts:
        return []
    from packaging.requirements import Requirement

    found = map(Requirement, texts)
    return [r.name for r in found if r.marker is None or r.marker.evaluate({"extra": ""})]


def lacking(names: Iterable[str]) -> list[str]:
    """Returns which of the packages, and of all that they require, are not installed."""
    absent, seen, left = [], set(), list(names)
    while left:
        name = left.pop(0).lower().replace("_", "-")
        if name not in seen:
            seen.add(name)
            needed = requirements(name)
            absent += [] if needed is not None else [name]
            left += needed or ()
    return absent


def wheels(folder: str) -> list[str]:
    """Returns the wheels of packages that are not installed."""
    found = sorted(pathlib.Path(folder).glob("*.whl"))
    return [str(wheel) for wheel in found if requirements(wheel.name.split("-")[0]) is None]


if __name__ == "__main__":
    command, *words = sys.argv[1:]
    if command == "wheels":
        print("\n".join(wheels(*words)))
    else:
        print(", ".join(lacking(words)))
