"""The splits of a data set by their names, and their roles: training, evaluation, unused.

The words are those that Hugging Face's `datasets` finds in the names of files and directories.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from fp8rl_jax.base.errors import UserError

TRAIN = "train"
HELD_OUT = ("test", "validation")  # in this order
_WORDS = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
}


def splits_named(name: str) -> list[str]:
    """The splits that a file or a directory is named after: ['test'] of 'test-00000-of-00001'."""
    words = re.split("[^a-z]+", name.lower())
    return list(dict.fromkeys(_WORDS[word] for word in words if word in _WORDS))


class Roles(NamedTuple):
    """Names of the splits to train on and to evaluate on ('' for none), and of the other splits."""

    train: str
    held_out: str
    unused: tuple[str, ...]


def roles(task: str, names: Iterable[str]) -> Roles:
    """The roles of splits; a single split of another name is trained on.

    Raises:
      UserError: two splits have the same role.
    """
    names = list(names)
    found: dict[str, list[str]] = {}
    for name in names:
        for role in splits_named(name)[:1]:
            found.setdefault(role, []).append(name)
    chosen = {role: _one(task, role, several) for role, several in found.items()}
    held_out = next((chosen[role] for role in HELD_OUT if role in chosen), "")
    train = chosen.get(TRAIN, "") or (names[0] if len(names) == 1 and not held_out else "")
    return Roles(train, held_out, tuple(n for n in names if n not in (train, held_out)))


def _one(task: str, role: str, names: list[str]) -> str:
    if len(names) == 1 or role in names:
        return names[0] if len(names) == 1 else role
    raise UserError(
        f"{task} has several splits for {role!r} ({', '.join(names)}): name the directory or the "
        "files of one"
    )
