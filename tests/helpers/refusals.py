"""Steps of the tests named test_bad_*: a small config, its command line, how a refusal is read.

Their fixtures (tests/config/conftest.py) run a command in this process, up to the point where a run
would begin. A test file says `pytestmark = REFUSALS`.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from fp8rl_jax import cli, train

REFUSALS = [
    pytest.mark.usefixtures("count_compilations", "place"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
_ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIG = """\
import ml_collections


def get_config():
    return ml_collections.ConfigDict({
        "run": {"dir": "run", "cache_dir": "cache", "steps": 1},
        "model": {
            "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        },
        "env": {
            "train_questions": 8,
            "task_options": {
                "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1,
                "operators": ["+"], "allow_parentheses": False, "allow_negation": False,
            },
        },
        "rollout": {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 4},
        "sft": {"steps": 2, "questions": 8, "batch_size": 4, "evaluations": 1},
        "eval": {"questions": 2, "batch_size": 2},
    })
"""


class Begun(BaseException):
    """The input was accepted: training would begin."""


class NoRun:
    def __init__(self, *_):
        raise Begun


def without_self_check(monkeypatch) -> None:
    """It compiles, after all that is refused here."""
    monkeypatch.setattr(train, "_self_check", lambda runtime, note: None)


def train_command(*fields: str, config: str = "tiny.py") -> list[str]:
    return ["train", "--config", config, *(f"--config.{field}" for field in fields)]


def begins(*arguments: str) -> bool:
    try:
        cli.run(arguments)
    except Begun:
        return True
    return False


def assert_words(message: str, words: list[str]) -> None:
    for word in words:
        assert word in message, f"{word!r} is missing in: {message}"


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    paths = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "fp8rl_jax.cli", *arguments],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=1800,
    )
