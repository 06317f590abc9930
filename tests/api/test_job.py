"""The main job on questions and a reward from Python, and rewards that no module holds."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import ml_collections
import numpy as np
import pytest

import fp8rl_jax
from fp8rl_jax.api import job
from fp8rl_jax.api.fields import path_of, with_fields
from fp8rl_jax.api.kept_reward import reward_name
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.envs import load_rewards
from fp8rl_jax.envs.question import Question
from fp8rl_jax.envs.rewards.scoring import Scoring, Tally
from fp8rl_jax.train import Outcome

_ENDED = Outcome(True, None, None)


def _closure(bonus: float):
    def mine(prompt, response, answer):
        return float(response == answer) + bonus

    return mine


@pytest.fixture(autouse=True)
def _path(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_a_function_reaches_the_workers(tmp_path):
    """With what it closes over; its file shows the source, its term has the file's digest."""
    name = reward_name(_closure(0.25), tmp_path, False)
    (file,) = tmp_path.glob("reward_*.py")
    assert name == f"{file.stem}:mine" and "#           return float(response" in file.read_text()
    terms = load_rewards(name)
    assert terms[0].digest
    values, _ = Scoring(terms, [Question("?", "4")] * 2, ["4", "5"]).result(Tally("test"))
    assert values == [1.25, 0.25]
    # A resumed run goes on with the function that it began with; another run does not.
    (tmp_path / "config.json").write_text("{}")
    assert reward_name(_closure(0.5), tmp_path, True) == name
    assert reward_name(_closure(0.5), tmp_path, False) != name
    assert reward_name(lambda prompt, response, answer: 1.0, tmp_path, True) != name


def test_a_function_of_a_module_is_named(tmp_path):
    assert reward_name(json.dumps, tmp_path, False) == "json:dumps"
    assert reward_name("gsm8k", tmp_path, False) == "gsm8k"
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="write a function"):
        reward_name(3, tmp_path, False)
    lock = __import__("threading").Lock()
    with pytest.raises(UserError, match="cannot be sent to worker processes"):
        reward_name(lambda prompt, response, answer: lock, tmp_path, False)


def test_fields_by_their_last_name():
    for name, path in (
        ("learning_rate", "optimizer.learning_rate"),
        ("steps", "run.steps"),
        ("sft__learning_rate", "sft.learning_rate"),
        ("eval.samples", "eval.samples"),
        ("temperature", "rollout.temperature"),
        ("reward_timeout", "env.reward_timeout"),
    ):
        assert path_of(name) == path
    with pytest.raises(UserError, match="write sft__batch_size or eval__batch_size"):
        path_of("batch_size")
    config = with_fields({"run": {"steps": 3}}, {"preset": "dapo", "clip_low": 0.1}, "here")
    assert (config.run.steps, config.algo.clip_low, config.algo.dynamic_sampling) == (3, 0.1, True)
    for fields, words in (
        ({"steps": "x"}, "here: run.steps is 'x'.*whole number"),
        ({"foo__bar": 1}, "no config section 'foo'"),
    ):
        with pytest.raises(UserError, match=words):
            with_fields({}, fields, "here")


def test_questions_are_a_file_of_the_run(tmp_path):
    rows = [("1 + 1?", np.int64(2)), {"question": "2 + 2?", "answer": "4", "level": 1}]
    task = job._task(rows, tmp_path)
    assert task == job._task(rows, tmp_path) != job._task(rows[:1], tmp_path)
    lines = [json.loads(line) for line in pathlib.Path(task).read_text().splitlines()]
    assert lines == [{"question": "1 + 1?", "answer": 2}, rows[1]]
    for wrong in (["1 + 1?"], [{"question": {1, 2}}]):
        with pytest.raises(UserError, match="grpo: a question"):
            job._task(wrong, tmp_path)


