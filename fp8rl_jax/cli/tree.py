"""Makes the parsers from which help, completion and the command reference are generated."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from fp8rl_jax.cli.arguments import Command, Parser

_EPILOG = (
    "`fp8rl COMMAND --help` lists a command's options, and `fp8rl train --help-config` the "
    "config's fields. Exit status: 0 done; 2 something to fix; 75 a run stopped by a signal, "
    "saved; 3 a run ended by drift, saved (precision.zero_drift=required); 1 anything else."
)


def parser(commands: Mapping[str, Command]) -> tuple[Parser, dict[str, Parser]]:
    """Returns the parser of a program, and {name of a command: its parser}.

    Args:
      commands: {name: command} of the program; a group comes before its subcommands.
    """
    program = next(iter(commands.values())).program
    root = Parser(
        program,
        allow_abbrev=False,
        epilog=_EPILOG if program == "fp8rl" else None,
        description="Reinforcement learning of language models in FP8: rollout and learner run "
        "through one forward function.",
    )
    root.add_argument(
        "--version", action="store_true", help="show the versions of fp8rl_jax and JAX, and exit"
    )
    groups = {name.rpartition(" ")[0] for name in commands}
    parsers: dict[str, Parser] = {}
    below: dict[str, argparse._SubParsersAction] = {}
    for name, command in commands.items():
        group, _, word = name.rpartition(" ")
        if group not in below:
            below[group] = parsers.get(group, root).add_subparsers(
                title="commands", metavar="COMMAND", dest="below", parser_class=Parser
            )
        parsers[name] = below[group].add_parser(
            word,
            help=command.summary,
            description=command.summary,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.fill(parsers[name], name in groups)
    return root, parsers
