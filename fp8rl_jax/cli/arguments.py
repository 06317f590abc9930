"""Declares, parses and checks the arguments of the commands."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import os
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from fp8rl_jax.base.errors import UserError, refused_by_system
from fp8rl_jax.base.meeting import this_place
from fp8rl_jax.base.paths import expanded


class Parser(argparse.ArgumentParser):
    """An argument parser that raises its errors as a UserError of one sentence."""

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        raise UserError(f"{self.prog}: {message}; see `{self.prog} --help`")


def argument(
    name: str, help: str, metavar: str = "", **settings: Any
) -> tuple[str, dict[str, Any]]:
    """Returns an argument of a command as `ArgumentParser.add_argument` takes it."""
    return name, {"help": help, **({"metavar": metavar} if metavar else {}), **settings}


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of `fp8rl`, or of another program of this project.

    Attributes:
      name: its words, such as 'bench rollout'.
      summary: what it does, in a line or two.
      run: function of the parsed values (config overrides in `overrides`) that returns the exit
        status; None for a name that only has subcommands.
      arguments: results of `argument`.
      config: whether it takes a config FILE and --config.SECTION.FIELD=VALUE.
      processes: whether several processes may run it together.
      starts: what it does first and how long that takes, shown at once; '' for a command that
        takes about a second.
      program: what is written before its name.
    """

    name: str
    summary: str
    run: Callable[[argparse.Namespace], int] | None = None
    arguments: tuple[tuple[str, dict[str, Any]], ...] = ()
    config: bool = False
    processes: bool = False
    starts: str = ""
    program: str = "fp8rl"

    @property
    def words(self) -> str:
        """The program and the command's name, such as 'fp8rl bench rollout'."""
        return f"{self.program} {self.name}"

    @property
    def usage(self) -> str:
        """The command line with its positional arguments, such as 'fp8rl recipe show NAME'."""
        follow = [more["metavar"] for name, more in self.arguments if name[0] != "-"]
        return " ".join([self.words, *follow])

    def fill(self, parser: argparse.ArgumentParser, group: bool) -> None:
        """Adds the command's arguments to its parser.

        A command with a config takes its file also as a positional argument, unless it has other
        positional arguments or subcommands (`group`).
        """
        if self.config and not group and all(name[0] == "-" for name, _ in self.arguments):
            parser.add_argument("file", nargs="?", type=a_path, metavar="FILE", help="as --config")
        if self.config:
            parser.add_argument(
                "--config",
                default="",
                type=a_path,
                metavar="FILE",
                help="a config file, or the name of one that is part of the package, such as "
                "tiny_arithmetic; FILE:CASE for other precisions",
            )
            parser.add_argument(
                "--config.SECTION.FIELD=VALUE",
                action="store_true",
                dest="_field",
                help="sets a field; may be given several times",
            )
            parser.add_argument(
                "--help-config",
                metavar="SECTION",
                nargs="?",
                help="show the config's fields, or those of a section, and exit",
            )
        for name, settings in self.arguments:
            parser.add_argument(name, **settings)

    def _takes(self, word: str, overrides: Sequence[str]) -> str:
        """Returns the remedy for a word that is not understood."""
        name, equals, value = word.partition("=")
        if self.config and name.startswith("-"):
            from fp8rl_jax.config.names import override_meant

            if override := override_meant(name.lstrip("-"), value if equals else "VALUE"):
                return f"write {override}"
        if self.config and not word.startswith("-"):
            for field in (o for o in overrides if "=" not in o):  # a blank instead of '='
                return f"write {field}={word}"
            return "config fields are written --config.SECTION.FIELD=VALUE"
        names = [
            name if name[0] == "-" else more.get("metavar", name) for name, more in self.arguments
        ]
        takes = ", ".join(["--config"] * self.config + names) or "no argument"
        return f"it takes {takes}{'' if self.config else ', and no config'}"

    def parse(self, parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
        """Parses a command line; the result holds config overrides as `overrides`.

        Args:
          parser: parser of this command, filled by `fill`.
          words: words after the command's name.

        Raises:
          UserError: an argument is unknown or missing, or its value is not allowed.
        """
        overrides = [word for word in words if word.startswith(("--config.", "-config."))]
        rest = [word for word in words if word not in overrides]
        # '--fail_above=1' -> '--fail-above=1'.
        hyphenated = [re.sub("^--[^=]*", lambda m: m[0].replace("_", "-"), word) for word in rest]
        group = parser._subparsers is not None
        parse = parser.parse_known_args if group else parser.parse_known_intermixed_args
        values, unknown = parse(hyphenated)
        if group and values.below:
            parser.error(f"write `{self.words} {values.below}` and options after that")
        if overrides and not self.config:
            unknown = overrides + unknown
        if self.config and (file := getattr(values, "file", "")):
            unknown += [file] * bool(values.config)
            values.config = values.config or file
        if unknown:
            word = dict(zip(hyphenated, rest, strict=True)).get(unknown[0], unknown[0])
            parser.error(f"{word!r} is not understood; {self._takes(word, overrides)}")
        values.overrides = overrides
        return values


def words(text: str) -> list[str]:
    """Splits 'one,two' into its words; '' has none."""
    return [word.strip() for word in text.split(",")] if text else []


ALLOW_IMPORT = argument(
    "--allow-import",
    "modules, or module:function, that the run's config.json may import",
    "NAME,...",
    type=words,
    default=[],
)


def counts(most: int, least: int = 1) -> Callable[[str], list[int]]:
    """Returns an argument's type: integers from `least` to `most`, separated by commas."""

    def read(text: str) -> list[int]:
        numbers = words(text)
        for word in numbers or [text]:
            if not word.isdecimal() or not least <= int(word) <= most:
                raise argparse.ArgumentTypeError(
                    f"it holds {word!r}; write whole numbers from {least} to {most}, "
                    f"such as {least},64"
                )
        return [int(word) for word in numbers]

    return read


def whole(least: int) -> Callable[[str], int]:
    """Returns an argument's type: an integer, at least `least`."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"it is {text!r}; write a whole number of at least {least}"
            )
        return int(text)

    return read


def a_path(text: str) -> str:
    """Expands `~` in the path of a file or a directory; an argument's type."""
    try:
        return expanded(text, "it")
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def directory(text: str) -> str:
    """Expands the path of a directory to write to and refuses ''; an argument's type."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty; name a directory, or leave it out")
    return a_path(text)


def config_file(command: str, values: argparse.Namespace) -> str:
    """Returns the file of --config; `command` is a program and its command, here and below.

    Raises:
      UserError: no file is named.
    """
    if not values.config:
        alternative = ""
        if command in ("fp8rl eval", "fp8rl sample"):
            alternative = ", or a directory with --checkpoint"
        raise UserError(
            f"{command}: name a config, for example `{command} --config "
            f"tiny_arithmetic`{alternative}, or write one with `fp8rl init`"
        )
    return values.config


def read_config(command: str, values: argparse.Namespace):
    """Reads the configuration of --config and overrides; except for benches uses its program cache.

    Raises:
      UserError: no file is named, or `load_config` refuses it.
    """
    from fp8rl_jax.config import load_config

    config = load_config(config_file(command, values), values.overrides)
    if "bench" not in command:  # times of compilation are among its results
        keep_programs(config.run.compilation_cache)
    return config


def recorded_config(run: str | pathlib.Path, values: argparse.Namespace):
    """Returns the configuration with which a run trained, with the overrides of a command that
    takes them; uses its program cache.

    Raises:
      UserError: `training_config` refuses it.
    """
    from fp8rl_jax.config import override
    from fp8rl_jax.training.run_directory import training_config

    needed = ("precision", "env", "algo")
    config = training_config(pathlib.Path(run), values.allow_import, needed)
    override(config, values.overrides)
    keep_programs(config.run.compilation_cache)
    return config


def keep_programs(setting: str = "") -> None:
    """Uses the compilation cache; `setting` is the value of `run.compilation_cache`."""
    from fp8rl_jax.base.compilation_cache import use_compilation_cache

    if problem := use_compilation_cache(setting):
        note(problem)


def note(text: str) -> None:
    """Prints a line to standard error (results go to standard output), in process 0 only."""
    processes = sys.modules.get("fp8rl_jax.base.processes")  # not there before JAX is loaded
    if processes.first() if processes else this_place().process == 0:
        print(text, file=sys.stderr, flush=True)


def writing(command: str, directory: str | pathlib.Path) -> AbstractContextManager[None]:
    """Turns an OSError into a UserError: nothing can be written to `directory`."""
    return refused_by_system(
        f"{command}: nothing can be written to --out={directory}", "name another directory"
    )


def writable(command: str, directory: str) -> pathlib.Path:
    """Makes the directory if it is missing, and returns its path.

    Raises:
      UserError: nothing can be written to it.
    """
    path = pathlib.Path(directory)
    with writing(command, directory):
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return path
