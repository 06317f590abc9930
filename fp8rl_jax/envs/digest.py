"""Hashes the questions of a run, to show whether a data set has changed.

The hash covers prompts, answers, and the rows, which a reward may read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from fp8rl_jax.envs.question import SPLITS, Question

_DEEPEST = 100
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+")  # in the repr of an object; differs by process


def digest_of(questions: Mapping[str, Iterable[Question]]) -> str:
    """Returns the hash of all questions, {split: questions}."""
    digest = hashlib.sha256()
    for split in SPLITS:
        for q in questions[split]:
            line = [split, q.text, q.answer, q.solution, q.messages, q.tools, q.row]
            try:
                text = json.dumps(line, default=lambda value: _plain(value, ()))
            except (TypeError, ValueError, RecursionError):  # keys, huge numbers, cycles
                text = json.dumps(_plain(line, ()))
            digest.update(text.encode())
    return digest.hexdigest()


def _plain(value: Any, within: tuple[int, ...]) -> Any:
    """Converts a row's value to JSON types that are equal in each process; a user's object becomes
    its repr. `within`: ids of the enclosing lists and mappings, to detect cycles."""
    if value is None or isinstance(value, str | bool | float):
        return value
    if isinstance(value, int):
        return hex(value)  # Python limits the digits of a decimal
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        if id(value) in within or len(within) > _DEEPEST:
            return "..."
        within = (*within, id(value))
        if isinstance(value, Mapping):
            return {str(key): _plain(part, within) for key, part in value.items()}
        parts = [_plain(part, within) for part in value]
        return sorted(map(json.dumps, parts)) if isinstance(value, set | frozenset) else parts
    if hasattr(value, "tolist"):  # numpy's
        return _plain(value.tolist(), within)
    return _ADDRESS.sub("", repr(value))