@pytest.mark.parametrize("form", ["dict", "ConfigDict", "FrozenConfigDict"])
def test_forms_of_a_configuration(form, tmp_path, monkeypatch):
    """What differs from the defaults, or all of it; with a path and numpy's numbers."""
    found = []
    monkeypatch.setattr(job.train, "train", lambda config, resume: found.append(config) or _ENDED)
    config = {"run": {"dir": tmp_path / "run", "steps": np.int64(3)}, "env": {"task": "chain_sum"}}
    config["optimizer"] = {"learning_rate": np.float32(0.5)}
    if form != "dict":
        config = getattr(ml_collections, form)(with_fields(config, {}, "test"))
    ended = job.run(config, reward="gsm8k")
    assert ended.directory == tmp_path / "run" and found[0].run.dir == str(tmp_path / "run")
    assert (found[0].run.steps, found[0].env.task, found[0].env.reward) == (3, "chain_sum", "gsm8k")
    assert found[0].optimizer.learning_rate == 0.5 and type(found[0].run.steps) is int


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: job.run("config.py"), r"config is a str .* write run\(load_config\(FILE\)"),
        (lambda: job.run({"steps": 3}), "config is a dict without sections"),
        (lambda: job.run({"run": {"step": 3}}), "did you mean run.steps"),
        (lambda: job.grpo(questions=None), "questions is a NoneType; write a list"),
        (lambda: job.grpo(dir=5), "dir is a int; write a directory"),
        (
            lambda: with_fields({}, {"steps": np.float32(1.5)}, "here"),
            "run.steps is 1.5; write a whole",
        ),
    ],
)
def test_other_arguments_are_refused(call, words):
    with pytest.raises(UserError, match=words):
        call()


@pytest.mark.slow
def test_grpo_on_ones_own_questions(tmp_path):
    """A list of questions and a closure: it runs, can be resumed, and refuses another reward."""
    questions = [(f"{a} + {b} = ?", str(a + b)) for a in range(20) for b in range(20)]
    fields = {
        "dir": str(tmp_path / "run"),
        "prompts_per_step": 8,
        "group_size": 4,
        "loggers": "",
        "sft__steps": 4,
        "sft__questions": 64,
        "sft__batch_size": 16,
        "sft__evaluations": 1,
        "eval__questions": 16,
        "num_hidden_layers": 1,
        "checkpoint_every": 1,
    }
    ended = fp8rl_jax.grpo(None, questions, _closure(0.25), steps=1, **fields)
    assert ended.finished and ended.report.exists() and len(ended.metrics) == 1
    assert 0.25 <= ended.metrics[0]["reward_mean"] <= 1.25
    assert len(ended.evaluations) >= 2
    (text,) = fp8rl_jax.sample(ended.policy, "3 + 4 = ?", temperature=0.0).texts
    assert len(text) <= 4
    again = fp8rl_jax.grpo(None, questions, _closure(0.25), steps=2, resume=True, **fields)
    assert [record["step"] for record in again.metrics] == [1, 2]
    with pytest.raises(UserError, match=r"env\.reward was"):
        fp8rl_jax.grpo(None, questions, lambda p, r, a: 1.0, steps=2, resume=True, **fields)
    with pytest.raises(UserError, match="already holds this run"):
        fp8rl_jax.grpo(None, questions, f"{_reward_of(ended)}", steps=2, **fields)


def _reward_of(ended) -> str:
    return json.loads((ended.directory / "config.json").read_text())["env"]["reward"]


def test_names_of_the_package():
    assert {"load", "grpo", "run", "load_config"} <= {*dir(fp8rl_jax)}
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        _ = fp8rl_jax.lod
    code = (
        "import sys, fp8rl_jax; assert not {'jax', 'numpy'} & {*sys.modules}\n"
        "sys.modules['ml_collections'] = None; fp8rl_jax.load"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stderr.splitlines()[-1] == (
        "ImportError: fp8rl_jax.load needs ml_collections: pip install 'fp8rl_jax[train]'"
    )
