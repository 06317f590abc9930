"""Arguments of the commands: options, config overrides, positional words (a private parser)."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from absl import flags

from fp8rl_jax.errors import UserError


def parse(
    command: str, arguments: Sequence[str], options: Mapping[str, tuple[str, object, str]]
) -> tuple[flags.FlagValues, list[str], list[str]]:
    """Splits arguments into options, config overrides and positional ones.

    `options` maps a name to (kind, default, meaning); a kind is 'string', 'strings' (may be given
    several times), 'bool', 'int', 'float'. Names have underscores here and hyphens on the command
    line, where either will do.
    """
    values = flags.FlagValues()
    define: dict[str, Callable[..., object]] = {
        "string": flags.DEFINE_string, "strings": flags.DEFINE_multi_string,
        "bool": flags.DEFINE_bool, "int": flags.DEFINE_integer, "float": flags.DEFINE_float,
    }  # fmt: skip
    for name, (kind, default, meaning) in options.items():
        define[kind](name, default, meaning, flag_values=values)
    overrides = [a for a in arguments if a.startswith(("--config.", "-config."))]
    rest = [_underscored(a, options) for a in arguments if a not in overrides]
    try:
        positional = values([command, *rest])[1:]
    except flags.Error as error:
        text = " ".join(str(error).split())
        raise UserError(f"fp8rl {command}: {text}; see `fp8rl {command} --help`") from None
    return values, overrides, positional


def _underscored(argument: str, options: Mapping[str, object]) -> str:
    """'--fail-above=1' -> '--fail_above=1', if there is such an option."""
    name, equals, value = argument.partition("=")
    known = name.lstrip("-").replace("-", "_")
    return f"--{known}{equals}{value}" if name.startswith("--") and known in options else argument


CONFIG = {"config": ("string", "", "the config file")}


def read_config(command: str, values: flags.FlagValues, overrides: list[str]):
    """The configuration that --config and its overrides give; its compiled programs are kept.

    Raises:
      UserError: no file is named, or of `load_config`.
    """
    from fp8rl_jax.config import load_config

    if not values.config:
        directory = ", or a directory with --checkpoint" if command in ("eval", "sample") else ""
        raise UserError(
            f"fp8rl {command}: name a config, for example --config configs/tiny_arithmetic.py"
            + directory
        )
    config = load_config(values.config, overrides)
    if not command.startswith("bench"):  # times of compilation are among its results
        keep_programs(config.run.compilation_cache)
    return config


def keep_programs(setting: str = "") -> None:
    """Uses the compilation cache; `setting` is the field `run.compilation_cache`."""
    from fp8rl_jax.compilation_cache import use_compilation_cache

    if problem := use_compilation_cache(setting):
        note(problem)


def found_programs() -> str | None:
    """The line that says how many compiled programs were found; None for a command without."""
    if "fp8rl_jax.compilation_cache" not in sys.modules:
        return None
    from fp8rl_jax import compilation_cache

    return compilation_cache.found_programs()


def no_positional(command: str, positional: list[str]) -> None:
    if positional:
        raise UserError(
            f"fp8rl {command}: {positional[0]!r} is not understood; config fields are written "
            "--config.SECTION.FIELD=VALUE"
        )


def note(text: str) -> None:
    """A line on standard error, which holds no results."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def writing(command: str, directory: str | pathlib.Path) -> Iterator[None]:
    """Within it an OSError becomes the sentence that nothing can be written to `directory`."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"fp8rl {command}: nothing can be written to --out={directory} ({error.strerror}): "
            "name another directory"
        ) from None


def writable(command: str, directory: str) -> pathlib.Path:
    """The directory, made if need be.

    Raises:
      UserError: nothing can be written to it.
    """
    path = pathlib.Path(directory)
    with writing(command, directory):
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return path
