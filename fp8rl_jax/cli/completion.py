"""`fp8rl completion SHELL`: the script by which a shell completes commands, options and fields."""

from __future__ import annotations

import argparse
import dataclasses

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.cli.arguments import Command, argument

_SHELLS = ("bash", "zsh", "tcsh")


def _completion(values: argparse.Namespace) -> int:
    if values.shell not in _SHELLS:
        wrong = f"{values.shell!r} is no shell that is known; " if values.shell else ""
        raise UserError(f"fp8rl completion: {wrong}write one of {', '.join(_SHELLS)}")
    import shtab

    from fp8rl_jax.cli.main import COMMANDS
    from fp8rl_jax.cli.tree import parser
    from fp8rl_jax.config import all_fields

    fields = tuple(
        argument(f"--config.{path}", help=field.meaning, choices=field.choices or None)
        for path, field in all_fields().items()
    )
    commands = {
        name: dataclasses.replace(command, arguments=command.arguments + fields)
        if command.config
        else command
        for name, command in COMMANDS.items()
    }
    print(shtab.complete(parser(commands)[0], values.shell))
    return 0


COMPLETION = Command(
    "completion",
    'prints a shell\'s completion script; use it with: eval "$(fp8rl completion bash)"',
    _completion,
    (argument("shell", nargs="?", metavar="SHELL", help="bash, zsh or tcsh"),),
)
