"""`fp8rl completion SHELL`: prints a shell's completion script for commands, options and fields."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.cli import tree
from fp8rl_jax.cli.arguments import Command, argument

_SHELLS = ("bash", "zsh", "tcsh")


def command(commands: Mapping[str, Command]) -> Command:
    """Returns the command `completion`; its script completes `commands` (read when it runs)."""

    def run(values: argparse.Namespace) -> int:
        if values.shell not in _SHELLS:
            wrong = f"{values.shell!r} is no shell that is known; " if values.shell else ""
            raise UserError(f"fp8rl completion: {wrong}write one of {', '.join(_SHELLS)}")
        import shtab

        from fp8rl_jax.config import all_fields

        fields = tuple(
            argument(f"--config.{path}", field.meaning, choices=field.choices or None)
            for path, field in all_fields().items()
        )
        completed = {
            name: dataclasses.replace(c, arguments=c.arguments + fields) if c.config else c
            for name, c in commands.items()
        }
        print(shtab.complete(tree.parser(completed)[0], values.shell))
        return 0

    return Command(
        "completion",
        'prints a shell\'s completion script; use it with: eval "$(fp8rl completion bash)"',
        run,
        (argument("shell", "bash, zsh or tcsh", "SHELL", nargs="?"),),
    )
