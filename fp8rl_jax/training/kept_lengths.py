"""Lengths of questions in tokens, kept in the cache directory for the next start.

A data set's questions are tokenised at a start, to leave out those that are too long. The file
depends on tokenizer, chat format and source; an entry on the question's own text, so that a data
set that grows costs its new questions alone. It holds a hash of its entries, then the entries: a
damaged file is as good as none.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from fp8rl_jax.base import processes
from fp8rl_jax.base.user_cache import library_digest
from fp8rl_jax.base.whole_file import write_whole
from fp8rl_jax.config import flatten
from fp8rl_jax.data import ChatFormat
from fp8rl_jax.data.load import tokenizer_files
from fp8rl_jax.training.run_directory import cache_root

_FEWEST = 1000  # questions; counting fewer takes no time
_ENTRY = np.dtype([("key", "S16"), ("prompt", np.int32), ("response", np.int32)])
Lengths = tuple[int, int]  # of a prompt, and of a demonstration's response or 0


class KeptLengths:
    """Lengths by question: those of the last start, and those that this one counts.

    Args:
      config: a run's configuration.
      chat: its chat format, or None.
    """

    def __init__(self, config: Any, chat: ChatFormat | None):
        self._config = config
        self._chat = chat
        self._used: dict[bytes, Lengths] = {}
        self._counted = 0

    @functools.cached_property
    def _path(self) -> pathlib.Path | None:
        root = cache_root(self._config)
        return root and root / f"lengths-{_digest_of_what_counts(self._config, self._chat)}"

    @functools.cached_property
    def _known(self) -> dict[bytes, Lengths]:
        """The lengths in the file; read for the first question, as generated ones ask for none."""
        with contextlib.suppress(OSError, ValueError):  # none yet, or damaged
            return _read(self._path) if self._path else {}
        return {}

    def of(self, text: Any, count: Callable[[], Lengths]) -> Lengths:
        """Returns the lengths of a question: kept ones, or those that `count` returns.

        Args:
          text: what the lengths depend on: texts, messages.
          count: function that tokenises.
        """
        content = json.dumps(text, default=repr).encode()
        key = hashlib.blake2b(content, digest_size=16).digest()
        found = self._known.get(key)
        if found is None:
            found = count()
            self._counted += 1
        self._used[key] = found
        return found

    def keep(self) -> None:
        """Writes what this start used, if it counted many questions."""
        if self._counted < _FEWEST or self._path is None or not processes.first():
            return
        rows = [(key, *lengths) for key, lengths in self._used.items()]
        content = np.array(rows, _ENTRY).tobytes()
        with contextlib.suppress(OSError):  # then the next start counts, too
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, hashlib.sha256(content).digest() + content)


def _digest_of_what_counts(config: Any, chat: ChatFormat | None) -> str:
    """Returns a hash of all that lengths depend on, but the questions."""
    files = tokenizer_files(config.data.tokenizer, config.model.checkpoint)
    depends_on = {
        "data": {n: x for n, x in flatten(config).items() if n.split(".")[0] == "data"},
        "tasks": [config.env.task, config.env.eval_task],
        "now": str(chat.now) if chat and chat.template.tells_time else "",
        "files": [hashlib.sha256(file.read_bytes()).hexdigest() for file in files],
        "source": library_digest(),
        "versions": [importlib.metadata.version(name) for name in ("tokenizers", "jinja2")],
    }
    return hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:20]


def _read(path: pathlib.Path) -> dict[bytes, Lengths]:
    """Returns what `KeptLengths.keep` wrote; raises OSError or ValueError if it cannot be read."""
    content = path.read_bytes()
    if hashlib.sha256(content[32:]).digest() != content[:32]:
        raise ValueError(f"{path} is damaged")
    rows = np.frombuffer(content[32:], _ENTRY).tolist()  # numpy leaves out zeros at a key's end
    return {key.ljust(16, b"\0"): (prompt, response) for key, prompt, response in rows}
