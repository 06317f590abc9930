"""Runs over data sets: what is logged, what a changed file does, and resuming bit for bit."""

from __future__ import annotations

import pathlib
import shutil

import pytest
from data_files import ROWS, jsonl
from tiny_run import CONFIG, overrides, reproducible
from train_process import finish, kill_after_records, start

from fp8rl_jax import train
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.config import load_config
from fp8rl_jax.envs import tfds_prepare
from fp8rl_jax.training.logs import read_jsonl
from fp8rl_jax.training.sft import cache_directory

_TINY = pathlib.Path(__file__).parent / "tiny.jsonl"


def test_a_run_over_a_file(tmp_path, monkeypatch, capsys):
    """The first line names the form; samples have the rows' answers; every reward is logged; a
    file that has changed, if only in what a reward reads, is refused. The programs are those of
    `tiny_run`."""
    monkeypatch.setattr(train, "write_report", lambda directory: None)
    (tmp_path / "row_rewards.py").write_text(
        "def digits(prompt, response, answer, row):\n    return row['digits'] + len(answer)\n"
    )
    data = shutil.copy(_TINY, tmp_path / "data.jsonl")
    monkeypatch.syspath_prepend(str(tmp_path))
    fields = {"env.task": data, "env.reward": "gsm8k, 0.5*row_rewards:digits"}
    arguments = overrides(tmp_path, **fields, **{"run.steps": 2, "sft.steps": 0})
    config = load_config(str(CONFIG), arguments)
    assert cache_directory(config, "one digest") != cache_directory(config, "another")
    assert train.train(config).finished
    assert capsys.readouterr().out.startswith(
        f"{data}: rows (question in question, answer in answer after ####); 22 to train on, 2 held "
        "out (0.1 of all, by the hash of the question); columns not shown: digits\n"
        "warning: only 2 questions are held out, so one standard error of an accuracy is up to 35 "
    )
    answers = {row["question"]: row["answer"].split("#### ")[1] for row in read_jsonl(_TINY)}
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    assert samples and all(s["answer"] == answers[s["prompt"]] for s in samples)
    metrics = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert len(metrics) == 2
    for record in metrics:
        assert 4 <= record["reward/row_rewards:digits"] <= 6
        weighted = record["reward/gsm8k"] + 0.5 * record["reward/row_rewards:digits"]
        assert record["reward_mean"] == pytest.approx(weighted) and record["reward_errors"] == 0
    assert all(r["accuracy_greedy"] <= 1 for r in read_jsonl(tmp_path / "run" / "eval.jsonl"))

    rows = read_jsonl(_TINY)
    jsonl(pathlib.Path(data), [{**row, "digits": row["digits"] + 1} for row in rows])
    with pytest.raises(UserError, match="the data set has changed since the run in"):
        train.train(config, resume=True)


@pytest.mark.slow
def test_killed_and_resumed_over_a_tfds_set(tmp_path, monkeypatch):
    """SIGKILL after the fourth RL step, then --resume: the records of the run in one piece."""
    jsonl_rows = [{**row, "question": f"{i}+{i}="} for i, row in enumerate(ROWS, 1)]
    jsonl(tmp_path / "train.jsonl", jsonl_rows)
    tfds_prepare.prepare_rows("sums", {"train": jsonl_rows}, tmp_path)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    fields = {"env.task": "tfds:sums", "sft.questions": 8, "sft.batch_size": 8}
    finish(start(tmp_path / "whole", **fields))
    killed = tmp_path / "killed"
    kill_after_records(start(killed, **fields), killed, "metrics", 4)
    finish(start(killed, "--resume", **fields))
    assert reproducible(killed) == reproducible(tmp_path / "whole")
    assert len(reproducible(killed)["metrics"]) == 6
