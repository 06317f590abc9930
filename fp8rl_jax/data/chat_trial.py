"""Renders a first conversation by a chat template in a process of its own.

Jinja's sandbox protects the file system and Python, but neither time nor memory, and a template is
a program that comes with a model: nested loops run for hours, `'a' * 10**12` fills the memory. A
template that does so for one short message is refused here, before a run begins.

Not covered: a template that waits for a particular message.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import subprocess
import sys

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.resource_limits import limit
from fp8rl_jax.data.chat import sandbox

_SECONDS = 3  # of computing
_MEMORY = 2**30  # bytes of data
_WAIT = 60.0  # seconds until a busy machine has given it those
_PROGRAM = (
    "import json, sys; path, *template = json.load(sys.stdin); sys.path[:] = path; "
    "from fp8rl_jax.data.chat_trial import main; main(*template)"
)


def check_template(source: str, special_tokens: dict[str, str], where: str) -> None:
    """Checks that a template renders a short message, or refuses it, in little time and memory.

    Args:
      source, special_tokens, where: as for `ChatTemplate`.

    Raises:
      UserError: it takes more than `_SECONDS` or `_MEMORY`.
    """
    if not _ends(json.dumps([source, special_tokens])):
        raise UserError(
            f"{where}: the chat template takes more than {_SECONDS} seconds or "
            f"{_MEMORY >> 30} GiB of memory for one short message; fix it, or leave chat off"
        )


@functools.cache
def _ends(template: str) -> bool:
    path = [entry for entry in sys.path if isinstance(entry, str)]
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-c", _PROGRAM],
            input=json.dumps([path, *json.loads(template)]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_WAIT,
            text=True,
        )
    except subprocess.TimeoutExpired:
        return False
    return child.returncode == 0


def main(source: str, special_tokens: dict[str, str]) -> None:
    """Renders a message; ends the process with a status above 0 if memory runs out."""
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_CPU, _SECONDS)
    limit(resource.RLIMIT_DATA, _MEMORY)
    messages = [{"role": "user", "content": "x"}]
    try:
        sandbox().from_string(source).render(
            special_tokens, messages=messages, tools=None, add_generation_prompt=True
        )
    except MemoryError:
        os._exit(1)
    except Exception:
        pass  # `ChatTemplate` says what it refuses
