"""Markdown of all commands of `fp8rl`: what each does, and its options."""

from __future__ import annotations

import argparse

from fields import plain, row

from fp8rl_jax.cli import tree
from fp8rl_jax.cli.main import COMMANDS


def all_commands(_: str = "") -> str:
    """A section for each command, with a table of its options."""
    lines = []
    for name, parser in tree.parser(COMMANDS)[1].items():
        arguments = [a for a in parser._actions if not isinstance(a, _NOT_SHOWN)]
        lines += [f"## fp8rl {name}", "", plain(" ".join((parser.description or "").split())), ""]
        if COMMANDS[name].config:
            lines += [
                "Takes a config, and [fields](configuration.md) as `--config.SECTION.FIELD=VALUE`.",
                "",
            ]
        if arguments:
            lines += [row("option", "meaning"), row("---", "---")]
            lines += [row(_written(argument), _meaning(argument)) for argument in arguments]
            lines.append("")
    return "\n".join(lines)


_NOT_SHOWN = (argparse._HelpAction, argparse._SubParsersAction)


def _written(argument: argparse.Action) -> str:
    """How an argument is written: '`--out` `DIR`'."""
    words = list(argument.option_strings)
    if argument.nargs != 0:
        words.append(str(argument.metavar or "|".join(map(str, argument.choices or ("VALUE",)))))
    return " ".join(f"`{word}`" for word in words)


def _meaning(argument: argparse.Action) -> str:
    """The help of an argument, with its choices."""
    text = plain((argument.help or "") % vars(argument))
    if argument.choices and argument.metavar:
        text += "; one of " + ", ".join(f"`{choice}`" for choice in argument.choices)
    return text
