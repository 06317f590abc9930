"""`fp8rl init` writes a config that starts as it is, with lengths from the user's questions."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from fp8rl_jax import cli
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.config import load_config
from fp8rl_jax.envs import Question
from fp8rl_jax.training.questions import few_held_out
from fp8rl_jax.training.runtime import make_runtime
from fp8rl_jax.training.starter import starter

_ROWS = [{"question": f"Add {i} to {100 * i}.", "answer": str(101 * i)} for i in range(1, 60)]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory with questions and a reward."""
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps(row) for row in _ROWS]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "scores_of_mine.py").write_text(
        "def score(prompt, response, answer):\n    return float(answer in response)\n"
    )
    return tmp_path


def test_a_config_of_ones_own(place, capsys):
    """It is accepted, has room for all but the longest questions, and says what comes next."""
    words = ["init", "mine.py", "--data", "rows.jsonl", "--reward", "scores_of_mine:score"]
    assert cli.run(words) == 0
    assert "fp8rl train mine.py" in capsys.readouterr().out
    runtime = make_runtime(load_config("mine.py"))
    config = runtime.config
    assert config.run.dir.endswith("runs/mine") and config.env.reward == "scores_of_mine:score"
    assert config.rollout.max_prompt_tokens == 32 and config.rollout.max_new_tokens == 8
    assert sum(map(len, runtime.questions.values())) > 50
    assert cli.run(words) == 2
    assert "mine.py is there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name a file and questions"),
        (["mine"], "name a file and questions"),
        (["mine", "--data=rows.jsonl"], "write mine.py"),
        (["mine.py", "--data=none.jsonl"], "none.jsonl does not exist"),
        (["mine.py", "--data=rows.jsonl", "--reward=no_such:score"], "no_such:score"),
        (["mine.py", "--data=rows.jsonl", "--model=none/there"], "none/there is no directory"),
        (["mine.py", "--data=rows.jsonl", "--model=qwen9"], "qwen9"),
    ],
)
def test_what_it_refuses(words, said, place, capsys):
    """One sentence, and no file."""
    assert cli.run(["init", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not (place / "mine.py").exists()


def test_few_questions_held_out(place, capsys):
    """`init` says how many: one is said to be one."""
    lines = [json.dumps(row) for row in _ROWS[:12]]
    (place / "few.jsonl").write_text("\n".join(lines) + "\n")
    assert cli.run(["init", "few.py", "--data=few.jsonl"]) == 0
    said = "warning: only 1 question is held out, so one standard error of an accuracy is up to 50"
    assert said in capsys.readouterr().out
    many = [Question(str(i), "") for i in range(100)]
    assert not few_held_out(many) and "only 99 questions are" in few_held_out(many[1:])


@pytest.mark.parametrize(
    "name", ['a"""b', "it's", "back\\slash\\", "two\nlines", "\U0001f600 and é"]
)
def test_any_name_of_a_file(name, place, capsys):
    """What is written is Python, and names the file."""
    (place / "rows.jsonl").rename(place / f"{name}.jsonl")
    assert cli.run(["init", f"{name}.py", f"--data={name}.jsonl"]) == 0
    config = load_config(f"{name}.py")
    assert config.env.task == f"{name}.jsonl" and config.run.dir.endswith(f"runs/{name}")
    last = capsys.readouterr().out.partition("fp8rl train ")[2]
    assert shlex.split(last) == [f"{name}.py"]


def test_the_reward_is_tried(place, capsys):
    """On the first question's own answer and on nothing; one that fails ends the command."""
    words = ["--data=rows.jsonl", "--question-key=question", "--answer-key=answer"]
    assert cli.run(["init", "mine.py", *words, "--reward=scores_of_mine:score"]) == 0
    said = capsys.readouterr().out
    assert "scores_of_mine:score pays 1 for the answer" in said
    assert "and 0 for an empty response" in said
    (place / "fails_at_once.py").write_text("def score(prompt, response, answer): return 1 / 0\n")
    assert cli.run(["init", "other.py", *words, "--reward=fails_at_once:score"]) == 2
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert not (place / "other.py").exists()


def test_a_home_directory_in_a_path(place, monkeypatch):
    """Also from Python, where no shell has replaced it."""
    monkeypatch.setenv("HOME", str(place))
    fields = {"run.dir": "~/run", "data.tokenizer": "~/no_tokenizer.json"}
    with pytest.raises(UserError, match=re.escape(str(place / "no_tokenizer.json"))):
        starter("", "rows.jsonl", "exact_match", fields, "here")
    with pytest.raises(UserError, match=re.escape(str(place / "model"))):
        starter("~/model", "rows.jsonl", "exact_match", {}, "here")
