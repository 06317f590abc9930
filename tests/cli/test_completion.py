"""`fp8rl completion` prints a script that a shell reads without a complaint."""

from __future__ import annotations

import subprocess

from fp8rl_jax import cli


def test_bash_completes_commands_options_and_fields(capsys):
    """What bash's own function offers for a beginning."""
    assert cli.run(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    for words, offered in (
        (["fp8rl", "tr"], {"train"}),
        (["fp8rl", "train", "--res"], {"--resume"}),
        (["fp8rl", "train", "--config.rollout.group"], {"--config.rollout.group_size"}),
        (["fp8rl", "recipe", "sh"], {"show"}),
    ):
        ask = (
            f"{script}\nCOMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}\n"
            "_shtab_fp8rl; printf '%s\\n' \"${COMPREPLY[@]}\""
        )
        done = subprocess.run(["bash"], input=ask, capture_output=True, text=True, check=False)
        assert done.stderr == ""
        assert {word.strip() for word in done.stdout.split("\n")} - {""} == offered


def test_an_unknown_shell(capsys):
    assert cli.run(["completion", "fish"]) == 2
    assert (
        "'fish' is no shell that is known; write one of bash, zsh, tcsh" in capsys.readouterr().err
    )
