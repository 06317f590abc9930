"""`fp8rl replay`: a step that is run again has the bits of the run, or the first difference is
named."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from tiny_run import CONFIG, overrides

from fp8rl_jax import cli
from fp8rl_jax.base.json_file import strict_json
from fp8rl_jax.replay.again import recorded_steps
from fp8rl_jax.training.logs import read_jsonl

_IMPORT = "--allow-import=dense_reward"


def _changed(path, step, **values):
    """Gives the line of a step other values."""
    lines = read_jsonl(path)
    for line in lines:
        if line.get("step") == step:
            line |= values
    path.write_text("".join(strict_json(line) + "\n" for line in lines))


def test_a_step_again(tiny_run, tmp_path, capsys):
    """From a checkpoint two steps before it, read only; a table and the arrays of what it drew."""
    run = tiny_run[0] / "run"
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    command = ["replay", str(run), "6", "--sample=5", f"--save={tmp_path / 'a.npz'}", _IMPORT]
    assert cli.run(command) == 0
    out = capsys.readouterr().out
    assert f"RL step 6 of {run}: equal bit for bit: prompts, tokens, rewards, record and" in out
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    arrays = np.load(tmp_path / "a.npz")
    rewards = [line["rewards"] for line in read_jsonl(run / "rewards.jsonl")]
    np.testing.assert_array_equal(arrays["rewards"], rewards[5])
    mask = arrays["mask"]
    np.testing.assert_array_equal(arrays["logprobs"][mask], arrays["learner_logprobs"][mask])
    rows = [line.split() for line in out.splitlines() if line.strip()[:1].isdigit()]
    assert [int(row[1]) for row in rows[: mask[5].sum()]] == arrays["tokens"][5][mask[5]].tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "values", "said"),
    [
        ("digests.jsonl", {"state": "0" * 16}, "not equal: state differ"),
        ("digests.jsonl", {"tokens": "0" * 16}, "not equal: tokens differ"),
        ("rewards.jsonl", {"rewards": [[9.0] * 4] * 4}, "rewards: sample 0 was 9.0, is "),
        ("metrics.jsonl", {"loss": 7.0}, "metrics: loss was 7.0, is "),
    ],
)
def test_a_step_that_is_not_equal(tiny_run, tmp_path, capsys, file, values, said):
    run = tmp_path / "run"
    shutil.copytree(tiny_run[0] / "run", run)
    _changed(run / file, 5, **values)
    changed = {"rewards.jsonl": "rewards", "metrics.jsonl": "record"}.get(file)
    if changed:
        _changed(run / "digests.jsonl", 5, **{changed: "0" * 16})
    assert cli.run(["replay", str(run), "5", _IMPORT]) == 1
    assert said in capsys.readouterr().out


@pytest.mark.slow
def test_what_would_have_happened(tiny_run, capsys):
    run = tiny_run[0] / "run"
    change = "--config.optimizer.learning_rate=0.001"
    assert cli.run(["replay", str(run), "5", change, _IMPORT]) == 0
    out = capsys.readouterr().out
    assert f"with {change}: not equal: record, state differ" in out and "metrics: lr was" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"rollout.ahead": 2},
        {"rollout.slots": 5, "rollout.most_versions": 2},
        {"lora.rank": 4},
        {"learner.tokens_per_batch": 256},
        {"algo.kl_coef": 0.1},
        {"sft.steps": 0},
    ],
    ids=lambda fields: next(iter(fields)),
)
@pytest.mark.parametrize("step", [1, 3, 6])
def test_steps_of_other_runs(fields, step, tmp_path_factory, capsys):
    """Steps whose rollouts were begun before, or by several versions, of adapters, of packed rows,
    with a reference, and from random weights; with and without a checkpoint kept for good."""
    directory = tmp_path_factory.getbasetemp() / f"run-{next(iter(fields))}"
    if not directory.exists():
        arguments = overrides(directory, **{"run.keep_every": 3, **fields})
        assert cli.run(["train", "--config", str(CONFIG), *arguments]) == 0
    capsys.readouterr()
    assert cli.run(["replay", str(directory / "run"), str(step), _IMPORT]) == 0
    assert "equal bit for bit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "write `fp8rl replay RUN_DIR STEP`"),
        (["RUN", "0"], "with an RL step from 1"),
        (["RUN", "7"], "there is no RL step 7: run.steps is 6"),
        (["RUN", "5", "--config", "tiny_arithmetic"], "it takes the configuration of the run"),
        (["RUN/checkpoints", "1"], "holds no config.json: name the directory of a run"),
        (["RUN/nothing"], "is no directory"),
        (["RUN", "5", "--stop=end"], "invalid choice"),
    ],
)
def test_mistakes(words, said, tiny_run, capsys):
    words = [word.replace("RUN", str(tiny_run[0] / "run")) for word in words]
    assert cli.run(["replay", *words, _IMPORT]) == 2
    assert said in capsys.readouterr().err


def test_what_git_bisect_skips(tiny_run, tmp_path, capsys):
    shutil.copy(tiny_run[0] / "run" / "config.json", tmp_path)
    assert cli.run(["replay", str(tmp_path), "--git-bisect"]) == 125
    assert "which runs of older versions did not write" in capsys.readouterr().err


def test_every_step_has_a_line(tiny_run):
    assert [*recorded_steps(tiny_run[0] / "run")] == [1, 2, 3, 4, 5, 6]
