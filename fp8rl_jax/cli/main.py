"""The command line: `fp8rl COMMAND ...`.

Exit status: 0 done; 2 an error that the user can fix, one sentence on standard error; 75 a run that
a signal stopped, with a checkpoint; 3 a run that drift ended, with a checkpoint, because
precision.zero_drift is 'required'; 1 anything else: a bug, a run that met NaN, a bound of `fp8rl
drift --fail-above` that was exceeded, a kernel that failed in `fp8rl bench kernels`. docs/usage.md
has the table.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence

from fp8rl_jax.base.errors import (
    DriftError,
    NonFiniteError,
    RewardError,
    UserError,
    did_you_mean,
    limit_reached,
    raised,
)
from fp8rl_jax.cli import (
    bench,
    compare,
    completion,
    data,
    drift,
    init,
    named,
    replay,
    runs,
    sample_eval,
    tree,
)
from fp8rl_jax.cli.arguments import Command, argument, note
from fp8rl_jax.cli.start import missing_package, prepare

_DRIFTED = 3


def _plan(values: argparse.Namespace) -> int:
    from fp8rl_jax.cli.plan import plan

    return plan(values)


_COMMANDS = (
    init.INIT,
    runs.TRAIN,
    *sample_eval.COMMANDS,
    *data.COMMANDS,
    drift.DRIFT,
    replay.REPLAY,
    replay.BISECT,
    replay.VERIFY,
    compare.COMPARE,
    *bench.COMMANDS,
    Command(
        "plan",
        "what a rollout and a train step need of GPUs, whether they fit, and what the step costs;\n"
        "needs no GPU and no weights",
        _plan,
        (
            argument(
                "--rollout",
                "plan the rollout alone: weights, slots and pages in FP8 and BF16, and "
                "predicted decode times of BF16, FP8 linear layers, FP8 KV cache, and both",
                action="store_true",
            ),
            argument(
                "--learner",
                "plan the train step alone: memory, FLOPs, bytes over the mesh, times",
                action="store_true",
            ),
            argument(
                "--devices", "number of devices (default: product of the mesh axes)", "N", type=int
            ),
            argument("--hosts", "number of hosts (default: one for eight devices)", "H", type=int),
            argument(
                "--gpu",
                "GPU model to plan for (default: h200)",
                choices=("h100", "h200"),
                default="h200",
            ),
            argument(
                "--memory-gb",
                "memory of a GPU, in GiB (default: 141 for an H200, 80 for an H100)",
                "X",
                type=float,
            ),
            argument(
                "--compile",
                "also compile train step and decode step for H200s, without having one, "
                "and print the compiler's figures (extra gpu_proofs; minutes)",
                action="store_true",
            ),
        ),
        config=True,
        starts="counts bytes and operations; a few seconds, with --compile minutes",
    ),
    *named.RECIPES,
    *named.ALGORITHMS,
    runs.CONVERT,
    runs.REPORT,
)
COMMANDS = {command.name: command for command in _COMMANDS}
COMMANDS["completion"] = completion.command(COMMANDS)


def _version() -> str:
    """Returns the versions of this package (with the commit of a checkout), JAX and Python."""
    import importlib.metadata
    import platform

    from fp8rl_jax.base.version import __version__, commit

    at = f" ({found})" if (found := commit()) else ""
    return (
        f"fp8rl_jax {__version__}{at}, jax {importlib.metadata.version('jax')}, "
        f"Python {platform.python_version()}"
    )


def _find(words: Sequence[str], commands: Mapping[str, Command]) -> tuple[Command, Sequence[str]]:
    """Returns the command that the first words name, and the remaining words."""
    for count in (2, 1):
        if command := commands.get(" ".join(words[:count])):
            return command, words[count:]
    program = tree.parser(commands)[0].prog
    names = list(dict.fromkeys(name.split()[0] for name in commands))
    hint = did_you_mean(words[0], [*names, "--version", "--help"], "", f"`{program} {{}}`")
    advice = f"{hint} write one of {', '.join(names)}".strip()
    raise UserError(f"{program}: no command {words[0]!r}; {advice}")


def _parse(
    command: Command, words: Sequence[str], commands: Mapping[str, Command]
) -> argparse.Namespace:
    """Parses a command's words.

    Raises:
      UserError: `Command.parse` refuses them, or the command needs a subcommand and has none.
    """
    if command.run is None:
        below = [f"`{c.usage}`" for c in commands.values() if c.name.startswith(command.name + " ")]
        wrong = f"{words[0]!r} is not understood; " if words else ""
        raise UserError(f"{command.words}: {wrong}write {', '.join(below[:-1])} or {below[-1]}")
    return command.parse(tree.parser(commands)[1][command.name], words)


def _help(command: Command, words: Sequence[str], commands: Mapping[str, Command]) -> str | None:
    """Returns the text for --help or --help-config, even if other words are wrong; else None."""
    if any(word in ("-h", "--help") for word in words):
        return tree.parser(commands)[1][command.name].format_help()
    for i, word in enumerate(words):
        name, equals, section = word.replace("_", "-").partition("=")
        if command.config and name == "--help-config":
            from fp8rl_jax.config.fields import describe_fields

            following = [] if equals else [w for w in words[i + 1 :][:1] if not w.startswith("-")]
            return describe_fields(section or "".join(following))
    return None


def run(
    arguments: Sequence[str],
    starting: Callable[[str], None] = lambda line: None,
    commands: Mapping[str, Command] = COMMANDS,
) -> int:
    """Runs one command and returns the exit status; bugs propagate as exceptions.

    Args:
      arguments: the words after the program's name.
      starting: called with a line that says what a slow command does first.
      commands: {name: command} of the program; a group comes before its subcommands.
    """
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(tree.parser(commands)[0].format_help(), end="")
        return 0
    if arguments[0] == "--version":
        print(_version())
        return 0
    try:
        command, words = _find(arguments, commands)
        if text := _help(command, words, commands):
            print(text, end="")
            return 0
        values = _parse(command, words, commands)
        if command.starts:
            starting(f"{command.words}: {command.starts}")
        prepare(command)
        assert command.run is not None
        status = command.run(values)
        cache = sys.modules.get("fp8rl_jax.base.compilation_cache")  # if the command compiles
        if cache is not None and (found := cache.found_programs()):
            note(found)
        return status
    except RewardError as error:  # ends with a traceback, in several lines
        return _end(2, f"error: {error}")
    except UserError as error:
        return _end(2, f"error: {' '.join(str(error).split())}")
    except DriftError as error:
        return _end(_DRIFTED, f"stopped: {' '.join(str(error).split())}")
    except NonFiniteError as error:
        return _end(1, f"stopped: {error}")
    except SystemExit as error:  # only a user's function raises it
        return _end(
            2,
            f"error: a function that the configuration names has ended the command with "
            f"{raised(error)}: raise another error there, or return",
        )
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and (missing := missing_package(error)):
            return _end(2, f"error: {missing}")
        if limit := limit_reached(error):
            return _end(2, f"error: {limit}: raise that limit")
        processes = sys.modules.get("fp8rl_jax.base.processes")
        if processes is None or processes.count() == 1:
            raise
        return _end(1, traceback.format_exc().rstrip())


def _end(status: int, text: str) -> int:
    """Prints why this process ends, ends the other processes too, and returns the status."""
    if (processes := sys.modules.get("fp8rl_jax.base.processes")) is not None:
        return processes.end(status, text)
    print(text, file=sys.stderr)
    return status
