"""Recognises a data set's splits by name, and assigns roles: training, evaluation, unused.

The words are those that Hugging Face's `datasets` finds in the names of files and directories.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from fp8rl_jax.base.errors import UserError

TRAIN = "train"
HELD_OUT = ("test", "validation")  # in order of preference
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
    """Returns the splits that a file or directory is named after: ['test'] for 'test-00000'."""
    words = re.split("[^a-z]+", name.lower())
    return list(dict.fromkeys(_WORDS[word] for word in words if word in _WORDS))


class Roles(NamedTuple):
    """The split to train on and the split to evaluate on ('' for none), and the other splits."""

    train: str
    held_out: str
    unused: tuple[str, ...]


def roles(task: str, names: Iterable[str]) -> Roles:
    """Assigns roles to splits; a single split that is not held out is trained on.

    Raises:
      UserError: two splits have the same role.
    """
    names = list(names)
    by_role: dict[str, list[str]] = {}
    for name in names:
        for role in splits_named(name)[:1]:
            by_role.setdefault(role, []).append(name)
    chosen = {role: _one(task, role, several) for role, several in by_role.items()}
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
