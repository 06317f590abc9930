"""Runs over data sets: what is logged, what a changed file does, and resuming bit for bit."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import time

import pytest
from data_files import ROWS, jsonl
from tiny_run import CONFIG, overrides, reproducible

from fp8rl_jax import train
from fp8rl_jax.config import load_config
from fp8rl_jax.envs import tfds_prepare
from fp8rl_jax.errors import UserError
from fp8rl_jax.training.logs import read_jsonl
from fp8rl_jax.training.sft import cache_directory

_TINY = pathlib.Path(__file__).parent / "tiny.jsonl"


def test_a_run_over_a_file(tmp_path, monkeypatch, capsys):
    """The first line names the form; samples have the rows' answers; every reward is logged; a
    file that has changed is refused. The programs are those of `tiny_run`."""
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
        "out (0.1 of all, by the hash of the question)\n"
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

    lines = pathlib.Path(data).read_text().splitlines(keepends=True)
    pathlib.Path(data).write_text("".join([*lines[1:], lines[0]]))
    with pytest.raises(UserError, match="the data set has changed since the run in"):
        train.train(config, resume=True)


def _start(directory: pathlib.Path, *more: str, **fields) -> subprocess.Popen:
    command = [sys.executable, "-m", "fp8rl_jax.cli", "train", "--config", str(CONFIG)]
    paths = [str(CONFIG.parent), *sys.path]
    return subprocess.Popen(
        [*command, *overrides(directory, **fields), *more],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip


def _finish(process: subprocess.Popen) -> None:
    output, _ = process.communicate(timeout=1800)
    assert process.returncode == 0, output


@pytest.mark.slow
def test_killed_and_resumed_over_a_tfds_set(tmp_path):
    """SIGKILL after the fourth RL step, then --resume: the records of the run in one piece."""
    jsonl_rows = [{**row, "question": f"{i}+{i}="} for i, row in enumerate(ROWS, 1)]
    jsonl(tmp_path / "train.jsonl", jsonl_rows)
    tfds_prepare.prepare_rows("sums", {"train": jsonl_rows}, tmp_path)
    fields = {
        "env.task": "tfds:sums", "env.data_dir": tmp_path, "sft.questions": 8, "sft.batch_size": 8,
    }  # fmt: skip
    _finish(_start(tmp_path / "whole", **fields))
    killed = tmp_path / "killed"
    process = _start(killed, **fields)
    deadline = time.monotonic() + 1800
    while len(read_jsonl(killed / "run" / "metrics.jsonl")) < 4:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.communicate()
    _finish(_start(killed, "--resume", **fields))
    assert reproducible(killed) == reproducible(tmp_path / "whole")
    assert len(reproducible(killed)["metrics"]) == 6
