"""Commands and arguments that are missing or not known: help, and a refusal in one sentence."""

from __future__ import annotations

import re
import subprocess
import sys

import jax
import pytest
from refusals import REFUSALS, assert_words, begins, python, train_command

from fp8rl_jax import cli
from fp8rl_jax.cli import main
from fp8rl_jax.config import all_fields

pytestmark = REFUSALS

# The measure itself.


def test_a_good_config_begins():
    """The base of all cases is accepted, so each refusal is due to its own mistake."""
    assert begins(*train_command())


def test_compilations_are_counted(count_compilations):
    """The counter that every case relies on sees a compilation."""
    before = len(count_compilations)
    jax.jit(lambda x: x * 3 + 17)(1.0)
    assert len(count_compilations) > before


# Help.


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_help(arguments, capsys):
    """Help is no error: status 0, on standard output, with every command's first word."""
    assert cli.run(arguments) == 0
    output, error = capsys.readouterr()
    assert error == ""
    assert_words(output, [f"    {command.split()[0]}" for command in main.COMMANDS])


@pytest.mark.parametrize("name", main.COMMANDS)
def test_help_of_a_command(name, capsys):
    """Its options and the commands below it; the rest may be wrong."""
    command = main.COMMANDS[name]
    assert cli.run([*name.split(), "junk", "--help"]) == 0
    output, error = capsys.readouterr()
    assert error == ""
    options = [name for name, _ in command.arguments if name.startswith("-")]
    assert_words(output, [f"usage: fp8rl {name} ", *options])
    assert ("--help-config" in output) == command.config
    below = [other for other in main.COMMANDS if other.startswith(name + " ")]
    assert_words(output, [f"    {other.split()[1]}" for other in below])


@pytest.mark.parametrize("section", ["", "algo"])
def test_help_of_fields(section, capsys):
    """Every field with its default, or a section's; the values of closed sets."""
    assert cli.run(["train", "--help-config", *section.split(), "--junk"]) == 0
    output, error = capsys.readouterr()
    assert error == ""
    for path, field in all_fields().items():
        shown = section in ("", path.partition(".")[0])
        assert (f"--config.{path}=" in output) == shown
        assert not shown or all(choice in output for choice in field.choices)


def test_help_of_an_unknown_section(refused):
    assert_words(refused("train", "--help-config=alog"), ["alog", "did you mean algo?"])


# Commands and arguments.

_ARGUMENTS = {
    "unknown command": (["trian"], ["trian", "train"]),
    "option as a command": (["--config", "tiny.py"], ["--config", "train"]),
    "no config": (["train"], ["--config"]),
    "no config for eval": (["eval"], ["--config"]),
    "no config for sample": (["sample", "1 + 1"], ["--config"]),
    "no subcommand": (["bench"], ["bench kernels", "bench rollout"]),
    "config without a value": (["train", "--config"], ["--config"]),
    "empty config": (["train", "--config="], ["--config"]),
    "missing file": (["train", "--config", "nope.py"], ["nope.py", "no file"]),
    "directory": (["train", "--config", "."], ["--config", "no file"]),
    "no Python file": (["train", "--config", "notes.txt"], ["notes.txt", ".py"]),
    "positional": (["train", "--config", "tiny.py", "junk"], ["junk", "--config.SECTION.FIELD"]),
    "positional for eval": (["eval", "--config", "tiny.py", "junk"], ["junk"]),
    "positional for bench": (["bench", "rollout", "--config", "tiny.py", "junk"], ["junk"]),
    "value after a blank": (
        ["train", "--config", "tiny.py", "--config.run.steps", "3"],
        ["write --config.run.steps=3"],
    ),
    "unknown option": (["train", "--config", "tiny.py", "--junk=3"], ["junk", "--help"]),
    "option of another command": (["eval", "--config", "tiny.py", "--resume"], ["resume"]),
    "no question": (["sample", "--config", "tiny.py"], ["prompt"]),
    "no repeats": (
        ["bench", "rollout", "--config", "tiny.py", "--repeats=0"],
        ["--repeats", "at least 1"],
    ),
    "repeats in words": (["bench", "rollout", "--config", "tiny.py", "--repeats=x"], ["repeats"]),
    "eval without a run": (["eval", "--config", "tiny.py"], ["run.dir", "train first"]),
    "sample without a run": (["sample", "--config", "tiny.py", "1 + 1"], ["run.dir", "train"]),
    "no run to report": (["report"], ["run directory"]),
    "report of nothing": (["report", "nope"], ["nope", "does not exist"]),
    "report of a file": (["report", "tiny.py"], ["tiny.py"]),
    "report of another directory": (["report", "."], ["config.json"]),
    "report with a field": (["report", ".", "--config.run.steps=3"], ["--config.run.steps=3"]),
}


@pytest.mark.parametrize("case", _ARGUMENTS)
def test_arguments(case, refused, tmp_path):
    """Commands, options and paths that are missing or not known."""
    (tmp_path / "notes.txt").write_text("hello\n")
    arguments, words = _ARGUMENTS[case]
    assert_words(refused(*arguments), words)
    assert not (tmp_path / "run").exists()


def test_exit_status_of_the_process():
    """What `run` returns is the status of the process, and the sentence its whole output."""
    process = python("train", "--config", "nope.py")
    assert process.returncode == 2
    assert process.stdout == ""
    assert re.fullmatch(r"fp8rl train: [^\n]*\nerror: [^\n]*nope\.py[^\n]*\n", process.stderr)
    process = python("train", "--help-config")
    assert process.returncode == 0
    assert "--config.rollout.group_size=" in process.stdout


def test_help_needs_no_jax():
    """Help, the version and mistakes in the words answer at once."""
    script = (
        "import sys\nfrom fp8rl_jax import cli\n"
        "assert [cli.run(a.split()) for a in sys.argv[1:]] == [0, 0, 0, 0, 2]\n"
        "assert not {'jax', 'numpy', 'flax', 'ml_collections'} & set(sys.modules)\n"
    )
    words = ["", "--version", "train --help", "bench rollout --help", "trian"]
    done = subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^fp8rl_jax \S+( \(\w+\))?, jax [\d.]+, Python [\d.]+$", done.stdout, re.M)
    assert "did you mean `fp8rl train`?" in done.stderr
